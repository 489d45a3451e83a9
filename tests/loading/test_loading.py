"""Loading over simulated devices: placement, which is the same however a model is loaded, and
failures, which leave nothing behind.

Each scenario is a function that runs in a process of its own, on the devices that it names, and
returns what the test then checks.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from cases import small_pages
from native import needs_kernels
from rich.progress import Progress
from simproc import run_sim
from tiny import LLAMA_70B, llama, reference, save

from exkv import CACHES, Cache, Cache8bit, Model, PlacementError, place, sim
from exkv.checkpoint import Checkpoint
from exkv.loading.report import LINES
from exkv.loading.route import Route

MEBI = 1 << 20
IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save(reference(llama()), tmp_path_factory.mktemp("model")))


# Results of scenarios -----------------------------------------------------------------------


def allocated() -> list[int]:
    return [torch.accelerator.memory_allocated(i) for i in range(torch.accelerator.device_count())]


def on_cpu(folder: str, kind: type, rows: int = 2) -> torch.Tensor:
    """Logits of the whole model on the CPU: what every split must give, bit for bit."""
    model = Model(folder, max_input_len=16)
    model.load(devices=["cpu"])
    return model.forward(IDS[:rows], kind(model, 48, rows))


def digest(tensor: torch.Tensor) -> int:
    """A hash of a tensor's bits."""
    return hash(tensor.cpu().numpy().tobytes())


def greedy(model: Model, cache: Cache) -> list[list[int]]:
    cache.reset()
    ids, tokens = IDS[: cache.batch_size], []
    for _ in range(6):
        ids = model.forward(ids, cache, last_id_only=True)[:, 0].argmax(-1, keepdim=True).cpu()
        tokens.append(ids[:, 0].tolist())
    return tokens


# The table ----------------------------------------------------------------------------------

# Between the needs of the first layers with caches and of one more layer without any, so that a
# manual split is the same whether or not a cache is built later.
SPLIT = [1330 << 10, 1900 << 10, 64 << 20]
WAYS = ("load", "load_gen", "load_autosplit", "load_autosplit_gen")


def load_in_a_way(model: Model, way: str, cache: Cache | None) -> None:
    if way.startswith("load_autosplit"):
        result = getattr(model, way)(cache)
    else:
        result = getattr(model, way)([nbytes / 2**30 for nbytes in SPLIT])
    for _ in result or ():
        pass


def one_combination(folder, kind, lazy, before, way, count):
    """Everything that must not depend on ``lazy``, ``before`` and ``way``."""
    model = Model(folder, max_input_len=16)

    def one() -> Cache:
        return CACHES[kind](model, 48, 2, lazy=lazy, **small_pages(kind))

    def build() -> list[Cache]:
        return [one() for _ in range(count)]

    # load_autosplit needs its cache, so "after" then means the second one.
    first = way.startswith("load_autosplit")
    caches = (
        build()
        if before
        else [CACHES[kind](model, 48, 2, lazy=lazy, **small_pages(kind))]
        if first
        else []
    )
    load_in_a_way(model, way, caches[0] if caches else None)
    while len(caches) < count:
        caches.append(one())
    result = {
        "cache_map": {str(layer): str(device) for layer, device in model.cache_map.items()},
        "allocated": allocated(),
        "nbytes": [{str(d): n for d, n in cache.nbytes().items()} for cache in caches],
        "logits": [digest(model.forward(IDS, cache)) for cache in caches],
        "tokens": [greedy(model, cache) for cache in caches],
    }
    model.unload()
    return result, allocated()


#: Every kind alone, and two caches at once of a kind on the weights' device and of one elsewhere.
CACHE_COUNTS = [*((kind, 1) for kind in CACHES), ("fp16", 2), ("offloaded", 2)]
ROWS = [
    (*caches, lazy, before, way)
    for caches in CACHE_COUNTS
    for lazy, before, way in itertools.product((False, True), (False, True), WAYS)
    if caches == ("fp16", 1) or "gen" not in way  # generators run the same code, in steps
]


def whole_table(folder):
    rows = []
    for kind, count, lazy, before, way in ROWS:
        row = one_combination(folder, kind, lazy, before, way, count)
        rows.append((kind, count, lazy, before, way, *row))
    return rows, {kind: digest(on_cpu(folder, CACHES[kind])) for kind in CACHES}


