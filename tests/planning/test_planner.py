"""From models, caches and devices to plans, and the questions that plans answer. No device is
touched: the cards here don't exist."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import LLAMA_70B, llama
from work import function_calls

from exkv import CACHES, Cache, Cache8bit, Model, ModelConfig, PlacementError, place
from exkv.cache import BY_LOSS
from exkv.ops import registry
from exkv.ops.kv_formats import FORMATS
from exkv.planning import CacheShape, Plan, Scenario, Workload, make_budgets, workspace
from exkv.planning.op_calls import SHORTER
from exkv.planning.solve import (
    extra_memory,
    largest,
    largest_batch,
    least_lossy,
    longest,
    nearest_changes,
    plans_for,
)

CPU = torch.device("cpu")
MEBI = 1 << 20
#: Cards that are too small for segments and a context.
EXACT = {"margin": 0, "allocator": "exact"}


def config(**changes) -> ModelConfig:
    return ModelConfig.from_dict(llama(**changes).to_dict() | {"torch_dtype": "float32"})


def model(**options) -> Model:
    return Model(config(), max_input_len=16, **{"embed_cpu": False, **options})


def scenario(devices: str, kind=Cache, length=200, rows=2, models=1, **more) -> Scenario:
    workloads = []
    for _ in range(models):
        each = model()
        workloads.append(Workload.of(each, [CacheShape.planned(each, kind, length, rows)]))
    budgets = make_budgets(devices, **EXACT, **more)
    return Scenario(workloads=tuple(workloads), budgets=tuple(budgets))


# place ----------------------------------------------------------------------------------------


def test_place_counts_every_cache():
    alone = model()
    plan = place(alone, devices="64M", **EXACT)
    cache, second = Cache(alone, 100, 2), Cache8bit(alone, 50)
    both = place(alone, [cache, second], "64M", **EXACT)
    assert both.ledgers[0].weights == plan.ledgers[0].weights
    # Four layers; in 8 bits values of 3,200 bytes and scales of 200, rounded up to whole blocks.
    assert both.ledgers[0].cache == 4 * (2 * 100 * 2 * 2 * 32 * 4 + 2 * (3584 + 512))
    assert both.ledgers[0].workspace > 0 and both.ledgers[0].logits == 2 * 16 * 320 * 4
    last = place(alone, [cache, second], "64M", **EXACT, last_id_only=True)
    assert last.ledgers[0].logits == 2 * 320 * 4
    assert not alone.device_map and cache.nbytes() == {}


def test_workspace_without_kernels_is_the_same_on_card_and_host(monkeypatch):
    """Host temporaries don't count on a card, so the host's prediction doesn't count them; and a
    kernel that only the host has doesn't reduce a card's workspace."""
    monkeypatch.setattr("exkv.planning.dry_run.has_kernel", lambda name, device_type: False)
    bare = model()
    card = place(bare, Cache(bare, 100, 2), "64M", **EXACT).units
    host = place(bare, Cache(bare, 100, 2), ["cpu"]).units
    assert [unit.workspace for unit in card] == [unit.workspace for unit in host]
    monkeypatch.setattr(
        "exkv.planning.dry_run.has_kernel", lambda name, device_type: device_type == "cpu"
    )
    other = model()
    assert [u.workspace for u in place(other, Cache(other, 100, 2), "64M", **EXACT).units] == [
        unit.workspace for unit in card
    ]
    assert place(other, Cache(other, 100, 2), ["cpu"]).units[1].workspace < host[1].workspace


def unlike_to_attention() -> list[str]:
    """One kind of cache for each way in which attention receives keys and values."""

    def given(kind: type) -> tuple:
        bare = model()
        spec = kind(bare, 100).layers[0].spec
        form = FORMATS[spec.storage.keys]
        return type(form), form.group, spec.storage.recent > 0, type(spec.retention)

    return list({given(kind): name for name, kind in reversed(CACHES.items())}.values())


#: Around the 256 queries and keys of a block, and several of them, whole and not. Beyond its length
#: a chunk is as long as the text.
LENGTHS = [(100, 1), (100, 256), (300, 256), (300, 300), (700, 600), (700, 1000)]
LENGTHS += [(1300, chunk) for chunk in (1, 256, 300, 1000)]


def lengths_of(kind: str, first: int) -> list[tuple[int, int]]:
    """All lengths for the ops of floats and of 8 bits alone, and for a kind with everything that
    ``attention_part`` has; that op's other kinds, which tests/ops compare, take turns."""
    return LENGTHS if kind in ("fp16", "8bit", "kivi") else LENGTHS[first % 3 :: 3]


