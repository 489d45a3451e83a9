"""Predict the workspace of a forward call by running the same code on shapes.

Each unit runs at the worst shape that its caches promise in a ``DryRun``, which follows the
storages that come and go. Plan and program can't drift apart, since they are the same program;
nothing is allocated, and a layer takes a few milliseconds. ``module_calls.py`` measures models of
other libraries.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import nn

from exkv import devices as accelerators
from exkv.batch import Batch, Lengths
from exkv.cache import CacheLayer, KVCache, Paged, Shared, make_layers
from exkv.cache.base import CacheOwner, HasConfig
from exkv.cache.paging.growth import any_pages
from exkv.cache.spec import LayerSpec, Prefix
from exkv.cache.state import StateLayer
from exkv.cache.stored_bits import storage_of
from exkv.caching_allocator import Rules
from exkv.devices import rounded
from exkv.layers import RotaryTables
from exkv.layers.descriptions import LowRank
from exkv.layers.linear import with_tensors
from exkv.layers.mlp import lay_on_host
from exkv.models import Unit
from exkv.models.adapters import adapted
from exkv.models.bound_run import MOST_TOKENS
from exkv.models.native_run import most_bytes
from exkv.ops.weight_groups import MOST_ROWS

from . import dry_run
from .dry_run import DryRun, ShapeTensor
from .model import ModelShape
from .reserved import CallTrace, reserved_bytes
from .unit_call import Wanted, run_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The largest forward calls that are planned for, and probed after loading.

    Attributes:
        max_input_len: tokens per row that one call handles at once.
        caches: the caches in use; without any, a chunk attends to itself.
        last_id_only: whether logits are only wanted for each row's last token.
        logits_len: tokens per row whose logits are made at once; None for all of a chunk.
        adapters: that a call may go through.
    """

    max_input_len: int
    caches: tuple[CacheShape, ...]
    last_id_only: bool
    adapters: tuple[str, ...] = ()
    logits_len: int | None = None

    @property
    def logits(self) -> Wanted:
        return Wanted(self.last_id_only, self.logits_len)

    def worst_calls(self) -> list[tuple[CacheShape | None, Lengths]]:
        """Calls that may be the worst, for every cache: a full chunk after a full past in all rows,
        and one that completes as many groups of tokens as any; where that leaves no past, also a
        chunk shorter by one token after one token; and with several rows, also the same with rows
        of unlike length. Each once without adapters, and once with each adapter for all rows: no
        part of a call with several is larger."""
        calls: list[tuple[CacheShape | None, Lengths]]
        calls = [(cache, call) for cache in self.caches for call in self._calls(cache)]
        calls = calls or [(None, Lengths.uniform(1, 0, self.max_input_len))]
        chosen = (None, *self.adapters)
        return [(cache, replace(call, adapters=each)) for each in chosen for cache, call in calls]

    def _calls(self, cache: CacheShape) -> list[Lengths]:
        longest = min(self.max_input_len, cache.call_len or self.max_input_len)
        chunk = min(longest, cache.max_seq_len - cache.shared_len)
        ends = sorted({cache.max_seq_len, cache.busiest_end(chunk)}, reverse=True)
        calls = [call for end in ends for call in self._calls_to(cache, end, chunk)]
        if chunk > 1 and chunk == cache.max_seq_len - cache.shared_len:
            # A ring that holds a token is laid out before the chunk; an empty one is not.
            calls += self._calls_to(cache, cache.max_seq_len, chunk - 1)
        return calls

    def _calls_to(self, cache: CacheShape, end: int, chunk: int) -> list[Lengths]:
        rows, past = cache.batch_size, end - chunk
        calls = [Lengths.uniform(rows, past, chunk)]
        if rows > 1 and past > cache.shared_len:
            calls.append(Lengths(past=(past - 1, *[past] * (rows - 1)), new=(chunk,) * rows))
        elif rows > 1:
            calls.append(Lengths(past=(past,) * rows, new=(chunk - 1, *[chunk] * (rows - 1))))
        growth = cache.layers[0].spec.growth
        if isinstance(growth, Paged):
            calls = [any_pages(growth, rows, call) for call in calls]
        return calls


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """A cache as the arithmetic sees it: its layers' shapes, whether or not they have storage.

    Attributes:
        call_len: most tokens that a call adds to a row; None for the model's limit.
    """

    kind: type[KVCache]
    layers: tuple[CacheLayer, ...]
    batch_size: int
    max_seq_len: int
    call_len: int | None = None

    @classmethod
    def of(cls, cache: KVCache) -> CacheShape:
        return cls(
            kind=type(cache),
            layers=tuple(cache.layers),
            batch_size=cache.batch_size,
            max_seq_len=cache.max_seq_len,
            call_len=cache.call_len,
        )

    @classmethod
    def planned(
        cls,
        model: HasConfig,
        kind: type[KVCache],
        max_seq_len: int,
        batch_size: int,
        *,
        snapshots: bool = False,
    ) -> CacheShape:
        """The shape of a cache that isn't built."""
        specs = kind.layer_specs(model, max_seq_len, batch_size, snapshots=snapshots)
        layers = tuple(make_layers(specs))
        return cls(
            kind=kind,
            layers=layers,
            batch_size=batch_size,
            max_seq_len=layers[0].spec.max_seq_len,
        )

    @property
    def shared_len(self) -> int:
        """Most tokens that rows of a fork begin with; they are never run."""
        prefix = self.layers[0].spec.prefix
        return max(prefix.lens) if prefix else 0

    def busiest_end(self, chunk: int) -> int:
        """The last length that rows can reach by a chunk that completes as many groups of tokens as
        any chunk does."""
        arranged = [layer.spec.arrangement for layer in self.layers]
        group, alone = (max(getattr(a, name) for a in arranged) for name in ("group", "alone"))
        over, others = chunk % group, self.max_seq_len - alone
        if over == 0 or others % group < over:
            return self.max_seq_len
        end = alone + others // group * group + over - 1
        return end if end >= chunk else self.max_seq_len

    def resized(
        self, *, batch_size: int | None = None, max_seq_len: int | None = None
    ) -> CacheShape:
        """With another number of rows, or length."""
        specs = [
            replace(
                layer.spec,
                batch_size=batch_size or layer.spec.batch_size,
                max_seq_len=max_seq_len or layer.spec.max_seq_len,
            )
            for layer in self.layers
        ]
        return replace(
            self,
            layers=self._lent(tuple(make_layers(specs))),
            batch_size=batch_size or self.batch_size,
            max_seq_len=max_seq_len or self.max_seq_len,
        )

    def as_kind(self, model: HasConfig, kind: type[KVCache]) -> CacheShape:
        """The same rows and lengths, stored as this kind does."""
        specs = kind.layer_specs(model, self.max_seq_len, self.batch_size)
        pairs = zip(specs, self.layers, strict=True)
        specs = [replace(spec, state=layer.spec.state) for spec, layer in pairs]  # with snapshots
        return replace(self, kind=kind, layers=self._lent(tuple(make_layers(specs))))

    def made(self, model: CacheOwner) -> KVCache:
        """The cache itself, for a model."""
        return self.kind.of(model, [layer.spec for layer in self.layers], self.call_len)

    def stored(self, pairs: Mapping[int, str]) -> CacheShape:
        """With keys and values of these layers in a pair of bits (``exkv.cache.stored_bits``)."""
        specs = [layer.spec for layer in self.layers]
        for layer, pair in pairs.items():
            specs[layer] = replace(specs[layer], storage=storage_of(pair))
        return replace(self, layers=self._lent(tuple(make_layers(specs))))

    def _lent(self, layers: tuple[CacheLayer, ...]) -> tuple[CacheLayer, ...]:
        """The layers, sharing another cache's storage where this cache's own do."""
        for layer, like in zip(layers, self.layers, strict=True):
            layer.lender = like.lender
        return layers


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that one forward call through a unit takes, and those of its output; and the
    most that it reserves on a device that gives memory in segments, 0 on others."""

    workspace: int
    output: int
    reserved: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Predicted:
    """One call through a unit; ``growth`` is what its cache takes beside the tensors while it
    grows, ``reserved`` memoizes replays."""

    peak: Peak
    trace: CallTrace
    growth: int
    reserved: dict[tuple[_Predicted, Rules], int] = field(default_factory=dict)

    def reserved_after(self, before: _Predicted, rules: Rules) -> int:
        """Bytes reserved by this call after the same call through the unit before it, and after
        itself, since the next layer may be alike."""
        key = before, rules
        if key not in self.reserved:
            calls = [before.trace, self.trace, self.trace]
            self.reserved[key] = max(reserved_bytes(calls, rules), rules.share(self.growth))
        return self.reserved[key]


#: Memo of predictions, for units of a model and of its variants, which share its rotary tables;
#: formats, shapes and lengths are the key.
_predicted: weakref.WeakKeyDictionary[RotaryTables, dict[object, _Predicted]]
_predicted = weakref.WeakKeyDictionary()


def predict_workspaces(model: ModelShape, promise: Promise, device_type: str) -> list[Peak]:
    """The worst promised forward call in each unit: its peak with input and output, its output
    alone, and what it reserves."""
    memo = _predicted.setdefault(model.rotary, {})
    calls = promise.worst_calls()
    rules = accelerators.allocator_rules(device_type)
    before: list[_Predicted] = []
    peaks = []
    for unit in model.units:
        worst = []
        for cache, lengths in calls:
            store = cache.layers[unit.spec.layer] if cache and unit.spec.layer is not None else None
            plain = replace(lengths, adapters=None)
            changed = _adapter_shapes(model, unit, lengths)
            head = unit.index == len(model.units) - 1
            logits = promise.logits if head else Wanted()
            case = (*case_of(unit, store, plain), changed, device_type, logits)
            if case not in memo:
                memo[case] = _call_peak(model, unit, store, lengths, device_type, logits)
            worst.append(memo[case])
        peak = Peak(
            max(each.peak.workspace for each in worst), max(each.peak.output for each in worst)
        )
        if rules is not None:
            pairs = zip(worst, before or worst, strict=True)
            peak = replace(peak, reserved=max(a.reserved_after(b, rules) for a, b in pairs))
        peaks.append(peak)
        before = worst
    if device_type != "cpu" or not dry_run.has_kernel("bound_run", device_type):
        return peaks
    lengths_of_calls = [lengths for _, lengths in calls]
    return [
        *(_or_bound(peak, model, lengths_of_calls) for peak in peaks[:-1]),
        _or_bound(peaks[-1], model, lengths_of_calls, promise.logits_len),
    ]


def _adapter_shapes(model: ModelShape, unit: Unit, lengths: Lengths) -> tuple:
    """What distinguishes a unit in a call with an adapter: where the adapter's matrices are."""
    if not isinstance(lengths.adapters, str):
        return ()
    shapes = model.adapters[lengths.adapters].shapes(unit.index)
    return tuple((path, a.shape, b.shape) for path, (a, b) in shapes.items())


