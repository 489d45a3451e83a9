"""Static layers of an :class:`HFCache`, which ``torch.compile`` traces without a graph break.

In a graph, a tensor counts the tokens and determines their places, and keys are returned where they
are stored: no length is a constant, and steps share one graph. Outside of graphs, the rows' lengths
are updated on demand.
"""

from __future__ import annotations

from typing import Any

import torch

from exkv.cache import CacheLayer, OnDevice, Storage
from exkv.cache.arrangement import OneStore
from exkv.cache.views import Tensors

from .layer import HFLayer, Rows
from .versions import SINCE_5, query_count


class HFStaticLayer(HFLayer):
    """Keys and values at the layer's full length, like a stock ``StaticLayer``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._length = torch.tensor(0)  # of the longest row, including left padding
        self._in_graph = False  # whether a graph stored tokens that ``rows`` doesn't count
        self._made: dict[str, torch.Tensor] | None = None  # by a graph, in place of a store
        super().__init__(*args, **kwargs)

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]  # an attribute there
        """Whether keys and values are returned at the full length."""
        return bool(self.full_length)

    @property
    def max_cache_len(self) -> int:
        """Capacity in tokens."""
        return self.template.capacity

    @property
    def num_heads(self) -> int:
        return self._placed.spec.num_heads

    @property
    def k_head_dim(self) -> int:
        return self.dims[0]

    @property
    def v_head_dim(self) -> int:
        return self.dims[1]

    @property
    def cumulative_length(self) -> torch.Tensor:  # type: ignore[override]  # an int there
        """Tokens of the longest row, including left padding: int64 (), on the layer's device."""
        if not torch.compiler.is_compiling():
            self.settle()
        return self._length

    @property
    def store(self) -> CacheLayer | None:
        if self._made is not None and not torch.compiler.is_compiling():
            self._take_over(self._made)
        return self._store

    @store.setter
    def store(self, store: CacheLayer | None) -> None:
        self._store = store

    def _take_over(self, made: dict[str, torch.Tensor]) -> None:
        """Move tokens that a graph has stored to a store."""
        in_graph, length, self._made = self._in_graph, self._length.clone(), None
        none = zip(made.values(), self.dims, strict=True)
        k, v = (x[:, :0, :, :dim].transpose(1, 2) for x, dim in none)
        self.lazy_initialization(k, v)
        for name, stored in self._placed.tensors.items():
            stored.copy_(made[name])
        self._in_graph = in_graph
        self._length.copy_(length)

    @property
    def rows(self) -> Rows:
        return self._rows

    @rows.setter
    def rows(self, rows: Rows) -> None:
        self._rows = rows
        self._length.fill_(rows.length)

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor | None = None
    ) -> None:
        self._length = self._length.to(key_states.device)
        super().lazy_initialization(key_states, value_states)
        if self._can_be_traced():  # for CUDA graphs
            for tensor in (*self._placed.tensors.values(), self._length):
                torch._dynamo.mark_static_address(tensor)

    def settle(self) -> None:
        if self._in_graph:
            length = int(self._length)
            self._in_graph = False
            self.set_rows((length,) * self.batch_size, self.pads, self.written)
        super().settle()

    def reset(self) -> None:
        """Drop all tokens, and leave zeros."""
        self._in_graph = False
        super().reset()
        for tensor in () if self.store is None else self.store.tensors.values():
            tensor.zero_()

    def __deepcopy__(self, memo: dict[int, Any]) -> HFLayer:
        other = super().__deepcopy__(memo)
        assert isinstance(other, HFStaticLayer)
        other._length = self._length.clone()
        return other

    # Inside of graphs ---------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take tokens (B, H_kv, T, D) -> all keys and values that they see."""
        if torch.compiler.is_compiling() and self._can_be_traced(key_states):
            given = {"k": key_states, "v": value_states}
            stored = self._tensors or self._make(key_states, value_states)
            new = {name: self._by_token(x).to(stored[name].dtype) for name, x in given.items()}
            seen = self._store_in_graph(stored, new, key_states.shape[2])
            keys, values = (
                seen[name][..., : x.shape[-1]].transpose(1, 2).to(x.dtype)
                for name, x in given.items()
            )
            return keys, values
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        """Tokens of the longest row, including left padding; a tensor in a graph, from which 4.57
        can't make positions."""
        if SINCE_5 and torch.compiler.is_compiling() and self._can_be_traced():
            return self._length  # type: ignore[return-value]  # like stock layers
        return super().get_seq_length()

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Number of keys that a call sees, including its own, and the first one's position."""
        if torch.compiler.is_compiling() and self._can_be_traced():
            return self._sizes_in_graph(query_count(query_length))
        return super().get_mask_sizes(query_length)

    def _can_be_traced(self, keys: torch.Tensor | None = None) -> bool:
        """Whether the length alone determines the places of tokens, of these keys if given."""
        template, stored = self.template, self._tensors
        plain = type(template.arrangement) is OneStore and template.storage == Storage()
        fits = keys is None or stored is None or len(keys) == len(stored["k"])
        in_place = bool(self.full_length) and plain and template.residence == OnDevice()
        return fits and in_place and self._call is None and not any(self.pads)

    @property
    def _tensors(self) -> dict[str, torch.Tensor] | None:
        """Stored keys and values, (B, N, H_kv, D) each; None before the first tokens."""
        return self._made if self._store is None else self._store._tensors

    def _make(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, heads, _, key_dim = keys.shape
        self.dims = key_dim, values.shape[-1]
        shape = rows, self.full_length, heads, max(self.dims)
        dtype = self.stored_dtype or torch.promote_types(keys.dtype, values.dtype)
        self._length = self._length.to(keys.device)
        self._made = {x: torch.zeros(shape, dtype=dtype, device=keys.device) for x in ("k", "v")}
        return self._made

    def _sizes_in_graph(self, tokens: int) -> tuple[int, int]:
        return self.full_length, 0

    def _store_in_graph(self, stored: Tensors, new: Tensors, tokens: int) -> Tensors:
        """Store tokens (B, T, H_kv, D) -> all keys and values that they see."""
        at = torch.arange(tokens, device=self._length.device) + self._length
        for name, x in new.items():
            stored[name].index_copy_(1, at, x)  # an IndexError if there is no room
        self._count_in_graph(tokens)
        return stored

    def _count_in_graph(self, tokens: int) -> None:
        self._length.add_(tokens)
        self._in_graph = True


class HFStaticSlidingLayer(HFStaticLayer):
    """A window's last tokens, like a stock ``StaticSlidingWindowLayer``. The keys that a call sees
    depend on the number of tokens, which is therefore an integer in graphs, too."""

    _count = 0

    @property
    def cumulative_length_int(self) -> int:
        """Tokens of the longest row, including evicted ones."""
        return self.get_seq_length()

    @HFStaticLayer.rows.setter  # type: ignore[attr-defined]  # a property
    def rows(self, rows: Rows) -> None:
        HFStaticLayer.rows.fset(self, rows)  # type: ignore[attr-defined]
        self._count = rows.length

    def _sizes_in_graph(self, tokens: int) -> tuple[int, int]:
        kept = min(self._count, self.max_cache_len - 1)
        return max(kept + tokens, self.max_cache_len), self._count - kept

    def _store_in_graph(self, stored: Tensors, new: Tensors, tokens: int) -> Tensors:
        """Store in a ring, and return in order: see ``exkv.cache.retention.Window``."""
        past, size = self._count, self.max_cache_len
        if past + tokens <= size:
            return super()._store_in_graph(stored, new, tokens)
        count = torch.arange(size + tokens, device=self._length.device) + self._length
        kept, last = min(past, size - 1), min(tokens, size)
        before, after = (count[:kept] - kept) % size, (count[:last] + tokens - last) % size
        seen = {
            name: torch.cat((stored[name].index_select(1, before), x), dim=1)
            for name, x in new.items()
        }
        for name, x in new.items():
            stored[name].index_copy_(1, after, x[:, -last:])
        self._count_in_graph(tokens)
        return seen

    def _count_in_graph(self, tokens: int) -> None:
        super()._count_in_graph(tokens)
        self._count += tokens

    def _can_be_traced(self, keys: torch.Tensor | None = None) -> bool:
        """As the base class; calls that are too long are refused outside of graphs."""
        too_long = keys is not None and self._count + keys.shape[2] > self.limit
        return not too_long and not self.record_past and super()._can_be_traced(keys)
