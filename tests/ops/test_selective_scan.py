"""The selective scan, kernel and reference, against transformers' Jamba: its scan over all tokens
from no state, and its step of one."""

from __future__ import annotations

import pytest
import torch
from native import BACKENDS, ops_of
from transformers.models.jamba.modeling_jamba import (
    mamba_selective_scan,
    mamba_selective_state_update,
)

import exkv  # noqa: F401 # defines the ops
from exkv.ops import REFERENCES

#: Channels and states: blocks of channels and vectors that are full, and that are not.
SIZES = [(128, 16), (75, 5), (9, 35)]


def inputs(tokens: int, sizes: tuple[int, int], dtype: torch.dtype = torch.float32, rows: int = 2):
    """x, dt, a, b, c, d, and a state."""
    generator = torch.Generator().manual_seed(tokens)
    channels, size = sizes

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    dt, a = random(rows, tokens, channels).abs(), -2 * random(size, channels).abs()
    x, b, c = (random(rows, tokens, n).to(dtype) for n in (channels, size, size))
    return x, dt, a, b, c, random(channels), random(rows, size, channels)


@pytest.fixture(params=["reference", *BACKENDS])
def op(request):
    """The reference, and the kernels."""
    if request.param == "reference":
        return REFERENCES["selective_scan"]
    return ops_of(request.param).selective_scan


def theirs(x, dt, a, b, c, d, state):
    """Step by step from the state."""
    state, outs = state.mT.contiguous(), []
    for t in range(x.shape[1]):
        outs.append(
            mamba_selective_state_update(state, x[:, t], dt[:, t], a.T, b[:, t], c[:, t], d)
        )
    return torch.stack(outs, dim=1), state.mT


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 16, 50])
def test_outputs_and_states_are_transformers_steps(op, sizes, tokens):
    *given, state = inputs(tokens, sizes)
    expected, after = theirs(*given, state)
    assert_close(op(*given, state, None), expected)
    assert_close(state, after)


def test_outputs_from_no_state_are_transformers_scan(op):
    x, dt, a, b, c, d, state = inputs(20, SIZES[0])
    wide = (x.mT, dt.mT, a.T, b.mT, c.mT)
    expected, after = mamba_selective_scan(*wide, D=d, return_last_state=True)
    assert_close(op(x, dt, a, b, c, d, state.zero_(), None), expected.mT)
    assert_close(state, after.mT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_few_bits_are_computed_in_float32(op, dtype):
    x, dt, a, b, c, d, state = inputs(5, SIZES[0], dtype)
    expected, after = theirs(x.float(), dt, a, b.float(), c.float(), d, state)
    out = op(x, dt, a, b, c, d, state, None)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype))
    assert_close(state, after)


def test_padding_leaves_a_rows_state_as_it_is(op):
    x, dt, a, b, c, d, state = inputs(20, SIZES[1], rows=3)
    lens = torch.tensor([20, 11, 0], dtype=torch.int32)
    before, padded = state.clone(), state.clone()
    out = op(x, dt, a, b, c, d, padded, lens)
    assert torch.equal(padded[2], before[2])
    for row, tokens in ((0, 20), (1, 11)):
        x1, dt1, b1, c1 = (each[row : row + 1, :tokens] for each in (x, dt, b, c))
        expected, after = theirs(x1, dt1, a, b1, c1, d, before[row : row + 1])
        assert_close(out[row, :tokens], expected[0])
        assert_close(padded[row], after[0])


def test_a_tokens_bits_depend_on_no_other_row_and_no_later_token(kernels):
    x, dt, a, b, c, d, state = inputs(9, SIZES[1], torch.bfloat16, rows=4)
    own, run = state[2:3].clone(), kernels.selective_scan
    together = run(x, dt, a, b, c, d, state, None)

    def step(at: int) -> torch.Tensor:
        x1, dt1, b1, c1 = (each[2:3, at : at + 1] for each in (x, dt, b, c))
        return run(x1, dt1, a, b1, c1, d, own, None)

    assert torch.equal(torch.cat([step(at) for at in range(9)], dim=1), together[2:3])
    assert torch.equal(own, state[2:3])


def test_tensors_that_contradict_each_other_are_named(kernels):
    x, dt, a, b, c, d, state = inputs(2, SIZES[0])
    run = kernels.selective_scan
    with pytest.raises(RuntimeError, match="state must be float32 with x's rows"):
        run(x, dt, a, b, c, d, state[..., :-1], None)
    with pytest.raises(RuntimeError, match="x must be .B, T, C. and b .B, T, N."):
        run(x, dt, a, b[:, :1], c[:, :1], d, state, None)
    with pytest.raises(RuntimeError, match="a must be float32"):
        run(x, dt, a.T.contiguous(), b, c, d, state, None)
    with pytest.raises(RuntimeError, match="new_lens must be int32"):
        run(x, dt, a, b, c, d, state, torch.tensor([1, 2]))
