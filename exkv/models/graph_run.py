"""The bound run on a GPU: one token per row through all units, captured once and replayed.

The modules themselves are captured, over static buffers: token ids, lengths, rotary factors, and
the block table of paged rows. Each step fills them by one copy from pinned memory; ops read lengths
and pages on the device. Only attention's split of the keys is decided on the host, for the longest
possible row, so there is one graph for each of a few lengths (:func:`bucket`).

Paged rows come and go, so there are graphs for a few numbers of them (:func:`row_bucket`). Rows
that pad a bucket have no token: nothing of them is stored, and they see no keys. Proposed tokens
are verified as rows that share their sequence's pages.

All graphs of a run share one memory pool, whose tensors live for one step, and write results to one
tensor per number of rows; plans count segments for both (``exkv.overhead``). If logits would be
larger, or there is no memory, units take the readable route.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from exkv import devices, overhead
from exkv.batch import Batch, Factors, Lengths, RotaryTables
from exkv.cache import KVCache
from exkv.cache.layer import CacheLayer, InPlace
from exkv.cache.views import ContiguousView, Tensors
from exkv.caching_allocator import LARGE
from exkv.errors import Attempt, is_out_of_memory
from exkv.layers.attention import Attend
from exkv.layers.descriptions import (
    AttentionBlock,
    GatedBlock,
    Layer,
    LogitsHead,
    PlainBlock,
    try_describe,
)
from exkv.layers.mlp import Experts
from exkv.ops.attention import AttentionParams
from exkv.ops.experts import MOST_CHOOSING

from .bound_run import BoundRun, Logits, TokensAsRows
from .units import PlacedUnit

#: Number of graphs to keep for one run, the last used ones.
MOST_GRAPHS = 16
#: Graphs are made for steps with at most so many bytes of logits: those of 16, 8, 4, 2 rows and 1
#: row fit a segment of medium tensors together. Longer steps hide Python's overhead anyway.
MOST_LOGITS = LARGE - 1
#: For MLPs without a bound.
ANY_ROWS = 1 << 30
#: Smallest distance between two buckets, in tokens.
LEAST_STEP = 256


def bind(units: Sequence[PlacedUnit], kept: KVCache, dtype: torch.dtype) -> BoundRun | None:
    """Bind the longest prefix of the units that one graph can capture; None if it has no decoder
    layer."""
    parts = list(stretch(units, kept, dtype))
    if not any(part.store is not None for part in parts):
        return None
    return GraphRun(parts, dtype, capture)


def bucket(kv_len: int) -> int:
    """The length for which a call of ``kv_len`` keys is captured: at most a quarter more, or the
    next multiple of :data:`LEAST_STEP`."""
    step = max(1 << max((kv_len - 1).bit_length() - 3, 0), LEAST_STEP)
    return -(-kv_len // step) * step


def row_bucket(rows: int, most: int) -> int:
    """The number of paged rows for which a call of ``rows`` rows is captured: a power of two, or
    all ``most`` rows that the cache has and plans count."""
    return min(1 << (rows - 1).bit_length(), most)


# What is bound --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A unit; a decoder layer has its part of the cache, the head a vocabulary.

    Attributes:
        table: rows and pages of the cache's block table, with room for a row's longest bucket;
            zeros for contiguous rows.
    """

    unit: PlacedUnit
    module: nn.Module
    store: Attend | None
    table: tuple[int, int]
    vocabulary: int
    most_rows: int

    @property
    def is_head(self) -> bool:
        return self.vocabulary > 0


def stretch(units: Sequence[PlacedUnit], kept: KVCache, dtype: torch.dtype) -> Iterator[Part]:
    """The first units on one device that can be captured."""
    device, rows = units[0].device, ANY_ROWS
    for unit in units:
        if unit.device != device or unit.module is None or unit.host_experts:
            return
        described = try_describe(unit.module)
        if described is None:
            return
        store: Attend | None = None
        table = (0, 0)
        if isinstance(described, Layer):
            assert unit.spec.layer is not None
            layer = kept.layers[unit.spec.layer]
            place = layer.in_place(dtype)
            if place is None or not _is_captured(described):
                return
            rows = _most_rows(described.mlp, unit.module.get_submodule("mlp"))
            if rows == 0:
                return
            table = _table_size(layer, place) if place.paged else table
            # Over pages, the readable route asks the host only for the longest row.
            store = layer if place.paged else CapturedAttend(layer, place)
        size = described.projection.weight.size[0] if isinstance(described, LogitsHead) else 0
        yield Part(
            unit=unit,
            module=unit.module,
            store=store,
            table=table,
            vocabulary=size,
            most_rows=rows,
        )


