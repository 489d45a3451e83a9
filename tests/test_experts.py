"""The experts' op against a dense sum over all experts, and its promise about memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from simproc import run_sim
from torch._subclasses.fake_tensor import FakeTensorMode

import exkv.ops  # noqa: F401  (registers it)
from exkv.workspace import PeakTracker

HIDDEN, INNER = 16, 24


def weights_of(experts: int, hidden: int = HIDDEN, inner: int = INNER) -> list[list[torch.Tensor]]:
    """gate, up, down of each."""
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    return [[torch.randn(size) * 0.2 for _ in range(experts)] for size in sizes]


def dense(x, chosen, shares, gate, up, down):
    """Every expert runs on every token; those that weren't chosen have a share of zero."""
    share = torch.zeros(len(x), len(gate)).scatter_(1, chosen, shares)
    answers = [F.silu(x @ g.T) * (x @ u.T) @ d.T for g, u, d in zip(gate, up, down, strict=True)]
    return (torch.stack(answers, dim=-1) * share.unsqueeze(1)).sum(-1)


@given(
    tokens=st.integers(1, 40),
    experts=st.integers(1, 9),
    taken=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_any_routing_gives_the_dense_sum(tokens, experts, taken, seed):
    torch.manual_seed(seed)
    taken = min(taken, experts)
    x, weights = torch.randn(tokens, HIDDEN), weights_of(experts)
    shares, chosen = torch.randn(tokens, experts).softmax(-1).topk(taken)
    out = torch.ops.exkv.experts(x, chosen, shares, *weights, "silu")
    torch.testing.assert_close(out, dense(x, chosen, shares, *weights), rtol=1e-4, atol=1e-5)


def test_an_expert_that_no_token_chose_is_not_run():
    x, weights = torch.randn(5, HIDDEN), weights_of(3)
    for matrix in weights:
        matrix[1].fill_(torch.nan)
    chosen = torch.tensor([[0, 2]] * 5)
    out = torch.ops.exkv.experts(x, chosen, torch.rand(5, 2), *weights, "silu")
    assert out.isfinite().all()


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_the_op_keeps_torchs_rules(act):
    x, weights = torch.randn(5, HIDDEN), weights_of(3)
    chosen = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [0, 2]])
    args = (x, chosen, torch.rand(5, 2), *weights, act)
    torch.library.opcheck(
        torch.ops.exkv.experts, args, test_utils=("test_schema", "test_faketensor")
    )


def peaks(tokens: int, experts: int, taken: int, hidden: int, inner: int):
    """The predicted peak, then those measured for routings from even to all the same."""

    def arguments(device: str, chosen: torch.Tensor):
        weights = [[w.to(device) for w in ws] for ws in weights_of(experts, hidden, inner)]
        x, shares = torch.randn(tokens, hidden), torch.rand(tokens, taken)
        return x.to(device), chosen.to(device), shares.to(device), *weights, "silu"

    tracker, nothing = PeakTracker("sim"), torch.zeros(tokens, taken, dtype=torch.int64)
    with FakeTensorMode(), torch.no_grad():
        given = arguments("sim", torch.zeros(tokens, taken, dtype=torch.int64))
        with tracker:
            torch.ops.exkv.experts(*given)
    same = nothing + torch.arange(taken)
    even = (torch.arange(tokens * taken) % experts).view(tokens, taken)
    drawn = [torch.rand(tokens, experts).topk(taken).indices for _ in range(5)]
    measured = []
    for chosen in (same, even, *drawn):
        given = arguments("sim", chosen)
        before = torch.accelerator.memory_allocated(0)
        torch.accelerator.reset_peak_memory_stats(0)
        torch.ops.exkv.experts(*given)
        measured.append(torch.accelerator.max_memory_allocated(0) - before)
    return tracker.peak, measured


@pytest.mark.parametrize(
    "sizes", [(1, 4, 2, 64, 96), (33, 8, 2, 64, 96), (7, 3, 3, 16, 8), (200, 16, 4, 32, 320)]
)
def test_no_routing_takes_more_than_is_predicted(sizes):
    predicted, measured = run_sim(peaks, "64M", args=sizes)
    assert measured[0] == predicted  # all tokens choose the same: the worst case
    assert max(measured) == predicted
