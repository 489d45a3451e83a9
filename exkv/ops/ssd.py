"""State space duality, what Mamba 2's layers compute over their state (Dao and Gu, 2024, arXiv
2405.21060)."""

from __future__ import annotations

import torch
from torch import Tensor

from .recurrent import zero_at_padding
from .registry import define_op

#: Tokens of a block.
_BLOCK = 64


@define_op(
    "ssd(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor d, Tensor(a!) state, "
    "Tensor? new_lens) -> Tensor",
    fake=lambda x, dt, a, b, c, d, state, new_lens: x.new_empty(x.shape),
    kernels_fall_back=True,
)
def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor,
    new_lens: Tensor | None,
) -> Tensor:
    """For each token ``state <- exp(dt * a) * state + b (dt * x)``, and the output is ``c state +
    d * x``; all in float32.

    Several tokens are computed in blocks, within which each token attends to those before it, with
    what is kept of them for a mask (the paper's section 6).

    Args:
        x: (B, T, H, P).
        dt: float32 (B, T, H), the sizes of the steps.
        a: float32 (H,), negative.
        b, c: (B, T, G, N); H is a multiple of G, whose groups serve neighbours.
        d: float32 (H,).
        state: float32 (B, H, N, P); becomes that behind the last token.
        new_lens: int32 (B,), real tokens of each row; None if all T are.

    Returns:
        (B, T, H, P) in x's dtype; undefined at padding.
    """
    dt = zero_at_padding(dt, new_lens)  # steps of no size leave the state as it is
    blocks = zip(*(each.split(_BLOCK, dim=1) for each in (x, dt, b, c)), strict=True)
    return torch.cat([_block(state, a, d, *block) for block in blocks], dim=1)


def _block(
    state: Tensor, a: Tensor, d: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor
) -> Tensor:
    """:func:`ssd` of a few tokens T; below, heads come before tokens."""
    heads = x.shape[2] // b.shape[2]
    inputs, outputs = (each.float().transpose(1, 2) for each in (b, c))  # (B, G, T, N)
    wide, steps = x.float().transpose(1, 2), dt.transpose(1, 2).unsqueeze(-1)
    decay = steps * a.view(-1, 1, 1)  # (B, H, T, 1)
    # Sums of neighbours, and not differences of sums, which would cancel.
    between = decay.expand(-1, -1, -1, x.shape[1]).tril(-1).cumsum_(-2).exp_().tril_()
    since = decay.cumsum(-2).exp_()  # of the start
    scores = (outputs @ inputs.mT).repeat_interleave(heads, dim=1).mul_(between)  # (B, H, T, T)
    added = wide * steps
    out = (outputs.repeat_interleave(heads, dim=1) @ state).mul_(since)
    out.add_(scores @ added).addcmul_(wide, d.view(-1, 1, 1))
    kept = inputs.repeat_interleave(heads, dim=1) * between[:, :, -1].unsqueeze(-1)
    state.mul_(since[:, :, -1:]).add_(kept.mT @ added)
    return out.transpose(1, 2).to(x.dtype)
