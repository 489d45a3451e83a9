"""Measure the memory of a transformers model's blocks, by running its own code on shapes.

The model is built here, split into units, and called as ``generate`` would call it; the planner
measures the calls (``exkv.planning.module_calls``).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    EncoderDecoderCache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache

from exkv.devices import allocator_rules, rounded
from exkv.planning.dry_run import DryRun, ShapeTensor
from exkv.planning.module_calls import MeasuredModule, ModuleCalls, argument_key, module_key
from exkv.planning.reserved import reserved_beside

from .attention import NAME, planned_padding
from .cache import HFCache
from .layer import UNLIMITED, HFLayer
from .lazy import LazyTensor
from .static import HFStaticLayer
from .versions import LinearAttentionCacheLayerMixin, cache_argument, no_init_weights

#: Float32 copies of the last logits that ``generate`` makes to choose a token.
_COPIES_OF_LOGITS = 6
#: Int64 tensors (B, T) that ``generate`` holds: ids, masks, positions, and the caller's own.
_COPIES_OF_IDS = 6
#: Tokens in the first call of an encoder-decoder's decoder, by default.
_FIRST_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The largest calls that ``generate`` may make.

    Attributes:
        max_input_len: tokens per row of one call; None for all, or, for an encoder-decoder's
            decoder, for the few of its first call.
        encoder_len: tokens of the encoder's input; None for ``max_seq_len``. (Whisper's features
            have a fixed length.)
        cache, cross_cache: kinds of the decoder's own cache, and of the one for the encoder's keys.
    """

    max_seq_len: int
    batch_size: int = 1
    max_input_len: int | None = None
    encoder_len: int | None = None
    cache: str = "dynamic"
    cache_config: Mapping[str, Any] = field(default_factory=dict)
    cross_cache: str = "dynamic"
    cross_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False, kw_only=True)
class Unit(MeasuredModule):
    """A block, or a module before or after the blocks; sizes in bytes.

    Attributes:
        tensors: identity -> bytes of its parameters and buffers.
        caches: bytes of each of its layers in a cache.
        follows: names of other modules and tensors that are placed with this one: those without
            parameters, and those that share its tensors.
    """

    name: str
    tensors: dict[int, int]
    caches: list[int] = field(default_factory=list)
    follows: list[str] = field(default_factory=list)

    @property
    def cache(self) -> int:
        return sum(self.caches)


def measured(
    config: PretrainedConfig, dtype: torch.dtype, promise: Promise, device_type: str
) -> list[Unit]:
    """Measure each of the model's units on a type of device.

    Raises:
        ValueError: transformers can't build the model from its config alone, the model's code
            can't run on shapes, or its encoder takes neither ids nor features.
    """
    run, rules = DryRun.planned_on(device_type), allocator_rules(device_type)
    with run, torch.no_grad(), run.device:
        model = _built(config, dtype)
        units = _units_of(model)
        with _on_shapes(model):
            calls = _Calls(model, promise)
            calls.first()  # which creates caches and states
            calls.make_room()
            layers = _layers_by_unit(model, units, calls.caches)
            for unit, kept in layers.items():
                unit.caches = list(map(_layer_bytes, kept))
            kinds = {unit: _kind(unit.module, layers[unit]) for unit in units}
            with ModuleCalls(run, rules, Cache, _argument_key).following(kinds):
                calls.measure(run)
    for unit, kept in layers.items():
        unit.workspace = max(unit.workspace, sum(map(_growth, kept)))
    vocabulary = config.get_text_config(decoder=True).vocab_size
    logits = rounded(promise.batch_size * vocabulary * 4) * _COPIES_OF_LOGITS
    for unit in units[0], units[-1]:  # created with the last, copied to the first
        unit.workspace = max(unit.workspace, logits + calls.held_ids)
        if rules is not None:
            unit.reserved = max(unit.reserved, reserved_beside(logits + calls.held_ids, [], rules))
    return _joined(units)


