"""What every cache is: a list of per-layer stores, and which tokens each row holds.

``KVCache`` knows rows and their tokens; a ``CacheLayer`` knows how one layer's keys and values are
stored and attended to. A new kind is one file with a ``CacheLayer`` and a preset.

A layer's storage comes to life in ``CacheLayer.allocate(device)`` and nowhere else. The cache is
registered with its model, and whichever comes last, the cache or the placement of the layer,
makes the call. So eager and lazy, before and after ``load``, are the same thing.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch

from exkv import devices
from exkv.batch import Batch
from exkv.config import ModelConfig
from exkv.errors import PlacementError
from exkv.ops.attention import AttentionParams

from .file import load, save
from .retention import KeepAll, Retention, View


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The shape of one layer's store: B rows of up to S tokens, H_kv heads of D values."""

    batch_size: int
    max_seq_len: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    retention: Retention = KeepAll()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the keys that are kept."""
        kept = self.retention.capacity(self.max_seq_len)
        return self.batch_size, kept, self.num_heads, self.head_dim


class CacheOwner(Protocol):
    """What a cache asks of its model."""

    config: ModelConfig
    dtype: torch.dtype
    max_input_len: int

    @property
    def cache_map(self) -> dict[int, torch.device]:
        """Decoder layer -> device, for the layers that are placed."""

    def check_cache(self, cache: KVCache) -> None:
        """Raise PlacementError where the model is loaded and has no room for this cache."""

    def register_cache(self, cache: KVCache) -> None:
        """Remember the cache, weakly, and allocate its layers as they are placed."""


class CacheLayer(ABC):
    """Keys and values of one decoder layer, on that layer's device."""

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.storage: dict[str, torch.Tensor] = {}

    @abstractmethod
    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> shape and dtype of each tensor; the first two dimensions are (B, S)."""

    @abstractmethod
    def encode(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        """k, v (B, T, H_kv, D) as they are stored, by the names of :meth:`layout`."""

    @abstractmethod
    def read(self, q: torch.Tensor, view: View, params: AttentionParams) -> torch.Tensor:
        """Attend q (B, T, H, D) over what the view shows -> (B, T, H, D). The window is the
        view's, not the params'."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Store k, v (B, T, H_kv, D) and attend q (B, T, H, D) over the rows -> (B, T, H, D)."""
        new = self.encode(k, v)
        view = self.spec.retention.store(self.storage, new, batch, params.window)
        return self.read(q, view, params)

    def bytes_needed(self) -> int:
        """Bytes that :meth:`allocate` takes from a device."""
        return sum(
            devices.rounded(torch.Size(shape).numel() * dtype.itemsize)
            for shape, dtype in self.layout().values()
        )

    def allocate(self, device: torch.device) -> None:
        """Create the storage, zeroed, all of it or none.

        Raises:
            torch.OutOfMemoryError: the device is full; nothing was allocated.
        """
        self.storage = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in self.layout().items()
        }

    def free(self) -> None:
        self.storage = {}

    @property
    def device(self) -> torch.device | None:
        """Where the storage lies; None while there is none."""
        return next(iter(self.storage.values())).device if self.storage else None

    def with_spec(self, **changes: object) -> CacheLayer:
        """A store of the same kind without storage, of another shape if asked."""
        return type(self)(replace(self.spec, **changes))