def test_placement_and_logits_are_the_same_however_loaded(folder):
    sizes = ",".join(str(nbytes) for nbytes in SPLIT)
    # Hashes of bytes are comparable within the scenario's process only.
    rows, alone = run_sim(whole_table, sizes, args=[folder])
    assert len(rows) == len(ROWS) == len(CACHE_COUNTS) * 2 * 2 * 2 + 2 * 2 * 2
    for kind, count in CACHE_COUNTS:
        mine = [row for row in rows if row[:2] == [kind, count]]
        for row in mine:
            assert row[5] == mine[0][5], f"{row[:5]} differs from {mine[0][:5]}"
            assert row[6] == [0, 0, 0], f"{row[:5]} left memory behind"
        first = mine[0][5]
        assert len(set(first["cache_map"].values())) == 3
        assert set(first["logits"]) == {alone[kind]}
        lies = {"cpu"} if kind.startswith("offloaded") else {"sim:0", "sim:1", "sim:2"}
        assert set(first["nbytes"][0]) == lies


# The ledger ---------------------------------------------------------------------------------


def predicted_and_measured(folder):
    rows = []
    for kind, batch, length, chunk in [
        (Cache, 1, 48, 16),
        (Cache, 3, 48, 16),
        (Cache, 2, 16, 64),
        (Cache8bit, 1, 1300, 32),
        (Cache8bit, 3, 48, 16),
    ]:
        model = Model(folder, max_input_len=chunk)
        cache = kind(model, length, batch)
        model.load_autosplit(cache)
        for row in model.report.devices:
            for line in LINES:
                rows.append([getattr(row.ledger, line), row.measured.get(line, 0)])
        print(model.report)
        model.unload()
    return rows


def test_prediction_matches_measurement_to_the_byte(folder):
    rows = run_sim(predicted_and_measured, "1400K,1900K,64M", args=[folder])
    assert len(rows) == 15 * len(LINES)
    assert sum(predicted > 0 for predicted, _ in rows) > 30
    for predicted, measured in rows:
        assert predicted == measured


def cut_to_the_byte(folder):
    """Shrink the only device to what the plan promises; then run the largest promised calls."""
    outcomes = []
    for kind, batch in [(Cache, 1), (Cache, 2), (Cache8bit, 2)]:
        sim.set_capacity(0, 64 * MEBI)
        model = Model(folder, max_input_len=16, embed_cpu=False)
        cache = kind(model, 64, batch)
        model.load_autosplit(cache)
        (row,) = model.report.devices
        total = row.ledger.total
        model.unload()
        sim.set_capacity(0, total)
        model.load_autosplit(cache)
        # Ragged lengths, then full to the last token, then one token at a time.
        ids = IDS[:batch].repeat(1, 2)[:, :62]
        model.forward(ids, cache, new_lens=[62, 50][:batch])
        cache.reset()
        model.forward(ids, cache)
        for _ in range(2):
            model.forward(ids[:, :1], cache)
        model.unload()
        sim.set_capacity(0, total - 1)
        before = sim.allocation_count()
        try:
            model.load_autosplit(cache)
            outcomes.append("loaded")
        except PlacementError as error:
            outcomes.append([error.needed - error.available, sim.allocation_count() - before])
    return outcomes


def test_promised_calls_fit_and_one_byte_less_is_refused_before_loading(folder):
    assert run_sim(cut_to_the_byte, "64M", args=[folder]) == [[1, 0]] * 3


# Real out-of-memory errors ------------------------------------------------------------------


