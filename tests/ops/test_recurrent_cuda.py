"""CUDA kernels of layers with a state, emulated or on a GPU, at the sizes that select each code
path."""

from __future__ import annotations

import ctypes

import pytest
import test_recurrent
import test_state_space
import torch
import torch.nn.functional as F
from native import load_emulated_ops, ops_of
from torch import Tensor

from exkv.ops import REFERENCES
from exkv.planning.kernel_uses import kernel_use
from exkv.planning.op_calls import named_arguments


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def ops(request):
    return ops_of(request.param)


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: Keys' heads and size, values' heads and size: 16, 32 and 64 keys a warp, of which the last warp
#: has fewer, in one warp to four; one tile of columns or two.
DELTA_SIZES = [(1, 7, 2, 33), (1, 20, 1, 4), (2, 40, 2, 3), (1, 100, 1, 32), (1, 128, 2, 40),
               (1, 129, 1, 9), (1, 256, 1, 5)]  # fmt: skip


def delta_in_double(q, k, v, decay, beta, state):
    """By the definition, token by token, in float64: outputs and the last state."""
    q, k, v, decay, beta, state = (x.double() for x in (q, k, v, decay, beta, state))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    outs = []
    for t in range(v.shape[1]):
        state = state * decay[:, t].exp().unsqueeze(-1)
        seen = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        added = beta[:, t].unsqueeze(-1) * (v[:, t] - seen)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], added)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * q.shape[-1] ** -0.5)
    return torch.stack(outs, dim=1), state


@pytest.mark.parametrize("fading", [None, 0.01, 10])
@pytest.mark.parametrize("sizes", DELTA_SIZES, ids=str)
def test_deltas_of_any_size_are_those_of_a_loop_in_double(ops, sizes, fading):
    """Ragged rows: all tokens, one turn of the warps and a token, and none."""
    *given, state = test_recurrent.inputs(11, sizes, rows=3, fading=fading)
    before, lens = state.clone(), torch.tensor([11, 5, 0], dtype=torch.int32)
    out = ops.gated_delta(*given, state, lens)
    assert torch.equal(state[2], before[2]) and not out[2].any() and not out[1, 5:].any()
    for row, tokens in ((0, 11), (1, 5)):
        alone = [x[row : row + 1, :tokens] for x in given]
        expected, after = delta_in_double(*alone, before[row : row + 1])
        close = {"rtol": 2e-5, "atol": 2e-6}
        torch.testing.assert_close(out[row, :tokens].double(), expected[0], **close)
        torch.testing.assert_close(state[row].double(), after[0], **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fading", [None, 1])
def test_deltas_errors_are_at_most_twice_those_of_transformers_loop(ops, dtype, fading):
    *given, state = test_recurrent.inputs(40, (1, 64, 2, 32), dtype, fading=fading)
    right = delta_in_double(*given, state)
    out, after = test_recurrent.theirs(*given, state)
    ours = ops.gated_delta(*given, state, None), state
    for mine, plain, exact in zip(ours, (out.to(dtype), after), right, strict=True):
        assert (mine.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(2, 33, 1, 7), (3, 5, 3, 50), (2, 40, 1, 128), (1, 3, 1, 256)])
def test_scans_of_any_size_are_those_of_a_loop_in_double(ops, sizes, dtype):
    x, dt, a, b, c, d, state = test_state_space.ssd_inputs(11, sizes, dtype, rows=3)
    before, lens = state.clone(), torch.tensor([11, 5, 0], dtype=torch.int32)
    out = ops.ssd(x, dt, a, b, c, d, state, lens)
    assert torch.equal(state[2], before[2]) and not out[2].any() and not out[1, 5:].any()
    for row, tokens in ((0, 11), (1, 5)):
        parts = [each[row : row + 1, :tokens].double() for each in (x, dt, b, c)]
        x1, dt1, b1, c1 = parts
        expected, after = test_state_space.ssd_in_double(
            x1, dt1, a.double(), b1, c1, d.double(), before[row : row + 1].double()
        )
        torch.testing.assert_close(out[row, :tokens], expected[0].to(dtype))
        torch.testing.assert_close(state[row].double(), after[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 7, 90])
@pytest.mark.parametrize("with_bias", [False, True])
def test_convolutions_of_any_size_are_torchs(ops, taps, dtype, with_bias):
    """Segments of tokens that end anywhere, rows that end anywhere, channels that fill no block,
    in a tensor whose tokens lie apart."""
    generator = torch.Generator().manual_seed(taps)
    whole, channels = torch.randn((4, 150, 300), generator=generator).to(dtype), 133
    x, lens = whole[..., 20 : 20 + channels], torch.tensor([150, 66, 1, 0], dtype=torch.int32)
    weight = torch.randn((channels, 1, taps), generator=generator).to(dtype)
    bias = torch.randn(channels, generator=generator).to(dtype) if with_bias else None
    state = torch.randn((4, taps - 1, channels), generator=generator).to(dtype)
    inputs = torch.cat((state, x), dim=1)
    wide = None if bias is None else bias.double()
    expected = F.conv1d(inputs.double().mT, weight.double(), wide, groups=channels).mT
    out = ops.causal_conv(x, weight, bias, state, lens)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(out, expected.to(dtype), **close)
    for row, tokens in enumerate(lens.tolist()):
        assert torch.equal(state[row], inputs[row, tokens : tokens + taps - 1])


