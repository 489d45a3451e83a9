"""The promise where memory comes in segments, as on CUDA: plans on simulated devices that allocate
by the rules of torch's caching allocator, cut to what the plan reserves.

``EXKV_PROMISE=200`` (or more) runs that many plans instead of a few.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from unittest.mock import patch

import pytest
import sweep
import torch
from full_length import work_at_the_edge
from simproc import run_sim
from tiny import llama, mixtral, reference, save, small

from exkv import CACHES, Cache, Model, ModelConfig, PlacementError, place, sim
from exkv.cache import KVCache
from exkv.caching_allocator import CachingAllocator, Rules
from exkv.cli.simulate import HollowCheckpoint
from exkv.decode.fallback import STEPS
from exkv.loading import load_units
from exkv.loading.options import LoadOptions
from exkv.planning import reserved
from exkv.planning.plan import OBJECTIVES

MEBI = 1 << 20
CASES = int(os.environ.get("EXKV_PROMISE", sweep.cases(12, 60)))
SEGMENTS = {"EXKV_SIM_ALLOCATOR": "cuda"}
WIDE = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
SHAPES = {
    "dense": lambda: llama(**WIDE, intermediate_size=1408, num_hidden_layers=6, vocab_size=8000),
    "tied": lambda: llama(num_hidden_layers=5, vocab_size=4000, tie_word_embeddings=True),
    "experts": lambda: mixtral(hidden_size=256, num_hidden_layers=3, num_local_experts=8),
    "many experts": lambda: small("Qwen3Moe", num_experts=64, num_experts_per_tok=4)(
        num_hidden_layers=3, moe_intermediate_size=64, decoder_sparse_step=1, head_dim=16
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: str(save(reference(make()), tmp_path_factory.mktemp("model")))
        for name, make in SHAPES.items()
    }


def plans(folders, first, end):
    """Plan on cards of any size, cut them to what is reserved, load by the plan, and work at the
    limit; then the same with a byte less."""
    outcomes: Counter[str] = Counter()
    held, wrong = Counter(), []
    for case in range(first, end):
        rng = random.Random(case)
        name, weights = rng.choice(sorted(folders)), rng.choice([None, None, "int8", "int4"])
        model = Model(folders[name], max_input_len=rng.choice([16, 64]), weights=weights)
        kind, length, rows = rng.choice(list(CACHES)), rng.choice([17, 90, 300]), rng.choice([1, 3])
        cache = CACHES[kind](model, length, rows)
        options = {
            "objective": rng.choice([each for each in OBJECTIVES if each != "speed"]),
            "last_id_only": rng.random() < 0.3,
        }
        what = [case, name, weights, model.max_input_len, kind, length, rows, options]
        for index in range(torch.accelerator.device_count()):
            sim.set_capacity(index, rng.randrange(12, 90) * MEBI)
        try:
            plan = place(model, cache, **options)
        except PlacementError:
            outcomes["refused"] += 1
            continue
        cards = [ledger for ledger in plan.ledgers if ledger.device.type != "cpu"]
        for ledger in cards:
            taken = ledger.budget.in_use_by_others
            sim.set_capacity(ledger.device.index, taken + (ledger.total if ledger.units else 1))
        try:
            model.load(plan=plan)
            work_at_the_edge(model, cache, options["last_id_only"])
            outcomes["held"] += 1
            held[f"{name}, {weights or 'float32'}, {kind}"] += 1
            outcomes["several devices"] += len(set(plan.devices)) > 1
            as_planned = list(model.device_map.values()) == list(plan.devices)
            wrong += [] if as_planned else [[*what, "another device"]]
            wrong += [[*what, each] for each in model.report.surprises()]
        except (torch.OutOfMemoryError, PlacementError) as error:
            wrong.append([*what, str(error)])
        model.unload()
        left = [torch.accelerator.memory_reserved(i) for i in range(len(cards))]
        wrong += [[*what, "left behind", left]] if any(left) else []
        fullest = max(cards, key=lambda ledger: ledger.total)
        taken = fullest.budget.in_use_by_others
        sim.set_capacity(fullest.device.index, taken + fullest.total - 1)
        try:
            model.load(plan=plan)
            wrong.append([*what, "loaded with a byte less"])
            model.unload()
        except PlacementError as error:
            if error.needed - error.available != 1:
                wrong.append([*what, "a byte less", str(error)])
        del cache
    return outcomes, held, wrong


@pytest.mark.sweep(1)
def test_plans_hold_on_cards_cut_to_what_they_reserve(folders):
    outcomes, held, wrong = run_sim(
        plans, "90M,90M,90M", args=[folders, 0, CASES], env=SEGMENTS, timeout=60 * CASES
    )
    print(outcomes, *(f"{n} of {which}" for which, n in sorted(held.items())), sep="\n")
    assert wrong == []
    assert outcomes["held"] >= CASES / 2
    assert sum(outcomes[each] for each in ("held", "refused")) == CASES
    assert outcomes["several devices"] > 0


def plan_without_holes(folders, case):
    """A plan that ignores holes from growth and unlike sizes; how often a cache was packed during a
    call."""
    packed, share, defragment = [], Rules.share, KVCache.defragment
    with (
        patch.object(Rules, "share", lambda rules, nbytes, _=(): share(rules, nbytes)),
        patch.object(reserved, "_held_back", lambda units, *_: [0] * len(units)),
        patch.object(KVCache, "defragment", lambda it: packed.append(it) or defragment(it)),
    ):
        return *plans(folders, case, case + 1), len(packed)


def test_growth_amid_calls_is_packed_anew_where_its_holes_leave_no_room(folders):
    """A dynamic cache of three layers, in segments that also hold other tensors."""
    outcomes, _, wrong, packed = run_sim(
        plan_without_holes, "90M,90M,90M", args=[folders, 69], env=SEGMENTS
    )
    assert outcomes["held"] == 1 and wrong == [] and packed > 0


def best_on_cards(folder):
    """Weights chosen for cards of several sizes: their formats, and what exceeds the plan."""
    kept, beyond = [], []
    for mebibytes in (40, 56, 72, 100):
        model = Model(folder, max_input_len=16, weights="best")
        cache = CACHES["8bit"](model, 90)
        sim.set_capacity(0, mebibytes * MEBI)
        plan = place(model, cache)
        ledger = next(ledger for ledger in plan.ledgers if ledger.device.type != "cpu")
        sim.set_capacity(0, ledger.budget.in_use_by_others + ledger.total)
        torch.accelerator.reset_peak_memory_stats(0)
        model.load(plan=plan)
        work_at_the_edge(model, cache, False)
        kept.append(sorted({unit.kept for unit in plan.units}))
        beyond.append(torch.accelerator.max_memory_reserved(0) - ledger.total)
        beyond += model.report.surprises()
        model.unload()
    return kept, beyond


def test_weights_are_chosen_by_what_a_card_reserves(folders):
    kept, beyond = run_sim(best_on_cards, "90M", args=[folders["dense"]], env=SEGMENTS)
    assert max(beyond) <= 0
    assert len({tuple(each) for each in kept}) > 2 and max(map(len, kept)) > 1


def converted_on_load(folder):
    """Weights of another dtype, converted as they are read, on a card cut to what is planned."""
    model = Model(folder, max_input_len=16, dtype=torch.bfloat16)
    cache = CACHES["8bit"](model, 90)
    plan = place(model, cache, last_id_only=True)
    (ledger,) = plan.ledgers
    sim.set_capacity(0, ledger.budget.in_use_by_others + ledger.total)
    model.load(plan=plan)
    return torch.accelerator.max_memory_reserved(0) - ledger.total, model.report.surprises()


def test_weights_are_converted_on_a_card_that_has_room_for_the_result_alone(folders):
    beyond, surprises = run_sim(converted_on_load, "90M", args=[folders["tied"]], env=SEGMENTS)
    assert beyond <= 0 and surprises == []


def hollow_load(kind, tokens, hidden, layers, capacity=None):
    """A model of shapes alone on a simulated card, cut to what is planned if ``capacity`` is None;
    its cache, and its plan."""
    sizes = {"hidden_size": hidden, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = llama(
        **sizes, head_dim=128, num_hidden_layers=layers, max_position_embeddings=8192
    ).to_dict()
    model = Model(ModelConfig.from_dict(config), dtype="float16", max_input_len=64)
    cache = CACHES[kind](model, tokens)
    scenario = model._scenario_of(LoadOptions(devices=["sim:0"], last_id_only=True))
    plan = place(model, cache, devices=["sim:0"], last_id_only=True)
    (ledger,) = plan.ledgers
    sim.set_capacity(0, capacity or ledger.budget.in_use_by_others + ledger.total)
    checkpoint, kept = HollowCheckpoint(model), model._keep_record
    list(load_units(model, scenario, checkpoint=checkpoint, lazy=False, on_loaded=kept))
    return model, cache


def reserved_beyond(model):
    torch.accelerator.empty_cache()
    (ledger,) = model.plan.ledgers
    open_segments = ledger.call - ledger.workspace
    held = ledger.weights + ledger.cache + ledger.segments + open_segments
    return torch.accelerator.memory_reserved(0) - ledger.budget.in_use_by_others - held


def converted_cache(kind, tokens, hidden, steps):
    """What a card reserves beyond its ledger, after a load and after each conversion."""
    model, cache = hollow_load(kind, tokens, hidden, 8, capacity=2 << 30)
    found = [reserved_beyond(model)]
    for step in steps:
        cache.convert(**STEPS[step])
        found.append(reserved_beyond(model))
    return found


@pytest.mark.sweep(4)
@pytest.mark.parametrize("tokens", [60, 300, 1000, 1600, 4096])
@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
@pytest.mark.parametrize("steps", [["4bit"], ["8bit", "4bit", "offload"]], ids=str)
def test_a_converted_cache_reserves_what_its_ledger_says(tokens, settings, steps):
    env = {**SEGMENTS, "EXKV_SIM_DRY": "1", "PYTORCH_CUDA_ALLOC_CONF": settings}
    beyond = run_sim(converted_cache, "2G", args=["fp16", tokens, 1024, steps], env=env)
    assert max(beyond) <= 0


@pytest.mark.sweep(2)
@pytest.mark.parametrize("tokens", [300, 1000, 1600, 4096])
def test_a_converted_cache_gives_segments_back_in_which_no_weights_lie(tokens):
    """Weights of 20 MiB per layer have their own segments."""
    env, steps = {**SEGMENTS, "EXKV_SIM_DRY": "1"}, ["8bit", "4bit", "offload"]
    beyond = run_sim(converted_cache, "2G", args=["fp16", tokens, 2304, steps], env=env)
    assert max(beyond) <= 0
    assert min(beyond) >= -64 * MEBI  # embedding and head may hold back one each, and one is open


def answers_after_conversion(folder, kind):
    """Logits of a cache and a fork of it, after both were converted."""
    model = Model(folder, max_input_len=16)
    cache = CACHES[kind](model, 1024)
    model.load(devices=["sim:0"])
    model.forward(torch.arange(3, 14)[None], cache)
    fork = cache.fork(2)
    cache.convert(storage=CACHES["8bit"](model, 64).layers[0].spec.storage)
    packed = all(layer.fragmented for layer in cache.layers)
    found = [model.forward(torch.tensor([[7]] * c.batch_size), c).tolist() for c in (cache, fork)]
    return packed, found


@pytest.mark.parametrize("kind", ["fp16", "paged", "dynamic"])
def test_packed_caches_and_their_forks_hold_what_they_held(folders, kind):
    packed, found = run_sim(
        answers_after_conversion, "90M", args=[folders["tied"], kind], env=SEGMENTS
    )
    exact = run_sim(answers_after_conversion, "90M", args=[folders["tied"], kind])
    assert packed and found == exact[1] and not exact[0]


def answers_after_a_failed_conversion(folder, kind, points):
    """Logits of a cache and a fork of it, if the n-th allocation of a conversion fails."""
    found = {}
    for point in points:
        model = Model(folder, max_input_len=16)
        cache = CACHES[kind](model, 1024)
        model.load(devices=["sim:0"])
        model.forward(torch.arange(3, 14)[None], cache)
        fork = cache.fork(2)
        eight_bits = CACHES["8bit"](model, 64).layers[0].spec.storage
        sim.fail_allocation(point)
        with contextlib.suppress(torch.OutOfMemoryError):
            cache.convert(storage=eight_bits)
        sim.fail_allocation(None)
        tokens = [
            model.forward(torch.tensor([[7]] * c.batch_size), c)[:, -1].argmax(-1).tolist()
            for c in (cache, fork)
        ]
        found[point] = tokens, any(layer.offloaded for layer in cache.layers)
        model.unload()
        del cache, fork, model
    return list(found.values())


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["fp16", "paged", "dynamic"])
def test_a_cache_and_its_fork_hold_what_they_held_if_a_conversion_fails(folders, kind):
    """Wherever it fails: between two layers, between the caches, or during packing."""
    points = [None, *range(1, 40, sweep.cases(5, 1))]
    args = [folders["tied"], kind, points]
    found = run_sim(answers_after_a_failed_conversion, "90M", args=args, env=SEGMENTS)
    assert all(tokens == found[0][0] for tokens, _ in found)
    assert any(on_host for _, on_host in found)


def cut_cards(first, end):
    """Models whose layers and caches have sizes that share segments, each on a card cut to its
    plan; what failed."""
    wrong, loaded = [], 0
    for case in range(first, end):
        rng = random.Random(case)
        kind = rng.choice(["fp16", "fp16", "8bit", "dynamic"])
        what = [kind, rng.randint(20, 2600), rng.randrange(128, 1153, 128), rng.randint(2, 12)]
        try:
            model, cache = hollow_load(*what)
            loaded += 1
        except (torch.OutOfMemoryError, PlacementError) as error:
            wrong.append([case, *what, str(error)])
            continue
        wrong += [[case, *what, found] for found in [reserved_beyond(model)] if found > 0]
        model.unload()
        del model, cache
        sim.set_capacity(0, 2 << 30)
    return loaded, wrong


@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "large_segment_size_mb:40"])
@pytest.mark.sweep(3)
def test_layers_and_caches_of_unlike_sizes_hold_on_cards_cut_to_what_they_reserve(settings):
    """Two sizes that share segments of 20 MiB, unit by unit, fill them less than each alone."""
    env = {**SEGMENTS, "EXKV_SIM_DRY": "1", "PYTORCH_CUDA_ALLOC_CONF": settings}
    cases = sweep.cases(20, 200)
    loaded, wrong = run_sim(cut_cards, "2G", args=[0, cases], env=env, timeout=60 * cases)
    assert wrong == []
    assert loaded == cases


def loaded(folder):
    """What each step of a load reserves, with one allocation for a unit's weights and its cache."""
    model = Model(folder, max_input_len=64)
    cache = Cache(model, 300, 2)
    reserved = []
    model.load(callback=lambda *_: reserved.append(torch.accelerator.memory_reserved(0)))
    units = [
        [sum(unit.nbytes.values()), 0 if unit.spec.layer is None else cache.layers[0].nbytes()]
        for unit in model.units
    ]
    segments = [segment_of(p) for unit in model.units for p in unit.module.parameters()]
    storages = len(set(segments))
    model.unload()
    return reserved, units, storages, torch.accelerator.memory_reserved(0)


def segment_of(parameter):
    return parameter.untyped_storage()._cdata


@pytest.mark.parametrize("name", ["dense", "many experts"])
def test_a_unit_lies_in_one_allocation_and_reserves_what_the_model_of_the_allocator_says(
    folders, name
):
    reserved, units, storages, left = run_sim(loaded, "256M", args=[folders[name]], env=SEGMENTS)
    assert storages == len(units) and left == 0
    allocator, rules, expected = CachingAllocator(Rules()), Rules(), [0]
    for unit in units:
        for nbytes in filter(None, unit):
            allocator.allocate(rules.request_size(nbytes))
        expected.append(allocator.reserved)
    assert reserved == expected