def rolled_back(folder):
    """Other memory fills the cards after the plan was made."""
    expected = digest(on_cpu(folder, Cache))
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 48, 2)
    thieves = []

    def steal(index: int, total: int) -> None:
        if index in (2, 4):
            device = torch.device("sim", index // 2 - 1)
            free, _ = torch.accelerator.get_memory_info(device)
            thieves.append(torch.empty(free - (300 << 10), dtype=torch.int8, device=device))

    model.load_autosplit(cache, callback=steal)
    result = [
        [str(device) for device in model.device_map.values()],
        digest(model.forward(IDS, cache)) == expected,
    ]
    stolen = [thief.untyped_storage().nbytes() for thief in thieves]
    model.unload()
    return [*result, stolen, allocated()]


def test_real_oom_rolls_back_the_unit_and_uses_the_next_device(folder):
    devices, same, stolen, left = run_sim(rolled_back, "64M,64M,64M", args=[folder])
    assert devices == ["sim:0"] * 2 + ["sim:1"] * 2 + ["sim:2"] * 2
    assert same
    # Only the other program's memory is left, rounded up as the allocator does.
    assert [left[0] - stolen[0], left[1] - stolen[1], left[2]] == [
        -stolen[0] % 512,
        -stolen[1] % 512,
        0,
    ]


def planned_again(folder):
    """A program takes memory that calls need, on a device whose units are loaded already."""
    expected = digest(on_one_device(folder))
    model = Model(folder, max_input_len=16)
    cache, thieves, seen = Cache(model, 48, 2), [], []

    def steal(index: int, total: int) -> None:
        seen.append(index)
        if index == total - 1 and not thieves:
            free, _ = torch.accelerator.get_memory_info(torch.device("sim", 0))
            thieves.append(torch.empty(free - 512, dtype=torch.int8, device="sim:0"))

    model.load_autosplit(cache, callback=steal, objective="balance")
    found = sorted({str(device) for device in model.device_map.values()})
    same = digest(model.forward(IDS, cache)) == expected
    model.unload()
    stolen = thieves.pop().untyped_storage().nbytes()
    try:
        model.load_autosplit(cache, callback=steal, devices=["sim:0"])
        failed = ""
    except PlacementError as error:
        failed = str(error)
    thieves.clear()
    return found, same, seen[:6], seen.count(0), stolen > 0, failed, allocated()


def on_one_device(folder):
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 48, 2)
    model.load_autosplit(cache, devices=["sim:0"])
    logits = model.forward(IDS, cache)
    model.unload()
    return logits


def test_load_is_replanned_around_memory_taken_meanwhile(folder):
    found, same, seen, loads, stolen, failed, left = run_sim(
        planned_again, "64M,64M", args=[folder]
    )
    assert (found, same, stolen, left) == (["sim:1"], True, True, [0, 0])
    assert (seen, loads) == ([0, 1, 2, 3, 4, 5], 3)  # the first load twice
    assert "memory" in failed and "sim:0" in failed


def beside_a_larger_one(folder):
    models = [Model(folder, max_input_len=size) for size in (32, 8)]
    for model in models:
        model.load_autosplit(Cache(model, 48), devices=["sim:0"])
    return [model.report.surprises() for model in models], [
        row.ledger.workspace > row.measured["workspace"] for row in models[1].report.devices
    ]


def test_workspace_shared_with_a_loaded_model_is_no_surprise(folder):
    """Calls run one after the other, so the ledger has the larger of both models' workspaces."""
    surprises, less = run_sim(beside_a_larger_one, "64M", args=[folder])
    assert surprises == [[], []] and less == [True]


def offered_again(folder):
    model = Model(folder, max_input_len=8)
    cache = Cache(model, 8)
    Route._behind = lambda route, full, taken: route._budgets
    sim.fail_allocation(3)
    try:
        model.load([64 / 1024, 64 / 1024])
    except AssertionError as error:
        return str(error), allocated(), len(model.caches), cache.nbytes()


def test_full_device_is_not_retried_forever(tmp_path):
    """A mistake in the route is an error, not an endless load."""
    folder = str(save(reference(llama(num_hidden_layers=2)), tmp_path))
    said = run_sim(offered_again, "64M,64M", args=[folder], timeout=60)
    assert said == ["sim:0 is full, and is offered again", [0, 0], 1, {}]


def oom_at_every_allocation(folder, error, stride):
    model = Model(folder, max_input_len=8)
    caches = [Cache(model, 8), Cache8bit(model, 8)]
    expected = [digest(on_cpu_cache(folder, type(cache))) for cache in caches]
    before = sim.allocation_count()
    model.load_autosplit(caches[0])
    points = sim.allocation_count() - before
    model.unload()
    outcomes = {"clean": 0, "right": 0, "wrong": []}
    for point in range(1, points + 1, stride):
        sim.fail_allocation(point, error)
        try:
            model.load_autosplit(caches[0])
        except PlacementError:
            sim.fail_allocation(None)
            clean = allocated() == [0, 0] and not model.device_map
            outcomes["clean"] += clean
            outcomes["wrong"] += [] if clean else [[point, "not clean"]]
            continue
        sim.fail_allocation(None)
        logits = [digest(model.forward(IDS[:1, :8], cache)) for cache in caches]
        where = set(map(str, model.device_map.values()))
        right = logits == expected and where != {"sim:0"}
        outcomes["right"] += right
        outcomes["wrong"] += [] if right else [[point, sorted(where)]]
        model.unload()
        if allocated() != [0, 0]:
            outcomes["wrong"].append([point, "left behind", allocated()])
    return points, len(range(1, points + 1, stride)), outcomes