def _is_captured(layer: Layer) -> bool:
    """Whether its attention can be, and it has an MLP."""
    attention = layer.attention
    if not isinstance(attention, AttentionBlock) or layer.beside is not None or layer.mlp is None:
        return False
    return not attention.params.chunk and attention.query_factors is None


def _table_size(layer: CacheLayer, place: InPlace) -> tuple[int, int]:
    """All rows, and the pages of the longest possible row, up to the bucket of its last step."""
    page = place.keys[0].shape[1]
    return layer.spec.batch_size, -(-bucket(layer.spec.capacity) // page)


def _most_rows(described: object, mlp: nn.Module) -> int:
    """The most rows of a step with which an MLP doesn't synchronize with the host."""
    if isinstance(described, GatedBlock | PlainBlock):
        return ANY_ROWS
    return MOST_CHOOSING if isinstance(mlp, Experts) and mlp.chooses_on_device else 0


class CapturedAttend:
    """A cache layer with tensors in place, and with lengths on the device."""

    def __init__(self, layer: CacheLayer, place: InPlace) -> None:
        self._storage = layer.spec.storage
        self._dtype = layer.spec.dtype
        self._tensors: Tensors = layer.tensors
        self._place = place
        room = place.keys[0].shape[1]
        #: A ring that is longer than the rows never wraps around.
        self._ring = place.ring if place.ring <= room else 0
        self._room = room

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Like :meth:`exkv.cache.layer.CacheLayer.attend`, for one token per row;
        ``batch.lengths`` are those of the bucket."""
        place, ring = self._place, self._ring
        place.append(k, v, batch.past_lens, ring)
        rows = len(batch.lengths.past)
        view = ContiguousView(
            stored={name: tensor[:rows] for name, tensor in self._tensors.items()},
            past_lens=batch.past_lens.clamp(max=ring - 1) if ring else batch.past_lens,
            kv_len=min(batch.lengths.kv_len, ring or self._room),
            ragged=True,
            window=0 if ring else params.window,
        )
        return self._storage.attend(q, view, params, self._dtype)


# The run --------------------------------------------------------------------------------------


class Recording(Protocol):
    """Captured ops."""

    def replay(self) -> None: ...


#: Records a step of a run, which writes to the run's buffers.
Record = Callable[[Callable[[], object], "GraphRun"], Recording]


class GraphRun:
    """A run that replays recordings over static buffers.

    Attributes:
        count: of its units, a head included.
        pool: the recordings' memory pool, set by the first.
    """

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, record: Record) -> None:
        assert parts[0].unit.device is not None
        self.count = len(parts)
        self.pool: Any = None
        self.device: torch.device = parts[0].unit.device
        self._parts = list(parts)
        self._dtype = dtype
        self._record = record
        self._buffers: dict[int, Buffers] = {}
        self._recordings: OrderedDict[tuple[int, int, bool], Recording] = OrderedDict()
        self._vocabulary = parts[-1].vocabulary
        self._most_rows = min(part.most_rows for part in parts)
        self._table_rows, self._table_width = max(part.table for part in parts)
        self._refused = False

    def takes(self, lengths: Lengths, logits: Logits) -> bool:
        """Whether each row has one token, or can have its tokens as rows, and logits are small."""
        if self._refused or min(lengths.new) < 1:
            return False
        mixed = isinstance(lengths.adapters, tuple)  # each row has its own matrices
        as_rows = self._table_rows > 0 and not mixed and logits == Logits.EACH
        if lengths.chunk > 1 and (not as_rows or lengths.snapshot_at):
            return False
        rows = self._captured_rows(lengths)
        if rows > self._most_rows:
            return False
        return rows * self._vocabulary * self._dtype.itemsize <= MOST_LOGITS

    def _captured_rows(self, lengths: Lengths) -> int:
        """Rows of the buffers for a call: a few more if rows are paged and alike."""
        rows = sum(lengths.new)
        mixed = isinstance(lengths.adapters, tuple)
        if mixed or not self._table_rows:
            return rows
        return row_bucket(rows, max(rows, self._table_rows))

    def __call__(
        self, x: torch.Tensor, lengths: Lengths, rotary: RotaryTables, logits: Logits
    ) -> torch.Tensor | None:
        if not self._parts:
            return None
        head = self._parts[-1].is_head and logits != Logits.NONE
        factors = rotary(lengths, self._dtype)
        if lengths.chunk == 1:
            return self._step(x, lengths, rotary, factors, head)
        rows = TokensAsRows(lengths)
        out = self._step(rows.split(x), rows.lengths, rotary, rows.factors(factors), head)
        return out if out is None or head else rows.joined(out)

    def _step(
        self,
        x: torch.Tensor,
        lengths: Lengths,
        rotary: RotaryTables,
        factors: Mapping[str, Factors],
        head: bool,
    ) -> torch.Tensor | None:
        """Run one token per row: replay its recording, or make one."""
        rows = self._captured_rows(lengths)
        if rows not in self._buffers:
            with Attempt():
                at = self.device, self._table_width
                self._buffers[rows] = Buffers(rows, x, rotary, factors, self._dtype, *at)
        if (buffers := self._buffers.get(rows)) is None:
            self._refused = True
            return None
        buffers.fill(x, lengths, factors)
        key = (rows, bucket(lengths.kv_len), head)
        recording = self._recordings.get(key)
        if recording is None:
            return self._run_and_record(key, buffers)[: len(lengths.new)]
        self._recordings.move_to_end(key)
        recording.replay()
        return buffers.outs[head][: len(lengths.new)].clone()

    def _run_and_record(self, key: tuple[int, int, bool], buffers: Buffers) -> torch.Tensor:
        """Run a call without a recording, and record it for the next one."""
        rows, kv_len, head = key
        parts = self._parts if head or not self._parts[-1].is_head else self._parts[:-1]
        modules = [(part.module, part.store) for part in parts]
        batch = buffers.batch(Lengths.uniform(rows, kv_len - 1, 1))

        def step() -> torch.Tensor:
            x = buffers.x
            for module, store in modules:
                x = module(x, batch, store)
            return x

        result = step()
        while len(self._recordings) >= MOST_GRAPHS:
            self._recordings.popitem(last=False)
        try:
            if head not in buffers.outs:
                buffers.outs[head] = torch.empty_like(result)
            out = buffers.outs[head]
            self._recordings[key] = self._record(lambda: out.copy_(step()), self)
        except RuntimeError as error:
            self._refused = True  # in this epoch: the readable route needs no pool
            if not is_out_of_memory(error):
                warnings.warn(
                    f"exkv: {self.device} captured no graph of a decode step, so steps are slower "
                    f"({str(error).splitlines()[0]})",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return result

    def release(self) -> None:
        self._parts = []
        self._recordings.clear()
        self._buffers.clear()


class Buffers:
    """The inputs of a step for one number of rows, on the device and in pinned memory, from which
    one copy fills them; and its results.

    Args:
        rows: of the step; a call may have fewer, and the others are padding.
        x, rotary, factors: of a call.
        pages: width of the block table; 0 for contiguous rows.

    Attributes:
        x: token ids int64 (rows, 1), or hidden states (rows, 1, hidden).
        outs: results of recordings, without the head and with it.
    """

    def __init__(
        self,
        rows: int,
        x: torch.Tensor,
        rotary: RotaryTables,
        factors: Mapping[str, Factors],
        dtype: torch.dtype,
        device: torch.device,
        pages: int,
    ) -> None:
        self._tables, self._paged = rotary, pages > 0
        self._names = list(factors)
        shapes = {
            "x": torch.empty((rows, *x.shape[1:]), dtype=x.dtype),
            "past": torch.empty(rows, dtype=torch.int32),
            "new": torch.empty(rows, dtype=torch.int32),
            "pages": torch.empty((rows, pages), dtype=torch.int32),
            **{
                f"{name} {i}": torch.empty((rows, *factor.shape[1:]), dtype=dtype)
                for name, pair in factors.items()
                for i, factor in enumerate(pair)
            },
        }
        nbytes = sum(devices.rounded(tensor.nbytes) for tensor in shapes.values())
        self._staged = devices.staging_buffer(nbytes, device).zero_()
        self._here = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._host, self._device = _views(self._staged, shapes), _views(self._here, shapes)
        self._host["pages"].fill_(-1)  # no page: reading it would give NaN
        self._copied: torch.Event | None = None
        self.x = self._device["x"]
        self.outs: dict[bool, torch.Tensor] = {}

    def batch(self, lengths: Lengths) -> Batch:
        """The buffers as a batch of these lengths."""
        return Batch(
            lengths=lengths,
            past_lens=self._device["past"],
            rotary={
                name: (self._device[f"{name} 0"], self._device[f"{name} 1"]) for name in self._names
            },
            write_index=None,
            last_index=None,
            tables=self._tables,
            new_lens=self._device["new"] if self._paged else None,
            block_table=self._device["pages"] if self._paged else None,
        )

    def fill(self, x: torch.Tensor, lengths: Lengths, factors: Mapping[str, Factors]) -> None:
        """Write a call's input, asynchronously."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still read the buffer
        rows, host = len(lengths.new), self._host
        for name, numbers in (("past", lengths.past), ("new", lengths.new)):
            host[name][:rows].copy_(torch.tensor(numbers, dtype=torch.int32))
            host[name][rows:].zero_()
        if lengths.pages is not None:
            host["pages"][:rows, : lengths.pages.shape[1]].copy_(lengths.pages)
        for name, pair in factors.items():
            for i, factor in enumerate(pair):
                host[f"{name} {i}"][:rows].copy_(factor)
        if x.device.type == "cpu":
            host["x"][:rows].copy_(x)
        self._here.copy_(self._staged, non_blocking=True)
        if self._staged.is_pinned():
            self._copied = torch.accelerator.current_stream(self._here.device).record_event()
        if x.device.type != "cpu":
            self.x[:rows].copy_(devices.move(x, self.x.device))


def _views(buffer: torch.Tensor, shapes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Views of a buffer with the shapes of these tensors, one after the other."""
    views, at = {}, 0
    for name, like in shapes.items():
        views[name] = buffer[at : at + like.nbytes].view(like.dtype).view(like.shape)
        at += devices.rounded(like.nbytes)
    return views


# CUDA graphs ----------------------------------------------------------------------------------

_streams: dict[torch.device, torch.cuda.Stream] = {}
#: Graphs whose capture failed. torch's pinned allocator keeps a pointer to such a graph, and asks
#: it during later captures whether an allocation belongs to it.
_failed: list[torch.cuda.CUDAGraph] = []


def capture(step: Callable[[], object], run: GraphRun) -> Recording:
    """Capture the step, whose kernels have all run before, as a CUDA graph.

    Raises:
        RuntimeError: something in it can't be captured, or there is no memory for it. Nothing of
            the capture remains.
    """
    if run.pool is None:
        run.pool = torch.cuda.graph_pool_handle()
    stream = _capture_stream(run.device)
    stream.wait_stream(torch.cuda.current_stream(run.device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        try:
            _captured(graph, step, run.pool)
        except BaseException:
            _abandon(graph, run.device, run.pool)
            raise
    torch.cuda.current_stream(run.device).wait_stream(stream)
    return graph


def _captured(graph: torch.cuda.CUDAGraph, step: Callable[[], object], pool: Any) -> None:
    # Other threads may continue to allocate meanwhile.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        step()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # it only reports that something failed before
            graph.capture_end()
        raise
    graph.capture_end()


def _abandon(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """Undo what a failed capture leaves open in torch's caching allocator.

    ``capture_end`` ends allocation to the pool only after CUDA has ended the capture without an
    error. Until it ends, the allocator frees no cached block when memory runs out.
    """
    with contextlib.suppress(RuntimeError):
        graph.pool()  # fails unless the capture ended: then the graph itself releases its pool
        return
    _failed.append(graph)
    for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):  # the capture failed before it got there
            undo(device.index, pool)


def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for captures on a device, since the default stream can't capture. cuBLAS allocates
    its workspace for the stream here, so that it is not in a graph's pool."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(_streams[device]):
            overhead.multiply(device)
        overhead.note_captures(device)
    return _streams[device]
