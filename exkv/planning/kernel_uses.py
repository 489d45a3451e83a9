"""Which calls native kernels take, and the memory that they allocate.

Kernels decide for themselves (on CUDA, ``exkv_ext/cuda/attention.cuh`` for decode-sized calls,
``prefill.cuh`` for larger ones); plans ask here, for devices that may be absent. A test keeps the
two in agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from exkv.ops.attention import is_flash, is_fresh
from exkv.ops.registry import NAMED
from exkv.weights.gguf import has_cuda_kernels
from exkv.weights.tiles import Packing

#: Maxima: query rows per key head, values per head, rows of a batch, query rows in total.
_DECODE_ROWS, _DECODE_DIM, _DECODE_BATCH, _DECODE_TOTAL = 16, 256, 65535, 1 << 24
#: Maxima for wider heads: queries of a row, and values per head.
_WIDE_QUERIES, _WIDE_DIM = 16, 576
#: Query rows per key head, over all rows of a large batch, must be fewer than this.
_PREFILL_TOTAL = 1 << 30
#: Fewest keys of a split, and most splits of a row.
_SPLIT_KEYS, _MOST_SPLITS = 128, 64
#: Most rows of a head's state that the CUDA kernels of recurrent layers keep in registers.
_STATE_ROWS = 256
#: Likewise for the selective scan: most numbers of a channel's state.
_SCAN_STATES = 64
#: Of a choice of a token: ChosenMatrix of exkv_ext/params/experts_params.h.
_CHOSEN_BYTES = 80
#: Most rows of partial results: 16 warps for each of 256 multiprocessors, four of which share up to
#: four rows of a tile; and what rounding up to whole blocks adds.
_MOST_STATES = 256 * 16 // 4 * 4 + 12
#: Likewise for wide heads, by bytes of a query's value: three blocks per multiprocessor, of 16 or 8
#: rows.
_MOST_WIDE_STATES = {2: 256 * 3 * 16, 4: 256 * 3 * 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelUse:
    """How a native kernel handles a call.

    Attributes:
        takes: whether it takes the call; if not, the reference serves it.
        scratch: most bytes that it allocates beside results, in this call or any with fewer
            queries.
    """

    takes: bool
    scratch: int = 0


def kernel_use(name: str, device_type: str, call: Mapping[str, Any]) -> KernelUse:
    """How the native kernel of ``exkv::<name>`` on this device type handles a call.

    Args:
        call: the op's arguments, all of them, by name.
    """
    named = NAMED.get(name, {})
    entries = (named.get(value) for value in call.values() if isinstance(value, str))
    if any(entry is not None and not entry.has_kernels for entry in entries):
        return KernelUse(takes=False)
    use = KERNEL_USES.get(device_type, {}).get(name)
    return KernelUse(takes=True) if use is None else use(**call)


def _attention(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_len: int,
    ragged: bool,
    window: int,
    softcap: float,
    **rest: Any,
) -> KernelUse:
    rule = (kv_len, ragged, window, softcap)
    if is_fresh(q.shape[1], *rule) or is_flash(q, k, *rule):  # torch's flash kernels serve it
        return _decode_use(q, k, kv_len)
    return _prefill_use(q, k, v, kv_len)


def _attention_int8(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_len: int, **rest: Any
) -> KernelUse:
    return _prefill_use(q, k, v, kv_len)


def _attention_part(
    *,
    q: torch.Tensor,
    k: Sequence[torch.Tensor],
    v: Sequence[torch.Tensor],
    kv_len: int,
    **rest: Any,
) -> KernelUse:
    return _prefill_use(q, k[0], v[0], kv_len)


def _decode_use(q: torch.Tensor, k: torch.Tensor, kv_len: int) -> KernelUse:
    """The CUDA kernels for decode-sized calls, whatever the format: q (B, T, H, D), k (B, S, H_kv,
    _).

    A split of the keys leaves D + 2 floats for each query row. A device with more multiprocessors
    cuts a row into more splits; the bound holds for all devices.
    """
    rows, length, heads, head_dim = q.shape
    group = heads // k.shape[2]
    wide = head_dim > _DECODE_DIM
    most_queries = min(length, _WIDE_QUERIES if wide else max(_DECODE_ROWS // group, 1))
    fits = head_dim <= _WIDE_DIM and max(rows, k.shape[2]) <= _DECODE_BATCH
    fits &= rows * most_queries * heads < _DECODE_TOTAL
    fits &= not wide or head_dim % 8 == 0
    if not fits:
        return KernelUse(takes=False)
    splits = min(-(-kv_len // _SPLIT_KEYS), _MOST_SPLITS)
    most_states = _MOST_WIDE_STATES[q.element_size()] if wide else _MOST_STATES
    states = min(rows * most_queries * heads * splits, most_states) if splits > 1 else 0
    return KernelUse(takes=length == most_queries, scratch=states * (head_dim + 2) * 4)


def _prefill_use(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_len: int) -> KernelUse:
    """Like :func:`_decode_use` where there is a prefill kernel too, which allocates nothing. It
    doesn't take float32 heads whose size is no multiple of 8."""
    rows, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    fits = head_dim <= _DECODE_DIM and max(rows, kv_heads) <= _DECODE_BATCH
    fits &= rows * length * (heads // kv_heads) < _PREFILL_TOTAL
    fits &= head_dim % 8 == 0 or torch.float32 not in (k.dtype, v.dtype)
    decode = _decode_use(q, k, kv_len)
    return replace(decode, takes=decode.takes or fits)


def _causal_conv(*, x: torch.Tensor, state: torch.Tensor, **rest: Any) -> KernelUse:
    return KernelUse(takes=x.dtype == state.dtype)


def _gated_delta(*, q: torch.Tensor, **rest: Any) -> KernelUse:
    return KernelUse(takes=q.shape[-1] <= _STATE_ROWS)


def _ssd(*, b: torch.Tensor, **rest: Any) -> KernelUse:
    return KernelUse(takes=b.shape[-1] <= _STATE_ROWS)


def _selective_scan(*, b: torch.Tensor, **rest: Any) -> KernelUse:
    return KernelUse(takes=b.shape[-1] <= _SCAN_STATES)


def _chosen(
    *, x: torch.Tensor, chosen: torch.Tensor, layout: Sequence[int], **rest: Any
) -> KernelUse:
    by_rows = layout[0] in (Packing.GGML, Packing.FLOAT8, Packing.FLOAT4)
    takes = x.element_size() == 2 and (layout[0] > 0 or by_rows) and has_cuda_kernels(layout)
    return KernelUse(takes=takes, scratch=_CHOSEN_BYTES * chosen.numel())


def _packed(*, layout: Sequence[int], **rest: Any) -> KernelUse:
    return KernelUse(takes=has_cuda_kernels(layout))


#: Device type -> op name -> a function from the op's arguments. A kernel that is not listed takes
#: every call and allocates nothing but results.
KERNEL_USES: dict[str, dict[str, Callable[..., KernelUse]]] = {
    "cuda": {
        "attention": _attention,
        "attention_int8": _attention_int8,
        "attention_part": _attention_part,
        "causal_conv": _causal_conv,
        "chosen_products": _chosen,
        "dequantize_packed": _packed,
        "gated_delta": _gated_delta,
        "linear_packed": _packed,
        "selective_scan": _selective_scan,
        "ssd": _ssd,
    }
}
