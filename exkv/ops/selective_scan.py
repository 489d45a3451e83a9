"""The selective scan of Mamba layers (Gu and Dao, 2023, arXiv 2312.00752)."""

from __future__ import annotations

from torch import Tensor

from .recurrent import in_blocks
from .registry import define_op

#: Tokens of a block, whose states take this times the memory of one.
_BLOCK = 16


@define_op(
    "selective_scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor d, "
    "Tensor(a!) state, Tensor? new_lens) -> Tensor",
    kernels_fall_back=True,
)
def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor,
    new_lens: Tensor | None,
) -> Tensor:
    """For each token and channel, ``state <- exp(dt * a) * state + b * dt * x``; the output is the
    sum of ``c * state``, plus ``d * x``; all in float32.

    Args:
        x: (B, T, C).
        dt: float32 (B, T, C), step sizes.
        a: float32 (N, C), negative.
        b, c: (B, T, N).
        d: float32 (C,).
        state: float32 (B, N, C); updated to that after the last token.
        new_lens: int32 (B,), real tokens of each row; None if all T are.

    Returns:
        (B, T, C) in x's dtype; undefined at padding.
    """
    return in_blocks(_BLOCK, _block, (state, a, d), (x, b, c), dt, new_lens)


def _block(
    state: Tensor, a: Tensor, d: Tensor, x: Tensor, b: Tensor, c: Tensor, dt: Tensor
) -> Tensor:
    """:func:`selective_scan` for a few tokens T: the states (B, T, N, C) by a parallel prefix sum
    over 1, 2, 4, ... tokens (Hillis and Steele, 1986)."""
    wide, inputs = x.float(), b.float().unsqueeze(-1)
    kept = (dt.unsqueeze(2) * a).exp_()
    states = (dt * wide).unsqueeze(2) * inputs
    states[:, 0].addcmul_(kept[:, 0], state)
    step = 1
    while step < x.shape[1]:
        states[:, step:] += kept[:, step:] * states[:, :-step]
        kept[:, step:] = kept[:, step:] * kept[:, :-step]
        step *= 2
    state.copy_(states[:, -1])
    out = (c.float().unsqueeze(2) @ states).squeeze(2)
    return out.addcmul_(wide, d).to(x.dtype)
