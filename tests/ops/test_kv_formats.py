"""Formats of keys and values: round-trip error within each format's bound, size in bytes, and the
rotation used with few bits."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from arithmetic import same
from hypothesis import given
from hypothesis import strategies as st
from native import assert_right_on, each_isa
from test_attention import at_the_end_of_memory

from exkv.ops import REFERENCES
from exkv.ops.kv_formats import FORMATS, FloatFormat, hadamard

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PACKED = ("int4", "int2", "int4c", "int2c")
BITS = {"int4": 4, "int2": 2, "int4c": 4, "int2c": 2}


def values(shape, seed, spread=4.0, dtype=torch.float32):
    """Normal values whose size and offset differ by token and channel, over decimal orders."""
    generator = torch.Generator().manual_seed(seed)
    rows, tokens, heads, dim = shape

    def orders(*size):
        return 10 ** ((torch.rand(size, generator=generator) - 0.5) * spread)

    x = torch.randn(shape, generator=generator) + torch.randn(heads, dim, generator=generator)
    return (x * orders(rows, tokens, 1, 1) * orders(heads, dim)).to(dtype)


def round_trip(name, x, dtype=torch.float32):
    return FORMATS[name].widen(FORMATS[name].encode(x), dtype, x.shape[-1])


def by_group(name, x):
    """x (B, T, H, D) in float64 as (..., groups, 32), and how to bring (..., groups, 1) back."""
    x = x.double()
    if FORMATS[name].group == 32:
        groups = x.unflatten(1, (-1, 32)).movedim(2, -1)  # (B, T / 32, H, D, 32)
        return groups, lambda y: y.expand(groups.shape).movedim(-1, 2).flatten(1, 2)
    dim = x.shape[-1]
    padded = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], -dim % 32)), -1)
    groups = padded.unflatten(-1, (-1, 32))
    return groups, lambda y: y.expand(groups.shape).flatten(-2)[..., :dim]


def half_rounding(x):
    """The largest distance to the nearest float16."""
    return (x.abs() * 2.0**-11).clamp(min=2.0**-25)


def largest_error(name, x):
    """What a value can be off: half a step of its group's range, and what rounding the scale and
    the offset to float16 moves its ends by."""
    groups, spread = by_group(name, x)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if name == "int8":
        scale = groups.abs().amax(-1, keepdim=True) / 127
        return spread(scale / 2 + 127.5 * half_rounding(scale)) * (1 + 1e-6)
    levels = 2 ** BITS[name] - 1
    scale = (high - low + half_rounding(low)) / levels
    bound = scale / 2 + half_rounding(low) + (levels + 0.5) * half_rounding(scale)
    float32_rounding = groups.abs().amax(-1, keepdim=True) * 1e-6
    return spread(bound * (1 + 1e-6) + float32_rounding)


@pytest.mark.parametrize("name", ["int8", *PACKED])
@given(
    rows=st.integers(1, 2),
    groups=st.integers(1, 2),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 2, 3, 5, 20, 31, 32, 33, 36, 64, 80, 100, 128]),
    spread=st.sampled_from([0.0, 2.0, 6.0, 12.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_round_trip_error_is_within_the_formats_bound(
    name, rows, groups, heads, dim, spread, dtype, seed
):
    x = values((rows, 32 * groups, heads, dim), seed, spread, dtype)
    x = x.clamp(-60000, 60000)
    error = (round_trip(name, x) - x.double()).abs()
    assert (error <= largest_error(name, x)).all()


@pytest.mark.parametrize("name", ["int8", *PACKED])
def test_error_bound_is_tight(name):
    """A bound that errors never come near would prove nothing."""
    x = values((2, 64, 3, 128), 0, 1.0)
    share = (round_trip(name, x) - x.double()).abs() / largest_error(name, x)
    assert share.max() > 0.85
    assert share.mean() > 0.4


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("mean", [0.0, 100.0, -3000.0])
def test_a_value_becomes_the_nearest_that_its_group_has_and_the_range_is_covered(name, mean):
    """Also far from zero, where rounding the offset shifts it by much of the range."""
    x = torch.rand(2, 64, 3, 96, generator=torch.Generator().manual_seed(0)) + mean
    stored = FORMATS[name].encode(x)
    groups, spread = by_group(name, x)
    scale, offset = (stored[part].double().unsqueeze(-1) for part in ("scale", "offset"))
    top = 2 ** BITS[name] - 1
    choices = (spread(scale * level + offset) for level in range(top + 1))
    nearest = torch.stack([(choice - x).abs() for choice in choices]).amin(0)
    error = (round_trip(name, x) - x.double()).abs()
    assert (error - nearest <= x.abs() * 2.0**-23).all()
    gap = groups.amax(-1, keepdim=True) - (offset + top * scale)
    assert (gap.abs() <= top * half_rounding(scale) * 1.001 + abs(mean) * 2.0**-23).all()
    assert ((groups.amin(-1, keepdim=True) - offset).abs() <= half_rounding(offset) * 1.001).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim", [1, 7, 20, 32, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_encoded_tensors_match_the_layout(name, dim, dtype):
    shape = (2, 64, 3, dim)
    stored = FORMATS[name].encode(torch.randn(shape).to(dtype))
    found = {part: (tuple(tensor.shape), tensor.dtype) for part, tensor in stored.items()}
    assert found == FORMATS[name].layout(shape, dtype)
    assert tuple(stored) == FORMATS[name].names
    for out in DTYPES:
        wide = FORMATS[name].widen(stored, out, dim)
        assert (wide.shape, wide.dtype) == (shape, out)
        rounded = FORMATS[name].widen(stored, torch.float32, dim).to(out)
        assert torch.equal(wide, rounded)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("float", 32), ("int8", 8.5), ("int4", 5), ("int2", 3), ("int4c", 5), ("int2c", 3)],
)
def test_a_value_takes_the_bits_that_the_name_says(name, bits):
    stored = FORMATS[name].encode(torch.randn(2, 64, 3, 128))
    assert sum(tensor.nbytes for tensor in stored.values()) * 8 == bits * 2 * 64 * 3 * 128


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dim", [1, 5, 32, 80])
def test_bytes_pack_adjacent_values_lowest_first(name, dim):
    """numpy unpacks the bits; bits without a value are zero."""
    x = torch.randn(2, 32, 3, dim)
    stored = FORMATS[name].encode(x)
    bits = np.unpackbits(stored[""].numpy(), axis=-1, bitorder="little")
    bits = bits.reshape(2, 32, 3, -1, BITS[name])
    assert not bits[..., dim:, :].any()
    levels = torch.from_numpy(bits[..., :dim, :] @ (1 << np.arange(BITS[name]))).double()
    scale, offset = (
        stored[part].double().repeat_interleave(32, 1 if name.endswith("c") else -1)
        for part in ("scale", "offset")
    )
    expected = levels * scale[..., :dim] + offset[..., :dim]
    torch.testing.assert_close(round_trip(name, x).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", PACKED)
def test_the_smallest_and_the_largest_of_a_group_are_the_ends_of_its_range(name):
    x = torch.arange(32.0)
    x = x.view(1, 32, 1, 1) if name.endswith("c") else x.view(1, 1, 1, 32)
    levels = 2 ** BITS[name] - 1
    stored = FORMATS[name].encode(x)
    assert stored["offset"].item() == 0
    assert stored["scale"].item() == torch.tensor(31 / levels).half().item()
    wide = round_trip(name, x).flatten()
    assert wide[0] == 0
    assert wide[-1] == pytest.approx(31, rel=2**-11)


@pytest.mark.parametrize("name", ["int8", *PACKED])
@pytest.mark.parametrize("constant", [0.0, -0.0, 1.0, -3.140625, 2.0**-24, -60000.0])
def test_float16_constants_round_trip_exactly(name, constant):
    x = torch.full((1, 32, 2, 40), constant)
    wide = round_trip(name, x)
    if name == "int8" and constant:  # its scale is a 127th of it
        assert (wide - x).abs().max() <= largest_error(name, x).max()
    else:
        assert torch.equal(wide, x)


@pytest.mark.parametrize("name", PACKED)
def test_a_range_below_float16s_smallest_step_is_its_offset(name):
    x = 2.0**-14 + torch.rand(1, 32, 1, 32) * 2.0**-27
    stored = FORMATS[name].encode(x)
    assert (stored["scale"] == 0).all() and (stored[""] == 0).all()
    assert torch.equal(round_trip(name, x), torch.full_like(x, 2.0**-14))


@pytest.mark.parametrize("name", PACKED)
def test_huge_value_affects_only_its_group(name):
    x = values((1, 64, 2, 64), 0, 0.0)
    huge = x.clone()
    huge[0, 3, 1, 5] = 50000.0
    before, after = round_trip(name, x), round_trip(name, huge)
    same = torch.ones_like(x, dtype=torch.bool)
    if name.endswith("c"):
        same[0, :32, 1, 5] = False
    else:
        same[0, 3, 1, :32] = False
    assert torch.equal(after[same], before[same])
    assert after[0, 3, 1, 5] == pytest.approx(50000, rel=2**-9)


@pytest.mark.parametrize("name", ["int8", *PACKED])
def test_infinities_are_the_nearest_that_can_be_stored(name):
    """Finite both, of the right sign, and larger than any number of the group."""
    x = torch.zeros(1, 32, 1, 32)
    x[0, 0, 0, 0], x[0, 31, 0, 31] = torch.inf, -torch.inf
    wide = round_trip(name, x)
    assert wide.isfinite().all()
    assert wide[0, 0, 0, 0] >= 65504 and wide[0, 31, 0, 31] <= -65504


@pytest.mark.parametrize("name", ["int8", *PACKED])
def test_nan_affects_its_group(name):
    x = torch.randn(1, 64, 2, 64)
    x[0, 3, 1, 5] = torch.nan
    expected = torch.zeros_like(x, dtype=torch.bool)
    if name.endswith("c"):
        expected[0, :32, 1, 5] = True
    else:
        expected[0, 3, 1, :32] = True
    assert torch.equal(round_trip(name, x).isnan(), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0, 32, 2, 8), (2, 0, 2, 8), (2, 32, 0, 8), (2, 32, 2, 0)])
def test_empty_tensors_are_stored_as_empty_ones(name, shape):
    assert round_trip(name, torch.empty(shape)).shape == shape


@pytest.mark.parametrize("name", ["int4c", "int2c"])
def test_a_last_group_of_tokens_may_be_cut_short_when_read(name):
    x = torch.randn(2, 96, 3, 20)
    stored = FORMATS[name].encode(x)
    whole = FORMATS[name].widen(stored, torch.float32)
    part = {"": stored[""][:, 32:77], **{n: stored[n][:, 1:] for n in ("scale", "offset")}}
    assert torch.equal(FORMATS[name].widen(part, torch.float32), whole[:, 32:77])


def test_the_float_format_keeps_its_dtype_or_the_layouts():
    shape, x = (1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    assert FORMATS["float"].layout(shape, torch.bfloat16) == {"": (shape, torch.bfloat16)}
    assert torch.equal(FORMATS["float"].encode(x)[""], x)
    half = FloatFormat(dtype=torch.float16)
    assert half.layout(shape, torch.bfloat16) == {"": (shape, torch.float16)}
    assert torch.equal(half.encode(x)[""], x.half())
    assert torch.equal(half.widen(half.encode(x), torch.float32), x.half().float())


def test_incomplete_groups_of_tokens_are_refused():
    with pytest.raises(ValueError, match="int4c stores 32 tokens at a time, and there are 33"):
        FORMATS["int4c"].encode(torch.randn(1, 33, 2, 8))


@pytest.mark.parametrize("way", ["op", "reference"])
def test_mismatched_arguments_are_refused_with_numbers(way):
    quantize, widen, rotate = (
        getattr(torch.ops.exkv, name) if way == "op" else REFERENCES[name]
        for name in ("quantize_groups", "dequantize_groups", "hadamard")
    )
    # Kernels raise nothing else.
    error = ValueError if way == "reference" else (ValueError, RuntimeError)
    with pytest.raises(error, match="bits is 3: packed values have 2 or 4"):
        quantize(torch.randn(2, 8), 3)
    with pytest.raises(error, match="x needs a dimension to group along"):
        quantize(torch.tensor(1.0), 4)
    with pytest.raises(error, match="x needs a dimension to transform"):
        rotate(torch.tensor(1.0))
    packed, scale, offset = quantize(torch.randn(2, 64), 4)
    with pytest.raises(error, match="bits is 8"):
        widen(packed, scale, offset, 8, 64, torch.float32)
    with pytest.raises(error, match=r"packed must be uint8 \(..., 33\) for 65 values"):
        widen(packed, scale, offset, 4, 65, torch.float32)
    with pytest.raises(error, match=r"packed must be uint8 .*(Char|int8)"):
        widen(packed.char(), scale, offset, 4, 64, torch.float32)
    with pytest.raises(error, match=r"scale must be float16 \(2, 2\).*\(2, 1\)"):
        widen(packed, scale[:, :1], offset, 4, 64, torch.float32)
    with pytest.raises(error, match=r"offset must be float16 .*(Float|float32)"):
        widen(packed, scale, offset.float(), 4, 64, torch.float32)


# Rotation ---------------------------------------------------------------------------------------


def sylvester(dim):
    """(dim, dim): blocks of the largest power of two, each the Kronecker product of [1 1; 1 -1]."""
    matrix, pair = torch.ones(1, 1), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while dim % (2 * len(matrix)) == 0:
        matrix = torch.kron(matrix, pair)
    return torch.block_diag(*[matrix * len(matrix) ** -0.5] * (dim // len(matrix)))


@pytest.mark.parametrize("dim", [1, 2, 7, 16, 32, 80, 96, 100, 128, 256])
def test_hadamard_is_sylvesters_matrix(dim):
    x = torch.randn(3, 5, dim, dtype=torch.float64).float()
    matrix = sylvester(dim)
    torch.testing.assert_close(hadamard(x), x @ matrix, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(torch.eye(dim)), matrix)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim))
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hadamard_leaves_products_and_spreads_what_is_large(dtype):
    q, k = torch.randn(2, 6, 64).to(dtype)
    rotated = [hadamard(x) for x in (q, k)]
    assert all(x.dtype == dtype for x in rotated)
    exact = (q.double() * k.double()).sum(-1)
    step = 4 * torch.finfo(dtype).eps * 64**0.5  # of q and k, each rounded once more
    torch.testing.assert_close((rotated[0].double() * rotated[1].double()).sum(-1), exact,
                               rtol=step, atol=step)  # fmt: skip
    spike = torch.zeros(64, dtype=dtype)
    spike[9] = 8.0
    assert torch.equal(hadamard(spike).abs(), torch.ones(64, dtype=dtype))


def test_hadamard_makes_no_alias_of_its_input():
    x = torch.randn(3, 7)
    hadamard(x).zero_()
    assert x.any()


# The kernels ------------------------------------------------------------------------------------


#: Whose kernels these tests are of; those of CUDA have a file of their own.
kernels = torch.ops.exkv


def assert_like_reference(x, bits, out):
    found, expected = (
        quantize(x, bits) for quantize in (kernels.quantize_groups, REFERENCES["quantize_groups"])
    )
    assert all(map(same, found, expected))
    args = (*expected, bits, x.shape[-1], out)
    wide = kernels.dequantize_groups(*args)
    assert same(wide, REFERENCES["dequantize_groups"](*args))
    assert same(kernels.hadamard(x), REFERENCES["hadamard"](x))


def check_every_float16_pattern(step=1):
    """Infinities, NaN, subnormals and both zeros included, alone in a group and in company.

    Args:
        step: only every so many of them alone.
    """
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    alone = torch.zeros(len(every[::step]), 3, dtype=torch.float16)
    alone[:, 1] = every[::step]
    for bits in (2, 4):
        for dtype in DTYPES:
            for x in (every.view(-1, 32), every[: 65536 // 80 * 80].view(-1, 80), alone):
                assert_like_reference(x.to(dtype), bits, dtype)


@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    dim=st.integers(1, 161),
    bits=st.sampled_from([2, 4]),
    dtype=st.sampled_from((*DTYPES, torch.float64)),
    out=st.sampled_from((*DTYPES, torch.float64)),
    seed=st.integers(0, 2**16),
    spread=st.sampled_from([0.0, 4.0, 16.0, 60.0]),
)
def check_any_shape(shape, dim, bits, dtype, out, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, dim, generator=generator, dtype=torch.float64)
    orders = torch.rand(*shape, 1, generator=generator, dtype=torch.float64) - 0.5
    assert_like_reference((x * 10 ** (orders * spread)).to(dtype), bits, out)


def check_strides_and_ends():
    """Reads past a tensor's end crash here: run it in a process of its own."""
    base = torch.randn(4, 6, 3, 97).bfloat16()
    for bits in (2, 4):
        for x in (base.transpose(1, 2), base[..., 1:], base[:, ::2], base.mT):
            assert_like_reference(x, bits, torch.bfloat16)
        for dim in (1, 5, 31, 32, 33, 80, 99):
            x = torch.randn(3, dim)
            expected = kernels.quantize_groups(x, bits)
            found = kernels.quantize_groups(at_the_end_of_memory(x), bits)
            assert all(map(same, found, expected))
            wide = kernels.dequantize_groups(*expected, bits, dim, x.dtype)
            ends = map(at_the_end_of_memory, expected)
            assert same(kernels.dequantize_groups(*ends, bits, dim, x.dtype), wide)


ISA_PROGRAM = """
import test_kv_formats as t
t.check_every_float16_pattern()
t.check_any_shape()
t.check_strides_and_ends()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages")
@each_isa
def test_each_instruction_set_gives_the_reference_bits(isa):
    assert_right_on(isa, ISA_PROGRAM)
