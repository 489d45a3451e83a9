"""exkv's attention for transformers' models: ``model.set_attn_implementation("exkv")``.

Causal masks with a window or left padding pass through the model as stand-ins (``lazy.py``), so
that keys in an :class:`HFCache` are read as they are stored, quantized ones without dequantizing
the past. With other masks, or keys from other caches, attention uses plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, AttentionMaskInterface

from exkv.ops.attention import AttentionParams, group_heads, ungroup_heads
from exkv.planning.dry_run import ShapeTensor

from .layer import Call
from .lazy import LazyTensor, outside_graphs
from .versions import SINCE_5, sdpa_mask

NAME = "exkv"


def register() -> None:
    """Make ``"exkv"`` an attention implementation of every model."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask if SINCE_5 else mask_by_positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalMask:
    """Description of a causal mask.

    Attributes:
        pads: left padding of each row.
        window: most keys that a query sees; 0 for all.
    """

    pads: tuple[int, ...]
    window: int


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,  # a number, or a static cache's tensor
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **pattern: Any,
) -> torch.Tensor | None:
    """Make the mask of a call: bool (B, 1, T, S), or a stand-in for it; None if every query sees
    all keys up to its own, and the last query's key is the last one (unlike in static caches)."""

    def make() -> torch.Tensor:
        sizes = batch_size, q_length, kv_length, q_offset, kv_offset
        rest = {**pattern, "attention_mask": attention_mask, "local_size": local_size}
        # Without the skip, which returns None for causal masks.
        return sdpa_mask(*sizes, **rest, allow_is_causal_skip=False)  # type: ignore[return-value]

    if not allow_is_causal_skip:
        return make()
    if isinstance(q_offset, torch.Tensor):
        return make()
    unused = kv_offset + kv_length - q_offset - q_length  # keys after the last query
    if unused < 0:
        return make()
    pads = _left_padding(attention_mask, q_offset + q_length, batch_size)
    if pads is None or (local_size and not _is_window(pattern["mask_function"], local_size)):
        return make()
    window = local_size if local_size and kv_offset + kv_length > local_size else 0
    if not window and not unused and not any(pads):
        return None
    shape = (batch_size, 1, q_length, kv_length)
    return _stand_in(make, shape, pattern.get("device"), CausalMask(pads=pads, window=window))


def mask_by_positions(
    batch_size: int,
    cache_position: torch.Tensor,
    kv_length: int,
    kv_offset: int = 0,
    **pattern: Any,
) -> torch.Tensor | None:
    """Make a mask with the arguments of 4.57: the position of each query, int64 (T,)."""
    length, device = len(cache_position), cache_position.device
    if isinstance(cache_position, ShapeTensor):  # a plan's last queries see the last keys
        first: Any = kv_offset + kv_length - length
    else:
        first = cache_position[0] if torch.compiler.is_compiling() else int(cache_position[0])
    return mask(batch_size, length, kv_length, first, kv_offset, device=device, **pattern)


@outside_graphs
def _stand_in(
    make: Callable[[], torch.Tensor], shape: tuple[int, ...], device: Any, known: CausalMask
) -> torch.Tensor:
    return LazyTensor.of(make, shape, torch.bool, torch.device(device or "cpu"), known)


def _left_padding(
    attention_mask: torch.Tensor | None, length: int, rows: int
) -> tuple[int, ...] | None:
    """Left padding of each row; None if there is other padding."""
    if attention_mask is None:
        return (0,) * rows
    if attention_mask.shape != (rows, length):
        return None
    if isinstance(attention_mask, ShapeTensor):
        return planned_padding(rows, length)
    if bool(attention_mask.all()):
        return (0,) * rows
    pads = length - attention_mask.sum(-1)
    steps = torch.arange(length, device=pads.device)
    if not torch.equal(attention_mask, steps >= pads.unsqueeze(-1)) or int(pads.max()) == length:
        return None
    return tuple(pads.tolist())


def planned_padding(rows: int, length: int) -> tuple[int, ...]:
    """The left padding that a plan assumes: rows of different lengths take more workspace."""
    return (min(length - 1, 1), *(0,) * (rows - 1)) if rows > 1 else (0,) * rows


