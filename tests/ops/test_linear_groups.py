"""exkv::linear_groups and related ops: every kernel against float64, with the error of multiplying
dequantized bfloat16 weights as the bound."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from arithmetic import assert_same_on_threads, error, float_error
from hypothesis import given, settings
from hypothesis import strategies as st
from native import assert_right_on, each_isa, load_emulated_ops, needs_cxx, needs_kernels, ops_of
from torch import Tensor

from exkv.ops import REFERENCES
from exkv.ops.weight_groups import MOST_ROWS
from exkv.weights import GroupFormat

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ops = torch.ops.exkv


def matrix(
    format: GroupFormat, outputs: int, inputs: int, seed: int = 0
) -> tuple[list[Tensor], Tensor]:
    """Random tensors of a matrix, and its values in float64."""
    generator = torch.Generator().manual_seed(seed)
    groups, top = format.groups.count(inputs), 2**format.bits
    codes = torch.randint(0, top, (outputs, inputs), generator=generator)
    scale = (torch.rand(outputs, groups, generator=generator) + 0.1).div(top).to(format.scale)
    shift = torch.randint(0, top, (outputs, groups), generator=generator)
    if format.shift == "offset":
        shift = -(shift * scale.float()).to(format.scale)
    order = torch.randperm(inputs, generator=generator) if format.ordered else None
    tensors = format.pack(codes, scale, shift, order)
    group = torch.arange(inputs) // (format.group or inputs)
    wide = scale.double()[:, group]
    if format.shift == "offset":
        values = codes * wide + shift.double()[:, group]
    elif format.shift == "zero":
        values = (codes - shift[:, group]) * wide
    else:
        values = (codes - top // 2) * wide
    if order is not None:
        values = torch.empty_like(values).index_copy_(1, order, values)
    return [tensors[name] for name in format.names], values


formats = st.builds(
    GroupFormat,
    bits=st.sampled_from([8, 6, 5, 4, 3, 2]),
    group=st.sampled_from([0, 32, 64, 128]),
    scale=st.sampled_from(DTYPES),
    shift=st.sampled_from(["symmetric", "offset", "zero"]),
    ordered=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    format=formats,
    rows=st.integers(0, 9),
    outputs=st.integers(1, 40),
    chunks=st.integers(1, 6),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape_is_right_within_rounding(format, rows, outputs, chunks, dtype, bias, seed):
    tensors, weight = matrix(format, outputs, 32 * chunks, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 32 * chunks, generator=generator).to(dtype)
    added = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    found = ops.linear_groups(x, tensors, list(format.groups), added)
    expected = F.linear(x.double(), weight, None if added is None else added.double())
    assert found.shape == expected.shape and found.dtype == dtype
    magnitude = x.double().abs() @ weight.abs().T + expected.abs()
    bound = 2 * magnitude * (2**-20 if dtype == torch.float32 else torch.finfo(dtype).eps)
    assert ((found.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3, 2])
def test_errors_are_at_most_twice_those_of_dequantized_weights(bits, dtype):
    """Also where one input is far larger than those beside it, as a few features of language
    models are."""
    for shift, group in (("symmetric", 32), ("offset", 64), ("zero", 0)):
        format = GroupFormat(bits=bits, group=group, scale=torch.float16, shift=shift)
        tensors, weight = matrix(format, 203, 2048)
        for rows, outlier in ((1, 1), (5, 300), (MOST_ROWS, 1)):
            x = torch.randn(rows, 2048, generator=torch.Generator().manual_seed(rows))
            x[:, 77] *= outlier
            x = x.to(dtype)
            expected = x.double() @ weight.T
            found = ops.linear_groups(x, tensors, list(format.groups), None)
            assert error(found, expected) <= 2 * float_error(x, weight, expected)


@each_isa
def test_every_instruction_set_is_right(isa):
    assert_right_on(isa, "import test_linear_groups; test_linear_groups.check_all()")


def check_all() -> None:
    """Every layout on this process's instruction set; the numbers of rows that have functions of
    their own, more than are multiplied together, and outputs that fill no block."""
    for bits in (8, 6, 5, 4, 3, 2):
        for dtype, shift, scale in zip(
            DTYPES, ("symmetric", "offset", "zero"), DTYPES, strict=True
        ):
            format = GroupFormat(bits=bits, group=64, scale=scale, shift=shift)
            tensors, weight = matrix(format, 21, 320)
            layout = list(format.groups)
            for rows in (1, 4, 19):
                x = torch.randn(rows, 320, generator=torch.Generator().manual_seed(rows)).to(dtype)
                expected = x.double() @ weight.T
                found = ops.linear_groups(x, tensors, layout, None)
                assert error(found, expected) <= 2 * float_error(x, weight, expected) + 1e-9
                several = ops.linears_groups(x, [*tensors, *tensors], layout, [])
                assert all(torch.equal(each, found) for each in several)
                alone = [ops.linear_groups(row, tensors, layout, None) for row in x]
                assert torch.equal(torch.stack(alone), found)
            plain = ops.dequantize_weight(tensors, layout, 8, 19, dtype)
            tolerance = torch.finfo(dtype).eps * weight.abs().max()
            assert (plain.double() - weight[8:19]).abs().max() <= tolerance


@needs_kernels
def test_rows_are_independent_of_threads():
    format = GroupFormat(bits=4, group=32, scale=torch.float16)
    tensors, _ = matrix(format, 1003, 512)
    x = torch.randn(4, 512).bfloat16()
    assert_same_on_threads(lambda: ops.linear_groups(x, tensors, list(format.groups), None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_infinities_and_tiny_numbers_propagate(dtype):
    format = GroupFormat(bits=4, group=32, scale=torch.float32)
    tensors, weight = matrix(format, 9, 64)
    x = torch.zeros(4, 64, dtype=dtype)
    x[1, 3], x[2, 5], x[3] = torch.inf, torch.nan, torch.finfo(dtype).smallest_normal
    out = ops.linear_groups(x, tensors, list(format.groups), None)
    assert torch.equal(out[0], torch.zeros(9, dtype=dtype))
    assert not out[1].isfinite().any() and out[2].isnan().all()
    assert (out[3].double() - x[3].double() @ weight.T).abs().max() <= 64 * x[3, 0].double()


def test_many_rows_are_multiplied_tile_by_tile(monkeypatch):
    monkeypatch.setattr("exkv.ops.weight_groups.TILE", 64 * 24)
    format = GroupFormat(bits=4, group=32, scale=torch.float16, shift="offset", ordered=True)
    tensors, weight = matrix(format, 59, 64)
    named = dict(zip(format.names, tensors, strict=True))
    x, bias = torch.randn(2, 13, 64), torch.randn(59)
    found = format.linear(x, named, bias)
    assert (found - F.linear(x.double(), weight, bias.double())).abs().max() <= 1e-4
    assert torch.equal(found[:, :3], format.linear(x, named, bias)[:, :3])


@needs_kernels
def test_mismatched_arguments_are_refused_by_name_and_number():
    format = GroupFormat(bits=4, group=32, scale=torch.float16, shift="zero", ordered=True)
    (codes, scale, zero, order), _ = matrix(format, 9, 64)
    x, layout = torch.randn(2, 64), list(format.groups)
    for tensors, complaint in [
        ([codes[:1], scale, zero, order], r"codes is Byte \(1, 2, 128\); it must be .*\(2, 2, 128"),
        ([codes, scale[:, :1], zero, order], r"scale is Half \(9, 1\).*must be Half \(9, 2\)"),
        ([codes, scale, zero.int(), order], "zero is Int"),
        ([codes, scale, zero, order + 1], "order names input 64 of 64"),
        ([codes, scale, zero], "3 tensors, and a matrix of this layout has 4"),
    ]:
        with pytest.raises(RuntimeError, match=complaint):
            ops.linear_groups(x, tensors, layout, None)
    with pytest.raises(RuntimeError, match=r"x \(2, 63\) must end in 64"):
        ops.linear_groups(x[:, :63], [codes, scale, zero, order], layout, None)


@pytest.mark.parametrize("step", [1, -1])
def test_the_reference_refuses_an_order_past_the_inputs(step):
    format = GroupFormat(bits=4, group=32, scale=torch.float16, shift="zero", ordered=True)
    (*tensors, order), _ = matrix(format, 9, 64)
    with pytest.raises(ValueError, match="order must be a permutation of x's inputs"):
        REFERENCES["linear_groups"](
            torch.randn(2, 64), [*tensors, order + step], list(format.groups), None
        )


@needs_cxx
@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3, 2])
def test_the_cuda_kernels_are_right(bits):
    """Under the emulation: rows that fill no launch, outputs that fill no block, sorted inputs."""
    load_emulated_ops()
    emulated = torch.ops.exkv_emulated
    for dtype, shift in zip(DTYPES, ("symmetric", "offset", "zero"), strict=True):
        format = GroupFormat(bits=bits, group=64, scale=dtype, shift=shift, ordered=bits == 4)
        tensors, weight = matrix(format, 13, 96)
        bias = torch.randn(13, generator=torch.Generator().manual_seed(bits)).to(dtype)
        for rows in (1, 2, 7):
            x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)).to(dtype)
            expected = F.linear(x.double(), weight, bias.double())
            found = emulated.linear_groups(x, tensors, list(format.groups), bias)
            magnitude = x.double().abs() @ weight.abs().T + expected.abs()
            bound = magnitude * (2**-19 if dtype == torch.float32 else torch.finfo(dtype).eps)
            assert ((found.double() - expected).abs() <= bound).all()
            both = [*tensors, *tensors]
            several = emulated.linears_groups(x, both, list(format.groups), [bias, bias])
            assert all(torch.equal(each, found) for each in several)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_cuda_kernels_are_right_for_every_layout(where, dtype):
    """On tensor cores for 16 bits; outputs that fill no block, more rows than a block has, and one
    more chunk than its warps have under way."""
    seed = 0
    for bits in (8, 6, 5, 4, 3, 2):
        for shift, group, scale in zip(
            ("symmetric", "offset", "zero"), (32, 64, 0), DTYPES, strict=True
        ):
            seed += 1
            format = GroupFormat(
                bits=bits, group=group, scale=scale, shift=shift, ordered=seed % 2 == 0
            )
            inputs = 64 if bits < 8 else 33 * 32 if group == 32 else 192
            tensors, weight = matrix(format, 21, inputs, seed)
            rows = (1, 3, 9)[seed % 3]
            x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)
            bias = torch.randn(21).to(dtype) if seed % 2 else None
            layout, ops_there = list(format.groups), ops_of(where)
            expected = F.linear(x.double(), weight, None if bias is None else bias.double())
            plain = F.linear(x, weight.to(dtype), bias)
            found = ops_there.linear_groups(x, tensors, layout, bias)
            bound = 2 * error(plain, expected) + 1e-6 * expected.abs().max()
            assert error(found, expected) <= bound, (format, rows)
            alone = [ops_there.linear_groups(row[None], tensors, layout, bias) for row in x]
            assert torch.equal(torch.cat(alone), found)
            if format.ordered:
                continue  # dequantized, columns are in the order of the codes
            part = ops_there.dequantize_weight(tensors, layout, 8, 19, dtype)
            tolerance = torch.finfo(dtype).eps * weight.abs().max()
            assert (part.double() - weight[8:19]).abs().max() <= tolerance


@needs_cxx
@pytest.mark.parametrize("where", ["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("shift", ["symmetric", "offset", "zero"])
@pytest.mark.parametrize("bits", [4, 8])
def test_tensor_cores_take_chunks_four_at_a_time(bits, shift, where):
    """More fours than a block has warps, and three chunks that are left; groups that share a scale
    over four chunks and groups that don't; any rows up to 16, alone and beside others, and x that
    begins anywhere."""
    inputs = 9 * 128 + 96
    for seed, (group, dtype) in enumerate(itertools.product((32, 64, 128, 0), DTYPES[1:])):
        format = GroupFormat(
            bits=bits, group=group, scale=DTYPES[seed % 3], shift=shift, ordered=False
        )
        tensors, weight = matrix(format, 21, inputs, seed)
        rows = (1, 2, 5, 8, 9, 12, 15, 16)[seed]
        x = torch.randn(rows * inputs + 1, generator=torch.Generator().manual_seed(seed)).to(dtype)
        x = x[seed % 3 // 2 :][: rows * inputs].view(rows, inputs)
        layout, linear = list(format.groups), ops_of(where).linear_groups
        expected, plain = x.double() @ weight.T, F.linear(x, weight.to(dtype))
        found = linear(x, tensors, layout, None)
        assert error(found, expected) <= 2 * error(plain, expected), (format, rows)
        for row in {0, rows - 1}:
            assert torch.equal(linear(x[row : row + 1], tensors, layout, None)[0], found[row])
