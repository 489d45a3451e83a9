"""Another program takes memory of a card while an engine runs: the engine preempts before a call
fails, and runs more jobs again when memory returns."""

from __future__ import annotations

import logging

import torch
from simproc import run_sim
from tiny import llama, reference, save, save_tokenizer

from exkv import Engine, Job, Model, ModelConfig, PagedCache, SamplingParams, Tokenizer, place, sim
from exkv.decode import pressure
from exkv.decode.pressure import Pressure
from exkv.planning.place import call_bytes

ROWS, CARD = 16, 64 << 20


def jobs() -> list[Job]:
    return [
        Job(prompt=[5 + i, 6, 7], max_new_tokens=24, settings=SamplingParams(temperature=0))
        for i in range(ROWS)
    ]


def squeezed(folder: str, looks: bool) -> dict:
    """Run jobs while the card lacks the memory of calls of more than 4 rows for a while."""
    logging.disable(logging.WARNING)
    pressure.INTERVAL = 0
    if not looks:
        Pressure.look = lambda self: self.rows
    model = Model(folder, max_input_len=16)
    model.load(devices=["sim:0"])
    cache = PagedCache(model, ROWS * 64, page=32)
    running: list[int] = []
    with Engine(model, cache, Tokenizer(folder), max_running=ROWS, chunk=4) as engine:
        caches = engine._running._caches
        needed = [
            call_bytes(model, model.plan, caches, most_rows=rows)[torch.device("sim", 0)]
            for rows in (1, 4, ROWS)
        ]
        handles = [engine.submit(job) for job in jobs()]
        for step in range(10_000):
            if not engine.busy:
                break
            if step == 24:
                sim.set_capacity(0, torch.accelerator.memory_allocated(0) + needed[1] + 4096)
            if step == 36:
                sim.set_capacity(0, CARD)
            engine.iterate()
            running.append(len(engine._running.jobs))
        stats = engine.stats
        tokens = [handle.tokens for handle in handles]
    left = torch.accelerator.memory_allocated(0)
    model.unload()
    return {
        "needed": needed,
        "running": running,
        "tokens": tokens,
        "out of memory": stats.out_of_memory,
        "pressed": stats.pressed,
        "left": left - torch.accelerator.memory_allocated(0),
    }


def test_engine_preempts_under_pressure_and_recovers(tmp_path):
    config = llama(num_hidden_layers=2, eos_token_id=None)
    folder = str(save_tokenizer(save(reference(config), tmp_path)))
    with_looks, blind = (run_sim(squeezed, "64M", args=[folder, looks]) for looks in (True, False))
    one, four, many = with_looks["needed"]
    assert one <= four < many
    assert blind["out of memory"] > 0 == blind["pressed"]  # without checks, calls do fail
    assert with_looks["out of memory"] == 0 < with_looks["pressed"]
    assert with_looks["tokens"] == blind["tokens"]
    running = with_looks["running"]
    assert max(running[:24]) == ROWS and max(running[25:36]) <= 4 < max(running[40:])


def test_rows_halve_at_once_and_double_once_a_check(monkeypatch):
    device, now, free = torch.device("cuda", 0), [0.0], [1600]
    monkeypatch.setattr(pressure.devices, "available_memory", lambda device: free[0])
    monkeypatch.setattr(pressure, "call_bytes", lambda *args, most_rows: {device: 100 * most_rows})

    class Planned:
        plan = object()

    looked = Pressure(Planned(), 16, list, clock=lambda: now[0])
    seen = []
    for available in (1600, 1599, 350, 99, 1600, 1600, 1600, 1600, 1600):
        now[0] += pressure.INTERVAL
        free[0] = available
        seen.append(looked.look())
    assert seen == [16, 8, 2, 1, 2, 4, 8, 16, 16]
    assert looked.raised == 3
    free[0] = 0
    assert looked.look() == 16  # it is too early to ask again


def test_calls_count_by_reserved_bytes():
    model = Model(ModelConfig.from_dict(llama().to_dict()), dtype="float16")
    cache = PagedCache(model, 4096, page=32)
    plan = place(model, cache, devices="24G")
    (ledger,) = plan.ledgers
    assert ledger.promised_call > ledger.workspace
    needed = call_bytes(model, plan, [cache], most_rows=ROWS)
    assert needed == {ledger.device: ledger.promised_call}


def test_model_on_the_host_has_no_memory_pressure():
    class Unplanned:
        plan = None

    assert Pressure(Unplanned(), 16, list).look() == 16
