"""Blocks of ggml's types with any codes and a scale of choice."""

from __future__ import annotations

import math

import torch

from exkv.weights.gguf import FORMATS

#: Where the 16-bit floats of a block lie.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),  # its scale is a power of two, in the first byte
}


def random_blocks(
    name: str, size: tuple[int, int], scale: float, generator: torch.Generator
) -> torch.Tensor:
    """A matrix (out, in) of a type, uint8 (out, bytes a row)."""
    nbytes = FORMATS[name].type.nbytes
    count = size[0] * size[1] // FORMATS[name].type.block
    made = torch.randint(256, (count, nbytes), generator=generator, dtype=torch.uint8)
    for place in HALVES[name]:
        half = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
        made[:, place : place + 2] = half
    if name == "MXFP4":
        made[:, 0] = 127 + round(math.log2(scale))
    return made.view(size[0], -1)