def _or_bound(
    peak: Peak, model: ModelShape, calls: Sequence[Lengths], most: int | None = None
) -> Peak:
    """The peak, or that of a bound run if it is higher: a call of few tokens holds the tensors
    between all parts of its units beside the logits, or beside what the current part takes.

    Args:
        most: tokens per row for which the peak is, where a call brings more.
    """
    rank = max((adapter.rank for adapter in model.adapters.values()), default=0)
    beside = max(most_bytes(model.config, model.dtype, lengths, rank) for lengths in calls)
    tokens = max(len(call.new) * min(call.chunk, most or call.chunk) for call in calls)
    of_few = max(peak.workspace * min(tokens, MOST_TOKENS) // tokens, peak.output)
    return replace(peak, workspace=max(peak.workspace, beside + of_few))


def case_of(unit: Unit, store: CacheLayer | None, lengths: Lengths) -> tuple:
    """A key under which decoder layers of one shape, with stores of one shape, are one case;
    embedding and head have their own, and don't see what a cache holds already, but have a call's
    block table beside them."""
    if unit.spec.layer is None:
        table = None if lengths.pages is None else lengths.pages.shape
        return unit.name, unit.spec.kind, lengths.new, lengths.ragged, table
    after = store.prefetches if store is not None else None
    specs = (layer.spec if layer is not None else None for layer in (store, after))
    return unit.spec.kind, unit.layout, *specs, lengths, _in_host_memory(unit, lengths)


def _in_host_memory(unit: Unit, lengths: Lengths) -> frozenset[int]:
    """Experts in host memory, or as many others, where that makes a difference: a call of more
    tokens takes as much as with all of them on the device."""
    tokens = len(lengths.new) * lengths.chunk
    if not unit.host_experts or tokens > MOST_ROWS:
        return frozenset()
    count = len(unit.expert_bytes)
    return frozenset(range(count - len(unit.host_experts), count))


def _call_peak(
    model: ModelShape,
    unit: Unit,
    store: CacheLayer | None,
    lengths: Lengths,
    device_type: str,
    logits: Wanted,
) -> _Predicted:
    run = DryRun.planned_on(device_type)
    out = dry_call(run, model, unit, store, lengths, logits)
    growth = 0 if store is None else store.growth_peak(device_type)
    storage = out.meta.untyped_storage()
    trace = CallTrace(run.trace, run.inputs, run.number_of(storage))
    return _Predicted(Peak(max(run.peak, growth), rounded(storage.nbytes())), trace, growth)


def dry_call(
    run: DryRun,
    model: ModelShape,
    unit: Unit,
    store: CacheLayer | None,
    lengths: Lengths,
    logits: Wanted,
) -> ShapeTensor:
    """A unit's output for a forward call; the run counts from the unit's input on.

    Args:
        store: the unit's part of a cache, from which a full one is made.
    """
    device, device_type = run.device, run.kernels
    with run, torch.no_grad():
        with device:
            module = _on_shapes(model, unit, lengths, run)
        if store is not None:
            store = _full(store, device, device_type)
        # Made on the host and sent, so that only what arrives counts on the device.
        batch = Batch.on(device, lengths, model.rotary, model.dtype)
        run.restart([getattr(batch, each.name) for each in fields(batch)])
        out = run_unit(model, unit, module, store, batch, logits)
    assert isinstance(out, ShapeTensor)
    return out


def _on_shapes(model: ModelShape, unit: Unit, lengths: Lengths, run: DryRun) -> nn.Module:
    """The unit's module, with the call's adapter on the default device."""
    tensors, name = run.parameters(unit.spec.shapes), lengths.adapters
    module = with_tensors(unit.spec.like.module, tensors, watched=True)
    lay_on_host(module, _in_host_memory(unit, lengths))
    if not isinstance(name, str):
        return module
    changes = {
        path: LowRank(a=_like(a), b=_like(b))
        for path, (a, b) in model.adapters[name].shapes(unit.index).items()
    }
    return adapted(module, {name: changes}, name)


def _like(half: torch.Tensor) -> torch.Tensor:
    return torch.empty(half.shape, dtype=half.dtype)


def _full(layer: CacheLayer, device: torch.device, device_type: str) -> CacheLayer:
    """A layer like this one, before the same next one, grown to its full length."""
    pair = [like.spec for like in (layer, layer.after) if like is not None]
    full = make_layers([spec.alone for spec in pair])[0]
    full.allocate(device, full.spec.capacity)
    if layer.beside is not None:
        full.beside = StateLayer(layer.beside.spec)
        full.beside.allocate(device)
    full.offloaded = (
        full.spec.residence.storage_device(torch.device(device_type)).type != device_type
    )
    prefix = full.spec.prefix
    if prefix is not None and full.spec.state is None:  # fetched where it is in host memory
        storage_device = full.spec.residence.storage_device(device)
        full.shared = _zeros(full.spec, prefix, storage_device)
    return full


def _zeros(spec: LayerSpec, prefix: Prefix, device: torch.device) -> Shared:
    """The shared prefix that a fork's layer begins with, all zeros."""
    shape = (max(prefix.rows) + 1, max(prefix.lens), spec.num_heads, spec.head_dim)
    layout = spec.storage.layout(shape, spec.dtype)
    tensors = {name: torch.zeros(s, dtype=t, device=device) for name, (s, t) in layout.items()}
    return Shared(tensors, list(prefix.rows), list(prefix.lens))
