"""exkv::linear_packed and dequantize_packed of EXL3's tiles: every kernel against tiles as
ExLlamaV3's kernel reads them (``packers/exl3.py``), values equal to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from arithmetic import assert_same_on_threads, error, float_error
from native import assert_right_on, each_isa, needs_cxx, needs_kernels, ops_of
from packers.exl3 import tile_values
from torch import Tensor

from exkv.ops import REFERENCES
from exkv.ops.weight_groups import MOST_ROWS
from exkv.weights import register
from exkv.weights.exl3 import CODEBOOKS, Exl3Format, TrellisFormat

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Every number of bits, with each codebook.
FORMATS = [
    TrellisFormat(words=words, codebook=codebook)
    for words in range(16, 129, 8)
    for codebook in CODEBOOKS
]
ops = torch.ops.exkv


def matrix(format: TrellisFormat, tiles: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Random tiles (outputs, inputs), and their values in float64."""
    register(format)
    generator = torch.Generator().manual_seed(format.words)
    shape = (*tiles, format.words)
    trellis = torch.randint(-(2**15), 2**15, shape, generator=generator).short()
    values = tile_values(trellis.flatten(0, 1).numpy().view("uint16"), format.codebook)
    whole = torch.from_numpy(values).view(*tiles, 16, 16).permute(0, 3, 1, 2)
    return trellis, whole.reshape(16 * tiles[0], -1).double()


def check(format: TrellisFormat, where: Any = ops, tiles: int = 34) -> None:
    """Rows and outputs that fill no block, more tiles than are taken at once."""
    trellis, weight = matrix(format, (3, tiles))
    inputs, layout = 16 * tiles, list(format.native((48, 16 * tiles)))
    for dtype in DTYPES:
        plain = where.dequantize_packed([trellis], format.name, layout, inputs, 3, 41, dtype)
        assert torch.equal(plain, weight[3:41].to(dtype))
        x = torch.randn(7, inputs, generator=torch.Generator().manual_seed(format.words)).to(dtype)
        bias = x[0, :45].clone()
        found = where.linear_packed(x, [trellis], format.name, layout, 45, bias)
        expected = F.linear(x.double(), weight[:45], bias.double())
        assert error(found, expected) <= 2 * float_error(x, weight[:45], expected - bias) + 1e-9
        alone = [where.linear_packed(row, [trellis], format.name, layout, 45, bias) for row in x]
        assert torch.equal(torch.stack(alone), found)


@needs_kernels
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_kernels_read_tiles_of_any_bits(format):
    check(format)


@each_isa
def test_every_instruction_set_reads_tiles(isa):
    assert_right_on(
        isa, "import test_trellis; [test_trellis.check(f) for f in test_trellis.FORMATS]"
    )


@needs_cxx
@pytest.mark.sweep(6)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_cuda_kernels_read_tiles(format):
    check(format, ops_of("emulated"), 10)


@pytest.mark.cuda
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_gpu_reads_tiles(format):
    check(format, ops_of("cuda"))


@needs_kernels
def test_rows_are_independent_of_threads():
    format = TrellisFormat(words=64, codebook="mcg")
    trellis, _ = matrix(format, (63, 16))
    x, layout = torch.randn(5, 256), list(format.native((1008, 256)))
    assert_same_on_threads(lambda: ops.linear_packed(x, [trellis], format.name, layout, 1003, None))


@needs_kernels
def test_prompts_use_dequantized_tiles_and_tokens_none(monkeypatch):
    """Up to MOST_ROWS rows no dequantized row is made, by whatever name."""
    format = Exl3Format(tiles=TrellisFormat(words=64, codebook="mcg"), size=(256, 256))
    trellis, _ = matrix(format.tiles, (16, 16))
    held = {"trellis": trellis, "suh": torch.rand(256).half(), "svh": torch.rand(256).half()}
    plain, made = format.dequantize(held, torch.float64), []
    monkeypatch.setattr(TrellisFormat, "rows", lambda *args: made.append(args))
    for rows in (1, MOST_ROWS, MOST_ROWS + 1, 40):
        x = torch.randn(rows, 256)
        found = format.linear(x, held, None)
        expected = x.double() @ plain.T
        assert error(found, expected) <= 4 * error(F.linear(x, plain.float()), expected)
    assert not made


@needs_kernels
def test_mismatched_arguments_are_refused_by_name_and_number():
    format = TrellisFormat(words=64, codebook="mcg")
    trellis, _ = matrix(format, (2, 4))
    x = torch.randn(2, 64)
    for tiles, layout, complaint in [
        (trellis, [-6, 60, 1, 0], "tiles of 60 words with codebook 1"),
        (trellis, [-6, 64, 3, 0], "tiles of 64 words with codebook 3"),
        (trellis, [-6, 48, 1, 0], r"trellis \(2, 4, 64\) must have 3 dimensions, the last of 48"),
        (trellis[:, ::2], [-6, 64, 1, 0], "contiguous"),
        (trellis.int(), [-6, 64, 1, 0], "Short"),
        (trellis[:1], [-6, 64, 1, 0], "17 outputs of 16"),
        (trellis[:, :3].contiguous(), [-6, 64, 1, 0], "48 inputs are no multiple of 32"),
    ]:
        with pytest.raises(RuntimeError, match=complaint):
            ops.linear_packed(x, [tiles], format.name, layout, 17, None)


def test_the_reference_is_that_of_tiles():
    format = TrellisFormat(words=40, codebook="mul1")
    trellis, weight = matrix(format, (2, 4))
    layout = list(format.native((32, 64)))
    x = torch.randn(3, 64, dtype=torch.float64)
    found = REFERENCES["linear_packed"](x, [trellis], format.name, layout, 32, None)
    assert torch.allclose(found, x @ weight.T)
