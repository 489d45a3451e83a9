"""To how many bits linear layers of prompts round x, on the CPU, where weights are integers.

llama.cpp rounds x to 8 bits everywhere. Here decode steps keep 15 or 16, whose second product costs
nothing while weights come from memory; a prompt's products do cost, and those of bytes are 1.4 to 2
times as fast as those of floats. Rounding costs quality, too: by ``auto`` it is done for weights of
so few bits that lose over ten times as much by themselves (docs/quantized-weights.md has the
figures). 16 bits lose nothing of 16-bit floats that counts, and are faster than float32 where there
are no products of 16-bit floats. ``EXKV_CPU_ACTIVATIONS`` chooses for a process: ``auto``, ``8bit``
for all integers, ``16bit`` for none.
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
AUTO, FEW, MANY = CHOICES = ("auto", "8bit", "16bit")
#: Weights of at most so many bits, with what is beside their codes, have x in 8 bits by ``auto``.
MOST_BITS = 5.5
#: Inputs that share a step.
CHUNK = 32
#: Bits of x -> steps up to the largest magnitude.
MOST = {8: 127, 16: 32767}


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


def bits_of(x: Tensor, weight_bits: float) -> int:
    """Bits to which x (..., in) of a prompt is to be rounded for weights of so many; 0 where it
    isn't. Who computes in float32 wants no rounding: only ``8bit`` does that."""
    isa = cpu_isa() if computes_on(x) in HOST else None
    if isa in (None, "portable") or x.dtype == torch.float64:
        return 0
    short, chosen = x.dtype.itemsize == 2, choice()
    if chosen == FEW or (chosen == AUTO and short and weight_bits <= MOST_BITS):
        return 8
    return 16 if short and isa == "avx2" else 0


def rounded(x: Tensor, bits: int) -> Tensor:
    """x (..., in), a multiple of 32 inputs: each 32 as multiples of a 127th of their largest
    magnitude, or of a 32767th, float32; NaN where one isn't finite.

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