def _joined(units: Sequence[Unit]) -> list[Unit]:
    """Join units that share a tensor (tied embeddings, a block of several layers): accelerate ties
    weights again after placing them, so they must be on one device."""
    joined: list[Unit] = []
    for unit in units:
        first = next((each for each in joined if each.tensors.keys() & unit.tensors.keys()), None)
        if first is None:
            joined.append(unit)
            continue
        first.follows += [unit.name, *unit.follows]
        first.tensors |= unit.tensors
        first.caches += unit.caches
        first.workspace = max(first.workspace, unit.workspace)
        first.reserved = max(first.reserved, unit.reserved)
    return joined


def _built(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model with the attention "exkv", or with transformers' default if it has its own
    kinds."""
    auto = _auto_class(config)
    try:
        with no_init_weights():  # which needs values
            try:
                model = auto.from_config(config, dtype=dtype, attn_implementation=NAME)
            except KeyError as error:  # not among the model's own kinds
                if error.args != (NAME,):
                    raise
                model = auto.from_config(config, dtype=dtype, attn_implementation=None)
    except Exception as error:
        raise ValueError(
            f"transformers can't build {auto._model_mapping[type(config)].__name__} from this "
            f"config: {_error_line(error)}"
        ) from error
    model.tie_weights()
    return model.eval()


def _auto_class(config: PretrainedConfig) -> Any:
    autos: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
    if config.is_encoder_decoder:
        autos = AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
    for auto in autos:
        if type(config) in auto._model_mapping:
            return auto
    raise ValueError(
        f"transformers has no model that generates text from a {type(config).__name__}"
    )


@contextmanager
def _on_shapes(model: PreTrainedModel) -> Iterator[None]:
    """Raise ValueError if a model's code fails on shapes, mostly because it needs values."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} can't be planned: a plan runs it on shapes without values, "
            f"and its code in transformers {transformers.__version__} fails: {_error_line(error)}"
        ) from error


def _error_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


# Calls ------------------------------------------------------------------------------------------


