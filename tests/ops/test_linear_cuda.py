"""Linear layers of few rows on CUDA, emulated and real: against float64, and equal to the bit where
that is guaranteed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from native import BACKENDS, ops_of
from test_linear import DTYPES, assert_within_rounding, case


@pytest.fixture(params=BACKENDS[1:])
def kernels(request):
    return ops_of(request.param)


#: Inputs and outputs: whole loads, tails of one, fewer than a warp takes, fewer outputs than a
#: block has, so few that warps share them.
SHAPES = [(512, 40), (4096, 6), (1100, 33), (20, 7), (3, 1), (64, 600), (0, 5)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_few_rows_are_right_within_rounding(kernels, inputs, outputs, dtype):
    for rows in range(1, 5):
        x, weight, bias = case(rows, inputs, outputs, dtype, bias=True, seed=rows)
        assert_within_rounding(x, weight, None, kernels.linear(x, weight, None))
        assert_within_rounding(x, weight, bias, kernels.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_are_bit_identical_to_single_ones(kernels, dtype):
    x, *_ = case(2, 96, 1, dtype)
    sizes = (130, 18, 18, 5, 64, 2)  # more than one launch takes
    weights = [case(1, 96, size, dtype, seed=size)[1] for size in sizes]
    biases = [case(1, 96, size, dtype, bias=True, seed=size)[2] for size in sizes]
    for added in (biases, []):
        found = kernels.linears(x, weights, added)
        for i, out in enumerate(found):
            assert_within_rounding(x, weights[i], added[i] if added else None, out)
    alone = kernels.linears(x, weights[:3], [])
    assert all(map(torch.equal, alone, kernels.linears(x, weights[:3], [])))


def test_row_is_independent_of_others(kernels):
    x, weight, _ = case(4, 700, 50, torch.bfloat16)
    together = kernels.linear(x, weight, None)
    for row in range(4):
        assert torch.equal(kernels.linear(x[row : row + 1], weight, None)[0], together[row])


def test_misaligned_tensors_are_bit_identical(kernels):
    """Parts of a larger matrix, rows that begin at odd addresses, heads first."""
    x, weight, _ = case(3, 200, 12, torch.bfloat16)
    expected = kernels.linear(x, weight, None)
    odd = torch.empty(12 * 200 + 1, dtype=weight.dtype)[1:].view(12, 200).copy_(weight)
    assert torch.equal(kernels.linear(x, odd, None), expected)
    assert torch.equal(
        kernels.linear(x, torch.cat((weight, weight, weight))[12:24], None), expected
    )
    assert torch.equal(kernels.linear(x.mT.contiguous().mT, weight, None), expected)
    assert kernels.linear(x.view(3, 1, 200), weight, None).shape == (3, 1, 12)


def test_no_read_outside_of_a_row(kernels):
    x, weight, _ = case(2, 19, 9, torch.float16)
    whole = torch.full((20, 19), torch.nan, dtype=weight.dtype)
    whole[5:14] = weight
    around = torch.full((6, 19), torch.nan, dtype=x.dtype)
    around[2:4] = x
    found = kernels.linear(around[2:4], whole[5:14], None)
    assert_within_rounding(x, weight, None, found)


def test_many_rows_use_torch(kernels):
    x, weight, bias = case(5, 64, 32, torch.float32, bias=True)
    torch.testing.assert_close(kernels.linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.cuda
def test_a_weight_on_another_device_is_refused():
    ops_of("cuda")
    x, weight, bias = case(1, 64, 32, torch.bfloat16, bias=True)
    with pytest.raises(RuntimeError, match="x is on cuda:0 and weight on cpu"):
        torch.ops.exkv.linear(x.cuda(), weight, bias)
