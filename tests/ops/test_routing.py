"""The router op: the kernel against the reference (which whole-model tests compare with
transformers), and against torch.topk where scores tie."""

from __future__ import annotations

import pytest
import torch
from native import needs_kernels

from exkv.layers.routing import Router
from exkv.ops.registry import REFERENCES

ROUTERS = {
    "softmax": Router(top_k=8, normalize=False),
    "one of many": Router(top_k=1),
    "normalized": Router(top_k=6, scale=2.5, min_sum=1e-20),
    "sigmoid": Router(top_k=8, sigmoid=True),
    "groups of two": Router(top_k=4, sigmoid=True, groups=8, top_k_groups=3),
    "groups of one": Router(top_k=4, groups=4, top_k_groups=2, best_of_group=1, normalize=False),
    "all": Router(top_k=64),
}


def both(logits: torch.Tensor, correction: torch.Tensor | None, router: Router) -> list:
    op, arguments = torch.ops.exkv.route_experts, (logits, correction, *router.numbers)
    return [op(*arguments), REFERENCES["route_experts"](*arguments)]


@needs_kernels
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_the_kernel_chooses_as_the_reference_does(name, corrected):
    torch.manual_seed(0)
    logits = torch.randn(200, 64) * 3
    correction = torch.randn(64) / 8 if corrected else None
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        (chosen, weights), (expected, their) = both(logits.to(dtype), correction, ROUTERS[name])
        assert torch.equal(chosen, expected), dtype
        torch.testing.assert_close(weights, their, rtol=2e-6, atol=1e-7)


@needs_kernels
@pytest.mark.parametrize("experts", [4, 8, 64, 128, 512, 1000])
def test_ties_are_broken_like_topk(experts):
    """Two values for all; rounded logits are often equal."""
    torch.manual_seed(experts)
    logits = torch.randint(0, 2, (300, experts)).bfloat16()
    for top_k in {1, 2, experts // 64 or 1, experts // 64 + 1, min(8, experts), experts}:
        (chosen, _), _ = both(logits, None, Router(top_k=top_k))
        assert torch.equal(chosen, logits.float().topk(top_k).indices), top_k


@needs_kernels
@pytest.mark.parametrize("name", ROUTERS)
def test_nan_still_chooses_experts(name):
    logits = torch.randn(30, 64)
    values = torch.tensor([torch.nan, torch.inf, -torch.inf])
    logits[torch.rand(30, 64) < 0.3] = values[torch.randint(0, 3, (1,))]
    logits[0] = torch.nan
    router = ROUTERS[name]
    chosen, _ = torch.ops.exkv.route_experts(logits, None, *router.numbers)
    assert chosen.min() >= 0 and chosen.max() < 64
    assert all(len(set(row)) == router.top_k for row in chosen.tolist())


@pytest.mark.parametrize("route", [torch.ops.exkv.route_experts, REFERENCES["route_experts"]])
def test_contradicting_numbers_are_refused(route):
    logits, good = torch.randn(3, 8), (2, False, True, 0.0, 2, 1, 2, 1.0)

    def refused(message: str, logits: torch.Tensor = logits, correction=None, **changes) -> None:
        numbers = [changes.get(f"at{index}", each) for index, each in enumerate(good)]
        with pytest.raises((ValueError, RuntimeError), match=message):
            route(logits, correction, *numbers)

    refused("route_experts: ", logits=torch.randn(8))
    refused("route_experts: .*top_k", at0=9)
    refused("1 of 3 groups of equal size, of 8 experts", at4=3)
    refused("3 of 2 groups of equal size", at5=3)
    refused("groups of 4 experts are judged by 5", at6=5)
    refused("route_experts: correction", correction=torch.randn(7))


@needs_kernels
def test_a_sigmoid_is_that_of_torch():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = (torch.randn(50, 3) * 20).to(dtype)
        expected = x.float().sigmoid()
        torch.ops.exkv.sigmoid_(x)
        torch.testing.assert_close(x.float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
