"""The Walsh-Hadamard transform of a linear layer's inputs and weights, in blocks of inputs.

With H block diagonal, of Sylvester matrices divided by the roots of their sizes, H H = 1 and
H = H^T. So x W^T = (x H) (W H)^T: a layer that stores W H and transforms x computes the same. A
block's weights are then sums of all of them, without outliers, and lose less as integers in groups
(QuIP#, Tseng et al., 2024; QuaRot, Ashkboos et al., 2024). Outliers among inputs are spread
likewise.
"""

from __future__ import annotations

import torch

#: Values of ``exkv quantize --transform``.
HADAMARD, NONE = "hadamard", "none"
#: Inputs of a block: upper bound on what is chosen, the size of a group; and the least allowed.
MOST, LEAST = 64, 32


def block_of(inputs: int, most: int = MOST) -> int:
    """The largest power of two up to ``most`` that divides the inputs; 0 if it is below
    ``LEAST``."""
    block = min(inputs & -inputs, most)
    return block if block >= LEAST else 0


def transformed(x: torch.Tensor, block: int) -> torch.Tensor:
    """x (..., in) times H; x itself for a block of 0. The op computes in float32 and rounds to x's
    dtype; float64 is multiplied by the matrix."""
    if block == 0:
        return x
    blocks = x.unflatten(-1, (-1, block))
    if x.dtype == torch.float64:
        return (blocks @ matrix(block, x.dtype, x.device)).flatten(-2)
    return torch.ops.exkv.hadamard(blocks).flatten(-2)


def matrix(block: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """H of one block."""
    return signs_of(block, dtype, device) * block**-0.5


def signs_of(block: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Sylvester's matrix of one block: entries of 1 and -1."""
    h = torch.ones(1, 1, dtype=dtype, device=device)
    while len(h) < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h
