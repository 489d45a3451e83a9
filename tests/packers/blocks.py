"""Blocks of ggml's types with any codes and a scale of choice."""

from __future__ import annotations

import math

import torch

from exkv.weights.gguf import FORMATS

#: Where the 16-bit floats of a block lie; MXFP4 and NVFP4 have none, and IQ1_M's lies in pieces.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)},
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **{"MXFP4": (), "NVFP4": (), "IQ1_M": ()},
}


def random_blocks(
    name: str, size: tuple[int, int], scale: float, generator: torch.Generator
) -> torch.Tensor:
    """A matrix (out, in) of a type, uint8 (out, bytes a row)."""
    nbytes = FORMATS[name].type.nbytes
    count = size[0] * size[1] // FORMATS[name].type.block
    made = torch.randint(256, (count, nbytes), generator=generator, dtype=torch.uint8)
    half = torch.tensor([scale], dtype=torch.float16)
    for place in HALVES[name]:
        made[:, place : place + 2] = half.view(torch.uint8)
    if name == "MXFP4":
        made[:, 0] = 127 + round(math.log2(scale))
    if name == "NVFP4":  # from the smallest on
        made[:, :4] &= 31
    if name == "IQ1_M":
        bits = int(half.view(torch.int16))
        for word in range(4):
            made[:, 49 + 2 * word] = made[:, 49 + 2 * word] & 15 | (bits >> 4 * word & 15) << 4
    return made.view(size[0], -1)