class _Calls:
    """The calls of a model that are measured, with caches like those that ``generate`` gets."""

    def __init__(self, model: PreTrainedModel, promise: Promise) -> None:
        self.model, self.promise, self.past = model, promise, 0
        self.is_pair = bool(model.config.is_encoder_decoder)
        length = promise.max_seq_len
        chunk = promise.max_input_len or (_FIRST_TOKENS if self.is_pair else length)
        self.chunk = min(chunk, length)
        own = HFCache(model.config, promise.cache, max_seq_len=length, **dict(promise.cache_config))
        self.caches = [own]
        self.cache: Any = own
        if self.is_pair:
            cross = HFCache(model.config, promise.cross_cache, **dict(promise.cross_config))
            self.caches.append(cross)
            self.cache = EncoderDecoderCache(own, cross)
        self.masked = not self.is_pair
        self._name = cache_argument(model)

    @property
    def held_ids(self) -> int:
        """Bytes of ids, masks and positions that ``generate`` holds."""
        return _COPIES_OF_IDS * rounded(self.promise.batch_size * self.promise.max_seq_len * 8)

    def first(self) -> None:
        """Run a short prompt on an empty cache, after the encoder if there is one."""
        few = min(2, self.promise.max_seq_len)
        with contextlib.suppress(RuntimeError):  # it reads the mask's values: leave the mask out
            return self._call(few, **self._encoded())
        self.masked = False
        for cache in self.caches:
            cache.reset()
        self._call(few, **self._encoded())

    def make_room(self) -> None:
        """Grow caches to their full size; layers that only images fill have no storage.

        Raises:
            ValueError: the model put nothing into the cache.
        """
        layers = self.caches[0].attention_layers
        stores = [layer.store for layer in layers if layer.store is not None]
        if layers and not stores:
            raise ValueError(f"{type(self.model).__name__} stores nothing in a cache")
        for store in stores:
            store.make_room(self.promise.max_seq_len)

    def measure(self, run: DryRun) -> None:
        """Run an encoder, then a prompt that fills the cache, then the last token alone."""
        run.peak = run.current
        held = [self._ids(self.promise.max_seq_len) for _ in range(_COPIES_OF_IDS)]
        held += self._input_of_encoder().values()  # the caller's own
        encoded = self._encoded()
        if self.is_pair:
            self._set_past(0)
            self._set_cross_empty()
            self._call(self.chunk, **encoded)
        for chunk in sorted({self.chunk, 1}):
            self._set_past(self.promise.max_seq_len - chunk)
            self._call(chunk, **encoded)
        del held

    def _set_past(self, past: int) -> None:
        self.past = past
        rows = self.promise.batch_size
        pads = planned_padding(rows, past + 1) if self.masked else (0,) * rows
        for layer in self.caches[0].attention_layers:
            _set_filled(layer, past, pads)

    def _set_cross_empty(self) -> None:
        for layer in self.caches[1].attention_layers:
            _set_filled(layer, 0, (0,) * self.promise.batch_size)
        self.cache.is_updated = dict.fromkeys(self.cache.is_updated, False)

    def _call(self, tokens: int, **given: Any) -> None:
        """Call the model as ``generate`` does."""
        name = "decoder_input_ids" if self.is_pair else "input_ids"
        known = inspect.signature(self.model.forward).parameters
        if "position_ids" in known:
            given["position_ids"] = self._ids(tokens)
        if self.masked and "attention_mask" in known:
            given["attention_mask"] = self._mask(tokens)
        self.model(
            **{name: self._ids(tokens), self._name: self.cache},
            **given,
            **_last_logits_only(self.model),
        )

    def _ids(self, tokens: int) -> torch.Tensor:
        return torch.zeros((self.promise.batch_size, tokens), dtype=torch.int64)

    def _mask(self, tokens: int) -> torch.Tensor:
        """The mask of padded rows; in 4 dimensions if the attention isn't exkv's, since making
        it from 2 would need values."""
        rows, length = self.promise.batch_size, self.past + tokens
        if self.model.config._attn_implementation == NAME:
            return torch.ones((rows, length), dtype=torch.int64)
        return torch.ones((rows, 1, tokens, length), dtype=torch.bool)

    def _encoded(self) -> dict[str, Any]:
        """The encoder's output as an argument of the decoder, if there is an encoder."""
        if not self.is_pair:
            return {}
        given = self._input_of_encoder()
        if self.promise.batch_size > 1 and "input_ids" in given:  # rows of different lengths
            length = given["input_ids"].shape[1]
            shape = (self.promise.batch_size, 1, length, length)
            given["attention_mask"] = torch.ones(shape, dtype=torch.bool)
        encoder: Any = self.model.get_encoder()
        return {"encoder_outputs": encoder(**given)}

    def _input_of_encoder(self) -> dict[str, torch.Tensor]:
        if not self.is_pair:
            return {}
        name, rows = self.model.main_input_name, self.promise.batch_size
        if name == "input_ids":
            return {name: self._ids(self.promise.encoder_len or self.promise.max_seq_len)}
        config: Any = self.model.config
        if name != "input_features" or not hasattr(config, "num_mel_bins"):
            raise ValueError(
                f"a {type(config).__name__} encodes {name}: plan_device_map supports input_ids, "
                "and input_features like Whisper's"
            )
        encoder: Any = self.model.get_encoder()
        frames = config.max_source_positions * encoder.conv1.stride[0] * encoder.conv2.stride[0]
        return {name: torch.zeros((rows, config.num_mel_bins, frames), dtype=self.model.dtype)}


def _last_logits_only(model: PreTrainedModel) -> dict[str, int]:
    """The argument for only the last logits, if the model has it."""
    supports = getattr(model, "_supports_logits_to_keep", None)
    return {"logits_to_keep": 1} if supports is not None and supports() else {}


# Units ------------------------------------------------------------------------------------------


