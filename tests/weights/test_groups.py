"""Integers with a scale per group: values of packed tensors, and the kernels' results on them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exkv.weights import GroupFormat

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
SHIFTS = ("symmetric", "offset", "zero")


def parts_of(format: GroupFormat, outputs: int, inputs: int, seed: int = 0) -> list:
    """Random codes, scales, shifts and order in the format's layout."""
    generator = torch.Generator().manual_seed(seed)
    groups = format.groups.count(inputs)
    codes = torch.randint(0, 2**format.bits, (outputs, inputs), generator=generator)
    scale = (torch.rand(outputs, groups, generator=generator) / 2**format.bits).to(format.scale)
    shift = order = None
    if format.shift == "offset":
        shift = torch.randn(outputs, groups, generator=generator).mul(0.1).to(format.scale)
    if format.shift == "zero":
        shift = torch.randint(0, 2**format.bits, (outputs, groups), generator=generator)
    if format.ordered:
        order = torch.randperm(inputs, generator=generator)
    return [codes, scale, shift, order]


def written_out(format: GroupFormat, codes, scale, shift, order) -> torch.Tensor:
    """The matrix by the definition, in float64, column by column."""
    outputs, inputs = codes.shape
    group = torch.arange(inputs) // (format.group or inputs)
    factor = scale.double()[:, group]
    if format.shift == "offset":
        sorted_columns = codes * factor + shift.double()[:, group]
    elif format.shift == "zero":
        sorted_columns = (codes - shift[:, group]) * factor
    else:
        sorted_columns = (codes - 2 ** (format.bits - 1)) * factor
    if order is None:
        return sorted_columns
    matrix = torch.empty(outputs, inputs, dtype=torch.float64)
    matrix[:, order] = sorted_columns
    return matrix


formats = st.builds(
    GroupFormat,
    bits=st.sampled_from([8, 6, 5, 4, 3, 2]),
    group=st.sampled_from([0, 32, 64, 128]),
    scale=st.sampled_from(FLOATS),
    shift=st.sampled_from(SHIFTS),
    ordered=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(format=formats, outputs=st.integers(1, 40), chunks=st.integers(1, 6))
def test_packed_tensors_round_trip(format, outputs, chunks):
    parts = parts_of(format, outputs, 32 * chunks)
    tensors = format.pack(*parts)
    layout = format.layout((outputs, 32 * chunks))
    assert {name: (part.shape, part.dtype) for name, part in tensors.items()} == layout
    expected = written_out(format, *parts)
    found = format.dequantize(tensors, torch.float32)
    bound = expected.abs().max() + (parts[2].abs().max() if format.shift == "offset" else 0)
    assert (found - expected).abs().max() <= 2**-22 * bound
    ids = torch.randint(0, outputs, (2, 3))
    assert torch.equal(format.embed(ids, tensors, torch.float32), found[ids])


@pytest.mark.parametrize(
    ("settings", "bytes_of_32"),
    [
        ({"bits": 8}, 34),  # Q8_0
        ({"bits": 4}, 18),  # Q4_0
        ({"bits": 4, "shift": "offset"}, 20),  # Q4_1
        ({"bits": 5}, 22),  # Q5_0
        ({"bits": 5, "shift": "offset"}, 24),  # Q5_1
    ],
)
def test_blocks_of_gguf_take_no_more_bytes(settings, bytes_of_32):
    format = GroupFormat(group=32, scale=torch.float16, **settings)
    assert format.nbytes((256, 4096)) == 256 * 4096 // 32 * bytes_of_32


def test_groups_with_zero_points_take_no_more_bytes_than_gptq():
    format = GroupFormat(bits=4, group=128, scale=torch.float16, shift="zero")
    assert format.nbytes((4096, 4096)) * 8 == 4096 * 4096 * (4 + (16 + 4) / 128)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 7}, "groups of 7 bits"),
        ({"group": 48}, "groups of 48 inputs; it must be a multiple of 32"),
        ({"shift": "both"}, "shift is 'both'; it must be one of symmetric, offset, zero"),
        ({"scale": torch.int8}, "scales are torch.int8"),
    ],
)
def test_invalid_layouts_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GroupFormat(**{"bits": 4, "group": 32, "scale": torch.float16, **settings})


def test_invalid_sizes_orders_and_zero_points_are_refused():
    format = GroupFormat(bits=4, group=32, scale=torch.float16, shift="zero", ordered=True)
    with pytest.raises(ValueError, match="24 x 40.*multiple of 32"):
        format.layout((24, 40))
    codes, scale, zeros, order = parts_of(format, 24, 64)
    with pytest.raises(ValueError, match="order must be a permutation of the 64 inputs"):
        format.pack(codes, scale, zeros, order * 0)
    with pytest.raises(ValueError, match="zero points range from 16 to 16; with 4 bits"):
        format.pack(codes, scale, zeros * 0 + 16, order)
