"""Storage: how keys and values are encoded, and read by attention. One of the four properties of a
cache.

A storage encodes a chunk's keys and values, and runs attention over the views that a retention
returns. It knows nothing of positions, windows or devices; formats and kernels are in ``exkv.ops``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from exkv.ops.attention import AttentionParams
from exkv.ops.attention_parts import chunk_starts, merge_parts, sink_part
from exkv.ops.kv_formats import FORMATS, Layout, Shape
from exkv.ops.kv_quant import GROUP

from .views import ContiguousView, Segment, SegmentedView, Tensors, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Formats for keys and for values, by their names in ``exkv.ops.kv_formats.FORMATS``.

    Attributes:
        rotate: whether heads are multiplied by a Hadamard matrix before they are stored, which
            spreads outliers before a group of features shares a scale (QuaRot, Ashkboos et al.,
            2024). Queries are transformed too, which preserves scores, and so is the output, which
            undoes it.
        recent: how many of the last tokens a query sees in full precision, whatever the formats; 0,
            or at least 32.
        values_are_keys: whether values are the keys' own tensors, which are stored once, in the
            keys' format. The model's attention says so (:class:`exkv.cache.spec.LayerSpec`).

    Raises:
        ValueError: an unknown format, too few recent tokens, or 0 with a format that encodes
            several tokens together.
    """

    keys: str = "float"
    values: str = "float"
    rotate: bool = False
    recent: int = 0
    values_are_keys: bool = False

    def __post_init__(self) -> None:
        if self.values_are_keys:
            object.__setattr__(self, "values", self.keys)
        for name in (self.keys, self.values):
            if name not in FORMATS:
                raise ValueError(f"unknown format {name!r}: choose from {', '.join(FORMATS)}")
        grouped = [name for name in self.formats if FORMATS[name].group > 1]
        if not (self.recent >= GROUP or self.recent == 0 and not grouped):
            needs = f"{grouped[0]} encodes {GROUP} tokens together" if grouped else "or none"
            raise ValueError(
                f"{self.recent} recent tokens in full precision: it must be at least {GROUP} "
                f"({needs})"
            )

    def __str__(self) -> str:
        values = "which are the values" if self.values_are_keys else f"{self.values} values"
        rotated = ", rotated" if self.rotate else ""
        recent = f", the last {self.recent} tokens as floats" if self.recent else ""
        joined = ", " if self.values_are_keys else " and "
        return f"{self.keys} keys{joined}{values}{rotated}{recent}"

    @property
    def formats(self) -> tuple[str, str]:
        """Formats of keys and of values."""
        return self.keys, self.values

    @property
    def in_place(self) -> bool:
        """Whether native code can write and read every token in place."""
        formats = [FORMATS[name] for name in self.formats]
        return all(each.has_kernels and each.group == 1 for each in formats)

    @property
    def lossless(self) -> bool:
        """Whether reading returns exactly what was stored."""
        return all(FORMATS[name].lossless for name in self.formats)

    @property
    def floats(self) -> Storage:
        """Full precision of the same tensors."""
        return Storage(values_are_keys=self.values_are_keys)

    @property
    def _sides(self) -> tuple[tuple[str, str], ...]:
        """Prefix and format of what is stored."""
        return (("k", self.keys), ("v", self.values))[: 1 if self.values_are_keys else 2]

    def tokens_an_entry(self, name: str) -> int:
        """Tokens that one entry of this tensor stands for."""
        prefix, _, part = name.partition("_")
        return FORMATS[self.keys if prefix == "k" else self.values].group if part else 1

    def layout(self, shape: Shape, dtype: torch.dtype) -> Layout:
        """Name -> shape and dtype of each tensor for keys (and values) of (B, S, H_kv, D)."""
        return {
            _named(prefix, name): tensor
            for prefix, kind in self._sides
            for name, tensor in FORMATS[kind].layout(shape, dtype).items()
        }

    def encode(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Encode k, v (B, T, H_kv, D) into the tensors of :meth:`layout`; v is disregarded where
        values are keys."""
        k, v = self.hadamard(k, v)
        return self.pack(_as(k, dtype), v if self.values_are_keys else _as(v, dtype))

    def hadamard(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the Hadamard transform if ``rotate``; its own inverse."""
        k = self._hadamard(k)
        return k, k if self.values_are_keys else self._hadamard(v)

    def _hadamard(self, x: Tensor) -> Tensor:
        return torch.ops.exkv.hadamard(x) if self.rotate else x

    def pack(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Encode the output of :meth:`hadamard` in the storage's formats."""
        if self.keys == self.values == "float":  # fast path of most caches
            return {"k": k} if self.values_are_keys else {"k": k, "v": v}
        return {
            _named(prefix, name): tensor
            for (prefix, kind), x in zip(self._sides, (k, v), strict=False)
            for name, tensor in FORMATS[kind].encode(x).items()
        }

    def tensors_of(self, prefix: str, stored: Tensors) -> list[Tensor]:
        """The tensors of keys, ``"k"``, or of values, ``"v"``, in the order of their format's
        names."""
        if self.values_are_keys:
            prefix = "k"
        names = FORMATS[self.keys if prefix == "k" else self.values].names
        return [stored[_named(prefix, name)] for name in names]

    def decode(self, stored: Tensors, dtype: torch.dtype, head_dim: int) -> tuple[Tensor, Tensor]:
        """Inverse of :meth:`encode`, up to the formats' loss: k, v (B, T, H_kv, D)."""
        return self.hadamard(*self.widen(stored, dtype, head_dim))

    def widen(self, stored: Tensors, dtype: torch.dtype, head_dim: int) -> tuple[Tensor, Tensor]:
        """Inverse of :meth:`pack`, up to the formats' loss."""
        wide = [
            FORMATS[kind].widen(_of(stored, prefix), dtype, head_dim)
            for prefix, kind in self._sides
        ]
        return wide[0], wide[-1]

    def attend(self, q: Tensor, view: View, params: AttentionParams, dtype: torch.dtype) -> Tensor:
        """Attend q (B, T, H, D) over a view, with chunks one of segments, -> (B, T, H, D)."""
        op = self._contiguous_op(view) if params.sinks is None else None
        if op is not None:
            out = op(self._hadamard(q), view, params, dtype)
        else:
            out = self._over_segments(q, view.as_segments(), params)
        return _as(self._hadamard(out), q.dtype)

    def _contiguous_op(self, view: View) -> _ContiguousOp | None:
        """The op for a contiguous view in these formats, if there is one."""
        if not isinstance(view, ContiguousView):
            return None
        return _CONTIGUOUS_OPS.get(view.formats or self.formats)

    def _over_segments(self, q: Tensor, view: SegmentedView, params: AttentionParams) -> Tensor:
        transformed, outputs = self._hadamard(q), []
        for segment in view.segments:
            queries = transformed
            if segment.rotary is not None:  # before the Hadamard transform: they don't commute
                queries = self._hadamard(torch.ops.exkv.rope(q, q[:, :, :0], *segment.rotary)[0])
            attend = self._over_segment if segment.rows is None else self._over_segment_of_rows
            outputs.append(attend(queries, view.past_lens, segment, params))
        if params.sinks is not None and len(outputs) == 1 and outputs[0][0].is_contiguous():
            torch.ops.exkv.share_with_sinks_(*outputs[0], params.sinks)
        elif params.sinks is not None:
            outputs.append(sink_part(q, params.sinks))
        return merge_parts(outputs, q.dtype)

    def _over_segment_of_rows(
        self, q: Tensor, past_lens: Tensor, segment: Segment, params: AttentionParams
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`_over_segment`, for a segment that only some rows see."""
        out = torch.zeros_like(q, dtype=torch.float32)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=torch.float32)
        rows = segment.rows
        out[rows], lse[rows] = self._over_segment(q[rows], past_lens[rows], segment, params)
        return out, lse

    def _over_segment(
        self, q: Tensor, past_lens: Tensor, segment: Segment, params: AttentionParams
    ) -> tuple[Tensor, Tensor]:
        """Attend over this segment alone; returns the output and the log-sum-exp of its scores, see
        ``merge_parts``."""
        before = past_lens - segment.skip_last if segment.skip_last else past_lens
        k = list(_of(segment.stored, "k").values())
        v = list(_of(segment.stored, "v").values()) or k
        keys, values = segment.formats or self.formats
        stored, where = (q, k, keys, v, values), (before, segment.start, segment.count)
        how = params.scale, segment.window, params.softcap, segment.block_table
        if params.chunk:
            since = chunk_starts(past_lens, q.shape[1], params.chunk)
            part = torch.ops.exkv.attention_part_since
            return part(*stored, *where, since, segment.kv_len, *how)
        return torch.ops.exkv.attention_part(*stored, *where, segment.kv_len, *how)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to a dtype; checking first costs a tenth of a no-op conversion."""
    return x if x.dtype == dtype else x.to(dtype)


def _named(prefix: str, name: str) -> str:
    return f"{prefix}_{name}" if name else prefix


def _of(stored: Tensors, prefix: str) -> dict[str, Tensor]:
    """The tensors of keys or of values, by their format's names."""
    return {
        name[len(prefix) :].lstrip("_"): tensor
        for name, tensor in stored.items()
        if name.partition("_")[0] == prefix
    }


def _attend_float(
    q: Tensor, view: ContiguousView, params: AttentionParams, dtype: torch.dtype
) -> Tensor:
    k = view.stored["k"]
    v = view.stored.get("v", k)
    how = view.ragged, params.scale, view.window, params.softcap
    return torch.ops.exkv.attention(_as(q, dtype), k, v, view.past_lens, view.kv_len, *how)


def _attend_int8(
    q: Tensor, view: ContiguousView, params: AttentionParams, dtype: torch.dtype
) -> Tensor:
    k, v = (_of(view.stored, side).values() for side in ("k", "v"))
    stored = (*k, *(v or k))
    how = params.scale, view.window, params.softcap
    return torch.ops.exkv.attention_int8(q, *stored, view.past_lens, view.kv_len, *how)


_ContiguousOp: TypeAlias = Callable[..., Tensor]

#: Ops for contiguous views, by formats of keys and values.
_CONTIGUOUS_OPS: Mapping[tuple[str, str], _ContiguousOp] = {
    ("float", "float"): _attend_float,
    ("int8", "int8"): _attend_int8,
}
