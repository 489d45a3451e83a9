"""Generation that runs out of memory continues with its cache stored in another way, and beams
store their prompt once."""

from __future__ import annotations

import logging
import random
import warnings
from pathlib import Path

import pytest
import sweep
import torch
from apart import run_script
from native import needs_kernels
from on_cpu import on_cpu
from simproc import needs_sim, run_sim
from tiny import llama, reference, save

from exkv import (
    CACHES,
    Cache,
    Cache4bit,
    Fallback,
    Model,
    OutOfMemoryError,
    Tokenizer,
    sim,
)
from exkv.cache import CacheLayer, Dynamic, OnDevice, OnHost, Storage
from exkv.decode import fixed_batch as entry

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "examples" / "demo-model")
PROMPTS = [list(range(5, 42)), list(range(60, 70)), list(range(90, 125))]
BEAMS = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7, "max_new_tokens": 6}
FEW = {**BEAMS, "max_new_tokens": 3}
WAYS = [
    {"max_new_tokens": 6},
    {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3, "seed": 4},
    {"max_new_tokens": 6, "num_beams": 4, "num_return_sequences": 4},
    {**BEAMS, "num_return_sequences": 4},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of two layers that never ends by itself."""
    theirs = reference(llama(num_hidden_layers=2, eos_token_id=None))
    return str(save(theirs, tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def always_shared(monkeypatch):
    monkeypatch.setattr(entry, "WORTH_SHARING", 0)


@pytest.fixture(scope="module")
def model(folder):
    return on_cpu(folder, max_input_len=16)


def small(folder: str) -> tuple[Model, int]:
    """A model alone on the simulated card, and the bytes of its weights."""
    entry.WORTH_SHARING = 0
    model = Model(folder, max_input_len=16)
    model.load_autosplit(Cache(model, max_seq_len=64, batch_size=16), last_id_only=True)
    return model, torch.accelerator.memory_allocated(0)


def expected_of(folder: str, prompts: list[list[int]], **options: object) -> list[list[int]]:
    """Tokens on the host, with a cache that has a row for every beam and shares nothing."""
    model = on_cpu(folder, max_input_len=16)
    cache = Cache(model, max_seq_len=64, batch_size=16)
    return model.generate(prompts, cache=cache, **options).tolist()


# The kind of cache -----------------------------------------------------------------------------


@pytest.mark.sweep(24)
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("kind", CACHES)
def test_cache_built_by_kind_gives_the_tokens_of_a_given_one(model, kind, options):
    given = CACHES[kind](model, max_seq_len=64, batch_size=16)
    expected = model.generate(PROMPTS, cache=given, **options)
    found = model.generate(PROMPTS, cache_implementation=kind, **options)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("window", [16, 40, 64])
def test_beams_with_a_prompt_shorter_than_the_window(model, window):
    given = CACHES["sliding_window"](model, 64, 4, window_length=window)
    expected = model.generate(PROMPTS[:1], cache=given, **{**BEAMS, "max_new_tokens": 12})
    kind = {"cache_implementation": "sliding_window", "cache_config": {"window_length": window}}
    found = model.generate(PROMPTS[:1], **{**BEAMS, "max_new_tokens": 12, **kind})
    assert found.tolist() == expected.tolist()


def test_cache_config_reaches_the_cache(model, monkeypatch):
    made = []
    register = Model.register_cache
    monkeypatch.setattr(Model, "register_cache", lambda m, c: (made.append(c), register(m, c)))
    options = {"nbits": 2, "rotate": False}
    call = {"cache_implementation": "quantized", "cache_config": options}
    model.generate(PROMPTS, **call, max_new_tokens=2)
    model.generate(PROMPTS, **call, num_beams=2, max_new_tokens=2)
    assert {layer.spec.storage for cache in made for layer in cache.layers} == {
        Storage(keys="int2", values="int2")
    }
    assert [cache.batch_size for cache in made] == [3, 3, 6]
    assert not model.caches


def test_beams_have_copies_of_a_short_prompt_and_share_a_long_one(model, monkeypatch):
    made = []
    register = Model.register_cache
    monkeypatch.setattr(Model, "register_cache", lambda m, c: (made.append(c), register(m, c)))
    monkeypatch.setattr(entry, "WORTH_SHARING", 30)
    model.generate([[5] * 9], num_beams=4, max_new_tokens=2)
    model.generate([[5] * 10], num_beams=4, max_new_tokens=2)
    assert [(cache.batch_size, cache.max_seq_len) for cache in made] == [(4, 11), (1, 10), (4, 12)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache_implementation": "paper"}, "'paper' is none of fp16, dynamic"),
        ({"cache_config": {"nbits": 4}}, "without a cache_implementation: set both"),
        ({"cache_implementation": "quantized", "cache_config": 4}, "cache_config is 4"),
        (
            {"cache_implementation": "quantized", "cache_config": {"max_seq_len": 9}},
            "max_seq_len = 9.* sized for the call",
        ),
        (
            {"cache_implementation": "quantized", "cache_config": {"bits": 4}},
            "cache_config is {'bits': 4}, which 'quantized' doesn't take",
        ),
        ({"on_oom": "panic"}, "on_oom is 'panic'"),
        ({"on_oom": "offload"}, r"a single step is \['offload'\]"),
        ({"on_oom": ["3bit"]}, "the step '3bit'"),
        ({"on_oom": [3]}, "the step 3"),
        ({"on_oom": 3}, "on_oom is 3"),
        ({"on_fallback": "print"}, "on_fallback is 'print'"),
    ],
    ids=str,
)
def test_a_bad_argument_is_named(model, options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        model.generate(PROMPTS, **options)


def test_cache_implementation_with_a_given_cache_is_refused(model):
    cache = Cache(model, 64, 3)
    with pytest.raises(ValueError, match="'offloaded', and a cache is given"):
        model.generate(PROMPTS, cache=cache, cache_implementation="offloaded")


# What beams share ------------------------------------------------------------------------------


def forty_beams(folder):
    """Bytes of caches in each step of a search, where rows were moved to, and the bytes before and
    after."""
    model, weights = small(folder)
    prompt = torch.randint(3, 320, (500,), generator=torch.Generator().manual_seed(1)).tolist()
    held, moves, promised = [], [], model.plan.ledgers
    move_rows = CacheLayer.move_rows

    def spy(layer, pairs, positions, step):
        moves.append((layer.shared is not None, positions.start, positions.stop))
        move_rows(layer, pairs, positions, step)

    def measure(ids, scores):
        held.append(torch.accelerator.memory_allocated(0) - weights)
        return scores

    CacheLayer.move_rows = spy
    model.generate(
        [prompt],
        num_beams=40,
        num_beam_groups=20,
        diversity_penalty=1.0,
        max_new_tokens=8,
        logits_processor=[measure],
    )
    left = torch.accelerator.memory_allocated(0) - weights
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    token = 2 * len(model.cache_map) * heads * dim * model.dtype.itemsize
    promise = model.plan.last_id_only, model.plan.ledgers == promised
    return held, moves, token, left, promise


def test_forty_beams_store_their_prompt_once_and_never_move_it(folder):
    held, moves, token, left, promise = run_sim(forty_beams, "64M", args=[folder])
    assert {round(nbytes / token) for nbytes in held[20:]} == {500 + 40 * 8}
    assert moves
    assert all(shared and 0 <= start < stop <= 8 for shared, start, stop in moves)
    assert left == 0
    assert promise == [True, True]  # still for the last logits only, and without the beams


# Out of memory ---------------------------------------------------------------------------------


#: Every n-th of a call's allocations fails once; 1 for all of them, which takes minutes. It divides
#: no loop's number of allocations, so that each kind occurs.
STRIDE = 37


def at_every_allocation(folder, options, stride, error):
    """For each allocation of a call, the outcome if that one fails."""
    model, weights = small(folder)
    call = {**options, "on_oom": ["offload"], "return_dict_in_generate": True}
    before = sim.allocation_count()
    expected = model.generate(PROMPTS[:2], **call).sequences.tolist()
    points = sim.allocation_count() - before
    wrong, during = [], []
    for point in range(1, points + 1, stride):
        sim.fail_allocation(point, error)
        out = model.generate(PROMPTS[:2], **call)
        sim.fail_allocation(None)
        during += [fallback.during for fallback in out.fallbacks]
        left = torch.accelerator.memory_allocated(0) - weights
        if out.sequences.tolist() != expected or len(out.fallbacks) > 1 or left or model.caches:
            wrong.append([point, left, len(out.fallbacks)])
    return expected, len(range(1, points + 1, stride)), wrong, during


@pytest.mark.sweep(5)
@pytest.mark.parametrize("error", sim.MEMORY_ERRORS[:4])
@pytest.mark.parametrize("options", [{"max_new_tokens": 3}, FEW], ids=["greedy", "beams"])
def test_whichever_allocation_fails_the_tokens_are_the_same(folder, options, error):
    result = run_sim(at_every_allocation, "64M", args=[folder, options, STRIDE, error])
    expected, points, wrong, during = result
    assert expected == expected_of(folder, PROMPTS[:2], **options)
    assert points > 200 / STRIDE
    assert wrong == []
    assert set(during) <= {"building the cache", "running the model", "forking the prompt"}
    assert len(during) > 0.7 * points  # the others move rows, which works by way of the host


def given_at_every_allocation(folder, on_oom, stride, errors):
    """The same with a given cache, which must also be right after an error."""
    model, _ = small(folder)
    cache = Cache(model, max_seq_len=64, batch_size=16)
    call = {**FEW, "cache": cache, "on_oom": on_oom}
    expected = model.generate(PROMPTS[:2], **call).tolist()
    cache.reset()
    before = sim.allocation_count()
    model.generate(PROMPTS[:2], **call)
    points = sim.allocation_count() - before
    wrong, raised = [], 0
    for point in range(1, points + 1, stride):
        cache.convert(residence=OnDevice())
        cache.reset()
        sim.fail_allocation(point, errors[point // stride % len(errors)])
        try:
            found = model.generate(PROMPTS[:2], **call).tolist()
        except OutOfMemoryError:
            raised, found = raised + 1, expected
        sim.fail_allocation(None)
        again = model.generate(PROMPTS[:2], **call).tolist()
        if found != expected or again != expected:
            wrong.append(point)
    return expected, len(range(1, points + 1, stride)), wrong, raised


@pytest.mark.parametrize("on_oom", ["raise", ["offload"]], ids=str)
def test_a_given_cache_is_right_whichever_allocation_fails(folder, on_oom):
    errors = sim.MEMORY_ERRORS[:4]
    result = run_sim(given_at_every_allocation, "64M", args=[folder, on_oom, STRIDE, errors])
    expected, points, wrong, raised = result
    assert expected == expected_of(folder, PROMPTS[:2], **FEW)
    assert wrong == []
    assert raised > 0.7 * points if on_oom == "raise" else raised == 0


def card_shrinks(folder):
    """Another program takes the free memory in the middle of a search -> each step's fallbacks."""
    model, _ = small(folder)
    whole = model.generate(PROMPTS, **BEAMS).tolist()
    seen = {}
    for on_oom in ("fallback", "raise", ["8bit"], ["4bit", "offload"]):
        sim.set_capacity(0, 64 << 20)
        told, cache = [], Cache(model, max_seq_len=64, batch_size=16)

        def shrink(ids, scores):
            if ids.shape[1] == 37 + 3:
                sim.set_capacity(0, torch.accelerator.memory_allocated(0) + 1024)
            return scores

        call = {**BEAMS, "cache": cache, "on_oom": on_oom, "on_fallback": told.append}
        try:
            found = model.generate(PROMPTS, **call, logits_processor=[shrink]).tolist()
        except OutOfMemoryError as error:
            found = str(error)
        seen[str(on_oom)] = (
            found == whole,
            [len(row) for row in found] if isinstance(found, list) else found,
            [[f.step, f.during, f.token, f.before, f.after, f.why] for f in told],
            cache.seq_lens,
            cache.nbytes().keys() == {torch.device("cpu")},
        )
        cache.free()
        del cache
    return seen


def test_search_falls_back_when_the_card_shrinks(folder):
    seen = run_sim(card_shrinks, "64M", args=[folder])
    same, lengths, ((step, during, token, before, after, why),), _, away = seen["fallback"]
    assert same and away
    assert (step, during, token) == ("offload", "running the model", 37 + 3)
    assert before["sim:0"] == after["cpu"] and "sim:0" not in after
    assert "sim out of memory" in why

    _, said, told, lengths, away = seen["raise"]
    assert "ran out of memory" in said and not told and not away
    assert lengths[:12] == [n + 3 for n in (37, 10, 35) for _ in range(4)]

    for steps in ("['8bit']", "['4bit', 'offload']"):
        _, lengths, told, _, _ = seen[steps]
        assert lengths == [43] * 3
        assert [each[0] for each in told] == [steps[2:6]]
        assert told[0][4]["sim:0"] < told[0][3]["sim:0"] / 2


def test_answers_are_right_after_rounding_the_cache():
    assert run_sim(rounded_half_way, "64M") == ["The cup is in the bathroom."] * 3


def rounded_half_way():
    model, tokenizer = Model(DEMO), Tokenizer(DEMO)
    question = "Lily put the cup in the bathroom. Where is the cup?"
    ids = tokenizer.encode_chat([{"role": "user", "content": question}])
    model.load_autosplit(Cache(model, 64), last_id_only=True)
    texts = []
    for steps in (["8bit"], ["4bit"], ["offload", "8bit", "4bit"]):
        told = []

        def fail(seen, scores, now=lambda step: step % 2 == 0):
            if now(seen.shape[1]):
                sim.fail_allocation(3)
            return scores

        out = model.generate(
            [ids],
            max_new_tokens=12,
            on_oom=[*steps, lambda cache: None, lambda cache: None, lambda cache: None],
            on_fallback=told.append,
            logits_processor=[fail],
        )
        sim.fail_allocation(None)
        assert [fallback.step for fallback in told][: len(steps)] == steps
        texts.append(tokenizer.decode(out[0, len(ids) :].tolist()).strip())
    return texts


def converted_at_every_allocation(folder, error):
    """Compare layers after a conversion that ran out of memory half-way with those before: the
    largest difference over the largest value, by storage."""
    model, _ = small(folder)
    cache = Cache(model, max_seq_len=64, batch_size=3)
    model.generate(PROMPTS, cache=cache, max_new_tokens=2)
    wrong, failed = [], 0
    for point in range(1, 40):
        copy = cache.clone()
        sim.fail_allocation(point, error)
        try:
            copy.convert(storage=Storage(keys="int8", values="int8"))
        except torch.OutOfMemoryError:
            failed += 1
        sim.fail_allocation(None)
        for old, new in zip(cache.layers, copy.layers, strict=True):
            spec = new.spec
            k, v = spec.storage.decode(new.tensors, spec.dtype, spec.head_dim)
            off = max(
                float((k - old.tensors["k"]).abs().max()), float((v - old.tensors["v"]).abs().max())
            )
            if off > (0 if spec.storage == Storage() else 0.05):
                wrong.append([point, str(spec.storage), off])
        copy.free()
    return failed, wrong


@pytest.mark.parametrize("error", sim.MEMORY_ERRORS[:4])
def test_a_conversion_that_fails_half_way_loses_nothing(folder, error):
    failed, wrong = run_sim(converted_at_every_allocation, "64M", args=[folder, error])
    assert failed >= 8  # two layers of four tensors
    assert wrong == []


def offloaded_at_every_pinned_allocation(folder):
    """Contents of layers that were moved to the host while it could not pin memory, and the number
    of pinned allocations."""
    model, _ = small(folder)
    cache = Cache(model, max_seq_len=64, batch_size=3)
    model.generate(PROMPTS, cache=cache, max_new_tokens=2)
    sim.let_streams_lag()  # else nothing is pinned for simulated devices
    points, wrong = 1, []
    for point in range(1, 20):
        copy = cache.clone()
        before = sim.allocation_count(pinned=True)
        sim.fail_allocation(point, "pinned")
        copy.convert(residence=OnHost())
        sim.fail_allocation(None)
        points = sim.allocation_count(pinned=True) - before
        for old, new in zip(cache.layers, copy.layers, strict=True):
            same = all(torch.equal(old.tensors[n].cpu(), new.tensors[n]) for n in old.tensors)
            wrong += [] if same and new.offloaded else [point]
        copy.free()
        if point >= points:
            break
    return points, wrong


def test_offloading_survives_failures_of_any_pinned_allocation(folder):
    points, wrong = run_sim(offloaded_at_every_pinned_allocation, "64M", args=[folder])
    assert points >= 2 and wrong == []  # one a layer


def grown_at_every_allocation(folder, error):
    """A call in which the cache grows: for each of its allocations, the outcome if it fails."""
    model, _ = small(folder)
    cache = Cache(model, max_seq_len=64, batch_size=2, growth=Dynamic(block=16))
    ids = torch.tensor([PROMPTS[0][:20], PROMPTS[2][:20]])
    model.forward(ids[:, :14], cache)
    whole, before = cache.clone(), sim.allocation_count()
    expected = model.forward(ids[:, 14:], whole)
    points, wrong, told = sim.allocation_count() - before, [], 0
    grown = [layer.room for layer in whole.layers]
    whole.free()
    for point in range(1, points + 1):
        copy, held = cache.clone(), torch.accelerator.memory_allocated(0)
        sim.fail_allocation(point, error)
        try:
            model.forward(ids[:, 14:], copy)
        except OutOfMemoryError:
            told += 1
            wrong += [] if copy.seq_lens == [14, 14] else [[point, copy.seq_lens]]
        sim.fail_allocation(None)
        copy.crop(14)
        wrong += [] if torch.equal(model.forward(ids[:, 14:], copy), expected) else [[point]]
        copy.free()
        left = torch.accelerator.memory_allocated(0) + cache.nbytes()[torch.device("sim", 0)] - held
        wrong += [[point, "left", left]] if left > 0 else []
    return grown, points, told, wrong


@pytest.mark.parametrize("error", sim.MEMORY_ERRORS[:4])
def test_growing_cache_is_right_whichever_allocation_fails(folder, error):
    grown, points, told, wrong = run_sim(grown_at_every_allocation, "64M", args=[folder, error])
    assert grown == [32, 32]
    assert wrong == [] and told == points > 20


def test_failed_call_is_retried_after_releasing_segments(folder):
    """After a release of idle segments, and with grown storages repacked."""
    env = {"EXKV_SIM_ALLOCATOR": "cuda"}
    result = run_sim(grown_at_every_allocation, "64M", args=[folder, "torch"], env=env)
    grown, points, told, wrong = result
    assert wrong == [] and told == 0 and points > 20


def packed_at_every_allocation(folder, errors):
    """Contents of repacked layers, one of which finds no room for what it had."""
    model, _ = small(folder)
    cache = Cache(model, max_seq_len=64, batch_size=2, growth=Dynamic(block=16))
    model.forward(torch.tensor([PROMPTS[0][:20], PROMPTS[2][:20]]), cache)
    points, wrong, away = 1, [], []
    for point in range(1, 40):
        copy = cache.clone()
        before = sim.allocation_count()
        sim.fail_allocation(point, errors[point % len(errors)])
        copy.defragment()
        sim.fail_allocation(None)
        points = sim.allocation_count() - before
        for old, new in zip(cache.layers, copy.layers, strict=True):
            same = all(torch.equal(old.tensors[n].cpu(), t.cpu()) for n, t in new.tensors.items())
            wrong += [] if same and len(new.tensors) == len(old.tensors) else [point]
        away.append(sum(layer.offloaded for layer in copy.layers))
        copy.free()
        if point > points:
            break
    return points, wrong, away


def test_repacking_a_cache_loses_nothing_whichever_allocation_fails(folder):
    args = [folder, sim.MEMORY_ERRORS[:4]]
    env = {"EXKV_SIM_ALLOCATOR": "cuda"}
    points, wrong, away = run_sim(packed_at_every_allocation, "64M", args=args, env=env)
    assert points >= 2 and wrong == []
    assert away[-1] == 0 and 1 in away  # a layer without room is on the host


def moved_at_every_allocation(folder, errors):
    """Results of reordering rows without room, beside those with room."""
    model, _ = small(folder)
    cache = Cache(model, max_seq_len=64, batch_size=3)
    model.generate(PROMPTS, cache=cache, max_new_tokens=2)
    expected = cache.clone()
    before = sim.allocation_count()
    expected.reorder([1, 2, 1])
    points = sim.allocation_count() - before
    wrong = []
    for point in range(1, points + 1):
        copy = cache.clone()
        sim.fail_allocation(point, errors[point % len(errors)])
        copy.reorder([1, 2, 1])
        pairs = zip(expected.layers, copy.layers, strict=True)
        same = [torch.equal(a.tensors[n], b.tensors[n]) for a, b in pairs for n in a.tensors]
        if not all(same) or copy.sequences != expected.sequences:
            wrong.append(point)
        copy.free()
    return points, wrong


def test_rows_are_moved_whichever_allocation_fails(folder):
    errors = sim.MEMORY_ERRORS[:4]
    points, wrong = run_sim(moved_at_every_allocation, "64M", args=[folder, errors])
    assert points >= 8
    assert wrong == []


def no_room_to_build(folder):
    """The first allocation of a call fails, and the only step is a function."""
    model, _ = small(folder)
    expected = model.generate(PROMPTS, **FEW).tolist()
    seen = []

    def look(cache):
        seen.append({str(device) for device in cache.nbytes()})

    def where(ids, scores):
        seen.append({str(device) for cache in model.caches for device in cache.nbytes()})
        return scores

    sim.fail_allocation(1)
    found = model.generate(PROMPTS, **FEW, on_oom=[look], logits_processor=[where])
    return found.tolist() == expected, [sorted(each) for each in seen[:2]]


def test_callable_step_gets_a_host_cache_if_none_could_be_built(folder):
    same, (first, later) = run_sim(no_room_to_build, "64M", args=[folder])
    assert same and first == ["cpu"] and later == ["sim:0"]


# Retries ---------------------------------------------------------------------------------------


class Failing:
    """Makes ``forward_chunk`` run out of memory in some calls, numbered from 0."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
        self.lengths: list[list[int]] = []
        forward_chunk = model.forward_chunk

        def spy(ids, cache, lengths, **options):
            self.lengths.append(list(lengths.new))
            if len(self.lengths) - 1 in calls:
                raise torch.OutOfMemoryError(f"call {len(self.lengths) - 1}")
            return forward_chunk(ids, cache, lengths, **options)

        monkeypatch.setattr(model, "forward_chunk", spy)


def nothing(cache):
    """A step that changes nothing."""


def test_prefill_resumes_at_the_failed_chunk(model, monkeypatch):
    prompt = torch.arange(5, 75).tolist()
    expected = model.generate([prompt], num_beams=3, max_new_tokens=5).tolist()
    failing = Failing(model, monkeypatch, 3)
    out = model.generate([prompt], num_beams=3, max_new_tokens=5, on_oom=[nothing])
    assert out.tolist() == expected
    assert failing.lengths == [[16]] * 5 + [[6]] + [[1] * 3] * 4


def test_prefilled_rows_rerun_their_last_token(model, monkeypatch):
    expected = model.generate(PROMPTS, max_new_tokens=5).tolist()
    failing = Failing(model, monkeypatch, 2)
    assert model.generate(PROMPTS, max_new_tokens=5, on_oom=[nothing]).tolist() == expected
    first = [[16, 10, 16], [16, 0, 16], [5, 0, 3]]
    assert failing.lengths == [*first, [5, 1, 3], *[[1] * 3] * 4]


def test_each_step_is_taken_once_and_in_order(model, monkeypatch, caplog):
    taken, told = [], []

    def first(cache):
        taken.append(("first", cache.seq_lens))

    def second(cache):
        taken.append(("second", cache.seq_lens))

    Failing(model, monkeypatch, 2, 3)
    with caplog.at_level(logging.WARNING):
        out = model.generate(
            [[1, 2, 3]],
            max_new_tokens=5,
            on_oom=[first, second],
            on_fallback=told.append,
            return_dict_in_generate=True,
        )
    assert taken == [("first", [4]), ("second", [4])]
    assert told == list(out.fallbacks)
    assert [(each.step, each.token) for each in told] == [("first", 4), ("second", 4)]
    assert "call 2" in told[0].why and "call 3" in told[1].why
    assert all(isinstance(each, Fallback) and each.before == each.after for each in told)
    first_line = caplog.messages[0]
    assert "while running the model at token 4; the step first" in first_line
    assert "call 2" in first_line

    Failing(model, monkeypatch, 2, 3, 4)
    with pytest.raises(OutOfMemoryError, match="call 4"):
        model.generate([[1, 2, 3]], max_new_tokens=5, on_oom=[first, second])
    assert not model.caches


def test_fallback_step_that_frees_nothing_is_skipped(model, monkeypatch):
    # A cache on the host can't be offloaded, and one in 4 bits can't be rounded to 8.
    told, cache = [], Cache4bit(model, 64)
    Failing(model, monkeypatch, 2)
    with pytest.raises(OutOfMemoryError, match="ran out of memory"):
        Failing(model, monkeypatch, *range(2, 9))
        model.generate([[1, 2, 3]], cache=cache, on_fallback=told.append)
    assert told == [] and cache.seq_lens == [4]


def test_rounding_warns_once_a_call(model, monkeypatch):
    for steps, calls, count in ((["8bit", "4bit"], (2, 3), 1), ([nothing], (2,), 0)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                with monkeypatch.context() as patch:
                    Failing(model, patch, *calls)
                    call = {"max_new_tokens": 5, "cache": Cache(model, 64), "on_oom": steps}
                    model.generate([[1, 2, 3]], **call)
        told = [str(each.message) for each in said if "rounds" in str(each.message)]
        assert len(told) == 2 * count
        assert all("int8 keys and int8 values" in each for each in told)


def no_room_for_a_cache(folder):
    """The error of a call without room for its cache and with ``on_oom="raise"``."""
    model, _ = small(folder)
    sim.set_capacity(0, torch.accelerator.memory_allocated(0) + 1024)
    try:
        model.generate(PROMPTS, max_new_tokens=6, on_oom="raise")
    except torch.OutOfMemoryError as error:
        return type(error).__name__, str(error)


def test_no_room_for_a_cache_is_an_out_of_memory_error(folder):
    name, said = run_sim(no_room_for_a_cache, "64M", args=[folder])
    assert name == "PlacementError" and "no room for Cache" in said


# The scene -------------------------------------------------------------------------------------


def beams_on(card: str, *flags: str) -> tuple[list[str], str]:
    """Run the example on a simulated card -> the answers, and its log."""
    done = run_script("examples/resilient_beams.py", DEMO, "--simulate", card, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@needs_kernels
@needs_sim
def test_forty_beams_answer_the_same_on_a_small_card():
    expected, said = beams_on("64M")
    assert "steps: none" in said and "out of memory" not in said
    answers, said = beams_on("5M")
    assert len(answers) == 40 and answers == expected
    assert answers[0].startswith("The cup is in the bathroom.")
    assert len(set(answers)) > 20
    assert "steps: offload)" in said
    assert "(forking the prompt at token 481 found no room: offload; the cache went from" in said
    assert "out of memory while forking the prompt at token 481" in said  # the log's


# Admitted calls --------------------------------------------------------------------------------

#: Ways to decode with several rows a prompt, whose sequences end at different lengths.
MANY = [
    {"num_beams": 12, "num_beam_groups": 6, "diversity_penalty": 1.0, "num_return_sequences": 6},
    {"num_beams": 9, "num_return_sequences": 2},
    {"do_sample": True, "num_return_sequences": 16, "seed": 3},
]
LADDERS = [[], ["offload"], ["8bit"], ["4bit"], ["offload", "8bit"], ["8bit", "4bit", "offload"]]
#: The first case, before random ones: its prompt is longer than what beams add.
FIRST = {"cache_implementation": "offloaded", "on_oom": [], "max_new_tokens": 30, **MANY[0]}


def promised_beside_taken(folder, cases, seed):
    """Peaks of calls that fall back half-way, after their prefill, where these exceed the plan; and
    the fallback steps that they took."""
    model, _ = small(folder)
    rng, wrong, steps, due = random.Random(seed), [], [], [False]
    forward = model.forward

    def failing(*args, **kwargs):
        sim.fail_allocation(1 if due[0] else None)
        due[:] = [False]
        return forward(*args, **kwargs)

    model.forward = failing
    for case in range(cases):
        kind, ladder = rng.choice(list(CACHES)), rng.choice(LADDERS)
        call = {**rng.choice(MANY), "cache_implementation": kind, "on_oom": ladder}
        call |= {"max_new_tokens": rng.choice([3, 30])}
        call = call if case else FIRST
        tries = [*call["on_oom"], nothing, nothing, nothing]  # a failure is injected for each step
        prompts = [
            [rng.randrange(3, 320) for _ in range(200 if not case else rng.choice([9, 200]))]
        ]
        prompts += [[5, 6, 7 + case]] * rng.choice([0, 0, 1])
        ends = {"eos_token_id": rng.choice([(), list(range(3, 320, 9))]) if case else ()}
        failures = {max(map(len, prompts)) + 3 + 2 * index for index in range(len(call["on_oom"]))}
        widest = max(map(len, prompts))

        def look(ids, scores, width=widest, failures=failures, call=call):
            taken = torch.accelerator.max_memory_allocated(0)
            if ids.shape[1] > width + 1 and taken > model.plan.ledgers[0].total:
                wrong.append([str(call), ids.shape[1], taken, model.plan.ledgers[0].total])
            if ids.shape[1] == width + 1:  # the prompts have prefilled
                torch.accelerator.reset_peak_memory_stats(0)
            due[:] = [ids.shape[1] in failures]
            return scores

        out = model.generate(
            prompts,
            **{**call, **ends, "on_oom": tries},
            logits_processor=[look],
            on_fallback=lambda _: torch.accelerator.reset_peak_memory_stats(0),
            return_dict_in_generate=True,
        )
        steps += [fallback.step for fallback in out.fallbacks]
    return wrong, sorted(set(steps))


def test_beams_stay_within_the_plan_after_any_fallback(folder):
    wrong, steps = run_sim(promised_beside_taken, "64M", args=[folder, sweep.cases(12, 24), 4])
    assert wrong == []
    assert {"4bit", "8bit", "offload"} <= set(steps)
