"""What layers with a state compute: short causal convolutions, and the gated delta rule.

Both change their state in place, to what it is behind each row's last real token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import define_op

#: Tokens of a block of the gated delta rule.
_BLOCK = 64
_EPS = 1e-6


@define_op(
    "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor? new_lens) "
    "-> Tensor",
    fake=lambda x, weight, bias, state, new_lens: x.new_empty(x.shape),
)
def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, new_lens: Tensor | None
) -> Tensor:
    """Each channel's convolution over its last K inputs, summed in float32.

    Args:
        x: (B, T, C).
        weight: (C, 1, K), the newest input's factor last.
        bias: (C,), or None.
        state: (B, K - 1, C), the inputs before; becomes the last ones.
        new_lens: int32 (B,), real tokens of each row; None if all T are.

    Returns:
        (B, T, C) in x's dtype.

    Raises:
        ValueError: shapes that contradict each other.
    """
    if x.dim() != 3 or weight.dim() != 3 or weight.shape[:2] != (x.shape[-1], 1):
        raise ValueError(
            f"causal_conv: weight must be (C, 1, K) for x (B, T, C); they are "
            f"{tuple(weight.shape)} and {tuple(x.shape)}"
        )
    tokens, size = x.shape[1], weight.shape[-1]
    if state.shape != (len(x), size - 1, x.shape[-1]):
        raise ValueError(
            f"causal_conv: state must be (B, K - 1, C), {(len(x), size - 1, x.shape[-1])}; it is "
            f"{tuple(state.shape)}"
        )
    inputs = torch.cat((state, x), dim=1)
    factors = weight[:, 0].float()
    total = inputs[:, :tokens] * factors[:, 0]
    for at in range(1, size):
        total.addcmul_(inputs[:, at : at + tokens].float(), factors[:, at])
    if bias is not None:
        total += bias
    if new_lens is None:
        state.copy_(inputs[:, tokens:])
    else:
        last = new_lens.unsqueeze(-1) + torch.arange(size - 1, device=x.device)
        index = last.long().unsqueeze(-1).expand(-1, -1, x.shape[-1])
        state.copy_(inputs.gather(1, index))
    return total.to(x.dtype)


@define_op(
    "gated_delta(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor(a!) state, "
    "Tensor? new_lens) -> Tensor",
    fake=lambda q, k, v, decay, beta, state, new_lens: v.new_empty(v.shape),
)
def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    new_lens: Tensor | None,
) -> Tensor:
    """The gated delta rule (Yang, Kautz and Hatamizadeh, 2025, arXiv 2412.06464): for each token
    ``state <- exp(decay) * state``, then ``state <- state + k (beta * (v - k state))``, and the
    output is ``q state``; all in float32. Queries and keys are divided by their norms, queries also
    by the root of their size.

    Several tokens are computed in blocks, each of which is one triangular system (the paper's
    section 3.3).

    Args:
        q, k: (B, T, H_k, D_k).
        v: (B, T, H_v, D_v); H_v is a multiple of H_k, whose heads serve neighbours.
        decay: float32 (B, T, H_v), at most 0.
        beta: float32 (B, T, H_v).
        state: float32 (B, H_v, D_k, D_v); becomes that behind the last token.
        new_lens: int32 (B,), real tokens of each row; None if all T are.

    Returns:
        (B, T, H_v, D_v) in v's dtype; undefined at padding.
    """
    if new_lens is not None:  # padding leaves the state as it is
        real = torch.arange(v.shape[1], device=v.device) < new_lens.unsqueeze(-1)
        decay, beta = (x * real.unsqueeze(-1) for x in (decay, beta))
    blocks = zip(*(x.split(_BLOCK, dim=1) for x in (q, k, v, decay, beta)), strict=True)
    return torch.cat([_block(state, *block) for block in blocks], dim=1)


def _block(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """:func:`gated_delta` of a few tokens T; below, heads come before tokens."""
    groups = v.shape[2] // k.shape[2]
    keys = _normed(k, groups)
    queries = _normed(q, groups).mul_(q.shape[-1] ** -0.5)
    since = decay.transpose(1, 2).cumsum(-1).unsqueeze(-1)  # (B, H, T, 1), of the start
    beta = beta.transpose(1, 2).unsqueeze(-1)
    between = (since - since.transpose(-1, -2)).tril_().exp_().tril_()  # (B, H, T, T)
    # What each token adds, given what those before it in the block add.
    wanted = v.float().transpose(1, 2).sub(since.exp() * (keys @ state)).mul_(beta)
    system = (keys @ keys.transpose(-1, -2)).mul_(between).mul_(beta)
    added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (queries @ state).mul_(since.exp())
    out += (queries @ keys.transpose(-1, -2)).mul_(between) @ added
    keys.mul_((since[:, :, -1:] - since).exp_())
    state.mul_(since[:, :, -1:].exp()).add_(keys.transpose(-1, -2) @ added)
    return out.transpose(1, 2).to(v.dtype)


def _normed(x: Tensor, groups: int) -> Tensor:
    """x (B, T, H, D) -> unit vectors (B, H * groups, T, D)."""
    wide = x.float().transpose(1, 2)
    unit = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPS)
    return unit.repeat_interleave(groups, dim=1) if groups > 1 else unit
