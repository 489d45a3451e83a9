"""The selective scan, what Mamba's first layers compute over their state (Gu and Dao, 2023, arXiv
2312.00752)."""

from __future__ import annotations

import torch
from torch import Tensor

from .recurrent import zero_at_padding
from .registry import define_op

#: Tokens of a block: with all their states, which take this times the memory of one.
_BLOCK = 16


@define_op(
    "selective_scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor d, "
    "Tensor(a!) state, Tensor? new_lens) -> Tensor",
    fake=lambda x, dt, a, b, c, d, state, new_lens: x.new_empty(x.shape),
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
    """For each token and channel ``state <- exp(dt * a) * state + b * dt * x``, and the output is
    the sum of ``c * state``, and ``d * x``; all in float32.

    Args:
        x: (B, T, C).
        dt: float32 (B, T, C), the sizes of the steps.
        a: float32 (N, C), negative.
        b, c: (B, T, N).
        d: float32 (C,).
        state: float32 (B, N, C); becomes that behind the last token.
        new_lens: int32 (B,), real tokens of each row; None if all T are.

    Returns:
        (B, T, C) in x's dtype; undefined at padding.
    """
    dt = zero_at_padding(dt, new_lens)  # steps of no size leave the state as it is
    blocks = zip(*(each.split(_BLOCK, dim=1) for each in (x, dt, b, c)), strict=True)
    return torch.cat([_block(state, a, d, *block) for block in blocks], dim=1)


def _block(
    state: Tensor, a: Tensor, d: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor
) -> Tensor:
    """:func:`selective_scan` of a few tokens T, whose states (B, T, N, C) are made of those of 1,
    2, 4, ... tokens before (Hillis and Steele, 1986)."""
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
