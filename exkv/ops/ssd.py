"""State space duality of Mamba 2 layers (Dao and Gu, 2024, arXiv 2405.21060)."""

from __future__ import annotations

from torch import Tensor

from .recurrent import in_blocks
from .registry import define_op

#: Tokens of a block.
_BLOCK = 64


@define_op(
    "ssd(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor d, Tensor(a!) state, "
    "Tensor? new_lens) -> Tensor",
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
    """For each token, ``state <- exp(dt * a) * state + b (dt * x)``; the output is ``c state + d *
    x``; all in float32.

    Several tokens are computed in blocks, within which each token attends to those before it, with
    their decay as a mask (the paper's section 6).

    Args:
        x: (B, T, H, P).
        dt: float32 (B, T, H), step sizes.
        a: float32 (H,), negative.
        b, c: (B, T, G, N); H is a multiple of G, and a group serves adjacent heads.
        d: float32 (H,).
        state: float32 (B, H, N, P); updated to that after the last token.
        new_lens: int32 (B,), real tokens of each row; None if all T are.

    Returns:
        (B, T, H, P) in x's dtype; undefined at padding.
    """
    return in_blocks(_BLOCK, _block, (state, a, d), (x, b, c), dt, new_lens)


def _block(
    state: Tensor, a: Tensor, d: Tensor, x: Tensor, b: Tensor, c: Tensor, dt: Tensor
) -> Tensor:
    """:func:`ssd` for a few tokens T; below, heads come before tokens."""
    heads = x.shape[2] // b.shape[2]
    inputs, outputs = (each.float().transpose(1, 2) for each in (b, c))  # (B, G, T, N)
    wide, steps = x.float().transpose(1, 2), dt.transpose(1, 2).unsqueeze(-1)
    decay = steps * a.view(-1, 1, 1)  # (B, H, T, 1)
    # Sums over adjacent tokens, not differences of sums, which would cancel.
    between = decay.expand(-1, -1, -1, x.shape[1]).tril(-1).cumsum_(-2).exp_().tril_()
    since = decay.cumsum(-2).exp_()  # since the block's start
    scores = (outputs @ inputs.mT).repeat_interleave(heads, dim=1).mul_(between)  # (B, H, T, T)
    added = wide * steps
    out = (outputs.repeat_interleave(heads, dim=1) @ state).mul_(since)
    out.add_(scores @ added).addcmul_(wide, d.view(-1, 1, 1))
    kept = inputs.repeat_interleave(heads, dim=1) * between[:, :, -1].unsqueeze(-1)
    state.mul_(since[:, :, -1:]).add_(kept.mT @ added)
    return out.transpose(1, 2).to(x.dtype)