def _units_of(model: PreTrainedModel) -> list[Unit]:
    """Split a model in registration order; modules without parameters follow the first unit."""
    blocks = set(model._no_split_modules or ())
    whole = {name for name, module in model.named_modules() if type(module).__name__ in blocks}
    parts = [name.split(".") for name in whole]
    holders = {".".join(each[:n]) for each in parts for n in range(1, len(each))} - whole
    units: list[Unit] = []
    follows: dict[str, dict[int, int]] = {}
    for name, module in _children(model, "", holders):
        tensors = {_key(x): rounded(x.nbytes) for x in (*module.parameters(), *module.buffers())}
        if any(True for _ in module.parameters()):
            units.append(Unit(name=name, module=module, tensors=tensors))
        else:
            follows[name] = tensors
    for name in ("", *sorted(holders)):
        own = f"{name}.".lstrip(".")
        holder = model.get_submodule(name)
        for named in (holder.named_parameters, holder.named_buffers):
            follows |= {
                own + inner: {_key(x): rounded(x.nbytes)} for inner, x in named(recurse=False)
            }
    units[0].follows = list(follows)
    for tensors in follows.values():
        units[0].tensors |= tensors
    return units


def _key(x: torch.Tensor) -> int:
    """A tensor's storage, which identifies it."""
    meta = x.meta if isinstance(x, ShapeTensor) else x
    return meta.untyped_storage()._cdata


def _children(module: nn.Module, prefix: str, holders: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules that are placed as a whole."""
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if full in holders:
            yield from _children(child, f"{full}.", holders)
        else:
            yield full, child


def _layers_by_unit(
    model: PreTrainedModel, units: Sequence[Unit], caches: Sequence[HFCache]
) -> dict[Unit, list[Any]]:
    """The cache layers of each unit."""
    decoder: Any = model.get_decoder()
    inner = set(decoder.modules())  # an encoder's layers have indices too, but no cache
    unit_of = {
        index: unit
        for unit in units
        for module in unit.module.modules()
        if module in inner and isinstance(index := getattr(module, "layer_idx", None), int)
    }
    kept: dict[Unit, list[Any]] = {unit: [] for unit in units}
    for cache in caches:
        for index, layer in enumerate(cache.layers):
            if index in unit_of:
                kept[unit_of[index]].append(layer)
    return kept


def _layer_bytes(layer: Any) -> int:
    """Bytes of a full layer: keys, values and states."""
    states = 0
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        kept = (*layer.conv_states.values(), *layer.recurrent_states.values())
        states = sum(rounded(state.nbytes) for state in kept if state is not None)
    if not isinstance(layer, HFLayer) or layer.store is None:
        return states
    if _is_limited(layer):
        counter = rounded(layer.cumulative_length.nbytes) if isinstance(layer, HFStaticLayer) else 0
        return states + counter + layer.store.bytes_needed("meta")
    return states + layer.nbytes()  # an encoder's, which is full


def _set_filled(layer: HFLayer, past: int, pads: Sequence[int]) -> None:
    """Make the layer report ``past`` tokens per row, including left padding."""
    lens = [past - pad for pad in pads]
    layer.set_rows(lens, pads, lens)


def _is_limited(layer: HFLayer) -> bool:
    return layer.template.max_seq_len < UNLIMITED


def _growth(layer: Any) -> int:
    """Transient bytes of a layer's last growth, besides the full layer."""
    if not isinstance(layer, HFLayer) or layer.store is None or not _is_limited(layer):
        return 0
    return layer.store.growth_peak("meta")


# Keys -------------------------------------------------------------------------------------------


def _kind(module: nn.Module, layers: Sequence[Any]) -> tuple[str, ...]:
    """A key that is equal for blocks that compute the same over the same kinds of cache layers."""
    specs = [(type(layer), getattr(layer, "template", None)) for layer in layers]
    return *module_key(module, ignored=("layer_idx",)), str(specs)


def _argument_key(value: Any) -> Any:
    if isinstance(value, LazyTensor):  # only its shape and dtype, or it would be made
        return tuple(value.shape), value.dtype, str(value.source)
    return argument_key(value)
