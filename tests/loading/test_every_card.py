"""Cards are handled one by one: a full or busy one is left out with the reason, and one that the
user left out isn't touched."""

from __future__ import annotations

import logging

import pytest
import torch
from simproc import run_sim
from tiny import llama, reference, save, save_tokenizer

from exkv import Cache, Engine, Job, Model, PagedCache, Tokenizer, sim
from exkv.planning import make_budgets

CARDS = "64M,64M,64M"
BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore lines"
IDS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = llama(num_hidden_layers=2, eos_token_id=None)
    return str(save_tokenizer(save(reference(config), tmp_path_factory.mktemp("model"))))


def touches() -> list[int]:
    return [sim.touches(index) for index in range(torch.accelerator.device_count())]


def used(folder: str, **options) -> tuple[list[str], list[int]]:
    """Load, run, generate and serve -> the units' devices, and how often each card was touched."""
    before = touches()
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 64)
    model.load(**options)
    where = sorted(set(map(str, model.device_map.values())))
    model.forward(IDS, cache)
    model.generate(IDS, max_new_tokens=3)
    with Engine(model, PagedCache(model, 64, page=16), Tokenizer(folder), max_running=2) as engine:
        engine.run([Job(prompt=[5, 6, 7], max_new_tokens=3)])
    model.unload()
    return where, [now - then for now, then in zip(touches(), before, strict=True)]


def left_out(folder):
    named = used(folder, devices=["sim:1"])
    split = used(folder, gpu_split=[0, 0.05])
    sim.refuse(0, BUSY)
    beside_busy = used(folder, devices=["sim:1"])
    return named, split, beside_busy


def test_a_card_that_the_user_left_out_is_not_touched(folder):
    for where, counts in run_sim(left_out, CARDS, args=[folder]):
        assert where == ["sim:1"]
        assert counts[0] == counts[2] == 0 < counts[1]


def busy(folder):
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("exkv.devices").addHandler(handler)
    sim.refuse(0, BUSY)
    offered = [str(budget.device) for budget in make_budgets()]
    with_reserves = [budget.reserve for budget in make_budgets(reserve=[1, 2, 3])]
    where, _ = used(folder)
    errors = []
    for devices in (["sim:0"], ["sim:1", "sim:0"]):
        try:
            Model(folder).load(devices=devices)
        except ValueError as error:
            errors.append(str(error))
    for index in (1, 2):
        sim.refuse(index, "CUDA error: out of memory")
    try:
        Model(folder).load()
    except ValueError as error:
        errors.append(str(error))
    return offered, with_reserves, where, records, errors


def test_busy_card_is_left_out_and_the_reason_is_logged(folder):
    offered, reserves, where, records, errors = run_sim(busy, CARDS, args=[folder])
    first = BUSY.splitlines()[0]
    assert offered == ["sim:1", "sim:2"] and reserves == [2, 3] and where == ["sim:1"]
    assert f"left out: sim:0: {first}" in records
    for named in errors[:2]:
        assert f"device sim:0 can't be used now: {first}" in named
    assert errors[2].startswith(
        f"no device can be used now (sim:0: {first}; sim:1: CUDA error: out"
    )
    assert 'devices=["cpu"]' in errors[2]