@pytest.mark.sweep(10)
@pytest.mark.parametrize(
    ("kind", "length", "chunk"),
    [
        (kind, *sizes)
        for number, kind in enumerate(unlike_to_attention())
        for sizes in lengths_of(kind, number)
    ],
)
def test_a_prediction_that_leaves_out_what_repeats_is_the_same(monkeypatch, kind, length, chunk):
    monkeypatch.setattr("exkv.planning.dry_run.has_kernel", lambda name, device_type: False)

    def workspaces() -> list[int]:
        bare = Model(config(num_hidden_layers=1), max_input_len=chunk)
        return [u.workspace for u in place(bare, CACHES[kind](bare, length, 2), ["cpu"]).units]

    shortened = workspaces()
    for name in ("append_kv", "attention", "attention_int8", "attention_part"):
        monkeypatch.delitem(SHORTER, name)
    assert workspaces() == shortened


def test_shortened_prediction_is_exact_for_many_query_heads(monkeypatch):
    """The blocks of queries are shorter then, 4 here."""
    monkeypatch.setattr("exkv.planning.dry_run.has_kernel", lambda name, device_type: False)
    monkeypatch.setattr("exkv.ops.attention.MASK_ROWS", 64)
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 1, "num_hidden_layers": 1}

    def workspaces() -> list[int]:
        bare = Model(config(**sizes), max_input_len=33)
        return [u.workspace for u in place(bare, Cache(bare, 3000, 2), ["cpu"]).units]

    shortened = workspaces()
    monkeypatch.delitem(SHORTER, "attention")
    assert workspaces() == shortened


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_prediction_from_two_weight_tiles_is_exact(monkeypatch, weights):
    """Also where the results of all tiles are larger than what a tile takes."""
    monkeypatch.setattr("exkv.ops.weight_groups.TILE", 64 * 8)
    monkeypatch.setattr("exkv.planning.dry_run.has_kernel", lambda name, device_type: False)

    def workspaces(rows: int) -> list[int]:
        bare = Model(config(num_hidden_layers=1), max_input_len=300, weights=weights)
        return [u.workspace for u in place(bare, Cache(bare, 300, rows), ["cpu"]).units]

    shortened = workspaces(1), workspaces(8)
    for name in ("linear_groups", "linear_group_tiles"):
        monkeypatch.delitem(SHORTER, name)
    assert (workspaces(1), workspaces(8)) == shortened


@pytest.mark.parametrize("kernels", [True, False])
def test_plan_uses_the_cards_tiles_on_any_processor(monkeypatch, kernels):
    """With kernels and without them."""
    there = registry.has_kernel

    def has_kernel(name: str, device_type: str) -> bool:
        asked = device_type == "cuda" and name == "dequantize_weight"
        return kernels if asked else there(name, device_type)

    monkeypatch.setattr("exkv.planning.dry_run.has_kernel", has_kernel)

    def workspace_of_a_layer(cards_tile: int, other_tile: int, processor: str) -> int:
        monkeypatch.setattr("exkv.ops.weight_groups.GPU_TILE", cards_tile)
        monkeypatch.setattr("exkv.ops.weight_groups.TILE", other_tile)
        monkeypatch.setattr("exkv.ops.weight_groups.cpu_isa", lambda: processor)
        bare = Model(config(num_hidden_layers=1), max_input_len=32, weights="int4", dtype="float16")
        return place(bare, Cache(bare, 64), "24G").units[1].workspace

    small, large = 1 << 10, 1 << 20
    expected = workspace_of_a_layer(large, large, "portable")
    assert workspace_of_a_layer(large, small, "avx2") == expected
    assert workspace_of_a_layer(small, large, "avx2") < expected


def test_absent_card_gets_context_and_margin():
    plan = place(model(), devices="24G,24G")
    assert [str(ledger.device) for ledger in plan.ledgers] == ["cuda:0", "cuda:1"]
    budget = plan.ledgers[0].budget
    assert (budget.margin, budget.segmented) == (160 * MEBI, True)
    beside = (budget.context, budget.libraries, budget.graphs)
    assert beside == (512 * MEBI, 64 * MEBI, 46 * MEBI) and budget.overhead == 622 * MEBI
    assert plan.ledgers[0].limit == (24 << 30) - (622 + 160) * MEBI
    assert plan.ledgers[0].allocator > 0
    exact = place(model(), devices="24G,24G", allocator="exact").ledgers[0]
    assert (exact.budget.overhead, exact.budget.segmented, exact.allocator) == (0, False, 0)
    with pytest.raises(ValueError, match="allocator is 'other': it must be one of exact, cuda"):
        place(model(), devices="24G", allocator="other")


