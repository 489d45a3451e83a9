"""Loads that are interrupted at the last moment, and memory that others take during a load."""

from __future__ import annotations

import pytest
import torch
from simproc import run_sim
from tiny import llama, reference, save

from exkv import (
    Cache,
    DynamicCache,
    Model,
    OutOfMemoryError,
    PlacementError,
    devices,
    place,
)
from exkv.planning import Workload

IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save(reference(llama()), tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("way", ["load", "load_autosplit"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_in_the_last_callback_leaves_nothing_loaded(folder, way, error):
    model = Model(folder)
    cache = Cache(model, 40)

    def stop(index: int, total: int) -> None:
        if index == total:
            assert model.loaded and model.report is not None
            raise error

    arguments = [cache] if way == "load_autosplit" else []
    with pytest.raises(error):
        getattr(model, way)(*arguments, devices=["cpu"], callback=stop)
    assert not model.loaded and model.device_map == {} and model.plan is None
    assert all(not layer.tensors for layer in cache.layers)
    getattr(model, way)(*arguments, devices=["cpu"])
    assert model.forward(IDS, cache := Cache(model, 40, 2)).shape[0] == 2
    del cache


def stolen_behind(folder):
    """Another program takes memory of a card that the user's plan has filled already."""
    model = Model(folder)
    cache = Cache(model, 40, 2)
    thieves = []

    def steal(index: int, total: int) -> None:
        if index == total - 1:
            free, _ = torch.accelerator.get_memory_info(0)
            thieves.append(torch.empty(free - 512, dtype=torch.int8, device="sim:0"))

    try:
        model.load(plan=place(model, cache, cap=["1400K", "1G"]), callback=steal)
        return "loaded"
    except PlacementError as error:
        message = str(error)
    thieves.clear()
    left = [torch.accelerator.memory_allocated(i) for i in range(2)]
    model.load_autosplit(cache)
    return [message, model.loaded, left]


def test_memory_taken_during_a_load_is_reported_at_its_end(folder):
    message, again, left = run_sim(stolen_behind, "4M,4M", args=[folder])
    assert "bytes on sim:0, and 512 are free" in message
    assert "while the model was loaded" in message
    assert again and left == [0, 0]


class Host:
    """Fake host memory: a test sets what this process and others use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mine = self.others = 0
        monkeypatch.setattr(devices, "_host_memory", self.memory)

    def memory(self) -> devices.Memory:
        return devices.Memory(capacity=1 << 40, in_use=self.mine, in_use_by_others=self.others)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("lacking", [0, 1])
def test_host_memory_taken_during_a_load_is_reported_at_its_end(folder, monkeypatch, lazy, lacking):
    host, model = Host(monkeypatch), Model(folder)
    caches = [Cache(model, 40, 2), DynamicCache(model, 400)]
    plan = place(model, caches, devices=["cpu"])
    (ledger,) = plan.ledgers

    def steal(index: int, total: int) -> None:
        if index == total - 1:
            host.mine = 0 if lazy else ledger.weights
            host.others = (1 << 40) - ledger.total + lacking

    if not lacking:
        model.load(plan=plan, lazy=lazy, callback=steal)
        return
    with pytest.raises(PlacementError, match="by other programs") as caught:
        model.load(plan=plan, lazy=lazy, callback=steal)
    assert (caught.value.device, caught.value.needed - caught.value.available) == ("cpu", 1)
    assert not model.loaded and model.plan is None


@pytest.mark.parametrize("planned", [False, True])
def test_a_load_computes_costs_once(folder, monkeypatch, planned):
    model, calls = Model(folder), []
    cache, costs = Cache(model, 40), Workload.costs
    plan = place(model, cache, devices=["cpu"])
    monkeypatch.setattr(Workload, "costs", lambda *a: calls.append(a) or costs(*a))
    if planned:
        model.load(plan=plan)
    else:
        model.load_autosplit(cache, devices=["cpu"])
    assert len(calls) == 1


def stolen_before_the_end(folder):
    """The error of a later call compares with memory before the load."""
    model = Model(folder)
    cache = Cache(model, 40, 2)
    model.load_autosplit(cache)
    row = model.report.devices[0]
    return row.change()


def test_what_others_took_is_counted_from_before_the_load(folder):
    assert "others +0" in run_sim(stolen_before_the_end, "4M", args=[folder])


def lazily(folder):
    model = Model(folder)
    caches = [DynamicCache(model, 400), Cache(model, 40)]
    model.load(lazy=True)
    lazy = model.report.surprises()
    measured = [sorted(row.measured) for row in model.report.devices]
    model.forward(IDS[:1], caches[0])
    return lazy, measured


def test_lazy_load_measures_no_workspace_and_reports_no_surprise(folder):
    surprises, measured = run_sim(lazily, "8M", args=[folder])
    assert surprises == []
    assert measured == [["cache"]]


def test_an_empty_split_is_no_split(folder):
    model = Model(folder)
    model.load([], devices=["cpu"])
    assert model.loaded


@pytest.mark.parametrize(
    ("split", "error", "message"),
    [
        ([float("inf")], ValueError, r"gpu_split\[0\] is inf"),
        (["1", 1], TypeError, r"gpu_split\[0\] is '1'"),
        (20, TypeError, r"gpu_split is 20: give a list"),
        ("20", TypeError, r"gpu_split is '20': give a list"),
        ([1e300], ValueError, r"gpu_split\[0\] is 1e\+300"),
    ],
)
def test_invalid_split_names_the_entry(folder, split, error, message):
    with pytest.raises(error, match=message):
        Model(folder).load(split)


def test_what_replaces_an_out_of_memory_error_is_one():
    assert issubclass(OutOfMemoryError, torch.OutOfMemoryError)
    assert issubclass(PlacementError, torch.OutOfMemoryError)
