"""Experts in host memory as one native call, between the parts of a simulated card's bound run: the
bits of the readable route, which other cards take, and of experts that are all on the card."""

from __future__ import annotations

import pytest
import torch
from host_experts import load
from runs import Readable, bound_runs
from simproc import run_sim
from tiny import TINY, reference, save

from exkv import Cache, Model, PagedCache
from exkv.layers.host_experts import HostExperts, bind
from exkv.layers.mlp import Experts, mixtures
from exkv.models.exchange import Swap, exchange

IDS = torch.randint(3, 300, (3, 40), generator=torch.Generator().manual_seed(9))
#: Shared experts in few bits and as floats; clamped gates with biases.
NAMES = {"Qwen2MoeForCausalLM": "int4", "Glm4MoeForCausalLM": None, "GptOssForCausalLM": None}


def steps(model: Model, cache: Cache) -> list[torch.Tensor]:
    """Logits of steps of one token and of several, a few of them of unlike lengths, and of every
    token by itself."""
    cache.reset()
    model.forward(IDS[:, :20], cache)
    found = [model.forward(IDS[:, 20 + at : 21 + at], cache).cpu() for at in range(3)]
    ragged = model.forward(IDS[:, 23:27], cache, new_lens=[4, 1, 3], last_id_only=True)
    each = model.forward(IDS[:, 27:31], cache, each_token=True)
    return [*found, ragged.cpu(), each.cpu()]


def mixtures_of(model: Model) -> list[Experts]:
    return [mixture for unit in model.units for mixture in mixtures(unit.module)]


def tallies(model: Model) -> list[list[int]]:
    """What each mixture has counted since the last time."""
    found = [mixture.counts.tolist() for mixture in mixtures_of(model)]
    for mixture in mixtures_of(model):
        mixture.counts.zero_()
    return found


def swapped(model: Model) -> None:
    """An expert of each mixture in host memory has changed places with one on the card."""
    for unit in model.units:
        if unit.host_experts:
            (mixture,) = mixtures(unit.module)
            hot = min(unit.host_experts)
            cold = min(set(range(mixture.count)) - unit.host_experts)
            exchange(Swap(unit=unit, mixture=mixture, to_card=hot, to_host=cold, gain=1), {})


def bound_and_readable(folder: str, weights: str | None) -> list[str]:
    """The differences, in words."""
    wrong: list[str] = []

    def compare(what: str, model: Model, cache: Cache, expected: list[torch.Tensor]) -> None:
        tallies(model)
        with bound_runs() as runs:
            found = steps(model, cache)
        counted = tallies(model)
        with Readable():
            readable = steps(model, cache)
        if set(runs) != {len(model.units)} or len(runs) != len(found):
            wrong.append(f"{what}: runs of {runs} units, of {len(model.units)}")
        if not any(map(any, counted)) or counted != tallies(model):
            wrong.append(f"{what}: counts of {counted}")
        for of, other in (("readable", readable), ("on the card", expected)):
            if not all(same := [*map(torch.equal, found, other)]):
                wrong.append(f"{what}: logits unlike those {of}: {same}")

    options = {} if weights is None else {"weights": weights}
    for kind in (Cache, PagedCache):
        expected = None
        for placement in ("all", "half", "one", "none"):
            model = Model(folder, dtype="bfloat16", **options)
            cache = kind(model, 48, 3)
            load(model, cache, placement)
            if expected is None:
                expected = steps(model, cache)
            else:
                compare(f"{kind.__name__}, {placement}", model, cache, expected)
                if placement == "half":
                    swapped(model)
                    compare(f"{kind.__name__}, exchanged", model, cache, expected)
            model.unload()
    return wrong


@pytest.mark.parametrize(("name", "weights"), NAMES.items())
def test_a_step_with_experts_on_the_host_is_one_run_with_the_same_bits(tmp_path, name, weights):
    folder = save(reference(TINY[name]()), tmp_path)
    assert run_sim(bound_and_readable, args=[str(folder), weights]) == []


# What is refused ------------------------------------------------------------------------------


@pytest.fixture
def native(tmp_path) -> HostExperts:
    """Experts 0 and 2 of four."""
    model = Model(save(reference(TINY["MixtralForCausalLM"]()), tmp_path), dtype="float32")
    model.load(devices=["cpu"])
    found = bind(mixtures_of(model)[0].describe_experts(), (0, 2), torch.float32, 2)
    assert found is not None
    return found


def test_calls_that_do_not_fit_are_refused(native):
    x, weights = torch.zeros(1, native.hidden), torch.ones(1, 2)

    def call(chosen: list[int], x=x, weights=weights, counts=None, whole: bool = False):
        chosen = torch.tensor([chosen])
        if whole:
            return native.sum(x, chosen, weights)
        return native.parts(x, chosen, weights, counts)

    def refused(message: str, *args, **options):
        with pytest.raises(RuntimeError, match=message):
            call(*args, **options)

    assert call([0, 2], whole=True).shape == x.shape
    refused("a sum of expert 1, whose matrices are elsewhere", [0, 1], whole=True)
    for wrong in ([0, 4], [-1, 0], [2, 2]):
        refused("chosen must name experts 0 to 3, none twice for a token", wrong)
    refused(r"chosen is Long \(1, 3\); it must be Long \(1, 2\)", [0, 1, 2])
    refused("x is Float", [0, 1], x=x[:, 1:].contiguous())
    refused("weights is Double", [0, 1], weights=weights.double())
    refused(r"counts is Long \(3\); it must be Long \(4\)", [0, 1], counts=torch.zeros(3).long())
    with pytest.raises(RuntimeError, match="experts without a router are for chosen_of_run alone"):
        numbers = torch.zeros(1, dtype=torch.int32), None, 1, [], 0
        torch.ops.exkv.bound_run(native._handle.tensor, x[None], *numbers)
