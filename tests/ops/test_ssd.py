"""State space duality, kernel and reference, against transformers' Bamba over all tokens and its
step of one."""

from __future__ import annotations

import pytest
import torch
from native import BACKENDS, ops_of
from transformers.models.bamba.modeling_bamba import (
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)

import exkv  # noqa: F401 # defines the ops
from exkv.ops import REFERENCES

#: Heads and their size, groups, and a state's size: also such as fill no vector of any processor.
SIZES = [(4, 64, 2, 128), (3, 40, 1, 16), (4, 5, 2, 6)]


def inputs(tokens: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, rows: int = 2):
    """x, dt, a, b, c, d, and a state."""
    generator = torch.Generator().manual_seed(tokens)
    heads, dim, groups, size = sizes

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    both = random(rows, tokens, 2 * groups, size).to(dtype)
    b, c = both.chunk(2, dim=2)  # as views, whose tokens lie apart
    dt, a = random(rows, tokens, heads).abs(), -4 * random(heads).abs()
    x = random(rows, tokens, heads, dim).to(dtype)
    return x, dt, a, b, c, random(heads), random(rows, heads, size, dim)


@pytest.fixture(params=["reference", *BACKENDS])
def op(request):
    """The reference, and the kernels."""
    return REFERENCES["ssd"] if request.param == "reference" else ops_of(request.param).ssd


def theirs(x, dt, a, b, c, d, state):
    out, after = mamba2_chunk_scan(
        *(x, dt, a, b, c, 32), D=d, initial_states=state.mT, return_final_states=True
    )
    return out, after.mT


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 64, 150])
def test_outputs_and_states_are_transformers(op, sizes, tokens):
    *given, state = inputs(tokens, sizes)
    expected, after = theirs(*given, state)
    assert_close(op(*given, state, None), expected)
    assert_close(state, after)


def test_a_step_is_transformers_step(op):
    x, dt, a, b, c, d, state = inputs(1, SIZES[0])
    heads, dim, _, size = SIZES[0]
    theirs = state.mT.contiguous()
    expected = mamba2_selective_state_update(
        *(theirs, x[:, 0], dt[:, 0, :, None].expand(-1, -1, dim)),
        *(a.view(-1, 1, 1).expand(heads, dim, size), b[:, 0], c[:, 0], d[:, None].expand(-1, dim)),
    )
    assert_close(op(x, dt, a, b, c, d, state, None)[:, 0], expected)
    assert_close(state, theirs.mT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_few_bits_are_computed_in_float32(op, dtype):
    *given, state = inputs(5, SIZES[0], dtype)
    expected, after = theirs(*given, state)
    out = op(*given, state, None)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype))
    assert_close(state, after)


def test_a_token_that_forgets_much_leaves_what_comes_after_it_exact(op):
    """Differences of sums over a block would lose the small steps behind a large one."""
    x, dt, a, b, c, d, state = inputs(64, SIZES[1])
    dt[:, 1:] *= 1e-3
    dt[:, 0], x[:, 0] = 1e4, 0
    wide = [each.double() for each in (x, dt, a, b, c, d, state)]
    expected, after = theirs_in_double(*wide)
    found = op(x, dt, a, b, c, torch.zeros_like(d), state, None).double()
    torch.testing.assert_close(found, expected - d.view(-1, 1) * wide[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(state.double(), after, rtol=1e-4, atol=1e-7)


def theirs_in_double(x, dt, a, b, c, d, state):
    """By the definition, token after token."""
    groups = x.shape[2] // b.shape[2]
    b, c = (each.repeat_interleave(groups, dim=2) for each in (b, c))
    outs = []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        added = b[:, t, :, :, None] * x[:, t, :, None] * step
        state = state * (step * a.view(-1, 1, 1)).exp() + added
        outs.append((c[:, t, :, None] @ state)[:, :, 0] + d[:, None] * x[:, t])
    return torch.stack(outs, dim=1), state


def test_padding_leaves_a_rows_state_as_it_is(op):
    x, dt, a, b, c, d, state = inputs(70, SIZES[1], rows=3)
    lens = torch.tensor([70, 11, 0], dtype=torch.int32)
    before, padded = state.clone(), state.clone()
    out = op(x, dt, a, b, c, d, padded, lens)
    assert torch.equal(padded[2], before[2])
    for row, tokens in ((0, 70), (1, 11)):
        x1, dt1, b1, c1 = (each[row : row + 1, :tokens] for each in (x, dt, b, c))
        expected, after = theirs(x1, dt1, a, b1, c1, d, before[row : row + 1])
        assert_close(out[row, :tokens], expected[0])
        assert_close(padded[row], after[0])


def test_a_tokens_bits_depend_on_no_other_row_and_no_later_token(kernels):
    x, dt, a, b, c, d, state = inputs(9, SIZES[0], torch.bfloat16, rows=4)
    own, run = state[2:3].clone(), kernels.ssd
    together = run(x, dt, a, b, c, d, state, None)

    def step(at: int) -> torch.Tensor:
        x1, dt1, b1, c1 = (each[2:3, at : at + 1] for each in (x, dt, b, c))
        return run(x1, dt1, a, b1, c1, d, own, None)

    assert torch.equal(torch.cat([step(at) for at in range(9)], dim=1), together[2:3])
    assert torch.equal(own, state[2:3])


def test_tensors_that_contradict_each_other_are_named(kernels):
    x, dt, a, b, c, d, state = inputs(2, SIZES[0])
    run = kernels.ssd
    with pytest.raises(RuntimeError, match="state must be float32 with x's rows"):
        run(x, dt, a, b, c, d, state[..., :-1], None)
    with pytest.raises(RuntimeError, match="groups that its heads are a multiple of"):
        run(x[:, :, :3], dt[..., :3], a[:3], b, c, d[:3], state[:, :3], None)
    with pytest.raises(RuntimeError, match="dt must be float32"):
        run(x, dt.half(), a, b, c, d, state, None)
    with pytest.raises(RuntimeError, match="new_lens must be int32"):
        run(x, dt, a, b, c, d, state, torch.tensor([1, 2]))
