"""The experts op against a dense sum over all experts, and its bound on memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from native import ops_of
from simproc import run_sim
from torch import Tensor

from exkv.ops.experts import Routing, sum_of_choices
from exkv.planning.dry_run import DryRun

HIDDEN, INNER = 16, 24


def weights_of(experts: int, hidden: int = HIDDEN, inner: int = INNER) -> list[list[Tensor]]:
    """gate, up, down of each."""
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    return [[torch.randn(size) * 0.2 for _ in range(experts)] for size in sizes]


def dense(x, chosen, shares, gate, up, down):
    """Every expert runs on every token; those not chosen have weight zero."""
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


def on_device(chosen: Tensor, experts: int, hidden: int, inner: int) -> tuple:
    """The op's arguments."""
    tokens, taken = chosen.shape
    weights = [[w.to("sim") for w in each] for each in weights_of(experts, hidden, inner)]
    x, shares = torch.randn(tokens, hidden), torch.rand(tokens, taken)
    return x.to("sim"), chosen.to("sim"), shares.to("sim"), *weights, "silu"


def predicted_peak(tokens: int, experts: int, taken: int, hidden: int, inner: int) -> int:
    with DryRun("sim") as run, torch.no_grad():
        given = on_device(torch.zeros(tokens, taken).long(), experts, hidden, inner)
        run.restart([])
        torch.ops.exkv.experts(*given)
    return run.peak


def measured_peak(chosen: Tensor, *sizes: int) -> int:
    given = on_device(chosen, *sizes)
    before = torch.accelerator.memory_allocated(0)
    torch.accelerator.reset_peak_memory_stats(0)
    torch.ops.exkv.experts(*given)
    return torch.accelerator.max_memory_allocated(0) - before


def peaks(tokens: int, experts: int, taken: int, hidden: int, inner: int):
    """The predicted peak, then those measured for routings from all the same to even."""
    same = torch.arange(taken).expand(tokens, taken)
    even = (torch.arange(tokens * taken) % experts).view(tokens, taken)
    drawn = [torch.rand(tokens, experts).topk(taken).indices for _ in range(5)]
    sizes = (experts, hidden, inner)
    measured = [measured_peak(chosen, *sizes) for chosen in (same, even, *drawn)]
    return predicted_peak(tokens, experts, taken, hidden, inner), measured


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 4, 2, 64, 96),
        (2, 4, 1, 64, 96),
        (33, 8, 2, 64, 96),
        (7, 3, 3, 16, 8),
        (200, 16, 4, 32, 320),
    ],
)
def test_no_routing_takes_more_than_is_predicted(sizes):
    predicted, measured = run_sim(peaks, "64M", args=sizes)
    assert measured[0] == predicted  # all tokens choose the same: the worst case
    assert max(measured) == predicted


def dry_peaks(tokens: int, experts: int, taken: int, hidden: int, inner: int):
    """The predicted peak, and that measured on tensors without data."""
    chosen = torch.randn(tokens, experts).to("sim").topk(taken).indices
    measured = measured_peak(chosen, experts, hidden, inner)
    return predicted_peak(tokens, experts, taken, hidden, inner), measured


@pytest.mark.parametrize("tokens", [2500, 5000])
def test_a_dry_device_takes_what_is_predicted(tokens):
    sizes = (tokens, 8, 2, 64, 96)
    predicted, measured = run_sim(dry_peaks, "64M", args=sizes, env={"EXKV_SIM_DRY": "1"})
    assert measured == predicted


@pytest.mark.parametrize(
    "changed, words",
    [
        ({4: []}, "are 3, 0 and 3 matrices"),
        ({5: 2}, "are 3, 3 and 2 matrices"),
        ({2: torch.rand(5, 3)}, r"chosen and weights \(N, K\)"),
        ({1: torch.zeros(5, 2)}, "chosen must be int64"),
        ({1: torch.full((5, 2), 3)}, "name experts 0 to 2"),
        ({1: torch.full((5, 2), -1)}, "name experts 0 to 2"),
        ({6: "tanh"}, "act is 'tanh'"),
    ],
)
def test_contradicting_arguments_are_refused(changed, words):
    gate, up, down = weights_of(3)
    chosen = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [0, 2]])
    args = [torch.randn(5, HIDDEN), chosen, torch.rand(5, 2), gate, up, down, "silu"]
    for index, value in changed.items():
        args[index] = args[index][:value] if isinstance(value, int) else value
    with pytest.raises(ValueError, match=f"experts: .*{words}"):
        torch.ops.exkv.experts(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("where", ["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_chosen_experts_are_multiplied_without_asking_which(where, dtype):
    """More inputs than a warp has under way, outputs that fill no block, a number of no expert."""
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = (776, 19) if dtype == torch.float32 else (1544, 19)
    weights = [torch.randn(outputs, inputs, generator=generator).to(dtype) for _ in range(5)]
    biases = [torch.randn(outputs, generator=generator).to(dtype) * 30 for _ in range(5)]
    chosen = torch.tensor([[3, 0], [4, 3], [1, 4]])
    for x in (torch.randn(3, inputs), torch.randn(3, 2, inputs)):
        x = x.to(dtype)
        found = ops_of(where).expert_products(x, chosen, weights, biases)
        wide = (x if x.dim() == 3 else x.unsqueeze(1)).double().expand(3, 2, -1)
        expected = torch.stack([w.double() for w in weights])[chosen] @ wide.unsqueeze(-1)
        expected = expected.squeeze(-1) + torch.stack(biases).double()[chosen]
        bound = 2 * torch.finfo(dtype).eps * expected.abs().max() + 1e-4 * inputs**0.5
        assert (found.double() - expected).abs().max() <= bound
    found = ops_of(where).expert_products(x, chosen.clamp(max=3).add_(2), weights, [])
    assert found[0, 0].isnan().all() and found[0, 1].isfinite().all()


@pytest.mark.cuda
def test_a_mixtures_layer_waits_for_nothing_on_a_gpu():
    """A capture ends with an error where the host is asked for a number."""
    ops_of("cuda")
    weights = [[w.cuda() for w in matrices] for matrices in weights_of(4)]
    x, shares = torch.randn(8, HIDDEN).cuda(), torch.rand(8, 2).cuda()
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(8)]).cuda()

    def products(place: int):
        return lambda x, chosen: torch.ops.exkv.expert_products(x, chosen, weights[place], [])

    def call() -> Tensor:
        routing = Routing(chosen=chosen, weights=shares)
        parts = (products(0), products(1), products(2))
        return sum_of_choices(x, routing, parts, lambda gate, up: F.silu(gate) * up)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    chosen.copy_(chosen.flip(0))
    graph.replay()
    on_host = [[w.cpu() for w in matrices] for matrices in weights]
    expected = dense(x.cpu(), chosen.cpu(), shares.cpu(), *on_host)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)
