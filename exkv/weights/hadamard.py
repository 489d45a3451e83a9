"""The Walsh-Hadamard transform of what linear layers multiply, in blocks of their inputs.

With H block diagonal, of Sylvester's matrices divided by their roots, H H = 1 and H = H^T. So
x W^T = (x H) (W H)^T: a layer that stores W H, and transforms x, computes what it did. A block's
weights are then sums of all of them, with none that is much larger than the others, and integers
in groups lose less (QuIP#, Tseng et al., 2024; QuaRot, Ashkboos et al., 2024). Inputs that are
larger than others spread likewise.
"""

from __future__ import annotations

import torch

#: What ``--transform`` of ``exkv quantize`` may be.
HADAMARD, NONE = "hadamard", "none"
#: Inputs of a block: the most that are chosen, as groups have, and the fewest that there may be.
MOST, LEAST = 64, 32


def block_of(inputs: int, most: int = MOST) -> int:
    """The largest power of two, ``most`` at most, that divides the inputs; 0 if that is less than
    ``LEAST``, or ``most`` is."""
    block = min(inputs & -inputs, most)
    return block if block >= LEAST else 0


def transformed(x: torch.Tensor, block: int) -> torch.Tensor:
    """x (..., in) times H; for a block of 0, x. By the op, which computes in float32, and rounded
    to x's dtype; float64 by the matrix, written out."""
    if block == 0:
        return x
    blocks = x.unflatten(-1, (-1, block))
    if x.dtype == torch.float64:
        return (blocks @ matrix(block, x.dtype, x.device)).flatten(-2)
    return torch.ops.exkv.hadamard(blocks).flatten(-2)


def matrix(block: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """H of one block."""
    h = torch.ones(1, 1, dtype=dtype, device=device)
    while len(h) < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h * block**-0.5
