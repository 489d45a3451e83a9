"""exkv::linear_packed and dequantize_packed: every kernel against float64, with the error of
multiplying dequantized bfloat16 weights as the bound; dequantized values equal the plain ones to
the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from arithmetic import assert_same_on_threads, error, float_error
from native import assert_right_on, each_isa, needs_cxx, needs_kernels, ops_of
from packers.blocks import HALVES
from torch import Tensor

from exkv.ops.weight_groups import MOST_ROWS
from exkv.planning.kernel_uses import kernel_use
from exkv.weights import register
from exkv.weights.bitsandbytes import Bnb4Format
from exkv.weights.exl2 import Exl2Format, Section
from exkv.weights.fp8 import UE8M0, Fp8Format
from exkv.weights.gguf import FORMATS, BlockFormat
from exkv.weights.mxfp4 import MXFP4
from exkv.weights.tiles import TiledFormat

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GGML = {
    name: format
    for name, format in FORMATS.items()
    if isinstance(format, BlockFormat) and format.native((1, 256))
}
#: Those that only the CPU's kernels know: points of a codebook.
POINTS = [name for name in GGML if name.startswith("IQ") and not name.startswith("IQ4")]
FLOAT8 = {
    "a matrix": Fp8Format(block=None, scale_dtype=torch.bfloat16),
    "rows": Fp8Format(block=(1, 512), scale_dtype=torch.float16),
    "blocks": Fp8Format(block=(16, 128)),
    "powers": Fp8Format(block=(32, 64), scale_dtype=UE8M0),
}
TABLES = {
    "nf4": Bnb4Format(kind="nf4", block=64, nested=False, state=0),
    "nested": Bnb4Format(kind="fp4", block=128, nested=True, state=0),
}
EVERY = {**GGML, **FLOAT8, **TABLES, "mxfp4": MXFP4}
ops = torch.ops.exkv


def matrix(name: str, outputs: int, inputs: int) -> tuple[list[Tensor], Tensor]:
    """Random tensors of a matrix, and its values in float64."""
    format, generator = EVERY[name], torch.Generator().manual_seed(len(name) + outputs)
    register(format)
    tensors = {
        key: torch.randint(256, shape, generator=generator).to(torch.uint8)
        if dtype.itemsize == 1
        else torch.rand(shape, generator=generator).sub(0.3).to(dtype)
        for key, (shape, dtype) in format.layout((outputs, inputs)).items()
    }
    if isinstance(format, BlockFormat):
        blocks = tensors["weight"].view(-1, format.type.nbytes)
        for at in HALVES[name]:
            half = torch.rand(len(blocks), 1, generator=generator).add(0.1).div(64).half()
            blocks[:, at : at + 2] = half.view(torch.uint8)
        if name == "IQ1_M":  # whose float lies in pieces
            half = torch.rand(len(blocks), 1, generator=generator).add(0.1).div(64).half()
            pieces = half.view(torch.int16).int() >> torch.arange(0, 16, 4) & 15
            blocks[:, 49::2] = blocks[:, 49::2] & 15 | pieces.to(torch.uint8) << 4
    if isinstance(format, Fp8Format):
        codes = tensors["weight"]
        codes[codes & 127 == 127] = 3  # which are no numbers
        tensors["weight"] = codes.view(torch.float8_e4m3fn)
        if tensors["scale"].dtype == torch.uint8:
            tensors["scale"] = tensors["scale"] % 8 + 120
    if format is MXFP4:
        tensors["scales"] = tensors["scales"] % 8 + 120
    return [tensors[key] for key in format.names], format.dequantize(tensors, torch.float64)


def linear(name: str, x: Tensor, tensors: Sequence[Tensor], bias=None) -> Tensor:
    """The op, for all rows of the matrix."""
    format: TiledFormat = EVERY[name]
    outputs = len(tensors[0])
    layout = format.native((outputs, x.shape[-1]))
    assert layout is not None
    return ops.linear_packed(x, tensors, format.name, list(layout), outputs, bias)


def sections(outputs: int, times: int) -> tuple[Exl2Format, list[Tensor], Tensor]:
    """A matrix of 384 inputs, so many times, of all numbers of bits, in groups of unlike sizes."""
    numbers = ((8, 32, 32), (6, 96, 64), (5, 32, 64), (4, 64, 96), (3, 32, 64), (2, 64, 64))
    parts = tuple(Section(bits, group, times * inputs) for bits, group, inputs in numbers)
    format = Exl2Format(sections=parts, outputs_of=outputs)
    register(format)
    generator = torch.Generator().manual_seed(outputs)
    layout = format.layout((outputs, 384 * times))
    (codes, scale, largest, order) = (shape for shape, _ in layout.values())
    tensors = {
        "codes": torch.randint(256, codes, generator=generator).to(torch.uint8),
        "scale": torch.randint(-(2**31), 2**31, scale, generator=generator).int(),
        "largest": torch.rand(largest, generator=generator).half(),
        "order": torch.randperm(*order, generator=generator).int(),
    }
    return format, list(tensors.values()), format.dequantize(tensors, torch.float64)


def check_sections(outputs: int, where: Any = ops, times: int = 1) -> None:
    """Every row is right and independent of the others; so are dequantized rows."""
    format, tensors, weight = sections(outputs, times)
    inputs = 384 * times
    layout = list(format.native((outputs, inputs)))
    for dtype in DTYPES:
        x = torch.randn(7, inputs, generator=torch.Generator().manual_seed(outputs)).to(dtype)
        bias = x[0, :outputs]
        found = where.linear_packed(x, tensors, format.name, layout, outputs, bias)
        expected = F.linear(x.double(), weight, bias.double())
        assert error(found, expected) <= 2 * float_error(x, weight, expected - bias) + 1e-9
        for row in range(7):
            alone = where.linear_packed(x[row], tensors, format.name, layout, outputs, bias)
            assert (alone - found[row]).abs().max() <= 1e-6 * found.abs().max()
        plain = where.dequantize_packed(tensors, format.name, layout, inputs, 3, outputs - 2, dtype)
        wanted = weight[3 : outputs - 2].to(dtype)
        assert (plain - wanted).abs().max() <= torch.finfo(dtype).eps * wanted.abs().max()


@pytest.mark.parametrize("name", EVERY)
def test_errors_are_at_most_twice_those_of_dequantized_weights(name):
    """Also where one input is far larger than those beside it, as a few features of language
    models are."""
    tensors, weight = matrix(name, 67, 512)
    for dtype in DTYPES:
        for rows, outlier in ((1, 1), (5, 300), (MOST_ROWS, 1)):
            x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
            x[:, 77] *= outlier
            x = x.to(dtype)
            expected = x.double() @ weight.T
            found = linear(name, x, tensors)
            assert error(found, expected) <= 2 * float_error(x, weight, expected)


@each_isa
def test_every_instruction_set_is_right(isa):
    assert_right_on(isa, "import test_linear_packed; test_linear_packed.check_all()")


def check_all() -> None:
    """Every layout on this process's instruction set, and the numbers of rows that have functions
    of their own; values to the bit."""
    check_sections(21)
    check_sections(16)
    for name, format in EVERY.items():
        tensors, weight = matrix(name, 21, 512)
        layout = list(format.native((21, 512)))
        for dtype in DTYPES:
            bias = torch.randn(21, generator=torch.Generator().manual_seed(1)).to(dtype)
            for rows in (1, 2, 7):
                x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)).to(dtype)
                expected = F.linear(x.double(), weight, bias.double())
                found = linear(name, x, tensors, bias)
                assert error(found, expected) <= 2 * float_error(x, weight, expected - bias) + 1e-9
                alone = [linear(name, row, tensors, bias) for row in x]
                assert torch.equal(torch.stack(alone), found)
            plain = ops.dequantize_packed(tensors, format.name, layout, 512, 3, 19, dtype)
            held = dict(zip(format.names, tensors, strict=True))
            assert torch.equal(plain, format.dequantize(held, dtype)[3:19])


@needs_kernels
def test_rows_are_independent_of_threads():
    tensors, _ = matrix("Q4_K", 1003, 512)
    x = torch.randn(4, 512).bfloat16()
    assert_same_on_threads(lambda: linear("Q4_K", x, tensors))


@pytest.mark.parametrize("name", ["Q6_K", "IQ4_NL", "blocks", "nf4"])
def test_zeros_infinities_and_tiny_numbers_propagate(name):
    tensors, weight = matrix(name, 9, 512)
    for dtype in DTYPES:
        x = torch.zeros(4, 512, dtype=dtype)
        x[1, 3], x[2, 5], x[3] = torch.inf, torch.nan, torch.finfo(dtype).smallest_normal
        out = linear(name, x, tensors)
        assert torch.equal(out[0], torch.zeros(9, dtype=dtype))
        assert not out[1].isfinite().any() and out[2].isnan().all()
        bound = weight.abs().sum(1).max() * x[3, 0].double()
        assert (out[3].double() - x[3].double() @ weight.T).abs().max() <= bound


@needs_cxx
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_codes_of_8_bit_floats_yield_nan(dtype):
    tensors, _ = matrix("blocks", 9, 544)
    tensors[0].view(torch.uint8)[4, 100] = 255
    tensors[0].view(torch.uint8)[7, 540] = 127
    x, layout = torch.zeros(3, 544, dtype=dtype), EVERY["blocks"].native((9, 544))
    for where in (ops, ops_of("emulated")):
        out = where.linear_packed(x, tensors, EVERY["blocks"].name, list(layout), 9, None)
        assert out.isnan().all(0).tolist() == [i in (4, 7) for i in range(9)]
        assert out[:, 5].isfinite().all()


def test_long_inputs_are_multiplied_tile_by_tile(monkeypatch):
    monkeypatch.setattr("exkv.weights.tiles.TILE", 512 * 24)
    for name in ("Q5_K", "rows", "nested"):
        tensors, weight = matrix(name, 59, 512)
        held = dict(zip(EVERY[name].names, tensors, strict=True))
        x, bias = torch.randn(2, 13, 512), torch.randn(59)
        found = EVERY[name].linear(x, held, bias)
        expected = F.linear(x.double(), weight, bias.double())
        assert error(found, expected) <= 2 * float_error(x, weight, expected - bias) + 1e-6
        assert torch.equal(found[:, :3], EVERY[name].linear(x, held, bias)[:, :3])


@pytest.mark.parametrize("name", EVERY)
def test_rows_of_a_matrix_are_a_matrix_in_the_same_memory(name):
    tensors, weight = matrix(name, 96, 512)
    format, held = EVERY[name], dict(zip(EVERY[name].names, tensors, strict=True))
    part = format.part(held, 64, 96)
    assert part is not None
    first = format.names[0]
    assert part[first].data_ptr() == held[first][64].data_ptr()
    assert torch.equal(format.dequantize(part, torch.float64), weight[64:])


@needs_kernels
def test_mismatched_arguments_are_refused_by_name_and_number():
    x = torch.randn(2, 512)
    (rows,), _ = matrix("Q4_K", 9, 512)
    nf4, _ = matrix("nf4", 9, 512)
    blocks, _ = matrix("blocks", 9, 512)
    mxfp4, _ = matrix("mxfp4", 9, 512)
    for tensors, layout, complaint in [
        ([rows[:, 1:].contiguous()], [-1, 12, 0, 0], "rows of 287 bytes are no blocks of 144"),
        ([rows[:, ::2]], [-1, 12, 0, 0], "not contiguous"),
        ([rows], [-1, 2, 0, 0], "ggml's type 2 has no kernel"),
        ([rows], [-7, 12, 0, 0], "the first is -1, -2, -3, -5 or -6"),
        ([rows, rows], [-1, 12, 0, 0], "2 tensors, and a matrix of this layout has 1"),
        ([nf4[0], nf4[1][1:], nf4[2]], [-3, 64, 0, 0], r"absmax is Float \(71,?\).*\(72"),
        (nf4, [-3, 48, 0, 0], "blocks of 48 weights"),
        ([blocks[0], blocks[1][:, 1:]], [-2, 16, 128, 0], r"scale is Float \(1, 3\)"),
        (blocks, [-2, 16, 100, 0], "scales of 16 x 100 weights"),
        (mxfp4[:1], [-5, 0, 0, 0], "1 tensors, and a matrix of this layout has 2"),
        ([mxfp4[0][:, :24].contiguous(), mxfp4[1]], [-5, 0, 0, 0], "48 inputs are no multiple"),
        ([mxfp4[0], mxfp4[1][1:]], [-5, 0, 0, 0], r"scales is Byte \(8, 16\)"),
    ]:
        with pytest.raises(RuntimeError, match=complaint):
            ops.linear_packed(x, tensors, "", layout, 9, None)
    with pytest.raises(RuntimeError, match=r"x \(2, 256\) must end in 512"):
        ops.linear_packed(x[:, :256], [rows], "", [-1, 12, 0, 0], 9, None)
    with pytest.raises(RuntimeError, match="10 outputs of 9"):
        ops.linear_packed(x, [rows], "", [-1, 12, 0, 0], 10, None)


#: dtype and rows of x, and its first element: x that begins anywhere is copied.
CUDA_CASES = (
    *((torch.float32, 5, 1), (torch.bfloat16, 1, 1), (torch.float16, 4, 1)),
    *((torch.bfloat16, 9, 0), (torch.float16, 2, 0)),
)


@needs_cxx
@pytest.mark.parametrize("where", ["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("name", [name for name in EVERY if name not in POINTS])
def test_cuda_kernels_are_right(name, where):
    """Rows and outputs that fill no block, more chunks than a warp has lanes, x that begins
    anywhere, or where tensor cores take it; values to the bit."""
    inputs = 1280 if name in GGML else 1056
    tensors, weight = matrix(name, 21, inputs)
    given = (EVERY[name].name, list(EVERY[name].native((21, inputs))))
    ops_there = ops_of(where)
    for dtype, rows, first in CUDA_CASES:
        bias = torch.randn(21, generator=torch.Generator().manual_seed(rows)).to(dtype)
        x = torch.randn(rows * inputs + 1, generator=torch.Generator().manual_seed(rows))
        x = x.to(dtype)[first : first + rows * inputs].view(rows, inputs)
        expected = F.linear(x.double(), weight, bias.double())
        found = ops_there.linear_packed(x, tensors, *given, 21, bias)
        assert error(found, expected) <= 2 * float_error(x, weight, expected - bias) + 1e-9
        alone = [ops_there.linear_packed(row[None], tensors, *given, 21, bias) for row in x]
        assert torch.equal(torch.cat(alone), found)
    for dtype in DTYPES:
        plain = ops_there.dequantize_packed(tensors, *given, inputs, 3, 19, dtype)
        held = dict(zip(EVERY[name].names, tensors, strict=True))
        assert torch.equal(plain, EVERY[name].dequantize(held, dtype)[3:19])


@needs_cxx
@pytest.mark.parametrize("name", POINTS)
def test_what_has_no_kernel_on_cuda_takes_the_reference(name):
    tensors, weight = matrix(name, 21, 512)
    given = (EVERY[name].name, list(EVERY[name].native((21, 512))))
    x, ops_there = torch.randn(2, 512), ops_of("emulated")
    expected = x.double() @ weight.T
    found = ops_there.linear_packed(x, tensors, *given, 21, None)
    assert error(found, expected) <= 2 * float_error(x, weight, expected)
    plain = ops_there.dequantize_packed(tensors, *given, 512, 3, 19, torch.float32)
    assert torch.equal(plain, weight[3:19].float())
    for op in ("linear_packed", "dequantize_packed"):
        assert not kernel_use(op, "cuda", {"format": given[0], "layout": given[1]}).takes
        assert kernel_use(op, "cuda", {"format": "gguf Q4_K", "layout": [-1, 12, 0, 0]}).takes


@needs_cxx
@pytest.mark.parametrize("where", ["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_cuda_kernels_of_sections_are_right(where):
    """Sections of fewer chunks than a block has warps, and of more than it has under way."""
    for times in (1, 11):
        check_sections(21, ops_of(where), times)


@needs_cxx
def test_a_captured_product_with_sections_follows_what_memory_holds():
    format, tensors, _ = sections(21, 1)
    given = (tensors, format.name, list(format.native((21, 384))), 21, None)
    x, where = torch.randn(2, 384), ops_of("emulated")
    where.capture_graph()
    found = where.linear_packed(x, *given)
    x.copy_(torch.randn(2, 384))
    where.replay_graph()
    assert torch.equal(found, where.linear_packed(x, *given))


@needs_cxx
def test_sections_that_begin_anywhere_are_refused_on_cuda():
    format, tensors, _ = sections(8, 1)
    moved = torch.cat([tensors[3][:1], tensors[3]])[1:]
    given = ([*tensors[:3], moved], format.name, list(format.native((8, 384))), 8, None)
    with pytest.raises(RuntimeError, match="codes and order must begin at a multiple of 16"):
        ops_of("emulated").linear_packed(torch.randn(2, 384), *given)
