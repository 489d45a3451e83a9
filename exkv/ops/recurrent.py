"""Ops of layers with a state: short causal convolutions, and the gated delta rule.

Both update their state in place, to that after each row's last real token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import define_op

#: Tokens of a block of the gated delta rule, and of a part of one.
_BLOCK, _PART = 64, 8
_EPS = 1e-6


@define_op(
    "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor? new_lens) "
    "-> Tensor",
    kernels_fall_back=True,
)
def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, new_lens: Tensor | None
) -> Tensor:
    """Each channel's convolution over its last K inputs, summed in float32.

    Args:
        x: (B, T, C).
        weight: (C, 1, K), the newest input's factor last.
        bias: (C,), or None.
        state: (B, K - 1, C), the previous inputs; updated to the last ones.
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
    kernels_fall_back=True,
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
    ``state <- exp(decay) * state``, then ``state <- state + k (beta * (v - k state))``; the output
    is ``q state``; all in float32. Queries and keys are divided by their norms, queries also by the
    root of their size. With a decay for each channel of the keys it is Kimi's delta attention (Kimi
    Team, 2025, arXiv 2510.26692).

    Several tokens are computed in blocks, each by one triangular system (the first paper's section
    3.3).

    Args:
        q, k: (B, T, H_k, D_k).
        v: (B, T, H_v, D_v); H_v is a multiple of H_k, and a head of keys serves adjacent ones.
        decay: float32 (B, T, H_v, 1 or D_k), at most 0.
        beta: float32 (B, T, H_v).
        state: float32 (B, H_v, D_k, D_v); updated to that after the last token.
        new_lens: int32 (B,), real tokens of each row; None if all T are.

    Returns:
        (B, T, H_v, D_v) in v's dtype; undefined at padding.

    Raises:
        ValueError: the number of value heads is not a multiple of that of key heads.
    """
    if {q.dim(), k.dim(), v.dim()} != {4} or not k.shape[2] or v.shape[2] % k.shape[2]:
        raise ValueError(
            "gated_delta: q and k must be (B, T, H_k, D_k), v (B, T, H_v, D_v), and H_v a multiple "
            f"of H_k; they are {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    decay = zero_at_padding(decay, new_lens)  # as in `in_blocks`
    return in_blocks(_BLOCK, _block, (state,), (q, k, v, decay), beta.unsqueeze(-1), new_lens)


def in_blocks(
    size: int,
    block: Callable[..., Tensor],
    fixed: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    steps: Tensor,
    new_lens: Tensor | None,
) -> Tensor:
    """Run ``block(*fixed, *inputs, steps)`` over ``size`` tokens at a time -> (B, T, ...).

    Args:
        inputs: (B, T, ...) each.
        steps: (B, T, ...), step sizes, zeroed at padding so that it leaves the state unchanged.
        new_lens: int32 (B,), real tokens of each row; None if all T are.
    """
    given = (*inputs, zero_at_padding(steps, new_lens))
    blocks = zip(*(x.split(size, dim=1) for x in given), strict=True)
    return torch.cat([block(*fixed, *each) for each in blocks], dim=1)


def zero_at_padding(x: Tensor, new_lens: Tensor | None) -> Tensor:
    """x (B, T, ...) with zeros after each row's real tokens."""
    if new_lens is None:
        return x
    real = torch.arange(x.shape[1], device=x.device) < new_lens.unsqueeze(-1)
    return x * real.view(*real.shape, *[1] * (x.dim() - 2))


def _block(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """:func:`gated_delta` for a few tokens T; below, heads come before tokens."""
    groups = v.shape[2] // k.shape[2]
    keys = _normed(k, groups)
    queries = _normed(q, groups).mul_(q.shape[-1] ** -0.5)
    since = decay.transpose(1, 2).cumsum(2)  # (B, H, T, 1 or D_k), since the block's start
    beta = beta.transpose(1, 2)
    products = _products if decay.shape[-1] == 1 else _products_of_channels
    among_keys, with_queries = products((keys, queries), keys, since)
    # What each token adds, given what earlier ones in the block add.
    wanted = v.float().transpose(1, 2).sub((keys * since.exp()) @ state).mul_(beta)
    system = among_keys.mul_(beta)
    added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = queries.mul_(since.exp()) @ state
    out += with_queries @ added
    keys.mul_((since[:, :, -1:] - since).exp_())
    state.mul_(since[:, :, -1:].exp().mT).add_(keys.mT @ added)
    return out.transpose(1, 2).to(v.dtype)


def _products(rows: Sequence[Tensor], keys: Tensor, since: Tensor) -> list[Tensor]:
    """Product of each token with each key up to its own, decayed by the tokens between them.

    Args:
        rows: the keys' other factors, each (B, H, T, D).
        keys: (B, H, T, D).
        since: (B, H, T, 1), the total decay up to each token.

    Returns:
        For each of ``rows`` (B, H, T, T), zeros above the diagonal.
    """
    between = (since - since.mT).tril_().exp_().tril_()  # (B, H, T, T)
    return [(x @ keys.mT).mul_(between) for x in rows]


def _products_of_channels(rows: Sequence[Tensor], keys: Tensor, since: Tensor) -> list[Tensor]:
    """:func:`_products` with ``since`` (B, H, T, D). No factor is above 1: tokens are split into
    parts (the FLA project's secondary chunks), keys before a part decay up to its first token, and
    its rows from there on; within a part each pair of tokens has its own factors."""
    tokens = keys.shape[2]
    part = min(_PART, tokens)
    rest = (0, 0, 0, -tokens % part)
    last = since[:, :, -1:]
    since = torch.cat((since, last.expand(-1, -1, rest[-1], -1)), dim=2)
    parts = since.unflatten(2, (-1, part))  # (B, H, P, part, D)
    first = parts[:, :, :, :1]
    before = (first - since.unsqueeze(2)).clamp_(max=0).exp_()  # (B, H, P, T, D)
    keys = F.pad(keys, rest)
    far = before.mul_(keys.unsqueeze(2)).mT
    from_first = (parts - first).exp_()
    near = (parts.unsqueeze(4) - parts.unsqueeze(3)).clamp_(max=0).exp_()
    near.mul_(keys.unflatten(2, (-1, part)).unsqueeze(3))  # (B, H, P, part, part, D)
    found = []
    for x in rows:
        own = F.pad(x, rest).unflatten(2, (-1, part))
        product = (own * from_first) @ far  # (B, H, P, part, T)
        product = product.unflatten(-1, (-1, part))
        product.diagonal(dim1=2, dim2=4).copy_(
            (near @ own.unsqueeze(-1)).squeeze(-1).movedim(2, -1)
        )
        found.append(product.flatten(4).flatten(2, 3)[:, :, :tokens, :tokens].tril())
    return found


def _normed(x: Tensor, groups: int) -> Tensor:
    """x (B, T, H, D) -> unit vectors (B, H * groups, T, D)."""
    wide = x.float().transpose(1, 2)
    unit = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPS)
    return unit.repeat_interleave(groups, dim=1) if groups > 1 else unit