@outside_graphs
def _is_window(mask_function: Any, size: int) -> bool:
    """Whether this pattern is a window of ``size`` tokens rather than, e.g., chunks of that size: a
    query at position ``size`` sees the last ``size`` tokens, and not the first one."""
    with _disable_current_modes():  # real tensors even if the model runs on fake ones
        at = torch.arange(size + 1, device="cpu").view(1, 1, 1, -1)
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device="cpu")
        try:
            seen = mask_function(zero, zero, zero + size, at)
        except RuntimeError:  # it reads a tensor of the call, unlike a window
            return False
        if isinstance(seen, FakeTensor):
            return False
        return seen.flatten().tolist() == [False] + [True] * size


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with query (B, H, T, D) to key and value (B, H_kv, S, D) -> (B, T, H, D), no weights.

    Raises:
        ValueError: the model is in training: neither the op nor the cache has gradients.
    """
    if dropout or (module.training and torch.is_grad_enabled()):
        raise ValueError(
            'the attention implementation "exkv" has no gradients and no dropout: call '
            'model.eval(), or train with set_attn_implementation("sdpa")'
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    params = _params(scale, 0, softcap or 0.0)
    q = (query.detach() if query.requires_grad else query).transpose(1, 2)  # (B, T, H, D)
    if isinstance(key, LazyTensor) and s_aux is None and position_bias is None:
        out = _over_cache(q, key, attention_mask, params, causal)
        if out is not None:
            return out, None
    bias = _bias(q, key, attention_mask, position_bias, causal)
    return _over_tensors(q, key, value, bias, params, s_aux, causal), None


def _params(scale: float, window: int, softcap: float) -> AttentionParams:
    if torch.compiler.is_compiling():  # which warns about lru_cache
        return AttentionParams(scale=scale, window=window, softcap=softcap)
    return _known_params(scale, window, softcap)


@functools.lru_cache(256)
def _known_params(scale: float, window: int, softcap: float) -> AttentionParams:
    return AttentionParams(scale=scale, window=window, softcap=softcap)


@outside_graphs
def _over_cache(
    q: torch.Tensor,
    key: LazyTensor,
    attention_mask: torch.Tensor | None,
    params: AttentionParams,
    causal: bool,
) -> torch.Tensor | None:
    """Attend to keys as they are stored; None if they or the mask don't allow it."""
    call = key.source
    if not isinstance(call, Call):
        return None
    if not causal and attention_mask is None:
        return call.layer.attend_all(call, q, params)
    known = attention_mask.source if isinstance(attention_mask, LazyTensor) else None
    if not causal or (attention_mask is not None and known is None):
        return None
    if not call.tokens:
        return None
    if known is None:
        return call.layer.attend(call, q, (0,) * q.shape[0], params)
    of_layer = _params(params.scale, known.window, params.softcap)
    return call.layer.attend(call, q, known.pads, of_layer)


def _bias(
    q: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor | None:
    """Combine mask and bias to float (B or 1, H or 1, T, S); without a bias, return the mask."""
    if position_bias is None:
        return attention_mask
    seen = attention_mask
    if seen is None and causal and q.shape[1] > 1:
        seen = _causal(q.shape[1], key.shape[2], q.device)
    if seen is None:
        return position_bias
    if seen.dtype == torch.bool:
        return torch.where(seen, position_bias, torch.finfo(position_bias.dtype).min)
    return position_bias + seen


def _causal(length: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """The causal mask of the last T of S tokens, bool (1, 1, T, S)."""
    seen = torch.ones((length, kv_len), dtype=torch.bool, device=device)
    return seen.tril(kv_len - length).view(1, 1, length, kv_len)


def _over_tensors(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    params: AttentionParams,
    sinks: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """Attend to plain keys and values (B, H_kv, S, D), under a mask or bias."""
    k, v = (x.made() if isinstance(x, LazyTensor) else x for x in (key, value))
    length, kv_len = q.shape[1], k.shape[2]
    same = k.dtype == q.dtype and k.shape[-1] == v.shape[-1] == q.shape[-1]
    if bias is None and sinks is None and same and (causal or length == 1):
        past = torch.full((len(q),), kv_len - length, dtype=torch.int32, device=q.device)
        k, v = (x.detach().transpose(1, 2) for x in (k, v))
        scores = params.scale, params.window, params.softcap
        return torch.ops.exkv.attention(q, k, v, past, kv_len, False, *scores)
    if bias is None and causal and length > 1:
        bias = _causal(length, kv_len, q.device)
    grouped = group_heads(q.contiguous(), k.shape[1])  # (B, H_kv, G * T, D)
    if bias is not None:
        bias = bias[..., :kv_len]
        if q.shape[2] != k.shape[1]:
            heads = (len(q), q.shape[2], length, kv_len)
            bias = bias.expand(heads).reshape(*grouped.shape[:3], kv_len)
    if params.softcap or sinks is not None:
        out = _written_out(grouped, k, v, bias, params, sinks)
    else:
        out = F.scaled_dot_product_attention(grouped, k, v, bias, scale=params.scale)
    return ungroup_heads(out, length)


def _written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    params: AttentionParams,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(q k^T) v with soft-capped scores, or with a learned score (H,) for a further key
    without a value (gpt-oss)."""
    scores = (q @ k.transpose(-1, -2)).float() * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    if bias is not None:
        lowest = torch.finfo(torch.float32).min  # finite: padding, which sees nothing, isn't NaN
        is_mask = bias.dtype == torch.bool
        scores = scores.masked_fill(~bias, lowest) if is_mask else scores + bias
    if sinks is not None:
        each = sinks.detach().float().view(1, k.shape[1], -1, 1)  # (1, H_kv, G, 1)
        each = each.repeat_interleave(q.shape[2] // each.shape[2], dim=2)
        scores = torch.cat((scores, each.expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v