def on_cpu_cache(folder: str, kind: type) -> torch.Tensor:
    model = Model(folder, max_input_len=8)
    model.load(devices=["cpu"])
    return model.forward(IDS[:1, :8], kind(model, 8))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("error", "stride"), [("torch", 1), ("cublas", 3), ("runtime", 3), ("launch", 3)]
)
def test_an_oom_at_any_allocation_leaves_the_model_right_or_all_devices_clean(
    tmp_path, error, stride
):
    folder = str(save(reference(llama(num_hidden_layers=2)), tmp_path))
    points, tried, outcomes = run_sim(
        oom_at_every_allocation, "64M,64M", args=[folder, error, stride]
    )
    assert points > 100
    assert outcomes["wrong"] == []
    assert outcomes["right"] == tried  # the second device takes over wherever it happens
    wrong, free = run_sim(oom_on_the_only_device, "64M", args=[folder, error, stride])
    assert wrong == []
    # What a unit had allocated when memory ran out is released before the error says what is free.
    assert [len(each) for each in free] == [1] * 4
    assert free == sorted(free, reverse=True) and free[0] == [64 << 20]


def oom_on_the_only_device(folder, error, stride):
    """Without another device, each must end in one clean error."""
    model = Model(folder, max_input_len=8)
    cache = Cache(model, 8)
    before = sim.allocation_count()
    model.load_autosplit(cache)
    points = sim.allocation_count() - before
    model.unload()
    wrong, free = [], {}
    for point in range(1, points + 1, stride):
        sim.fail_allocation(point, error)
        try:
            model.load_autosplit(cache)
            wrong.append([point, "loaded"])
        except PlacementError as refused:
            free.setdefault(refused.unit, set()).add(refused.available)
            if (
                allocated() != [0]
                or model.device_map
                or cache.nbytes()
                or "sim:0" not in str(refused)
            ):
                wrong.append([point, str(refused)])
        sim.fail_allocation(None)
    return wrong, list(map(list, free.values()))


def pinned_at_every_allocation(folder):
    """Loads and calls in which one allocation of pinned memory fails: the logits are right, or the
    error says why and nothing is left. (torch itself pins the targets of copies to the host.)
    """
    sim.let_streams_lag()  # else nothing is pinned for simulated devices
    model = Model(folder, max_input_len=8)
    cache = CACHES["offloaded_static"](model, 48)
    expected = digest(on_cpu_cache(folder, Cache))
    before = sim.allocation_count(pinned=True)
    model.load_autosplit(cache)
    right = [digest(model.forward(IDS[:1, :8], cache)) == expected]
    points = sim.allocation_count(pinned=True) - before
    model.unload()
    told = []
    for point in range(1, points + 1):
        sim.fail_allocation(point, "pinned")
        try:
            model.load_autosplit(cache)
            logits = model.forward(IDS[:1, :8], cache)
        except torch.OutOfMemoryError as error:
            told.append("CUDA error: out of memory" in str(error))
            logits = model.forward(IDS[:1, :8], cache) if model.loaded else None
        right.append(logits is None or digest(logits) == expected)
        del logits
        model.unload()
        right.append(allocated() == [0])
    return points, right, told


def test_failed_pinned_allocation_is_reported_or_avoided(tmp_path):
    folder = str(save(reference(llama(num_hidden_layers=2)), tmp_path))
    points, right, told = run_sim(pinned_at_every_allocation, "64M", args=[folder])
    assert points > 10 and all(right) and len(right) == 2 * points + 1
    assert all(told) and len(told) < points / 2


