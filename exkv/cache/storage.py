"""How keys and values are stored, and read by attention: one of four properties of a cache.

A storage turns a chunk's keys and values into what a layer keeps of them, and attends to what a
retention shows it. It knows nothing of positions, windows or devices; formats and kernels are in
``exkv.ops``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from exkv.ops.attention import AttentionParams
from exkv.ops.attention_parts import merge_parts
from exkv.ops.kv_formats import FORMATS, Layout
from exkv.ops.kv_quant import GROUP

from .retention import Part, Parts, Tensors, Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Names of ``exkv.ops.kv_formats.FORMATS`` for keys and for values.

    Attributes:
        rotate: whether heads are turned by a Hadamard matrix before they are stored, which evens
            out features of unlike size before a group of them shares a scale (QuaRot, Ashkboos et
            al., 2024). Queries are turned alike, so that scores stay, and the output back.
        recent: how many of the last tokens a query sees in full precision, whatever the formats
            do to older ones; 0, or 32 and more.

    Raises:
        ValueError: an unknown format, too few recent tokens, or none with a format that encodes
            several tokens together.
    """

    keys: str = "float"
    values: str = "float"
    rotate: bool = False
    recent: int = 0

    def __post_init__(self) -> None:
        for name in (self.keys, self.values):
            if name not in FORMATS:
                raise ValueError(f"{name!r} is no format: there are {', '.join(FORMATS)}")
        grouped = [name for name in self.formats if FORMATS[name].group > 1]
        if not (self.recent >= GROUP or self.recent == 0 and not grouped):
            needs = f"{grouped[0]} encodes {GROUP} tokens together" if grouped else "or none"
            raise ValueError(
                f"{self.recent} recent tokens in full precision: it must be at least {GROUP} "
                f"({needs})"
            )

    def __str__(self) -> str:
        turned = ", turned" if self.rotate else ""
        recent = f", the last {self.recent} tokens as floats" if self.recent else ""
        return f"{self.keys} keys and {self.values} values{turned}{recent}"

    @property
    def formats(self) -> tuple[str, str]:
        """Of keys and of values."""
        return self.keys, self.values

    @property
    def in_place(self) -> bool:
        """Whether native code writes and reads every token where it lies."""
        formats = [FORMATS[name] for name in self.formats]
        return all(each.has_kernels and each.group == 1 for each in formats)

    @property
    def lossless(self) -> bool:
        """Whether what is read is what was stored."""
        return all(FORMATS[name].lossless for name in self.formats)

    def tokens_an_entry(self, name: str) -> int:
        """For how many tokens one entry of this tensor stands."""
        prefix, _, part = name.partition("_")
        return FORMATS[self.keys if prefix == "k" else self.values].group if part else 1

    def layout(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Layout:
        """Name -> shape and dtype of each tensor for keys (and values) of (B, S, H_kv, D)."""
        return {
            _named(prefix, name): tensor
            for prefix, kind in (("k", self.keys), ("v", self.values))
            for name, tensor in FORMATS[kind].layout(shape, dtype).items()
        }

    def encode(
        self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """k, v (B, T, H_kv, D) as they are stored, by the names of :meth:`layout`."""
        k, v = self.turned(k, v)
        return self.pack(_as(k, dtype), _as(v, dtype))

    def turned(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads as they are stored; turning is its own inverse."""
        return (torch.ops.exkv.hadamard(k), torch.ops.exkv.hadamard(v)) if self.rotate else (k, v)

    def pack(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        """What :meth:`turned` gave, in the storage's formats."""
        if self.keys == self.values == "float":  # what most caches do at every layer and step
            return {"k": k, "v": v}
        return {
            _named(prefix, name): tensor
            for prefix, kind, x in (("k", self.keys, k), ("v", self.values, v))
            for name, tensor in FORMATS[kind].encode(x).items()
        }

    def tensors_of(self, prefix: str, stored: Tensors) -> list[torch.Tensor]:
        """Those of keys, ``"k"``, or of values, ``"v"``, in the order of their format's names."""
        names = FORMATS[self.keys if prefix == "k" else self.values].names
        return [stored[_named(prefix, name)] for name in names]

    def decode(
        self, stored: Tensors, dtype: torch.dtype, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What :meth:`encode` took, as near as the formats keep it: k, v (B, T, H_kv, D)."""
        return self.turned(*self.widen(stored, dtype, head_dim))

    def widen(
        self, stored: Tensors, dtype: torch.dtype, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The inverse of :meth:`pack`, as near as the formats keep it."""
        k, v = (
            FORMATS[kind].widen(_of(stored, prefix), dtype, head_dim)
            for prefix, kind in (("k", self.keys), ("v", self.values))
        )
        return k, v

    def attend(
        self, q: torch.Tensor, shown: Whole | Parts, params: AttentionParams, dtype: torch.dtype
    ) -> torch.Tensor:
        """q (B, T, H, D) over what a retention shows -> (B, T, H, D)."""
        formats = shown.formats or self.formats if isinstance(shown, Whole) else None
        if (read := _WHOLE.get(formats)) is not None:
            out = read(self._heads(q), shown, params, dtype)
        else:
            parts = shown.as_parts() if isinstance(shown, Whole) else shown
            out = self._over_parts(q, parts, params)
        return _as(self._heads(out), q.dtype)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Queries as they meet stored keys, and what was read of stored values as it leaves."""
        return torch.ops.exkv.hadamard(x) if self.rotate else x

    def _over_parts(self, q: torch.Tensor, shown: Parts, params: AttentionParams) -> torch.Tensor:
        heads, results = self._heads(q), []
        for part in shown.parts:
            met = heads
            if part.turn is not None:  # by positions first: the two turns can't change places
                met = self._heads(torch.ops.exkv.rope(q, q[:, :, :0], *part.turn)[0])
            read = self._part if part.rows is None else self._part_of_rows
            results.append(read(met, shown.past_lens, part, params))
        return merge_parts(results, q.dtype)

    def _part_of_rows(
        self, q: torch.Tensor, past_lens: torch.Tensor, part: Part, params: AttentionParams
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as :meth:`_part` where other rows see nothing of it."""
        out = torch.zeros_like(q, dtype=torch.float32)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=torch.float32)
        rows = part.rows
        out[rows], lse[rows] = self._part(q[rows], past_lens[rows], part, params)
        return out, lse

    def _part(
        self, q: torch.Tensor, past_lens: torch.Tensor, part: Part, params: AttentionParams
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax over this part alone, and the log-sum-exp of its scores; see ``merge_parts``."""
        if part.behind:
            past_lens = past_lens - part.behind
        keys, values = part.formats or self.formats
        return torch.ops.exkv.attention_part(
            q,
            list(_of(part.stored, "k").values()),
            keys,
            list(_of(part.stored, "v").values()),
            values,
            past_lens,
            part.start,
            part.count,
            part.kv_len,
            params.scale,
            part.window,
            params.softcap,
            part.block_table,
        )


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same values in this dtype; to ask first costs a tenth of a conversion to itself."""
    return x if x.dtype == dtype else x.to(dtype)


def _named(prefix: str, name: str) -> str:
    return f"{prefix}_{name}" if name else prefix


def _of(stored: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of keys or of values, by their format's names."""
    return {
        name[len(prefix) :].lstrip("_"): tensor
        for name, tensor in stored.items()
        if name.partition("_")[0] == prefix
    }


def _read_float(
    q: torch.Tensor, shown: Whole, params: AttentionParams, dtype: torch.dtype
) -> torch.Tensor:
    return torch.ops.exkv.attention(
        _as(q, dtype),
        shown.stored["k"],
        shown.stored["v"],
        shown.past_lens,
        shown.kv_len,
        shown.ragged,
        params.scale,
        shown.window,
        params.softcap,
    )


def _read_int8(
    q: torch.Tensor, shown: Whole, params: AttentionParams, dtype: torch.dtype
) -> torch.Tensor:
    return torch.ops.exkv.attention_int8(
        q,
        *(shown.stored[name] for name in ("k", "k_scale", "v", "v_scale")),
        shown.past_lens,
        shown.kv_len,
        params.scale,
        shown.window,
        params.softcap,
    )


#: Formats of keys and values that have an op of their own for whole rows.
_WHOLE: Mapping[tuple[str, str], Callable[..., torch.Tensor]] = {
    ("float", "float"): _read_float,
    ("int8", "int8"): _read_int8,
}
