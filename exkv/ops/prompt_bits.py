"""Bits to which linear layers with integer weights round the activations x of prompts on the CPU.

llama.cpp always rounds x to 8 bits. Decode steps here keep 15 or 16: reading the weights dominates
them, so the second product is free. Prompts are bound by the products, and 8-bit ones are 1.4 to 2
times as fast as those of floats. Rounding also loses quality, so ``auto`` does it only for weights
whose own bits lose more than ten times as much (figures: docs/quantized-weights.md). 16 bits lose
nothing of 16-bit floats that matters, and are faster than float32 on processors that can't multiply
16-bit floats. The environment variable ``EXKV_CPU_ACTIVATIONS`` chooses per process: ``auto``;
``8bit`` for all integers; ``16bit`` for none.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from exkv_ext import cpu_isa

from .registry import HOST, computes_on

#: The environment variable, and its values.
VARIABLE = "EXKV_CPU_ACTIVATIONS"
AUTO, FEW, MANY = CHOICES = ("auto", "8bit", "16bit")
#: Most bits per weight, scales included, with which ``auto`` rounds x to 8 bits.
MOST_BITS = 5.5
#: Number of inputs that share a quantization step.
CHUNK = 32
#: Bits of x -> number of steps up to the largest magnitude.
MOST = {8: 127, 16: 32767}


@functools.cache
def choice() -> str:
    """The value of the environment variable.

    Raises:
        ValueError: the value is unknown.
    """
    found = os.environ.get(VARIABLE) or AUTO
    if found not in CHOICES:
        raise ValueError(f"{VARIABLE}={found!r} is unknown; say one of {', '.join(CHOICES)}")
    return found


def bits_of(x: Tensor, weight_bits: float) -> int:
    """Bits to which a prompt's x (..., in) is rounded for weights of ``weight_bits``; 0 for no
    rounding. Float32 is rounded by ``8bit`` only."""
    isa = cpu_isa() if computes_on(x) in HOST else None
    if isa in (None, "portable") or x.dtype == torch.float64:
        return 0
    short, chosen = x.dtype.itemsize == 2, choice()
    if chosen == FEW or (chosen == AUTO and short and weight_bits <= MOST_BITS):
        return 8
    return 16 if short and isa == "avx2" else 0


def rounded(x: Tensor, bits: int) -> Tensor:
    """Round x (..., in), with a multiple of 32 inputs, to float32: every 32 inputs to multiples of
    1/127 of their largest magnitude (8 bits), or 1/32767 (16); NaN if one of them isn't finite.

    Raises:
        ValueError: ``bits`` is neither 8 nor 16.
    """
    if bits not in MOST:
        raise ValueError(f"bits is {bits}; x is rounded to 8 or 16")
    chunks = x.float().unflatten(-1, (-1, CHUNK))
    step = chunks.abs().amax(-1, keepdim=True) / MOST[bits]
    inverse = torch.where(step >= 2.0**-125, 1 / step, 0.0)
    made = (chunks * inverse).round() * step
    return torch.where(step.isfinite(), made, torch.nan).flatten(-2)