def no_room_at_all(folder):
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 400, 2)
    keep = torch.zeros(1000, device="sim:1")
    before = allocated()
    outcome = {}
    try:
        model.load_autosplit(cache)
    except PlacementError as error:
        outcome = {"message": str(error), "unit": error.unit, "fits": list(error.suggestions)}
    outcome["as_found"] = allocated() == before and cache.nbytes() == {}
    # Follow each suggestion.
    taken = []
    for suggestion in outcome["fits"]:
        model = Model(folder, max_input_len=16)
        if suggestion.startswith("a cache of max_seq_len="):
            length = int(suggestion.rpartition("=")[2])
            model.load_autosplit(Cache(model, length, 2))
            model.unload()
            model = Model(folder, max_input_len=16)
            try:
                model.load_autosplit(Cache(model, length + 1, 2))
                taken.append("one more fits too")
            except PlacementError:
                taken.append("length")
        elif suggestion.startswith("Cache8bit"):
            model.load_autosplit(Cache8bit(model, 400, 2))
            taken.append("kind")
        elif suggestion.startswith("'cpu'"):
            model.load_autosplit(Cache(model, 400, 2), devices=["sim:0", "sim:1", "cpu"])
            taken.append("cpu")
        model.unload()
    outcome["taken"] = taken
    del keep
    return outcome


@needs_kernels
def test_suggestions_of_a_placement_error_fit(folder):
    outcome = run_sim(no_room_at_all, "2380K,2380K", args=[folder])
    assert outcome["as_found"]
    assert outcome["unit"] in outcome["message"]
    assert "would have to hold" in outcome["message"] and "too few" in outcome["message"]
    assert outcome["taken"] == ["cpu", "length", "kind"]


def a_cache_too_many(folder):
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 48)
    model.load_autosplit(cache)
    before = allocated()
    try:
        Cache(model, 100_000)
        return "built"
    except PlacementError as error:
        fine = allocated() == before and len(model.caches) == 1
        return [fine, "sim:0" in str(error), greedy(model, cache) is not None]


def test_refused_cache_leaves_a_loaded_model_unchanged(folder):
    assert run_sim(a_cache_too_many, "8M", args=[folder]) == [True, True, True]


def a_freed_cache(folder):
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 1024, len(IDS))
    model.load_autosplit(cache)
    cache.free()
    free, _ = torch.accelerator.get_memory_info(0)
    thief = torch.empty(free - (64 << 10), dtype=torch.int8, device="sim:0")
    try:
        model.forward(IDS, cache)
        return "it ran"
    except PlacementError as error:
        named = [error.device, error.unit, error.needed > error.available]
    del thief
    return [named, model.forward(IDS, cache) is not None]


def test_freed_cache_without_room_for_a_call_names_its_layer(folder):
    seen = run_sim(a_freed_cache, "8M", args=[folder])
    assert seen == [["sim:0", "cache layer 0", True], True]


def saved_on_one_split(folder, file):
    """Save a cache over two devices, and restore it over two others."""
    digests = []
    for number, split in enumerate(([1330, 4000], [2000, 4000])):
        for name, kind in CACHES.items():
            model = Model(folder, max_input_len=16)
            cache = kind(model, 48, 2, **small_pages(name))
            model.load([kib / 2**20 for kib in split])
            if number == 0:
                model.forward(IDS, cache)
                cache.save(f"{file}-{kind.__name__}")
            else:
                cache.load(f"{file}-{kind.__name__}")
            where = [str(device) for device in model.cache_map.values()]
            digests.append([where, digest(model.forward(IDS[:, :3], cache))])
            model.unload()
    return digests


def test_a_saved_cache_comes_back_on_another_split(folder, tmp_path):
    seen = run_sim(saved_on_one_split, "8M,8M", args=[folder, str(tmp_path / "cache")])
    first, second = seen[: len(CACHES)], seen[len(CACHES) :]
    for (here, bits), (there, again) in zip(first, second, strict=True):
        assert here != there and len(set(here)) == len(set(there)) == 2
        assert bits == again


# Ways to load -------------------------------------------------------------------------------