def test_host_budget_and_excluded_device():
    sizes = {"cpu": "64M", "cap": [1 << 30, 0, 1 << 30], "allocator": "exact"}
    plan = place(model(), devices="1M,9G,2M", margin=0, **sizes)
    assert [str(ledger.device) for ledger in plan.ledgers] == ["cuda:0", "cuda:2", "cpu"]
    assert plan.devices[-1] == CPU
    assert plan.ledgers[-1].limit == 64 * MEBI


def test_embed_cpu_is_placed_on_the_host_in_the_plan_too():
    plan = place(model(embed_cpu=True), devices="64M", **EXACT)
    assert plan.devices[0] == CPU and set(plan.devices[1:]) == {torch.device("cuda", 0)}


def test_second_model_is_placed_around_the_first():
    main, draft = model(), model()
    first = place(main, Cache(main, 200, 2), "3M,3M,64M", **EXACT)
    second = place(draft, Cache(draft, 200, 2), beside=first)
    assert first == place(main, Cache(main, 200, 2), "3M,3M,64M", **EXACT)
    for before, after in zip(first.ledgers, second.ledgers, strict=True):
        held = before.weights + before.cache + before.logits
        assert after.budget.in_use == held
        assert after.workspace >= before.workspace
        assert held + after.total <= after.budget.capacity
    with pytest.raises(ValueError, match="devices follow"):
        place(draft, devices="24G", beside=first)


def test_plan_of_a_model_survives_json():
    alone = model()
    plan = place(alone, Cache(alone, 100), "1M,1M,64M", "balance", **EXACT, last_id_only=True)
    assert Plan.from_json(plan.to_json()) == plan


# Solving for one unknown ----------------------------------------------------------------------


def fits_with(setting: Scenario, **sizes: int) -> bool:
    """Directly from the ledger, not from the search."""
    try:
        setting.resized(**sizes).attempt()
    except PlacementError:
        return False
    return True


cards = st.lists(st.integers(300, 6000), min_size=1, max_size=3).map(
    lambda sizes: ",".join(f"{size}K" for size in sizes)
)


@settings(max_examples=25)
@given(cards, st.sampled_from(list(CACHES.values())), st.sampled_from([1, 2]))
def test_one_token_more_than_the_longest_does_not_fit(devices, kind, models):
    setting = scenario(devices, kind, models=models)
    length = longest(setting, 700)
    assert length == 0 or fits_with(setting, max_seq_len=length)
    assert length == 700 or not fits_with(setting, max_seq_len=length + 1)


@settings(max_examples=15)
@given(cards, st.sampled_from(list(CACHES.values())))
def test_one_row_more_than_the_largest_batch_does_not_fit(devices, kind):
    setting = scenario(devices, kind, length=60)
    rows = largest_batch(setting, 40)
    assert rows == 0 or fits_with(setting, batch_size=rows)
    assert rows == 40 or not fits_with(setting, batch_size=rows + 1)


@settings(max_examples=15)
@given(cards, st.sampled_from(["listed", "any"]))
def test_extra_memory_is_exact(devices, order):
    setting = scenario(devices)
    setting = Scenario(workloads=setting.workloads, budgets=setting.budgets, order=order)
    position, nbytes = extra_memory(setting)
    assert setting.with_more(position, nbytes).fits()
    if nbytes:
        assert not any(
            setting.with_more(device, nbytes - 1).fits() for device in range(len(setting.budgets))
        )


def test_least_lossy_cache_is_exact_if_it_fits():
    need = {
        name: plans_for(scenario("1G", CACHES[name], length=2000))[0].ledgers[0].total
        for name in BY_LOSS
    }
    assert need["8bit"] < need["fp16"]
    for nbytes in need.values():
        best = next(name for name in BY_LOSS if need[name] <= nbytes)
        assert least_lossy(scenario(str(nbytes), length=2000)) == best
    assert least_lossy(scenario(str(min(need.values()) - 1), length=2000)) is None