class KVCache:
    """The cache of a whole model: ``layers`` on their devices, ``sequences`` on the host.

    Args:
        model: the model that it serves, loaded or not.
        max_seq_len: tokens a row can hold; -1 for the model's ``max_position_embeddings``.
        batch_size: rows.
        lazy: ExLlamaV2's word, accepted for its users. It makes no difference here: storage is
            always allocated as soon as both the cache and its layers' devices are known.
        dtype: of the stored values where the kind stores floats; None for the model's.

    Attributes:
        layer_type: how the kind stores a layer.
        sequences: the token ids of each row, in order; what prefix reuse compares with.
        rotary_variants: for which variant of the model's rotary positions each row's keys were
            made, where it has several (longrope); None where that isn't known.
        stale: rows whose stored keys are not those of their tokens, since tokens were taken back
            that had overwritten others; the model computes them again when they are next used.

    Raises:
        ValueError: a size below 1, or a dtype that the kind cannot store.
        PlacementError: the model is loaded and a device has no room; nothing stays allocated.
    """

    layer_type: ClassVar[type[CacheLayer]]

    def __init__(
        self,
        model: CacheOwner,
        max_seq_len: int = -1,
        batch_size: int = 1,
        lazy: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        specs = self.layer_specs(model, max_seq_len, batch_size, dtype)
        self.model = model
        self.max_seq_len = specs[0].max_seq_len
        self.batch_size = batch_size
        self.lazy = lazy
        self.dtype = specs[0].dtype
        self.sequences: list[list[int]] = [[] for _ in range(batch_size)]
        self.rotary_variants: list[object] = [None] * batch_size
        self.stale: set[int] = set()
        self.layers = [self.make_layer(spec) for spec in specs]
        model.check_cache(self)
        self.allocate(model.cache_map)
        model.register_cache(self)

    @classmethod
    def layer_specs(
        cls,
        model: CacheOwner,
        max_seq_len: int = -1,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
    ) -> list[LayerSpec]:
        """Each layer's shape in such a cache; arguments and errors as of the constructor."""
        if max_seq_len == -1:
            max_seq_len = model.config.max_position_embeddings
        for name, value in (("max_seq_len", max_seq_len), ("batch_size", batch_size)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: it must be a whole number of at least 1")
        spec = LayerSpec(
            batch_size=batch_size,
            max_seq_len=max_seq_len,
            num_heads=model.config.num_key_value_heads,
            head_dim=model.config.head_dim,
            dtype=model.dtype if dtype is None else dtype,
        )
        return [spec] * model.config.num_hidden_layers

    @classmethod
    def make_layer(cls, spec: LayerSpec) -> CacheLayer:
        """The store of one layer, without storage yet."""
        return cls.layer_type(spec)

    # Storage ------------------------------------------------------------------------------

    def allocate(self, cache_map: dict[int, torch.device]) -> None:
        """Give every placed layer its storage where it has none yet; all of them or none."""
        missing = [index for index in cache_map if not self.layers[index].storage]
        full = self._first_full(cache_map, missing)
        if full is None:
            return
        for index in missing:
            self.layers[index].free()
        devices.release_idle_memory()
        device, needed = cache_map[full], self.layers[full].bytes_needed()
        available = devices.available_memory(device)
        total = sum(self.layers[i].bytes_needed() for i in missing if cache_map[i] == device)
        raise PlacementError(
            f"{self!r} needs {total:,} bytes on {device} for the layers that are there, and "
            f"{available:,} are available; layer {full} found no room. Build the cache before "
            "load_autosplit, so that it is counted, or make it shorter, or use an 8-bit one",
            unit=f"cache layer {full}",
            device=str(device),
            needed=needed,
            available=available,
        )

    def _first_full(self, cache_map: dict[int, torch.device], missing: list[int]) -> int | None:
        """Allocate; the layer that ran out of memory, once its error's frames are gone."""
        for index in missing:
            try:
                self.layers[index].allocate(cache_map[index])
            except torch.OutOfMemoryError:
                return index
        return None

    def free(self) -> None:
        """Give the storage back; the model calls it when it unloads."""
        for layer in self.layers:
            layer.free()
        self.reset()

    def nbytes(self) -> dict[torch.device, int]:
        """Bytes taken on each device."""
        total: dict[torch.device, int] = {}
        for layer in self.layers:
            if layer.device is not None:
                total[layer.device] = total.get(layer.device, 0) + layer.bytes_needed()
        return total

    # Tokens -------------------------------------------------------------------------------

    @property
    def seq_lens(self) -> list[int]:
        """Tokens in each row."""
        return [len(sequence) for sequence in self.sequences]

    @property
    def current_seq_len(self) -> int:
        """Tokens in the longest row. Setting it to less forgets the tokens after."""
        return max(self.seq_lens)

    @current_seq_len.setter
    def current_seq_len(self, length: int) -> None:
        if length > min(self.seq_lens):
            raise ValueError(f"current_seq_len can only shrink: {self.seq_lens} to {length}")
        self.crop(length)

    def advance(self, tokens: Sequence[Sequence[int]]) -> None:
        """Note tokens that every layer has stored; called once a forward call, and only there."""
        for sequence, new in zip(self.sequences, tokens, strict=False):
            sequence.extend(new)

    def reset(self) -> None:
        """Forget every token."""
        self.crop(0)

    def crop(self, max_length: int | Sequence[int]) -> None:
        """Keep at most the first ``max_length`` tokens of each row; one number, or one a row."""
        limits = [max_length] * self.batch_size if isinstance(max_length, int) else max_length
        if min(limits) < 0:
            raise ValueError(f"crop keeps tokens, and {min(limits)} is negative: see trim")
        for row, limit in enumerate(limits[: self.batch_size]):
            self._cut(row, len(self.sequences[row]), limit)

    def take_back(self, kept: Sequence[int], written: Sequence[int]) -> None:
        """Back to the first ``kept`` tokens of each row after a call that failed, of whose tokens
        some, perhaps ``written`` in all, may have been stored."""
        for row, (keep, length) in enumerate(zip(kept, written, strict=False)):
            self._cut(row, length, keep)

    def _cut(self, row: int, length: int, kept: int) -> None:
        del self.sequences[row][kept:]
        if kept == 0:
            self.stale.discard(row)
        elif any(layer.spec.retention.lost(length, kept) for layer in self.layers):
            self.stale.add(row)

    def trim(self, n: int) -> None:
        """Forget the last ``n`` tokens of each row (all that it has, if it has fewer)."""
        if n < 0:
            raise ValueError(f"trim forgets tokens, and {n} is negative")
        self.crop([max(length - n, 0) for length in self.seq_lens])

    # Rows ---------------------------------------------------------------------------------

    def reorder(self, rows: Sequence[int] | torch.Tensor) -> None:
        """Make row ``i`` what row ``rows[i]`` was (Hugging Face's ``reorder_cache(beam_idx)``).

        A row may be taken several times or not at all; rows after the last one given forget
        their tokens. Where a row begins with the same tokens as the one that it becomes, these
        stay where they are: for beams over one prompt the cost does not grow with the prompt.

        Raises:
            ValueError: more rows than ``batch_size``, or one that isn't there.
        """
        source = [int(row) for row in rows]
        if len(source) > self.batch_size:
            raise ValueError(f"{len(source)} rows, but the cache was built for {self.batch_size}")
        for row in source:
            if not 0 <= row < self.batch_size:
                raise ValueError(f"there is no row {row}: the cache has {self.batch_size}")
        old = self.sequences
        moves = [(to, row) for to, row in enumerate(source) if self._differ(to, row)]
        if moves:
            first = min(self._alike(to, row) for to, row in moves)
            self._move_rows(moves, first, max(len(old[row]) for _, row in moves))
        empty = self.batch_size - len(source)
        self.sequences = [list(old[row]) for row in source] + [[] for _ in range(empty)]
        self.stale = {to for to, row in enumerate(source) if row in self.stale}
        variants = self.rotary_variants
        self.rotary_variants = [variants[row] for row in source] + [None] * empty

    def _alike(self, first: int, second: int) -> int:
        """How many positions of two rows hold the same."""
        if first == second:
            return len(self.sequences[first])
        if self.rotary_variants[first] != self.rotary_variants[second]:
            return 0
        if self.stale & {first, second} or not self._keeps_all(first, second):
            return 0
        return common_prefix(self.sequences[first], self.sequences[second])

    def _keeps_all(self, *rows: int) -> bool:
        """Whether every token of these rows lies where its position says."""
        longest = max(len(self.sequences[row]) for row in rows)
        return all(layer.spec.retention.slots(0, longest).stop == longest for layer in self.layers)

    def _differ(self, first: int, second: int) -> bool:
        return self._alike(first, second) < len(self.sequences[second])

    def _move_rows(self, moves: Sequence[tuple[int, int]], first: int, last: int) -> None:
        """Copy positions ``first`` to ``last - 1`` from row to row, all rows at once, and no more
        positions at once than a forward call makes."""
        step = self.model.max_input_len
        for layer in self.layers:
            for tensor in layer.storage.values():
                to, rows = torch.tensor(moves).to(tensor.device).unbind(1)
                held = layer.spec.retention.slots(first, last)
                for start in range(held.start, held.stop, step):
                    part = slice(start, min(start + step, held.stop))
                    tensor[to, part] = tensor[rows, part]

    def select(self, rows: Sequence[int] | torch.Tensor) -> None:
        """Keep these rows, in this order, as the first ones; the others forget their tokens."""
        self.reorder(rows)

    def repeat_interleave(self, repeats: int, rows: int | None = None) -> None:
        """Make every row into ``repeats`` rows beside each other: a, b -> a, a, b, b.

        Args:
            rows: how many of the first rows; None for those up to the last that has tokens.

        Raises:
            ValueError: that makes more rows than ``batch_size``.
        """
        if repeats < 1:
            raise ValueError(f"repeats is {repeats}: it must be at least 1")
        if rows is None:
            rows = max((i + 1 for i, sequence in enumerate(self.sequences) if sequence), default=0)
        self.reorder([row for row in range(rows) for _ in range(repeats)])

    def clone(self) -> KVCache:
        """A second cache of the same kind on the same model, with the same tokens in it."""
        other = type(self)(self.model, self.max_seq_len, self.batch_size, self.lazy, self.dtype)
        for layer, copy in zip(self.layers, other.layers, strict=True):
            for name, tensor in layer.storage.items():
                copy.storage[name].copy_(tensor)
        other.sequences = [list(sequence) for sequence in self.sequences]
        other.rotary_variants = list(self.rotary_variants)
        other.stale = set(self.stale)
        return other

    def __deepcopy__(self, memo: dict[int, object]) -> KVCache:
        """The model is not copied: see :meth:`clone`."""
        memo[id(self)] = copy = self.clone()
        return copy

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the tokens and what is stored of them: see ``exkv.cache.file``."""
        save(self, file)

    def load(self, file: str | os.PathLike[str]) -> None:
        """Replace the contents by those that :meth:`save` wrote, from a cache of the same kind
        on the same model; the devices, the length and the number of rows may be others.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged, of another kind of cache or of another model, or has more
                rows or tokens than fit here; this cache stays as it was.
        """
        load(self, file)

    def __repr__(self) -> str:
        kind, rows = type(self).__name__, self.batch_size
        return f"{kind}(max_seq_len={self.max_seq_len}, batch_size={rows}, dtype={self.dtype})"