def ways_to_load(folder):
    seen: dict[str, object] = {}
    model = Model(folder, max_input_len=16)
    expected = digest(on_cpu(folder, Cache))
    cache = Cache(model, 48, 2)

    calls: list[list[int]] = []
    report = model.load(stats=True, callback=lambda *call: calls.append(list(call)))
    seen["callback"] = calls
    seen["stats"] = [str(report), [str(row.device) for row in report.devices]]
    seen["plain"] = digest(model.forward(IDS, cache)) == expected
    try:
        model.load()
    except ValueError as error:
        seen["twice"] = str(error)
    model.unload()

    def chatter(index: int, total: int):
        yield f"{index}/{total}"

    seen["callback_gen"] = list(model.load_autosplit_gen(cache, callback_gen=chatter))
    model.unload()
    half = model.load_gen(callback_gen=chatter)
    for _ in range(4):
        next(half)
    seen["during"] = sum(allocated()) > 0
    half.close()
    seen["dropped"] = [allocated(), len(model.device_map), model.loaded]

    def fail(index: int, total: int) -> None:
        if index == 3:
            raise KeyboardInterrupt

    try:
        model.load(callback=fail)
    except KeyboardInterrupt:
        seen["interrupted"] = [allocated(), len(model.device_map)]

    model.load([0, 0.01], lazy=True)
    seen["lazy placed"] = [sorted(set(map(str, model.device_map.values()))), allocated()]
    seen["lazy logits"] = digest(model.forward(IDS, cache)) == expected
    seen["lazy read"] = allocated()[1] > 2 * MEBI
    model.unload()

    model.load(devices=["sim:1", "cpu"], gpu_split=[0.0015, 1])
    seen["overflow"] = [str(device) for device in model.device_map.values()]
    seen["overflow logits"] = digest(model.forward(IDS, cache)) == expected
    model.unload()

    cheap = Model(folder, max_input_len=16, embed_cpu=True)
    other = Cache(cheap, 48, 2)
    cheap.load_autosplit(other)
    seen["embed_cpu"] = [str(device) for device in cheap.device_map.values()]
    seen["embed_cpu logits"] = digest(cheap.forward(IDS, other)) == expected
    cheap.unload()

    reserve = torch.accelerator.get_memory_info(0)[0] - (1200 << 10)
    model.load_autosplit(cache, reserve_vram=[reserve, 0])
    seen["reserve"] = [str(device) for device in model.device_map.values()].count("sim:0")
    seen["elsewhere"] = digest(model.forward(IDS, cache)) == expected
    model.unload()
    seen["at the end"] = allocated()
    return seen


def test_load_variants_do_what_their_arguments_say(folder):
    seen = run_sim(ways_to_load, "32M,32M", args=[folder])
    total = 6
    assert seen["callback"] == [[index, total] for index in range(total + 1)]
    assert seen["stats"][1] == ["sim:0", "sim:1"] and "sim:0" in seen["stats"][0]
    assert seen["plain"]
    assert "unload" in seen["twice"]
    assert seen["callback_gen"] == [f"{index}/{total}" for index in range(total + 1)]
    assert seen["during"]
    assert seen["dropped"] == [[0, 0], 0, False]
    assert seen["interrupted"] == [[0, 0], 0]
    cache_bytes = 2 * 48 * 2 * 2 * 32 * 4 * 4
    assert seen["lazy placed"] == [["sim:1"], [0, cache_bytes]]
    assert seen["lazy logits"] and seen["lazy read"]
    assert seen["overflow"][0] == "sim:1" and seen["overflow"][-1] == "cpu"
    assert seen["overflow logits"]
    assert seen["embed_cpu"] == ["cpu"] + ["sim:0"] * 5
    assert seen["embed_cpu logits"]
    assert 0 < seen["reserve"] < 4
    assert seen["elsewhere"]
    assert seen["at the end"] == [0, 0]


def tied_weights(folder):
    model = Model(folder, max_input_len=16)
    model.load()
    together = allocated()
    logits = model.forward(IDS).cpu()
    model.unload()
    model.load([1.5 / 1024, 1])
    apart = allocated()
    same = torch.equal(model.forward(IDS).cpu(), logits)
    model.unload()
    return together, apart, same, allocated()


def test_tied_weights_are_stored_once_on_a_device_and_twice_on_two(tmp_path):
    folder = str(save(reference(llama(tie_word_embeddings=True)), tmp_path))
    together, apart, same, left = run_sim(tied_weights, "32M,32M", args=[folder])
    assert same
    assert sum(apart) - sum(together) == 320 * 128 * 4
    assert left == [0, 0]


def broken_copies(folder):
    expected = digest(on_cpu(folder, Cache))
    sim.copy_fault(0, 1, True)
    zeros = torch.ones(4, device="sim:0").to("sim:1").cpu().tolist()
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 48, 2)
    model.load([0.0015, 1])
    return [
        zeros,
        sorted(set(map(str, model.device_map.values()))),
        digest(model.forward(IDS, cache)) == expected,
    ]


