"""The predicted time of a decode step with experts in host memory, compared with the simulated
accelerator's clock, and with random draws."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from simproc import needs_sim, run_sim
from tiny import TINY, reference, save

from exkv import Cache, Model, place, sim
from exkv.loading.usage import sum_of
from exkv.models.expert_usage import UsageCounter
from exkv.planning import Budget, Workload, expected_time
from exkv.planning.expected_time import HOP_SECONDS, LINK, chances, step_seconds

#: One group of experts, as in GLM 4.5: if a token chooses within one of several groups, experts
#: come together, which plans don't know (up to 1.13 times the predicted time).
FAMILIES = {
    "Qwen3MoeForCausalLM": {"num_experts": 16},
    "Glm4MoeForCausalLM": {"n_routed_experts": 16, "n_group": 1},
}
#: A shared expert as large as all routed ones of a token, which a card that is little faster than
#: its host computes beside these.
SHARED = {"shared_expert_intermediate_size": 1024, "num_experts": 16}
ALIKE = ((0.6, (4e8,), 2e8), (0.6, (3e8,), 2e8))
#: The share of all experts to put in host memory, bytes per second of the cards and of the host:
#: slow enough that these few bytes count beside hops, and in most rigs such that sometimes the card
#: finishes first and sometimes the host.
RIGS = (
    (0.1, (2e9, 1e9), 2e8),
    (0.2, (1e9, 1e9), 2e8),
    (0.3, (5e8, 1e9), 2e8),
    (0.4, (4e8, 4e8), 2e8),
    (0.6, (1e9, 2e9), 1e8),
)
PROMPT, STEPS = 40, 8


def run(model: Model, cache: Cache, clock: sim.Clock) -> tuple[float, dict[str, tuple[float, ...]]]:
    """Mean seconds of a decode step over several texts, and the share of steps that chose each
    expert, by unit."""
    texts = torch.randint(3, 300, (3, PROMPT + STEPS), generator=torch.Generator().manual_seed(39))
    seconds, counted = 0.0, []
    modules = {unit.name: unit.module for unit in model.units if unit.expert_bytes}
    with UsageCounter(modules) as counter:
        for ids in texts.unsqueeze(1):
            cache.reset()
            model.forward(ids[:, :PROMPT], cache, last_id_only=True)
            counter.take()
            for step in range(PROMPT, PROMPT + STEPS):
                clock.restart()
                with clock:
                    model.forward(ids[:, step : step + 1], cache)
                seconds += clock.seconds
            counted.append(counter.take())
    shares = {name: sum_of([each[name] for each in counted]).shares for name in modules}
    return seconds / (len(texts) * STEPS), shares


def both(folder: str, cards: int, rigs=RIGS) -> list[dict[str, float]]:
    """For each rig, seconds of a decode step: predicted from the counted shares, measured, and
    predicted as if a host's experts overlapped only with routed ones."""
    model = Model(folder, max_input_len=16, exchange_experts=False)
    cache = Cache(model, PROMPT + STEPS)
    names = [f"sim:{card}" for card in range(cards)]
    whole = place(model, cache, names)
    beside = max(ledger.total - ledger.weights for ledger in whole.ledgers)
    held = sum(ledger.weights for ledger in whole.ledgers)
    experts = sum(sum(unit.expert_bytes) for unit in model.units)
    seen = []
    for share, bandwidths, host in rigs:
        expected_time.CARD, expected_time.HOST = bandwidths[0], host
        for card in range(cards):
            sim.set_capacity(card, beside + int(held - share * experts) // cards)
        model.load_autosplit(cache, devices=[*names, "cpu"])
        rates = dict(zip(names, bandwidths, strict=False))
        clock = sim.Clock(rates, host=host, link=LINK, latency=HOP_SECONDS)
        seconds, shares = run(model, cache, clock)
        with mock.patch.object(model, "usage", lambda shares=shares: shares):
            workload = Workload.of(model, [cache])
            costs = workload.costs(workload.no_peaks(model.budgets()))
        budgets = [
            Budget(device=torch.device(name), capacity=0, bandwidth=rate)
            for name, rate in {**rates, "cpu": host}.items()
        ]
        planned = step_seconds(costs, model.plan.places, budgets)
        alone = [replace(cost, shared_experts=0) for cost in costs]
        after = step_seconds(alone, model.plan.places, budgets)
        apart = sum(len(unit.host_experts) for unit in model.units)
        seen.append({"planned": planned, "run": seconds, "apart": apart, "after": after})
        model.unload()
    return seen


@needs_sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_takes_what_was_planned(tmp_path, name, cards):
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts_per_tok": 4}
    config = TINY[name](num_hidden_layers=4, **FAMILIES[name], **sizes)
    folder = str(save(reference(config), tmp_path))
    found = run_sim(both, ",".join(["1G"] * cards), args=[folder, cards], timeout=300)
    assert len(found) == len(RIGS) and all(each["apart"] for each in found)
    for each in found:
        assert each["run"] == pytest.approx(each["planned"], rel=0.1)


@needs_sim
def test_what_all_tokens_take_is_read_while_the_host_reads_its_experts(tmp_path):
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts_per_tok": 4}
    config = TINY["Qwen2MoeForCausalLM"](num_hidden_layers=4, **SHARED, **sizes)
    folder = str(save(reference(config), tmp_path))
    for each in run_sim(both, "1G", args=[folder, 1, ALIKE], timeout=300):
        assert each["apart"] and each["run"] == pytest.approx(each["planned"], rel=0.1)
        assert each["after"] > 1.2 * each["run"]


def test_equal_shares_are_hypergeometric():
    count, taken, draws = 16, 4, 100_000
    found = chances((taken / count,) * count)
    rng = np.random.default_rng(39)
    for m in (0, 1, 5, 12, 16):
        drawn = rng.hypergeometric(m, count - m, taken, draws)
        np.testing.assert_allclose(
            found[m], np.bincount(drawn, minlength=taken + 1) / draws, atol=6e-3
        )


def test_certain_choices_have_a_certain_count():
    found = chances((0.0, 0.0, 1.0, 0.0, 1.0))
    assert found.argmax(1).tolist() == [0, 0, 0, 1, 1, 2]
    assert found.max(1) == pytest.approx(1.0, abs=1e-3)
