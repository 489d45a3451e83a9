"""Linear layers of prompts with x in 8 bits or 16: every kernel against float64 of the rounded x,
and when they are taken."""

from __future__ import annotations

from itertools import product
from typing import Any

import gguf
import pytest
import test_linear_groups
import test_linear_packed
import torch
import torch.nn.functional as F
from arithmetic import assert_same_on_threads
from native import assert_right_on, each_isa, needs_kernels, run_apart
from test_linear_packed import EVERY, GGML
from torch import Tensor

from exkv.ops.prompt_bits import CHUNK, rounded
from exkv.weights import GroupFormat
from exkv_ext import cpu_isa

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (*GGML, "mxfp4")
ops = torch.ops.exkv


def prompt(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """With an input far larger than those beside it, a chunk of zeros, and a tiny one."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    x[:, 77] *= 300
    x[1, :CHUNK] = 0
    x[2, CHUNK : 2 * CHUNK] *= torch.finfo(dtype).smallest_normal
    return x.to(dtype)


def assert_near(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, bits: int) -> None:
    """Up to float32's sums and one rounding to x's dtype."""
    exact, wide = rounded(x, bits).double(), None if bias is None else bias.double()
    expected = F.linear(exact, weight, wide)
    magnitude = exact.abs() @ weight.abs().T + expected.abs()
    bound = 2**-20 * magnitude + torch.finfo(found.dtype).eps * expected.abs() + 1e-37
    assert found.dtype == x.dtype
    assert ((found.double() - expected).abs() <= bound).all()


def assert_same_alone(alone: Tensor, found: Tensor, *exact: Any) -> None:
    """By kernels to the bit; without, torch sums a single row in another order."""
    if cpu_isa() == "portable":
        assert_near(alone, *exact)
    else:
        assert torch.equal(alone, found)


def check_packed() -> None:
    """All types, numbers of rows that have functions of their own, and outputs that fill no tile;
    rows don't depend on each other."""
    for name, bits in product(INTEGERS, (8, 16)):
        format = EVERY[name]
        for dtype, outputs in zip(DTYPES, (21, 16, 41), strict=True):
            tensors, weight = test_linear_packed.matrix(name, outputs, 512)
            given = tensors, format.name, list(format.native((outputs, 512))), outputs
            bias = torch.randn(outputs, generator=torch.Generator().manual_seed(1)).to(dtype)
            x = prompt(23, 512, dtype)
            found = ops.linear_packed_prompt(x, *given, bias, bits)
            assert_near(found, x, weight, bias, bits)
            alone = [ops.linear_packed_prompt(row, *given, bias, bits) for row in x]
            assert_same_alone(torch.stack(alone), found, x, weight, bias, bits)
            plain = ops.linear_packed_prompt(x[:3], *given, None, bits)
            assert_near(plain, x[:3], weight, None, bits)


def check_groups() -> None:
    """Chunks of sorted inputs are those of the codes' order."""
    for of_code, bits in product((8, 6, 5, 4, 3, 2), (8, 16)):
        for dtype, shift, outputs in zip(
            DTYPES, ("symmetric", "offset", "zero"), (21, 16, 41), strict=True
        ):
            how = {"group": 64, "scale": dtype, "shift": shift, "ordered": shift == "zero"}
            format = GroupFormat(bits=of_code, **how)
            tensors, weight = test_linear_groups.matrix(format, outputs, 320)
            x, layout = prompt(23, 320, dtype), list(format.groups)
            order = tensors[-1].long() if format.ordered else torch.arange(320)
            bias = torch.randn(outputs, generator=torch.Generator().manual_seed(1)).to(dtype)
            found = ops.linear_groups_prompt(x, tensors, layout, bias, bits)
            assert_near(found, x[:, order], weight[:, order], bias, bits)
            alone = [ops.linear_groups_prompt(row, tensors, layout, bias, bits) for row in x]
            exact = x[:, order], weight[:, order], bias, bits
            assert_same_alone(torch.stack(alone), found, *exact)


@each_isa
def test_every_instruction_set_is_right(isa):
    program = "import test_prompt_bits as t; t.check_packed(); t.check_groups()"
    assert_right_on(isa, program)


def test_steps_are_those_of_ggml():
    """Of Q8_0, but that it rounds halves away from zero, and keeps steps in float16."""
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(0))
    x[:, 77] *= 300
    stored = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q8_0)
    theirs = torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q8_0))
    step = x.unflatten(-1, (-1, CHUNK)).abs().amax(-1).repeat_interleave(CHUNK, -1) / 127
    assert ((rounded(x, 8) - theirs).abs() <= 2**-11 * theirs.abs() + 1e-5 * step).all()
    assert ((rounded(x, 16) - x).abs() <= 0.501 * step / 258).all()