def test_a_copy_between_devices_that_yields_zeros_goes_through_the_host(folder):
    zeros, devices, same = run_sim(broken_copies, "32M,32M", args=[folder])
    assert zeros == [0.0] * 4  # the fault is there
    assert devices == ["sim:0", "sim:1"]
    assert same


# Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu_split": [-1]}, r"gpu_split\[0\] is -1"),
        ({"gpu_split": [float("nan")]}, r"gpu_split\[0\] is nan"),
        ({"gpu_split": [0]}, "no device any memory"),
        ({"gpu_split": [1, 1]}, "names 2 devices, and there are 1: cpu"),
        ({"devices": ["cuda:7"]}, "cuda:7 is not on this machine"),
        ({"devices": ["nonsense"]}, "no such device: 'nonsense'"),
        ({"devices": "24G,24G"}, "devices has the size '24G'"),
        ({"devices": []}, "devices is empty"),
        ({"devices": ["cpu", "cpu"]}, "names one twice"),
    ],
)
def test_invalid_split_is_refused(folder, arguments, message):
    model = Model(folder)
    with pytest.raises(ValueError, match=message):
        model.load(**{"devices": ["cpu"], **arguments})
    assert not model.device_map


def test_dtype_may_be_a_name_and_unknown_arguments_are_refused(folder):
    assert Model(folder, dtype="float16").dtype == Model(folder, dtype=torch.float16).dtype
    assert Model(folder, dtype="auto").dtype == Model(folder).dtype
    for wrong in ("fp4", torch.int8):
        with pytest.raises(ValueError, match="dtype is .*: it must be one of float16"):
            Model(folder, dtype=wrong)
    model = Model(folder)
    with pytest.raises(TypeError, match="cache is a NoneType; it must be one of exkv's"):
        model.load_autosplit(None)
    with pytest.raises(ValueError, match="objective is 'luck': it must be one of pack"):
        model.load_autosplit(Cache(model, max_seq_len=64), objective="luck")


@pytest.mark.parametrize("host", [False, "1G"])
def test_a_plan_with_a_device_that_is_not_here_is_refused(folder, host):
    """Whether or not it holds anything: it would be next when another one is full."""
    model = Model(folder)
    sizes = ["1K" if host else "1G"] * 40
    plan = place(
        model, devices=",".join(sizes), cap=[0] * 39 + ["1G"], cpu=host, margin=0, allocator="exact"
    )
    assert [str(device) for device in set(plan.devices)] == ["cpu" if host else "cuda:39"]
    with pytest.raises(ValueError, match="new one: device cuda:39 is not on this machine, which"):
        model.load(plan=plan)
    assert not model.device_map


def test_invalid_reserve_is_refused(folder):
    model = Model(folder)
    cache = Cache(model, 16)
    with pytest.raises(ValueError, match="reserve for cpu is -1"):
        model.load_autosplit(cache, reserve_vram=-1, devices=["cpu"])
    with pytest.raises(ValueError, match="names 2 devices, and there are 1"):
        model.load_autosplit(cache, reserve_vram=[0, 0], devices=["cpu"])


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


HOSTILE = {
    "truncated": "model.safetensors.*download",
    "a missing shard": "model-00002.*",
    "a missing tensor": "model.layers.3.mlp.up_proj.weight",
    "a config with other shapes": "model.*weight.*112",
    "more layers than tensors": "model.layers.4",
    "a header of 2^60 bytes": "1152921504606846976",
    "overlapping offsets": "overlap",
    "an unknown dtype": "Q7",
    "integers for weights": "up_proj.weight.*int32.*float32",
}


