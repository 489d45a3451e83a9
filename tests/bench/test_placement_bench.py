"""The comparison of placements counts the bytes that transformers' own model has, and judges our
plans as it judges their maps."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from bench import harness, placement
from bench.placement import CARDS, MODELS, Case
from exkv.planning.solve import plans_for

pytest.importorskip("accelerate", reason="the peer's maps need accelerate")


@pytest.fixture(scope="module")
def case():
    return Case.of(MODELS["7B"], CARDS["24+12"])


@pytest.fixture(scope="module")
def costs(case):
    return case.costs("4k")


@pytest.mark.parametrize("mode", placement.MODES)
def test_their_map_covers_their_model_and_weighs_what_their_parameters_do(case, costs, mode):
    from accelerate.utils import check_device_map

    found = placement.device_map(case, mode)
    check_device_map(case.peer, found)
    weights = Counter()
    for name, parameter in case.peer.named_parameters():
        weights[placement.nearest(name, found)] += parameter.nbytes
    plan = case.judge(costs, placement.where(case, found))
    ledgers = {placement.map_key(ledger.device): ledger.weights for ledger in plan.ledgers}
    assert {key: nbytes for key, nbytes in ledgers.items() if nbytes} == dict(weights)


def test_a_plan_of_ours_judged_as_their_maps_are_is_that_plan(case, costs):
    (plan,) = plans_for(case.scenario("4k", "pack"))
    judged = case.judge(costs, plan.devices)
    assert judged == replace(plan, max_input_len=None)  # which is a load's, not of places
    assert sum(ledger.cache for ledger in plan.ledgers) == 4096 * 512 * 1024  # 0.5 MiB a token


def test_a_verdict_is_that_of_the_cards_headroom(tmp_path):
    file = tmp_path / "placement.json"
    assert harness.run(placement, ["--quick", "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["cases"]
    for split in (*found["transformers"].values(), *found["exkv"].values()):
        assert split["contexts"].keys() == placement.CONTEXTS.keys()
        for context in split["contexts"].values():
            overflows = min(context["headroom"].values()) < 0
            assert (context["verdict"] == "overflows") == overflows
    for plan in found["exkv"].values():
        for context in plan["contexts"].values():
            assert context["fits_on_cards"] == (context["verdict"] == "fits")