def test_convolutions_that_do_not_fit_are_refused_by_name(ops):
    x, weight, state = torch.zeros(2, 5, 6), torch.zeros(6, 1, 4), torch.zeros(2, 3, 6)
    with pytest.raises(RuntimeError, match=r"state must be \(B, K - 1, C\), \(2, 3, 6\)"):
        ops.causal_conv(x, weight, None, state[:, 1:], None)
    with pytest.raises(RuntimeError, match=r"weight must be \(C, 1, K\)"):
        ops.causal_conv(x, weight[:5], None, state, None)
    with pytest.raises(RuntimeError, match="x is Float and weight Half; convert one of them"):
        ops.causal_conv(x, weight.half(), None, state, None)
    with pytest.raises(RuntimeError, match=r"bias must be \(6,\)"):
        ops.causal_conv(x, weight, torch.zeros(5), state, None)
    with pytest.raises(RuntimeError, match="new_lens must be int32"):
        ops.causal_conv(x, weight, None, state, torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="the rows of state must be contiguous"):
        ops.causal_conv(x, weight, None, state.mT.contiguous().mT, None)


def test_a_state_in_other_floats_is_the_references_and_plans_know_it(ops):
    x, weight = torch.randn(2, 5, 6).bfloat16(), torch.randn(6, 1, 4).bfloat16()
    for dtype in DTYPES:
        states = [torch.ones(2, 3, 6, dtype=dtype) for _ in range(2)]
        out = ops.causal_conv(x, weight, None, states[0], None)
        assert torch.equal(out, REFERENCES["causal_conv"](x, weight, None, states[1], None))
        assert torch.equal(*states)
        call = named_arguments("causal_conv", (x, weight, None, states[0], None))
        assert kernel_use("causal_conv", "cuda", call).takes == (dtype == torch.bfloat16)


@pytest.mark.parametrize("rows", [256, 257])
def test_larger_states_are_the_references_and_plans_know_it(ops, rows):
    *delta, delta_state = test_recurrent.inputs(3, (1, rows, 1, 4))
    *scan, scan_state = test_state_space.ssd_inputs(3, (1, 4, 1, rows))
    for name, given, state in (("gated_delta", delta, delta_state), ("ssd", scan, scan_state)):
        states = [state.clone() for _ in range(2)]
        out = getattr(ops, name)(*given, states[0], None)
        expected = REFERENCES[name](*given, states[1], None)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        call = named_arguments(name, (*given, state, None))
        assert kernel_use(name, "cuda", call).takes == (rows <= 256)
        same = torch.equal(out, expected) and torch.equal(*states)
        assert same == (rows > 256)


@pytest.mark.parametrize("size", [64, 65])
def test_scans_of_more_numbers_a_channel_are_the_references_and_plans_know_it(ops, size):
    *given, state = test_state_space.scan_inputs(3, (9, size))
    states = [state.clone() for _ in range(2)]
    out = ops.selective_scan(*given, states[0], None)
    expected = REFERENCES["selective_scan"](*given, states[1], None)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    call = named_arguments("selective_scan", (*given, state, None))
    assert kernel_use("selective_scan", "cuda", call).takes == (size <= 64)
    same = torch.equal(out, expected) and torch.equal(*states)
    assert same == (size > 64)


CALLS = {
    "gated_delta": lambda: test_recurrent.inputs(9, (1, 100, 1, 40)),
    "gated_delta by channel": lambda: test_recurrent.inputs(9, (1, 40, 1, 40), fading=1),
    "ssd": lambda: test_state_space.ssd_inputs(9, (1, 40, 1, 100)),
    "selective_scan": lambda: test_state_space.scan_inputs(9, (40, 20)),
}


@pytest.mark.parametrize("name", CALLS)
def test_warps_give_the_same_bits_in_either_order(name):
    """A missing barrier would show in one of the orders."""
    ops, results = ops_of("emulated"), []
    library = ctypes.CDLL(str(load_emulated_ops()))
    for backward in (0, 1):
        *given, state = CALLS[name]()
        library.exkv_emulation_set_backward(backward)
        out = getattr(ops, name.split()[0])(*given, state, None)
        results.append((out, state))
    library.exkv_emulation_set_backward(0)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    *given, state = CALLS[name]()
    expected: Tensor = REFERENCES[name.split()[0]](*given, state, None)
    torch.testing.assert_close(results[0][0], expected, rtol=2e-4, atol=2e-4)