def spoil(folder: Path, how: str) -> None:
    """Damage a checkpoint."""
    file = folder / "model.safetensors"
    data = file.read_bytes() if file.exists() else b""
    if how == "truncated":
        file.write_bytes(data[:-1000])
    elif how == "a missing shard":
        next(folder.glob("model-00002*")).unlink()
    elif how == "a config with other shapes":
        edit_config(folder, intermediate_size=112)
    elif how == "more layers than tensors":
        edit_config(folder, num_hidden_layers=5)
    elif how == "a header of 2^60 bytes":
        file.write_bytes(struct.pack("<Q", 1 << 60) + data[8:])
    else:
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        name = "model.layers.3.mlp.up_proj.weight"
        if how == "a missing tensor":
            header["spare"] = header.pop(name)
        elif how == "an unknown dtype":
            header[name]["dtype"] = "Q7"
        elif how == "integers for weights":
            header[name]["dtype"] = "I32"
        else:
            begin, end = header[name]["data_offsets"]
            header[name]["data_offsets"] = [begin - 512, end - 512]
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def load_hostile(folders):
    messages = {}
    for how, folder in folders.items():
        before = sim.allocation_count()
        model = Model(folder)
        cache = Cache(model, 16)
        try:
            model.load_autosplit(cache)
            messages[how] = "loaded"
        except (ValueError, FileNotFoundError) as error:
            messages[how] = str(error)
        if sim.allocation_count() != before or model.device_map or cache.nbytes():
            messages[how] = "something was allocated"
    return messages


def test_a_hostile_checkpoint_is_refused_before_anything_is_allocated(tmp_path):
    folders = {}
    for how in HOSTILE:
        options = {"max_shard_size": "300KB"} if how == "a missing shard" else {}
        folder = save(reference(llama()), tmp_path / how.replace(" ", "_"), **options)
        spoil(folder, how)
        folders[how] = str(folder)
    messages = run_sim(load_hostile, "32M", args=[folders])
    for how, pattern in HOSTILE.items():
        assert re.search(pattern, messages[how], re.DOTALL), f"{how}: {messages[how]}"


# A dry run ----------------------------------------------------------------------------------


def dry_70b():
    """Plan Llama-2-70B's shapes over three imaginary cards; the weights are a sparse file."""
    import resource

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_hollow_checkpoint(folder)
        before = bytes_read()
        model = Model(folder)
        cache = Cache(model, 32768, lazy=True)
        model.load_autosplit(cache, last_id_only=True)
        read = bytes_read() - before
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        rows = [
            [
                row.units,
                row.ledger.limit,
                [[getattr(row.ledger, n), row.measured.get(n, 0)] for n in LINES],
            ]
            for row in model.report.devices
        ]
        print(model.report)
        model.unload()
        return peak, read, rows, allocated()


def bytes_read() -> int:
    """Bytes that this process has read from files, cached or not."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def write_hollow_checkpoint(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    model = Model(folder)
    header, offset = {}, 0
    for name, tensor in model.stored_tensors().items():
        nbytes = torch.Size(tensor.shape).numel() * 2
        offsets = [offset, offset + nbytes]
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": offsets}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligned, as safetensors writes it
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


def test_a_dry_run_places_70b_with_a_32k_cache_in_little_memory():
    peak, read, rows, left = run_sim(dry_70b, "48G,48G,80G", env={"EXKV_SIM_DRY": "1"}, fresh=True)
    assert sum(row[0] for row in rows) == 82
    assert all(row[0] > 0 for row in rows)
    assert sum(lines[0][0] for _, _, lines in rows) == pytest.approx(137.95e9, rel=0.001)
    assert sum(lines[1][0] for _, _, lines in rows) == 80 * 2 * 32768 * 8 * 128 * 2
    for _, limit, lines in rows:
        assert all(predicted == measured for predicted, measured in lines)
        assert sum(predicted for predicted, _ in lines) <= limit
    assert peak < 1.5 * 2**30
    assert read < 2**30  # no tensor is read
    assert left == [0, 0, 0]


# The progress bar ---------------------------------------------------------------------------------


def test_progress_bar_moves_from_the_start(folder, monkeypatch):
    """The bar pulses while the plan is being made, whose progress is unknown, then counts."""
    states = []

    class Watched(Progress):
        def state(self):
            return [(task.completed, task.total) for task in self.tasks]

    made = []
    watched = lambda **options: made.append(Watched(**options)) or made[-1]  # noqa: E731
    monkeypatch.setattr("exkv.loading.options.Progress", watched)
    expect = Checkpoint.expect

    def while_planning(self, *tensors):
        states.append((*made[0].state(), made[0].live.is_started))
        return expect(self, *tensors)

    monkeypatch.setattr(Checkpoint, "expect", while_planning)
    model = Model(folder)
    model.load(progress=True, callback=lambda *step: states.append(made[0].state()[0]))
    total = len(model.units)
    assert states == [((0, None), True), *((index, total) for index in range(total + 1))]
