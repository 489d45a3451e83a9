"""``plan_device_map``: where every block of a transformers model goes, cache and workspace counted.

The model is built without memory and run once on fake tensors, at the longest prompt that is
promised: what its blocks take there is their workspace. exkv's planner does the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from exkv.devices import rounded
from exkv.planning import Budget, Plan, UnitCost, make_budgets
from exkv.planning.budgets import Devices, Sizes
from exkv.planning.placement import place_units

from .attention import NAME
from .cache import HFCache
from .layer import HFLayer

#: Of a workspace, what is added for what fake tensors don't show: one part of so many.
_ALLOWANCE = 16
#: Copies of the last logits, in float32, that generate makes to choose a token.
_COPIES_OF_LOGITS = 6


def plan_device_map(
    model: PreTrainedModel | PreTrainedConfig,
    *,
    max_seq_len: int,
    batch_size: int = 1,
    max_input_len: int | None = None,
    cache: str = "dynamic",
    cache_config: Mapping[str, Any] | None = None,
    devices: Devices | None = None,
    reserve: Sizes | None = None,
    objective: str = "pack",
    dtype: torch.dtype | None = None,
) -> dict[str, str]:
    """Module -> device, for ``from_pretrained(device_map=...)`` or accelerate's
    ``dispatch_model``.

    It is good for ``HFCache(config, cache, max_seq_len=max_seq_len, **cache_config)``, calls of up
    to ``max_input_len`` tokens a row, and the attention "exkv".

    Args:
        model: a decoder, loaded or not, or its config.
        cache: kind of cache, with the settings of ``cache_config``.
        devices, reserve: as of ``exkv.planning.make_budgets``.
        objective: as of ``Model.load``: "pack", "balance", "fewest".
        dtype: of the weights; None for the config's, or float32.

    Raises:
        PlacementError: it does not fit; the error says where, and by how much.
        ValueError: an encoder-decoder, or a setting that makes no sense.
    """
    config = model if isinstance(model, PreTrainedConfig) else model.config
    if config.is_encoder_decoder:
        raise ValueError("plan_device_map serves decoders; this is an encoder-decoder's config")
    if dtype is None:
        given = getattr(config, "dtype", None) or torch.float32
        dtype = given if isinstance(model, PreTrainedConfig) else model.dtype
    budgets = make_budgets(devices, reserve=reserve)
    chunk = min(max_input_len or max_seq_len, max_seq_len)
    wish = _Wish(max_seq_len, batch_size, chunk, cache, dict(cache_config or {}), dtype)
    units = _measured(config, wish)
    plan = place_units(_costs(units, budgets), budgets, objective=objective)
    return _device_map(units, plan)


@dataclass(frozen=True, slots=True)
class _Wish:
    max_seq_len: int
    batch_size: int
    chunk: int
    kind: str
    options: dict[str, Any]
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class _Unit:
    """A block, or what comes before or behind the blocks; in bytes.

    Attributes:
        tensors: identity -> bytes of its parameters and buffers.
        follows: modules without parameters that are placed where this one is.
    """

    name: str
    module: nn.Module
    tensors: dict[int, int]
    cache: int = 0
    workspace: int = 0
    logits: int = 0
    follows: list[str] = field(default_factory=list)


class Storages(TorchDispatchMode):
    """Counts the storages that ops make, while they live.

    Attributes:
        current, peak: bytes, each storage rounded as allocators do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default:  # whose fake knows bfloat16 only
            out = args[0].new_empty((args[0].shape[0], args[1].shape[-1]))
        else:
            out = func(*args, **(kwargs or {}))
        known = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and _key(x) not in known:
                self._follow(x.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._alive:
            return
        self._alive[storage._cdata] = nbytes = rounded(storage.nbytes())
        weakref.finalize(storage, self._forget, storage._cdata)
        self.current += nbytes
        self.peak = max(self.peak, self.current)

    def _forget(self, storage: int) -> None:
        self.current -= self._alive.pop(storage, 0)


def _key(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _measured(config: PreTrainedConfig, wish: _Wish) -> list[_Unit]:
    """The model's units with what each takes."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = AutoModelForCausalLM.from_config(
            config, dtype=wish.dtype, attn_implementation=NAME
        ).eval()
        units = _units_of(model)
        cache = HFCache(config, wish.kind, max_seq_len=wish.max_seq_len, **wish.options)
        name = "cache_params" if "mamba" in type(model).__name__.lower() else "past_key_values"
        with Storages():
            model(torch.zeros((wish.batch_size, 1), dtype=torch.int64), **{name: cache})
        _count_caches(units, cache)
        for layer in cache.attention_layers:  # whose storage is there, and is no workspace
            past = [wish.max_seq_len - wish.chunk] * wish.batch_size
            layer.lens, layer.written = past, past
        ids = torch.zeros((wish.batch_size, wish.chunk), dtype=torch.int64)
        with Storages() as storages, _following(units, storages):
            model(ids, **{name: cache}, **_last_logits_only(model))
    vocabulary = config.get_text_config(decoder=True).vocab_size
    logits = rounded(wish.batch_size * vocabulary * 4) * _COPIES_OF_LOGITS
    units[0].logits = units[-1].logits = logits  # made on the last, copied to the first
    return units


def _last_logits_only(model: PreTrainedModel) -> dict[str, int]:
    """What ``generate`` passes for that, where the model knows it."""
    supports = getattr(model, "_supports_logits_to_keep", None)
    return {"logits_to_keep": 1} if supports is not None and supports() else {}


def _units_of(model: PreTrainedModel) -> list[_Unit]:
    """In the order of their registration; modules without parameters go with the first."""
    blocks = set(model._no_split_modules or ())
    holders = {
        outer
        for name, module in model.named_modules()
        if type(module).__name__ in blocks
        for outer in _outer_names(name)
    }
    units: list[_Unit] = []
    follows: list[str] = []
    for name, module in _children(model, "", holders):
        tensors = {_key(x): rounded(x.nbytes) for x in (*module.parameters(), *module.buffers())}
        if any(True for _ in module.parameters()):
            units.append(_Unit(name, module, tensors))
        else:
            follows.append(name)
    units[0].follows = follows
    return units


def _outer_names(name: str) -> Iterator[str]:
    """Of all modules in which this one lies."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        yield ".".join(parts[:count])


def _children(module: nn.Module, prefix: str, holders: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Modules as large as they can be on one device."""
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if full in holders:
            yield from _children(child, f"{full}.", holders)
        else:
            yield full, child


def _count_caches(units: Sequence[_Unit], cache: HFCache) -> None:
    """Add what each layer of a cache takes to the unit in which the layer lies."""
    unit_of = {
        index: unit
        for unit in units
        for module in unit.module.modules()
        if isinstance(index := getattr(module, "layer_idx", None), int)
    }
    for index, layer in enumerate(cache.layers):
        if index in unit_of:
            unit_of[index].cache += _layer_bytes(layer)


def _layer_bytes(layer: Any) -> int:
    """Bytes of a layer's keys, values and states once it is full."""
    states = 0
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        kept = (*layer.conv_states.values(), *layer.recurrent_states.values())
        states = sum(rounded(state.nbytes) for state in kept if state is not None)
    if not isinstance(layer, HFLayer) or layer.store is None:
        return states
    return states + layer.store.bytes_needed("meta")


@contextmanager
def _following(units: Sequence[_Unit], storages: Storages) -> Iterator[None]:
    """While a model runs, note the peak within each unit: of all that is alive then, since the
    model itself holds some of it as long as it runs, e.g. its embeddings."""

    def begins(module: nn.Module, *_: Any) -> None:
        storages.peak = storages.current

    def ends(module: nn.Module, *_: Any) -> None:
        unit = of[id(module)]
        unit.workspace = max(unit.workspace, storages.peak)

    of = {id(unit.module): unit for unit in units}
    handles = [
        handle
        for unit in units
        for handle in (
            unit.module.register_forward_pre_hook(begins),
            unit.module.register_forward_hook(ends),
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _costs(units: Sequence[_Unit], budgets: Sequence[Budget]) -> list[UnitCost]:
    kinds = {budget.device.type for budget in budgets}
    costs = []
    for index, unit in enumerate(units):
        shared = {}
        for other in range(index):
            both = unit.tensors.keys() & units[other].tensors.keys()
            if nbytes := sum(unit.tensors[key] for key in both):
                shared[other] = nbytes
        weights = sum(unit.tensors.values())
        costs.append(
            UnitCost(
                name=unit.name,
                weights=weights,
                cache=unit.cache,
                workspace=dict.fromkeys(kinds, unit.workspace + unit.workspace // _ALLOWANCE),
                logits=unit.logits,
                traffic=weights + unit.cache,
                shared=shared,
            )
        )
    return costs


def _device_map(units: Sequence[_Unit], plan: Plan) -> dict[str, str]:
    placed = {unit.name: str(unit.device) for unit in plan.units}
    first = placed[units[0].name]
    return {**placed, **dict.fromkeys(units[0].follows, first)}