@pytest.mark.parametrize("bits", [8, 16])
def test_what_is_not_finite_stays_so(bits):
    tensors, _ = test_linear_packed.matrix("Q4_K", 9, 512)
    x = prompt(20, 512, torch.bfloat16)
    x[3, 5], x[7, 300] = torch.inf, torch.nan
    format = EVERY["Q4_K"]
    layout = list(format.native((9, 512)))
    out = ops.linear_packed_prompt(x, tensors, format.name, layout, 9, None, bits)
    lost = torch.isnan(out).all(1)
    assert lost.nonzero().flatten().tolist() == [3, 7]
    assert out[~lost].isfinite().all()


@needs_kernels
def test_rows_are_independent_of_threads_and_of_strips():
    """More rows than are rounded at once."""
    tensors, _ = test_linear_packed.matrix("Q4_K", 70, 256)
    x = prompt(600, 256, torch.bfloat16)
    given = tensors, EVERY["Q4_K"].name, list(EVERY["Q4_K"].native((70, 256))), 70, None, 8
    assert_same_on_threads(lambda: ops.linear_packed_prompt(x, *given))
    assert torch.equal(
        ops.linear_packed_prompt(x, *given)[500:], ops.linear_packed_prompt(x[500:], *given)
    )


CHOICES = """
import torch, test_linear_groups, test_linear_packed
torch.manual_seed(0)
from exkv.weights import GroupFormat

def bits(format, tensors, x, op, *given):
    found = format.linear(x, dict(zip(format.names, tensors)), None)
    return next((n for n in (8, 16) if torch.equal(found, op(x, *given, n))), 0)

def packed(name, rows, dtype):
    tensors, _ = test_linear_packed.matrix(name, 21, 512)
    format = test_linear_packed.EVERY[name]
    given = tensors, format.name, list(format.native((21, 512))), 21, None
    x = torch.randn(rows, 512).to(dtype)
    return bits(format, tensors, x, torch.ops.exkv.linear_packed_prompt, *given)

def groups(of_code):
    format = GroupFormat(bits=of_code, group=32, scale=torch.float16)
    tensors, _ = test_linear_groups.matrix(format, 21, 512)
    x, given = torch.randn(40, 512).bfloat16(), (tensors, list(format.groups), None)
    return bits(format, tensors, x, torch.ops.exkv.linear_groups_prompt, *given)

half, single = torch.bfloat16, torch.float32
print(packed("Q4_K", 40, half), packed("mxfp4", 40, half), groups(4), packed("Q6_K", 40, half),
      groups(8), packed("Q4_K", 40, single), packed("Q4_K", 16, half))
"""


@needs_kernels
@pytest.mark.parametrize(
    ("choice", "printed"),
    [("auto", "8 8 8 16 16 0 0"), ("8bit", "8 8 8 8 8 8 0"), ("16bit", "16 16 16 16 16 0 0")],
)
def test_the_environment_chooses(choice, printed):
    """By itself few bits and 16-bit floats only; never decode steps."""
    result = run_apart(CHOICES, EXKV_CPU_ACTIVATIONS=choice, EXKV_CPU_ISA="avx2")
    assert result.stdout.strip() == printed, result.stderr


def test_an_unknown_choice_is_refused():
    program = "from exkv.ops import prompt_bits; prompt_bits.choice()"
    result = run_apart(program, EXKV_CPU_ACTIVATIONS="int8")
    assert "EXKV_CPU_ACTIVATIONS='int8' is unknown; say one of auto, 8bit, 16bit" in result.stderr