def test_fewest_devices():
    plan = place(model(), devices="1M,2M,64M,64M", objective="fewest", **EXACT)
    assert len(set(plan.devices)) == 1


# Refusals -------------------------------------------------------------------------------------


def taken(setting: Scenario, remedy: str) -> bool:
    """Apply a remedy."""
    if "max_seq_len=" in remedy:
        length = int(remedy.rpartition("=")[2])
        return fits_with(setting, max_seq_len=length) and not fits_with(
            setting, max_seq_len=length + 1
        )
    if "chunks of" in remedy:
        return setting.in_chunks_of(int(remedy.split()[2])).fits()
    if "reserve_vram" in remedy:
        nbytes = int(remedy.split("(")[1].split()[0].replace(",", ""))
        return setting.with_reserve(nbytes).fits() and not setting.with_reserve(nbytes + 1).fits()
    if "'cpu'" in remedy:
        moved = int(remedy.split("with ")[1].split()[0])
        return [*plans_for(setting.with_host())[0].devices].count(CPU) == moved > 0
    return setting.as_kind(Cache8bit).fits()


@pytest.mark.parametrize("split", [0.0, 0.2, 0.4])
def test_remedies_work_and_the_mildest_comes_first(split):
    """On cards that are slightly too small for a model with a large chunk and a reserve."""
    big = Model(config(), max_input_len=256)
    workload = Workload.of(big, [CacheShape.planned(big, Cache, 1500, 2)])
    total = place(big, Cache(big, 1500, 2), "1G", **EXACT).ledgers[0].total
    first = int(total * split)
    devices = f"{first},{total - first - 1000}" if first else str(total - 1000)
    budgets = make_budgets(devices, **EXACT, reserve="20K")
    setting = Scenario(workloads=(workload,), budgets=tuple(budgets))
    with pytest.raises(PlacementError) as caught:
        plans_for(setting)
    error = caught.value
    assert error.suggestions == tuple(nearest_changes(setting))
    assert len(error.suggestions) > 2
    assert all(remedy in str(error) for remedy in error.suggestions)
    assert all(taken(setting, remedy) for remedy in error.suggestions)
    costs = [("max_seq_len" in r) + 2 * ("8bit" in r) for r in error.suggestions]
    assert costs == sorted(costs)
    assert not error.plan.fits


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("lacking", [0.02, 0.1, 0.4])
def test_refusal_finds_the_length_with_few_predictions(monkeypatch, rows, lacking):
    """A layer without kernels has a workspace that grows with the cache; the model's ends, which
    don't see the cache, are not predicted again."""
    monkeypatch.setattr("exkv.planning.dry_run.has_kernel", lambda name, device_type: False)
    setting = scenario("1G", length=5000, rows=rows)
    (plan,) = setting.attempt()
    short = int(plan.ledgers[0].total - lacking * plan.ledgers[0].cache)
    setting = replace(setting, budgets=tuple(make_budgets(str(short), **EXACT)))
    with pytest.raises(PlacementError):
        setting.attempt()
    predicted = []

    def counted(model, unit, store, lengths, *rest):
        predicted.append((unit.name, lengths.kv_len))
        return call_peak(model, unit, store, lengths, *rest)

    call_peak = workspace._call_peak
    monkeypatch.setattr(workspace, "_call_peak", counted)
    length = largest(setting.shortened, 5000)
    assert {name for name, _ in predicted} == {"model.layers.0"}
    assert len({kv_len for _, kv_len in predicted}) <= 4  # one more where the line is a token off
    assert fits_with(setting, max_seq_len=length) and not fits_with(setting, max_seq_len=length + 1)


@pytest.mark.parametrize(("length", "rows"), [(32768, 9), (256, 521)])
def test_the_largest_batch_of_70b_takes_few_predictions_and_no_second(monkeypatch, length, rows):
    """Many rows take as many predictions as few, and hardly anything else: 150 before."""
    big = Model(ModelConfig.from_dict(LLAMA_70B), max_input_len=2048, embed_cpu=False)
    shape = CacheShape.planned(big, Cache, length, 1)
    workload = Workload.of(big, [shape], last_id_only=False)
    budgets = make_budgets("80G,80G,80G", allocator="exact")
    setting, calls = Scenario(workloads=(workload,), budgets=tuple(budgets)), []
    call_peak = workspace._call_peak
    monkeypatch.setattr(workspace, "_call_peak", lambda *a: calls.append(a) or call_peak(*a))
    found = []
    assert function_calls(lambda: found.append(largest_batch(setting))) < 2_500_000
    assert found == [rows]
    assert len(calls) < 60
    assert setting.resized(batch_size=rows).fits()
    assert not setting.resized(batch_size=rows + 1).fits()


