"""Attention as the definitions of storages and retentions say it, word by word, in float64: what
caches are compared with."""

from __future__ import annotations

import torch

from exkv import Cache
from exkv.cache import KeepAll, Sinks, Storage, Window
from exkv.cache.retention import Retention
from exkv.layers.rope import RotaryTable
from exkv.ops.attention import AttentionParams
from exkv.ops.kv_formats import FORMATS

GROUP = 32


class WrittenOut:
    """A cache layer for one row that keeps every key and value as it came.

    A query sees what the retention says, at the positions that this says. It sees the sinks and the
    last ``storage.recent`` keys as they are where the storage has recent ones, and all others as
    the formats give back what they were given: in groups of 32, counted from behind the sinks.
    """

    def __init__(self, model, storage: Storage, retention: Retention) -> None:
        self.tables = model.rotary.tables
        self.storage = storage
        self.sinks = retention.sinks if isinstance(retention, Sinks) else 0
        self.size = retention.size if isinstance(retention, Sinks | Window) else 0

    def attend(self, q, k, v, batch, params: AttentionParams) -> torch.Tensor:
        self.k = torch.cat((getattr(self, "k", k[:, :0]), k), dim=1)
        self.v = torch.cat((getattr(self, "v", v[:, :0]), v), dim=1)
        kinds = (self.storage.keys, self.k), (self.storage.values, self.v)
        stored = [self.stored(*kind) for kind in kinds]
        last = self.k.shape[1] - q.shape[1]
        outs = [self.one(query, last + t, stored, params) for t, query in enumerate(q[0].double())]
        return torch.stack(outs).unsqueeze(0).to(q.dtype)

    def stored(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        """What there is of every token once it is old, (S, H_kv, D); NaN where it never is."""
        first, whole = 0, x.shape[1]
        if self.storage.recent:
            first = min(self.sinks, whole)
            whole = (whole - first) // GROUP * GROUP
        packed = x[:, first : first + whole]
        packed = torch.ops.exkv.hadamard(packed) if self.storage.rotate else packed
        form = FORMATS[kind]
        packed = form.widen(form.encode(packed), torch.float32, x.shape[-1])
        packed = torch.ops.exkv.hadamard(packed) if self.storage.rotate else packed
        out = torch.full_like(x[0], torch.nan, dtype=torch.float64)
        out[first : first + whole] = packed[0].double()
        return out

    def one(self, q, position: int, stored: list[torch.Tensor], params: AttentionParams):
        seen = [p for p in range(position + 1) if self.sees(position, p, params.window)]
        exact = [p < self.sinks or p > position - self.storage.recent for p in seen]
        exact = torch.tensor([bool(self.storage.recent) and e for e in exact]).view(-1, 1, 1)
        k, v = (
            torch.where(exact, x[0, seen].double(), old[seen])
            for x, old in zip((self.k, self.v), stored, strict=True)
        )
        if self.sinks:  # each is where it is in the cache, and the query behind them
            moved = [at - p - (len(seen) - 1 - position) for at, p in enumerate(seen)]
            table = self.tables[params.rotary]
            k = torch.stack([self.turned(key, by, table) for key, by in zip(k, moved, strict=True)])
        if params.chunk:
            own = [at for at, p in enumerate(seen) if p // params.chunk == position // params.chunk]
            k, v = k[own], v[own]
        k, v = (x.repeat_interleave(len(q) // x.shape[1], dim=1) for x in (k, v))
        weights = (torch.einsum("hd,shd->hs", q, k) * params.scale).softmax(-1)
        return torch.einsum("hs,shd->hd", weights, v)

    def sees(self, position: int, p: int, window: int) -> bool:
        if self.sinks:
            return p < self.sinks or p > position - self.size
        return all(p > position - size for size in (self.size, window) if size)

    def turned(self, x: torch.Tensor, by: int, table: RotaryTable) -> torch.Tensor:
        """x (H, D) from one position to another; of the first R features, which are rotated, pairs
        are R / 2 apart."""
        angle = by * table.inverse_frequencies.double()
        first, second, plain = x.tensor_split((len(angle), 2 * len(angle)), dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, plain), dim=-1)


def written_out(
    model, ids: torch.Tensor, storage: Storage, retention: Retention | None = None
) -> torch.Tensor:
    """The logits of all tokens of a text, ids (1, S) -> (1, S, vocabulary)."""
    cache = Cache(model, ids.shape[1])
    for layer in cache.layers:
        layer.attend = WrittenOut(model, storage, retention or KeepAll()).attend
    return model.forward(ids, cache)
