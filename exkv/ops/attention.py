"""Causal attention of a chunk of queries over a cache, for float and for 8-bit storage.

Both ops work alike. A cache row holds keys at positions 0, 1, 2, ...; query ``t`` of row ``b`` is
at position ``past_lens[b] + t`` and sees the keys up to its own position, or with a window the last
``window`` of them. Keys past a row's length are masked, so a ragged batch needs no padding inside
the cache.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import define_op

if TYPE_CHECKING:
    from exkv.batch import Lengths

#: Queries processed at once: bounds the mask, and lets early queries skip late keys.
QUERY_BLOCK = 256
#: Rows of the mask at most: one for each query and each head that shares its keys.
MASK_ROWS = 16 * QUERY_BLOCK
#: Keys of a quantized cache that are dequantized at once.
KEY_TILE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """Attention parameters of a model's layer, independent of the cache.

    Attributes:
        scale: factor of the scores.
        window: most keys that a query sees, its own included; 0 for all.
        chunk: tokens of a chunk of positions; a query sees only its own chunk (Llama 4). 0 for
            none.
        softcap: ``softcap * tanh(score / softcap)`` bounds scaled scores (Gemma 2); 0 for none.
        rotary: name of the layer's rotary table.
        sinks: (H,), a sink score for each head, which takes its share of the softmax and
            contributes no value (gpt-oss); None for none.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    rotary: str = "main"
    sinks: Tensor | None = field(default=None, compare=False)

    def within(self, lengths: Lengths, *, windows: bool = False) -> AttentionParams:
        """The parameters for one call, without chunks if these make no difference: no chunk has
        ended yet, or a window shows a single token the same keys.

        Args:
            windows: whether windows of any size are possible.
        """
        if not self.chunk or lengths.kv_len <= self.chunk:
            return self if not self.chunk else replace(self, chunk=0)
        if lengths.chunk == 1 and not lengths.ragged and windows:
            return replace(self, chunk=0, window=lengths.past[0] % self.chunk + 1)
        return self


def _visible(past_lens: Tensor, queries: slice, keys: slice, window: int, kv_len: int) -> Tensor:
    """Mask of visible keys: bool (B or 1, queries, keys); every query sees at least one."""
    arange = lambda s: torch.arange(s.start, s.stop, device=past_lens.device)  # noqa: E731
    positions = (past_lens.view(-1, 1) + arange(queries)).unsqueeze(-1)  # (B, T, 1)
    seen = positions >= arange(keys)
    if window:
        # Padding may be more than a window past the last key.
        seen &= positions.clamp(max=kv_len - 1) - window < arange(keys)
    return seen


def group_heads(q: Tensor, kv_heads: int) -> Tensor:
    """(B, T, H, D) -> (B, H_kv, G * T, D): queries that share a key head become rows of one matrix,
    which every SDPA backend takes without copying keys."""
    batch, length, heads, dim = q.shape
    groups = heads // kv_heads
    grouped = q.view(batch, length, kv_heads, groups, dim)
    return grouped.permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, groups * length, dim)