def test_refusal_predicts_remedies_lazily(monkeypatch):
    predicted, call_peak = [], workspace._call_peak
    monkeypatch.setattr(
        workspace, "_call_peak", lambda *args: predicted.append(args) or call_peak(*args)
    )
    need = scenario("1G", length=5000).attempt()[0].ledgers[0].total
    for_a_plan = len(predicted)
    predicted.clear()
    with pytest.raises(PlacementError) as caught:
        plans_for(scenario(str(need - 1), length=5000))
    assert 0 < len(predicted) == for_a_plan
    assert "; a cache of max_seq_len=4999; " in str(caught.value)
    assert len(predicted) > for_a_plan
    asked = len(predicted)
    assert len(caught.value.suggestions) > 2 and str(caught.value) == str(caught.value)
    assert len(predicted) == asked


def test_refusal_names_an_excessive_reserve():
    setting = scenario("4M", length=20, rows=1, reserve="2M")
    with pytest.raises(PlacementError) as caught:
        plans_for(setting)
    remedy = next(r for r in caught.value.suggestions if "reserve" in r)
    assert "the same answers" in remedy and taken(setting, remedy)


def test_a_refusal_under_speed_is_one_although_nobody_knows_how_fast_the_host_is():
    need = scenario("1G").attempt()[0].ledgers[0].total
    setting = replace(scenario(str(need - 1), bandwidth=[9e11]), objective="speed")
    with pytest.raises(PlacementError) as caught:
        plans_for(setting)
    assert caught.value.suggestions and not any("cpu" in s for s in caught.value.suggestions)
    assert all(taken(setting, remedy) for remedy in caught.value.suggestions)


def test_refusal_without_a_single_remedy(monkeypatch):
    setting = scenario("64K,64K")
    monkeypatch.setattr(Scenario, "with_host", lambda self: self)
    with pytest.raises(PlacementError, match="no single change would; use a smaller model"):
        plans_for(setting)


# Budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": "24Q"}, "'24Q' is not a size.*look like 24G"),
        ({"devices": "24G,cuda:0"}, "'cuda:0' is not a size"),
        ({"devices": ""}, "no such device"),
        ({"devices": "24G", "reserve": -1}, "reserve for cuda:0 is -1: it can't be negative"),
        ({"devices": "24G", "reserve": "-1G"}, "reserve for cuda:0 is -1G: it can't be"),
        ({"devices": "24G", "reserve": [0, 1]}, "reserve names 2 devices, and there are 1: cuda:0"),
        ({"devices": "24G", "margin": "much"}, "'much' is not a size"),
        ({"devices": "24G,8G", "cap": 0}, "cap leaves every device out"),
        ({"devices": "24G", "bandwidth": [1, 2]}, "give 1 positive numbers"),
        ({"devices": "24G", "bandwidth": [0]}, "give 1 positive numbers"),
        ({"devices": "24G", "cpu": "-3G"}, "cpu is -3G: it can't be negative"),
    ],
)
def test_invalid_budgets_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_budgets(**arguments)


def test_size_of_wrong_type_is_rejected():
    with pytest.raises(TypeError, match="reserve for cuda:0 is 1.5"):
        make_budgets("24G", reserve=1.5)


def test_lists_accept_text_and_zeros():
    budgets = make_budgets("24G, 24G,8G", reserve="1G,0,0", cap=[20 << 30] * 3, bandwidth=[3, 2, 1])
    assert [budget.reserve >> 30 for budget in budgets] == [1, 0, 0]
    assert [budget.cap for budget in budgets] == [20 << 30] * 3
    assert [budget.bandwidth for budget in budgets] == [3.0, 2.0, 1.0]
    assert [budget.capacity >> 30 for budget in budgets] == [24, 24, 8]
    assert make_budgets(["1.5G", "512M"])[0].capacity == 3 << 29


def test_host_budget_is_its_current_memory():
    (budget,) = make_budgets(["cpu"])
    assert 0 < budget.in_use < budget.capacity
    assert 0 < budget.limit < budget.capacity
    assert make_budgets("24G", cpu=True)[1].device == CPU
