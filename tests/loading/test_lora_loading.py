"""Adapters on simulated devices: planned to the byte, loaded before or after the model, and rolled
back to the byte where one doesn't fit."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from adapters import linears_of, write_adapter
from simproc import run_sim

from exkv import Cache, Model, PlacementError, sim
from exkv.cli import main
from exkv.loading.report import LINES

IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(1))
NAMES = ("q_proj", "v_proj", "up_proj", "down_proj", "lm_head")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    reference, folder = tiny.reference(tiny.llama()), tmp_path_factory.mktemp("model")
    layers = linears_of(reference, NAMES)
    adapter = write_adapter(tmp_path_factory.mktemp("first"), layers, rank=5)
    other = write_adapter(tmp_path_factory.mktemp("other"), layers, rank=40, seed=1)
    return [str(each) for each in (tiny.save(reference, folder), adapter, other)]


def allocated() -> list[int]:
    return [torch.accelerator.memory_allocated(i) for i in range(torch.accelerator.device_count())]


def digest(tensor: torch.Tensor) -> int:
    return hash(tensor.cpu().numpy().tobytes())


def lines_of(model: Model) -> list[list[int]]:
    return [
        [getattr(row.ledger, line), row.measured.get(line, 0)]
        for row in model.report.devices
        for line in LINES
    ]


def in_every_order(folder, first, other):
    """Load adapters before the model, after it, and lazily -> digests, the ledger, and bytes after
    unloading."""
    digests, lines, left = [], [], []
    for when in ("before", "after", "lazy"):
        model = Model(folder, max_input_len=16)
        cache = Cache(model, 48, 2, lazy=True)
        if when == "before":
            model.load_adapter(first, "first")
            model.load_adapter(other, "other")
            model.load_autosplit(cache)
            lines = lines_of(model)
        elif when == "after":
            model.load_autosplit(cache)
            model.load_adapter(first, "first")
            model.load_adapter(other, "other")
        else:
            model.load_adapter(other, "other")
            model.load(lazy=True)
            model.load_adapter(first, "first")
        for adapter in ("first", ["other", None]):
            cache.reset()
            digests.append(digest(model.forward(IDS, cache, adapter=adapter)))
        used = {str(unit.device) for unit in model.units}
        before = allocated()
        model.unload_adapter("other")
        left.append(sum(before) - sum(allocated()))
        model.unload()
    return [digests, lines, left, sorted(used), allocated()]


def test_adapters_are_planned_to_the_byte_whenever_loaded(folders):
    digests, lines, freed, used, left = run_sim(in_every_order, "1700K,2M,64M", args=folders)
    assert digests[:2] == digests[2:4] == digests[4:] and digests[0] != digests[1]
    assert all(predicted == measured for predicted, measured in lines) and len(lines) == 18
    assert len(used) == 3 and len(set(freed)) == 1 and freed[0] > 0
    assert not any(left)


def refused(folder, first, other):
    """Load a second adapter where the plan has no room, and where memory really runs out half-way
    -> the errors' messages, and bytes."""
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 48, 2)
    model.load_adapter(first, "first")
    model.load_autosplit(cache, last_id_only=True)
    expected = digest(model.forward(IDS, cache, adapter="first", last_id_only=True))
    before, messages = allocated(), []
    total = model.report.devices[0].ledger.total
    sim.set_capacity(0, total + (100 << 10))
    for check in (True, False):
        if not check:
            model.check_adapter = lambda adapter: None
        try:
            model.load_adapter(other, "other")
        except PlacementError as error:
            messages.append(str(error))
        assert list(model.adapters) == ["first"]
    same = allocated() == before
    cache.reset()
    found = digest(model.forward(IDS, cache, adapter="first", last_id_only=True))
    return [messages, same, found == expected]


def test_adapter_without_room_changes_nothing(folders):
    (planned, real), same, works = run_sim(refused, "64M", args=folders)
    assert "no room for adapter 'other' on sim:0" in planned and "too few" in planned
    assert "sim:0 ran out of memory at" in real and "of adapter 'other'" in real
    assert same and works


def test_plan_command_counts_adapters(folders, capsys):
    folder, first, other = folders
    command, weights = ["plan", folder, "--devices", "4G", "--max-seq-len", "64"], []
    for more in ([], [first], [first, other]):
        flags = [flag for each in more for flag in ("--adapter", each)]
        main([*command, "--json", *flags])
        ledgers = json.loads(capsys.readouterr().out)["plans"]["model"]["ledgers"]
        weights.append(sum(ledger["weights"] for ledger in ledgers))
    model = Model(folder)
    sizes = [sum(model.load_adapter(each, each).nbytes.values()) for each in (first, other)]
    assert weights == [weights[0], weights[0] + sizes[0], weights[0] + sum(sizes)]
    assert main([*command, "--adapter", folder]) == 2
    assert "adapter_config.json is missing" in capsys.readouterr().err