def query_block(heads: int, kv_heads: int) -> int:
    """Queries that :func:`attention` processes at once: fewer if many heads share a head of keys
    (all 128 in latent attention)."""
    return min(QUERY_BLOCK, max(MASK_ROWS * kv_heads // heads, 1))


def ungroup_heads(out: Tensor, length: int) -> Tensor:
    """(B, H_kv, G * T, D) -> (B, T, H, D)."""
    batch, kv_heads, rows, dim = out.shape
    groups = rows // length
    split = out.view(batch, kv_heads, groups, length, dim)
    return split.permute(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * groups, dim)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """softmax(q k^T) v over q (B, H_kv, R, D), k and v (B, H_kv, S, D)."""
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    scores = (q @ k.transpose(-1, -2)).mul_(scale)
    scores = _capped(scores, softcap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def _attend_causally(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend q (B, T, H, D) to its own keys, k and v (B, H_kv, T, D), without a mask, which would
    rule out SDPA's flash kernels. Query heads that share a key head run one after another: stacked
    in one matrix they would not be causal."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    grouped, outs = (x.unflatten(2, (k.shape[1], -1)) for x in (q, out))
    for head in range(grouped.shape[3]):
        part = F.scaled_dot_product_attention(
            grouped[:, :, :, head].transpose(1, 2), k, v, is_causal=True, scale=scale
        )
        outs[:, :, :, head] = part.transpose(1, 2)
    return out


def _capped(scores: Tensor, softcap: float) -> Tensor:
    return scores.div_(softcap).tanh_().mul_(softcap)


def is_fresh(length: int, kv_len: int, ragged: bool, window: int, softcap: float) -> bool:
    """Whether queries see exactly the keys up to their own, with nothing before them: SDPA's flash
    kernels apply."""
    return not ragged and kv_len == length and not softcap and not 0 < window < length


#: Blocks of 64 queries of a head above which torch's flash kernels on CUDA don't split the keys,
#: which would take memory for partial results: 0.8 times two for each of 240 multiprocessors.
FLASH_BLOCKS = 384
_FLASH_DTYPES = (torch.float16, torch.bfloat16)


def is_flash(q: Tensor, k: Tensor, kv_len: int, ragged: bool, window: int, softcap: float) -> bool:
    """Whether torch's flash kernels on CUDA can serve a call; with cached keys too, if there are
    many queries (exkv_ext/bindings/decode_binding.h has the same rule)."""
    batch, length, heads, dim = q.shape
    if q.device.type != "cuda" or q.dtype not in _FLASH_DTYPES or k.dtype != q.dtype:
        return False
    if ragged or softcap or 0 < window < kv_len or dim % 8 or dim > 256 or length == 1:
        return False
    return kv_len == length or batch * heads * -(-length // 64) >= FLASH_BLOCKS


@functools.cache
def has_tensor_cores(device: torch.device) -> bool:
    """Whether a GPU multiplies matrices of 16-bit floats as torch's flash kernels and exkv's own
    do; assumed for GPUs that are not present."""
    if not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _attend_by_flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend the last queries of a causal call: q (B, T, H, D) over k and v (B, S, H_kv, D), in
    place (FlashAttention-2, Dao, 2023). Not through SDPA, which aligns causal queries with the
    first keys, copies keys for each head, and builds cuDNN plans first."""
    flash = torch.ops.aten._flash_attention_forward
    return flash(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False, scale=scale)[0]


@define_op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor past_lens, int kv_len, bool ragged, "
    "float scale, int window=0, float softcap=0.0) -> Tensor",
    kernels_fall_back=True,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_lens: Tensor,
    kv_len: int,
    ragged: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """q (B, T, H, D) over k, v (B, S, H_kv, D) -> (B, T, H, D).

    Args:
        past_lens: int32 (B,), keys in each row before these queries' own.
        kv_len: length of the longest row, these queries' keys included; later keys are not read.
        ragged: whether rows differ in ``past_lens``; if not, it is ``kv_len - T`` for all.
        scale, window, softcap: as in :class:`AttentionParams`.
    """
    if kv_len > k.shape[1]:
        raise ValueError(
            f"attention: kv_len {kv_len} must be at most the {k.shape[1]} tokens that k has room "
            "for"
        )
    length, kv_heads = q.shape[1], k.shape[2]
    if is_flash(q, k, kv_len, ragged, window, softcap) and has_tensor_cores(q.device):
        return _attend_by_flash(q, k[:, :kv_len], v[:, :kv_len], scale)
    k, v = k[:, :kv_len].transpose(1, 2), v[:, :kv_len].transpose(1, 2)  # (B, H_kv, S, D)
    if length == 1 and not ragged:
        first_key = max(kv_len - window, 0) if window else 0
        k, v = k[:, :, first_key:], v[:, :, first_key:]
        return ungroup_heads(_attend(group_heads(q, kv_heads), k, v, None, scale, softcap), 1)
    if is_fresh(length, kv_len, ragged, window, softcap):
        return _attend_causally(q, k, v, scale)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lens = past_lens if ragged else past_lens[:1]
    block = query_block(q.shape[2], kv_heads)
    for first in range(0, length, block):
        queries = slice(first, min(first + block, length))
        # In rows of equal length, the block's positions bound the visible keys.
        past = kv_len - length
        start = max(past + first - window + 1, 0) if window and not ragged else 0
        keys = slice(start, kv_len if ragged else past + queries.stop)
        mask = _visible(lens, queries, keys, window, kv_len).unsqueeze(1)  # (B or 1, 1, T, S)
        part = _attend(
            group_heads(q[:, queries], kv_heads),
            k[:, :, keys],
            v[:, :, keys],
            mask.repeat(1, 1, q.shape[2] // kv_heads, 1),
            scale,
            softcap,
        )
        out[:, queries] = ungroup_heads(part, queries.stop - first)
    return out


@define_op(
    "attention_int8(Tensor q, Tensor k, Tensor k_scale, Tensor v, Tensor v_scale, "
    "Tensor past_lens, int kv_len, float scale, int window=0, float softcap=0.0) -> Tensor",
    kernels_fall_back=True,
)
def attention_int8(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v: Tensor,
    v_scale: Tensor,
    past_lens: Tensor,
    kv_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """As :func:`attention`, over keys and values in :func:`quantize_kv`'s format.

    k, v int8 (B, S, H_kv, D) with scales float16 (B, S, H_kv, ceil(D / 32)). Keys are dequantized
    tile by tile, and tiles merged by the running maximum and sum of the online softmax (Milakov and
    Gimelshein, 2018), in float32.
    """
    length, kv_heads, widen = q.shape[1], k.shape[2], torch.ops.exkv.dequantize_kv
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for first in range(0, length, QUERY_BLOCK):
        queries = slice(first, min(first + QUERY_BLOCK, length))
        state = OnlineSoftmax(group_heads(q[:, queries].float() * scale, kv_heads), softcap)
        for start in range(0, kv_len, KEY_TILE):
            keys = slice(start, min(start + KEY_TILE, kv_len))
            mask = _visible(past_lens, queries, keys, window, kv_len).unsqueeze(1)
            state.add(
                widen(k[:, keys], k_scale[:, keys], torch.float32).transpose(1, 2),
                widen(v[:, keys], v_scale[:, keys], torch.float32).transpose(1, 2),
                mask.repeat(1, 1, q.shape[2] // kv_heads, 1),
            )
        out[:, queries] = ungroup_heads(state.result(), queries.stop - first)
    return out


class OnlineSoftmax:
    """softmax(q k^T) v, fed one tile of keys at a time; q (B, H_kv, R, D) float32."""

    def __init__(self, q: Tensor, softcap: float) -> None:
        self.q = q
        self.softcap = softcap
        self.out = torch.zeros_like(q)
        # Finite, so that a fully masked tile gives exp(0) * 0 and not a NaN.
        self.peak = q.new_full((*q.shape[:-1], 1), -1e30)
        self.total = torch.zeros_like(self.peak)

    def add(self, k: Tensor, v: Tensor, mask: Tensor) -> None:
        scores = self.q @ k.transpose(-1, -2)
        if self.softcap:
            scores = _capped(scores, self.softcap)
        scores.masked_fill_(~mask, -torch.inf)
        peak = torch.maximum(self.peak, scores.amax(-1, keepdim=True))
        weights = scores.sub_(peak).exp_()
        fade = (self.peak - peak).exp_()
        self.total = self.total.mul_(fade).add_(weights.sum(-1, keepdim=True))
        self.out = self.out.mul_(fade).add_(weights @ v)
        self.peak = peak

    def result(self) -> Tensor:
        return self.out / self.total

    def part(self) -> tuple[Tensor, Tensor]:
        """The result, 0 where nothing was visible, and the log-sum-exp of the scores, (..., R, 1),
        -inf there."""
        lse = self.total.log().add_(self.peak)
        return self.out / self.total.masked_fill(self.total == 0, 1), lse
