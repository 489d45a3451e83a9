"""The clock of the simulated devices: known programs take what arithmetic says."""

from __future__ import annotations

import pytest
import torch
from simproc import needs_sim, run_sim
from tiny import llama, reference, save

from exkv import Cache, Model, sim
from exkv.planning import Workload

CARD, HOST, LINK, LATENCY = 1e9, 1e8, 5e7, 1e-3
SIDE = 64
MATRIX = SIDE * SIDE * 4
#: Of a product of a row and a matrix.
TOUCHED = MATRIX + 2 * SIDE * 4

pytestmark = needs_sim


def clock(**changes) -> sim.Clock:
    rates = {"sim:0": CARD, "sim:1": CARD / 4}
    return sim.Clock(rates, **{"host": HOST, "link": LINK, "latency": LATENCY, **changes})


def near(seconds: float):
    return pytest.approx(seconds, rel=1e-9)


def programs() -> dict:
    """Seconds of small programs."""
    seen = {}
    x, w = torch.ones(1, SIDE), torch.ones(SIDE, SIDE)
    on = [(x.to(f"sim:{i}"), w.to(f"sim:{i}")) for i in range(2)]
    with clock() as time:

        def timed(name: str) -> None:
            seen[name] = [time.seconds, time.host_seconds]
            time.restart()

        torch.mm(*on[0])
        timed("card")
        torch.mm(*on[1])
        timed("slower card")
        torch.ops.exkv.linear(x, w, None)
        timed("host")
        for _ in range(3):
            torch.mm(*on[0])
        torch.mm(*on[1])
        torch.mm(x, w)
        timed("side by side")
        y = torch.mm(*on[0])
        y.cpu()
        timed("read back")
        y.sum().item()
        timed("item")
        x.to("sim:0")
        w.to("sim:0")
        timed("copies in a row")
        torch.mm(x.to("sim:0"), on[0][1])
        timed("copy and card")
        w.to("sim:0")
        torch.mm(*on[0])
        timed("behind a copy")
        on[0][0].to("sim:1")
        timed("between cards")
        z = torch.empty(SIDE, SIDE)
        z.copy_(on[0][1], non_blocking=True)
        z.add_(1)
        timed("after an enqueued copy")
        w.view(-1)[1:].expand(2, -1).t().unsqueeze(0)
        torch.empty(10, device="sim:0")
        timed("views")
        (x.expand(SIDE, SIDE) + w)
        timed("expanded")
        w.zero_()
        timed("zeros")
        torch.nn.functional.embedding(torch.tensor([[3, 3, 5]]), w)
        timed("rows")
        torch.mm(*on[0])
        seen["bytes"] = time.nbytes
        seen["busy"] = time.busy
        seen["spans"] = [list(span) for span in time.spans]
    return seen


def test_known_programs_take_what_arithmetic_says():
    seen = run_sim(programs, "1M,1M")
    card, slow, host = TOUCHED / CARD, TOUCHED * 4 / CARD, TOUCHED / HOST
    row, copy = SIDE * 4 / LINK, MATRIX / LINK
    assert seen["card"] == [near(card), 0.0]
    assert seen["slower card"] == [near(slow), 0.0]
    assert seen["host"] == [near(host), near(host)]
    assert seen["side by side"] == [near(max(3 * card, slow, host)), near(host)]
    assert seen["read back"] == [near(card + LATENCY + row)] * 2
    summed = (SIDE * 4 + 4 + 4) / CARD
    assert seen["item"] == [near(summed + LATENCY)] * 2
    assert seen["copies in a row"] == [near(LATENCY + row + copy), 0.0]
    assert seen["copy and card"] == [near(LATENCY + row + card), 0.0]
    assert seen["behind a copy"] == [near(LATENCY + copy + card), 0.0]
    assert seen["between cards"] == [near(LATENCY + row), 0.0]
    assert seen["after an enqueued copy"] == [near(LATENCY + copy + 2 * MATRIX / HOST)] * 2
    assert seen["views"] == [0.0, 0.0]
    assert seen["expanded"] == [near((2 * MATRIX + SIDE * 4) / HOST)] * 2
    assert seen["zeros"] == [near(MATRIX / HOST)] * 2
    assert seen["rows"][0] == pytest.approx((2 * 3 * SIDE * 4 + 24) / HOST, rel=0.02)
    assert seen["bytes"]["sim:0"] == TOUCHED and seen["busy"]["sim:0"] == near(card)
    assert seen["spans"] == [["sim:0", "aten::mm", 0.0, near(card)]]


