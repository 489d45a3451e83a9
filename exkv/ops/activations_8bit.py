"""When linear layers of prompts multiply x in 8 bits, on the CPU.

llama.cpp always does so. Here decode steps keep 15 or 16 bits, whose second product costs nothing
while weights are read from memory; a prompt's products do cost, and bytes are 1.5 to 2 times as
fast as floats. Rounding x costs quality, too: by ``auto`` it is done where weights of so few bits
lose over ten times as much (docs/quantized-weights.md has the figures). ``EXKV_CPU_ACTIVATIONS``
chooses for a process: ``auto``, ``8bit`` for all integers, ``16bit`` for none.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from exkv_ext import cpu_isa

from .registry import HOST, computes_on

#: The environment's variable, and its values.
VARIABLE = "EXKV_CPU_ACTIVATIONS"
AUTO, ROUNDED, EXACT = CHOICES = ("auto", "8bit", "16bit")
#: Weights of at most so many bits, with what is beside their codes, have x rounded by ``auto``.
MOST_BITS = 5.5
#: Inputs that share a step.
CHUNK = 32
#: Steps up to the largest magnitude.
MOST = 127


@functools.cache
def choice() -> str:
    """The environment's.

    Raises:
        ValueError: it is none of :data:`CHOICES`.
    """
    found = os.environ.get(VARIABLE) or AUTO
    if found not in CHOICES:
        raise ValueError(f"{VARIABLE}={found!r} is unknown; say one of {', '.join(CHOICES)}")
    return found


def has_kernels(x: Tensor) -> bool:
    """Whether products of bytes are faster than others where x (..., in) is multiplied."""
    return computes_on(x) in HOST and cpu_isa() not in (None, "portable")


def rounds(x: Tensor, bits: float) -> bool:
    """Whether x (..., in) of a prompt is to be rounded for weights of so many bits. Who computes in
    float32 wants no rounding: only ``8bit`` does that."""
    if choice() == AUTO:
        return bits <= MOST_BITS and x.dtype.itemsize == 2 and has_kernels(x)
    return choice() == ROUNDED and x.dtype != torch.float64 and has_kernels(x)


def rounded(x: Tensor) -> Tensor:
    """x (..., in), a multiple of 32 inputs: each 32 as multiples of a 127th of their largest
    magnitude, float32; NaN where one isn't finite."""
    chunks = x.float().unflatten(-1, (-1, CHUNK))
    step = chunks.abs().amax(-1, keepdim=True) / MOST
    inverse = torch.where(step >= 2.0**-125, 1 / step, 0.0)
    made = (chunks * inverse).round() * step
    return torch.where(step.isfinite(), made, torch.nan).flatten(-2)
