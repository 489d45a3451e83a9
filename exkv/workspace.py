"""Predict the workspace of a forward call: the very same code, run on fake tensors.

Each unit runs under ``FakeTensorMode`` at the worst shape that its caches promise, while a
dispatch mode follows the storages that come and go. Plan and program can't drift apart, since
they are the same program; nothing is allocated, and a layer takes some 15 ms.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from exkv.batch import Batch, Lengths
from exkv.cache import CacheLayer, KVCache, NoCacheLayer
from exkv.cache.int8 import Int8Layer
from exkv.devices import rounded
from exkv.models import Transformer, Unit
from exkv.ops import REFERENCES, SHORTENED, has_kernel


class PeakTracker(TorchDispatchMode):
    """Counts bytes of storages born on one device type while the mode is on, and their peak."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.current = 0
        self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            out = self._look_inside(func, args, kwargs)
        if out is not NotImplemented:
            return out
        given = {
            argument.untyped_storage()._cdata
            for argument in tree_leaves((args, kwargs))
            if isinstance(argument, torch.Tensor)
        }
        out = func(*args, **kwargs)
        tree_map_only(torch.Tensor, lambda tensor: self._follow(tensor, given), out)
        return out

    def _look_inside(self, func, args, kwargs):
        """Run what an op consists of, if it is made of others, so that their storages count."""
        if func.namespace == "exkv":
            name = func.name().removeprefix("exkv::")
            if not has_kernel(name, self.device_type):
                args = SHORTENED[name](*args) if name in SHORTENED else args
                return REFERENCES[name](*args, **kwargs)
        elif func.namespace == "aten":
            return func.decompose(*args, **kwargs)  # SDPA, for one, converts its mask
        return NotImplemented

    def _follow(self, tensor: torch.Tensor, given: set[int]) -> None:
        """Count the tensor's storage until it dies, unless it is a view of one that was given."""
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in given or key in self._alive:
            return
        nbytes = rounded(storage.nbytes())
        self._alive.add(key)
        weakref.finalize(storage, self._forget, key, nbytes)
        self.current += nbytes
        self.peak = max(self.peak, self.current)

    def _forget(self, key: int, nbytes: int) -> None:
        self._alive.discard(key)
        self.current -= nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a forward call may be asked: planned for, probed after loading.

    Attributes:
        max_input_len: tokens a row that one call handles at once.
        caches: the caches in use; without any, a chunk attends to itself.
        last_id_only: whether logits are only wanted for each row's last token.
    """

    max_input_len: int
    caches: tuple[CacheShape, ...]
    last_id_only: bool

    @classmethod
    def of(cls, model: Transformer, *, last_id_only: bool) -> Promise:
        caches = tuple(CacheShape.of(cache) for cache in model.caches)
        return cls(max_input_len=model.max_input_len, caches=caches, last_id_only=last_id_only)

    def worst_calls(self) -> list[tuple[CacheShape | None, Lengths]]:
        """For every cache a full chunk after a full past in all rows; where there are several
        rows, also the same with rows of unlike length."""
        if not self.caches:
            return [(None, Lengths.uniform(1, 0, self.max_input_len))]
        return [(cache, call) for cache in self.caches for call in self._calls(cache)]

    def _calls(self, cache: CacheShape) -> list[Lengths]:
        chunk = min(self.max_input_len, cache.max_seq_len)
        rows, past = cache.batch_size, cache.max_seq_len - chunk
        calls = [Lengths.uniform(rows, past, chunk)]
        if rows > 1 and past > 0:
            calls.append(Lengths(past=(past - 1, *[past] * (rows - 1)), new=(chunk,) * rows))
        elif rows > 1 and chunk > 1:
            calls.append(Lengths(past=(0,) * rows, new=(chunk - 1, *[chunk] * (rows - 1))))
        return calls


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """A cache as the arithmetic sees it: its layers' shapes, whether or not they have storage."""

    layers: tuple[CacheLayer, ...]
    batch_size: int
    max_seq_len: int

    @classmethod
    def of(cls, cache: KVCache) -> CacheShape:
        return cls(
            layers=tuple(cache.layers),
            batch_size=cache.batch_size,
            max_seq_len=cache.max_seq_len,
        )

    def with_length(self, max_seq_len: int) -> CacheShape:
        layers = tuple(layer.with_spec(max_seq_len=max_seq_len) for layer in self.layers)
        return replace(self, layers=layers, max_seq_len=max_seq_len)

    def in_8_bits(self) -> CacheShape:
        return replace(self, layers=tuple(Int8Layer(layer.spec) for layer in self.layers))


def predict_workspaces(model: Transformer, promise: Promise, device_type: str) -> list[int]:
    """Peak bytes of the worst promised forward call in each unit, input and output included."""
    known: dict[object, int] = {}
    peaks = []
    for unit in model.units:
        # Decoder layers of one shape are one case; embedding and head are their own.
        case = unit.name if unit.spec.layer is None else _layer_case(unit, promise)
        if case not in known:
            known[case] = max(
                _call_peak(model, unit, cache, lengths, device_type, promise.last_id_only)
                for cache, lengths in promise.worst_calls()
            )
        peaks.append(known[case])
    return peaks


def _layer_case(unit: Unit, promise: Promise) -> object:
    shapes = tuple((name, tensor.shape) for name, tensor in unit.shapes.items())
    stores = (cache.layers[unit.spec.layer] for cache in promise.caches)
    return shapes, tuple((type(store), store.spec) for store in stores)


def _call_peak(
    model: Transformer,
    unit: Unit,
    cache: CacheShape | None,
    lengths: Lengths,
    device_type: str,
    last_id_only: bool,
) -> int:
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, 0)
    tracker = PeakTracker(device_type)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        with device:
            module = unit.spec.build()
        store = None
        if cache is not None and unit.spec.layer is not None:
            store = cache.layers[unit.spec.layer].with_spec()
            store.allocate(device)
        with tracker:
            run_unit(model, unit, module, store, lengths, device, last_id_only=last_id_only)
    return tracker.peak


def run_unit(
    model: Transformer,
    unit: Unit,
    module: nn.Module,
    store: CacheLayer | None,
    lengths: Lengths,
    device: torch.device,
    *,
    last_id_only: bool,
) -> None:
    """One unit's part of a forward call, on zeros; the prediction and the probe alike."""
    rows, chunk = len(lengths.past), lengths.chunk
    batch = Batch.on(device, lengths, model.rotary, model.dtype)
    if unit.index == 0:
        x = torch.zeros((rows, chunk), dtype=torch.int64, device=device)
    else:
        length = 1 if last_id_only and unit is model.units[-1] else chunk
        shape = (rows, length, model.config.hidden_size)
        x = torch.zeros(shape, dtype=model.dtype, device=device)
    module(x, batch, store or NoCacheLayer())
