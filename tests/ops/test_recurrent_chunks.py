"""Prompts through recurrences in chunks, on the CPU: no less accurate than transformers' float32
chunks, measured against the definition in float64."""

from __future__ import annotations

import pytest
import test_recurrent
import test_state_space
import torch
from native import assert_right_on, each_isa, needs_kernels
from test_recurrent_cuda import delta_in_double
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

import exkv  # noqa: F401 # defines the ops

#: Tokens of rows: whole chunks, a short last one, a rest that runs token by token, too few for one.
LENS = (128, 100, 79, 15, 0)


def assert_no_worse(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    """At most twice the error of transformers' float32."""
    assert (found.double() - exact).norm() <= 2 * (plain.double() - exact).norm()


def rows_of(tensors, row: int, tokens: int):
    return [each[row : row + 1, :tokens] for each in tensors]


def delta_in_chunks(q, k, v, decay, beta, state):
    """transformers' chunked computation of a prompt."""
    wide = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    if decay.shape[-1] == 1:
        return torch_chunk_gated_delta_rule(q, k, v, g=decay[..., 0], beta=beta, **wide)
    return chunk_kimi_delta_attention(q, k, v, g=decay, beta=beta, **wide)


@needs_kernels
@pytest.mark.parametrize("sizes", [(1, 64, 2, 64), (2, 20, 2, 37)], ids=str)
@pytest.mark.parametrize("fading", [None, 0.01, 10])
def test_deltas_of_unlike_rows_are_as_exact_as_transformers_chunks(sizes, fading):
    *given, state = test_recurrent.inputs(LENS[0], sizes, rows=len(LENS), fading=fading)
    before = state.clone()
    out = torch.ops.exkv.gated_delta(*given, state, torch.tensor(LENS, dtype=torch.int32))
    for row, tokens in enumerate(LENS[:-1]):
        alone = rows_of(given, row, tokens), before[row : row + 1]
        exact, after = delta_in_double(*alone[0], alone[1])
        plain, left = delta_in_chunks(*alone[0], alone[1])
        assert_no_worse(out[row : row + 1, :tokens], plain, exact)
        assert_no_worse(state[row : row + 1], left, after)
        assert not out[row, tokens:].any()
    assert torch.equal(state[-1], before[-1])


@needs_kernels
@pytest.mark.parametrize("sizes", [(4, 64, 2, 128), (3, 37, 1, 20)], ids=str)
def test_scans_of_unlike_rows_are_as_exact_as_transformers_scan(sizes):
    x, dt, a, b, c, d, state = test_state_space.ssd_inputs(LENS[0], sizes, rows=len(LENS))
    before, lens = state.clone(), torch.tensor(LENS, dtype=torch.int32)
    out = torch.ops.exkv.ssd(x, dt, a, b, c, d, state, lens)
    for row, tokens in enumerate(LENS[:-1]):
        x1, dt1, b1, c1 = rows_of((x, dt, b, c), row, tokens)
        own = before[row : row + 1]
        wide = [each.double() for each in (x1, dt1, a, b1, c1, d, own)]
        exact, after = test_state_space.ssd_in_double(*wide)
        plain, left = test_state_space.bamba(x1, dt1, a, b1, c1, d, own)
        assert_no_worse(out[row : row + 1, :tokens], plain, exact)
        assert_no_worse(state[row : row + 1], left, after)
        assert not out[row, tokens:].any()
    assert torch.equal(state[-1], before[-1])


PROGRAM = """
import torch, exkv
from test_recurrent import inputs
from test_state_space import ssd_inputs
from exkv.ops import REFERENCES

for name, given in (("gated_delta", inputs(100, (1, 36, 2, 40))),
                    ("gated_delta", inputs(100, (1, 36, 2, 40), fading=1)),
                    ("ssd", ssd_inputs(100, (4, 40, 2, 36)))):
    *given, state = given
    after = state.clone()
    expected = REFERENCES[name](*given, after, None)
    out = getattr(torch.ops.exkv, name)(*given, state, None)
    torch.testing.assert_close(out, expected, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(state, after, rtol=2e-4, atol=2e-4)
"""


@each_isa
def test_each_instruction_set_has_the_references_results(isa):
    assert_right_on(isa, PROGRAM)