def mixtures() -> dict:
    """Bytes that ops of experts, and of caches, touch."""
    seen = {}
    x, chosen = torch.ones(2, SIDE), torch.tensor([[0, 3], [3, 0]])
    weights = torch.ones(2, 2)
    matrices = [[torch.ones(SIDE, SIDE) for _ in range(8)] for _ in range(3)]
    beside = 2 * SIDE * 4 * 2 + 4 * 8 + 4 * 4
    for name in ("cpu", "sim:0"):
        gate, up, down = [[w.to(name) for w in each] for each in matrices]
        call = x.to(name), chosen.to(name), weights.to(name)
        with clock() as time:
            torch.ops.exkv.experts(*call, gate, up, down, "silu")
            seen[name] = time.nbytes[name] - beside
    q, kv, none = (
        torch.ones(1, 1, 4, 16),
        torch.ones(1, 100, 4, 16),
        torch.tensor([24], dtype=torch.int32),
    )
    with clock() as time:
        torch.ops.exkv.attention(q, kv, kv, none, 25, False, 1.0)
        seen["attention"] = time.nbytes["cpu"] - 2 * q.nbytes - 4
    return seen


def test_of_experts_the_chosen_ones_are_read_and_of_a_cache_what_is_stored():
    seen = run_sim(mixtures, "4M,1M")
    assert seen["cpu"] == seen["sim:0"] == 2 * 3 * MATRIX
    assert seen["attention"] == 2 * 25 * 4 * 16 * 4


def decode_step(folder: str, split: list[int]) -> dict:
    """What a decode step of a model over two cards takes, and what its plan says that it reads."""
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 64)
    model.load([each / 2**30 for each in split])
    ids = torch.arange(63).view(1, -1) + 5
    model.forward(ids[:, :62], cache)
    alone = model.forward(ids[:, 62:], cache).cpu()
    seen = {"devices": [str(unit.device) for unit in model.units]}
    workload = Workload.of(model, [cache])
    costs = workload.costs(workload.no_peaks(model.budgets()))
    seen["traffic"] = [cost.traffic for cost in costs]
    cache.reset()
    model.forward(ids[:, :62], cache)
    with clock(host=1e11, link=1e10, latency=20e-6) as time:
        again = model.forward(ids[:, 62:], cache)
        seen["seconds"] = time.seconds
        seen["same"] = torch.equal(alone, again.cpu())
        seen["busy"] = time.busy
    return seen


def test_a_dense_models_decode_step_takes_what_the_objective_speed_says(tmp_path):
    config = llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
    folder = save(reference(config), tmp_path)
    whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    seen = run_sim(decode_step, "64M,64M", args=[str(folder), [whole // 2, whole * 2]])
    rates, devices = {"sim:0": CARD, "sim:1": CARD / 4}, seen["devices"]
    assert set(devices) == set(rates)
    read = [nbytes / rates[d] for nbytes, d in zip(seen["traffic"], devices, strict=True)]
    planned = sum(read) + 2 * 20e-6  # a hop to each card
    assert seen["same"]
    assert seen["seconds"] == pytest.approx(planned, rel=0.03)


def test_a_card_without_a_bandwidth_is_named():
    with pytest.raises(ValueError, match="bandwidth of sim:1 is 0"):
        sim.Clock({"sim:1": 0}, host=1.0, link=1.0)
