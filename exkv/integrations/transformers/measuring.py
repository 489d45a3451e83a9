"""What the blocks of a transformers model take: the model's own code, run on shapes.

The model is built and called in a ``DryRun``, which follows the storages that come and go, as
exkv's own models are (``exkv.planning.workspace``). Blocks that are alike are run once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    EncoderDecoderCache,
    PretrainedConfig,
    PreTrainedModel,
)

from exkv.devices import rounded
from exkv.planning.dry_run import DryRun, ShapeTensor

from .attention import NAME
from .cache import HFCache
from .layer import UNLIMITED, HFLayer
from .lazy import LazyTensor
from .versions import LinearAttentionCacheLayerMixin, cache_argument

#: Copies of the last logits, in float32, that ``generate`` makes to choose a token.
_COPIES_OF_LOGITS = 6
#: Numbers of 8 bytes for every token that ``generate`` holds: ids, masks, positions, and the
#: caller's own.
_COPIES_OF_IDS = 6
#: Tokens with which the decoder of an encoder-decoder begins, where nothing is said.
_FIRST_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What ``generate`` may be asked.

    Attributes:
        max_input_len: tokens a row of one call; None for all, of an encoder-decoder's decoder for
            the few with which it begins.
        encoder_len: tokens that an encoder takes; None for ``max_seq_len``. (Whisper's take
            features of one length.)
        cache, cross_cache: kinds, the latter of what a decoder keeps of its encoder's output.
    """

    max_seq_len: int
    batch_size: int = 1
    max_input_len: int | None = None
    encoder_len: int | None = None
    cache: str = "dynamic"
    cache_config: Mapping[str, Any] = field(default_factory=dict)
    cross_cache: str = "dynamic"
    cross_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Unit:
    """A block, or what stands before or behind the blocks; in bytes.

    Attributes:
        tensors: identity -> bytes of its parameters and buffers.
        follows: modules without parameters, and tensors of none of the units, that stand where
            this one does.
    """

    name: str
    module: nn.Module
    tensors: dict[int, int]
    cache: int = 0
    workspace: int = 0
    follows: list[str] = field(default_factory=list)


def measured(
    config: PretrainedConfig, dtype: torch.dtype, promise: Promise, device_type: str
) -> list[Unit]:
    """The model's units with what each takes on devices of this type.

    Raises:
        ValueError: a model that transformers can't build from its config alone, or whose encoder
            takes neither ids nor features.
    """
    run = DryRun.planned_on(device_type)
    with run, torch.no_grad(), run.device:
        model = _built(config, dtype)
        units = _units_of(model)
        calls = _Calls(model, promise)
        with _known_values_only(model):
            calls.first()  # which creates caches and states
        calls.make_room()
        layers = _layers_by_unit(model, units, calls.caches)
        for unit, kept in layers.items():
            unit.cache = sum(map(_layer_bytes, kept))
        with _following(units, layers, run):
            calls.measure(run)
    for unit, kept in layers.items():
        unit.workspace = max(unit.workspace, sum(map(_growth, kept)))
    vocabulary = config.get_text_config(decoder=True).vocab_size
    logits = rounded(promise.batch_size * vocabulary * 4) * _COPIES_OF_LOGITS
    for unit in units[0], units[-1]:  # made on the last, copied to the first
        unit.workspace = max(unit.workspace, logits + calls.held_ids)
    return units


def _built(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    options = {"dtype": dtype, "attn_implementation": NAME}
    autos: list[Any] = [AutoModelForCausalLM]
    if config.is_encoder_decoder:
        autos = [AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq]
    for auto in autos:
        if type(config) in auto._model_mapping:
            return auto.from_config(config, **options).eval()
    raise ValueError(
        f"transformers has no model that generates text from a {type(config).__name__}"
    )


@contextmanager
def _known_values_only(model: PreTrainedModel) -> Iterator[None]:
    """ValueError where a model's code asks for values, of which a run on shapes has none."""
    try:
        yield
    except NotImplementedError as error:
        what = str(error).partition(" raises")[0]
        raise ValueError(
            f"{type(model).__name__} decides by values of tensors what to run, and a plan runs it "
            f"on shapes: transformers {transformers.__version__} can't be planned for it ({what})"
        ) from None


# Calls ------------------------------------------------------------------------------------------


class _Calls:
    """The calls of a model whose memory counts, over caches as ``generate`` gets them."""

    def __init__(self, model: PreTrainedModel, promise: Promise) -> None:
        self.model, self.promise = model, promise
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
        self._name = cache_argument(model)

    @property
    def held_ids(self) -> int:
        """Bytes of ids, masks and positions that ``generate`` holds."""
        return _COPIES_OF_IDS * rounded(self.promise.batch_size * self.promise.max_seq_len * 8)

    def first(self) -> None:
        """One token into an empty cache, behind all that an encoder takes."""
        self._call(1, **self._encoded())

    def make_room(self) -> None:
        """See that caches are as large as they get."""
        for layer in self.caches[0].attention_layers:
            assert layer.store is not None  # the first call made it
            layer.store.make_room(self.promise.max_seq_len)

    def measure(self, run: DryRun) -> None:
        """A prompt that fills the cache, and a token behind it; of an encoder-decoder first what
        the encoder takes."""
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
        for layer in self.caches[0].attention_layers:
            _set_alike(layer, past, self.promise.batch_size)

    def _set_cross_empty(self) -> None:
        for layer in self.caches[1].attention_layers:
            _set_alike(layer, 0, self.promise.batch_size)
        self.cache.is_updated = dict.fromkeys(self.cache.is_updated, False)

    def _call(self, tokens: int, **given: Any) -> None:
        """As ``generate`` calls the model."""
        name = "decoder_input_ids" if self.is_pair else "input_ids"
        if "position_ids" in inspect.signature(self.model.forward).parameters:
            given["position_ids"] = self._ids(tokens)
        self.model(
            **{name: self._ids(tokens), self._name: self.cache},
            **given,
            **_last_logits_only(self.model),
        )

    def _ids(self, tokens: int) -> torch.Tensor:
        return torch.zeros((self.promise.batch_size, tokens), dtype=torch.int64)

    def _encoded(self) -> dict[str, Any]:
        """What the encoder, if there is one, passes to the decoder."""
        if not self.is_pair:
            return {}
        given = self._input_of_encoder()
        if self.promise.batch_size > 1 and "input_ids" in given:  # rows of unlike length
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
                f"a {type(config).__name__} encodes {name}: plan_device_map knows input_ids, and "
                "input_features as Whisper has them"
            )
        encoder: Any = self.model.get_encoder()
        frames = config.max_source_positions * encoder.conv1.stride[0] * encoder.conv2.stride[0]
        return {name: torch.zeros((rows, config.num_mel_bins, frames), dtype=self.model.dtype)}


def _last_logits_only(model: PreTrainedModel) -> dict[str, int]:
    """What ``generate`` passes for that, where the model knows it."""
    supports = getattr(model, "_supports_logits_to_keep", None)
    return {"logits_to_keep": 1} if supports is not None and supports() else {}


# Units ------------------------------------------------------------------------------------------


def _units_of(model: PreTrainedModel) -> list[Unit]:
    """In the order of their registration; modules without parameters go with the first."""
    blocks = set(model._no_split_modules or ())
    whole = {name for name, module in model.named_modules() if type(module).__name__ in blocks}
    holders = {outer for name in whole for outer in _outer_names(name)} - whole
    units: list[Unit] = []
    follows: dict[str, dict[int, int]] = {}
    for name, module in _children(model, "", holders):
        tensors = {_key(x): rounded(x.nbytes) for x in (*module.parameters(), *module.buffers())}
        if any(True for _ in module.parameters()):
            units.append(Unit(name, module, tensors))
        else:
            follows[name] = tensors
    for name in ("", *sorted(holders)):
        own = f"{name}.".lstrip(".")
        for inner, x in _own_tensors(model.get_submodule(name)):
            follows[own + inner] = {_key(x): rounded(x.nbytes)}
    units[0].follows = list(follows)
    for tensors in follows.values():
        units[0].tensors |= tensors
    return units


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers that lie in no module inside."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _key(x: torch.Tensor) -> int:
    """The same for tensors that share a storage."""
    meta = x.meta if isinstance(x, ShapeTensor) else x
    return meta.untyped_storage()._cdata


def _outer_names(name: str) -> Iterator[str]:
    """Of all modules in which this one lies."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        yield ".".join(parts[:count])


def _children(module: nn.Module, prefix: str, holders: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules that are placed whole on one device."""
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if full in holders:
            yield from _children(child, f"{full}.", holders)
        else:
            yield full, child


def _layers_by_unit(
    model: PreTrainedModel, units: Sequence[Unit], caches: Sequence[HFCache]
) -> dict[Unit, list[Any]]:
    """The layers of caches that lie in each unit."""
    decoder: Any = model.get_decoder() if model.config.is_encoder_decoder else model
    inner = set(decoder.modules())  # an encoder's layers have numbers, too, and no cache
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
    """Bytes of a layer's keys, values and states once it is full."""
    states = 0
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        kept = (*layer.conv_states.values(), *layer.recurrent_states.values())
        states = sum(rounded(state.nbytes) for state in kept if state is not None)
    if not isinstance(layer, HFLayer) or layer.store is None:
        return states
    if _is_limited(layer):
        return states + layer.store.bytes_needed("meta")
    return states + layer.nbytes()  # an encoder's: it holds all that it ever will


def _set_alike(layer: HFLayer, past: int, rows: int) -> None:
    """Let the layer say that so many tokens are in each row."""
    lens = (past,) * rows
    layer.set_rows(lens, (0,) * rows, lens)


def _is_limited(layer: HFLayer) -> bool:
    return layer.template.max_seq_len < UNLIMITED


def _growth(layer: Any) -> int:
    """Bytes beside a full layer that its last step of growth takes for a moment."""
    if not isinstance(layer, HFLayer) or layer.store is None or not _is_limited(layer):
        return 0
    return layer.store.growth_peak("meta")


# The run ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a tensor that a block returns."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: torch.Tensor) -> _Shape:
        return cls(x.size(), x.stride(), x.dtype, x.device)

    def made(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class _Passage:
    """A call of a block: what it took at its peak beside what was there, and what it returned."""

    taken: int
    returned: Any


@contextmanager
def _following(
    units: Sequence[Unit], layers: Mapping[Unit, Sequence[Any]], run: DryRun
) -> Iterator[None]:
    """While a model runs, note the peak within each unit and right before it: of all that is alive
    then beside the weights and caches, since the model itself holds some of it as long as it runs,
    e.g. its embeddings. A unit like one before returns the same shapes at once."""
    base = run.current
    known: dict[Any, _Passage] = {}

    def called(
        unit: Unit, what: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        before, at_begin = run.peak, run.current
        case = what, _signature((args, kwargs))
        if case not in known:
            run.peak = run.current
            out = forward(*args, **kwargs)
            known[case] = _Passage(run.peak - at_begin, tree_map_only(torch.Tensor, _Shape.of, out))
        else:
            out = tree_map_only(_Shape, _Shape.made, known[case].returned)
        unit.workspace = max(unit.workspace, max(before, at_begin + known[case].taken) - base)
        run.peak = run.current
        return out

    for unit in units:
        forward, what = unit.module.forward, _kind(unit.module, layers[unit])
        unit.module.forward = functools.partial(called, unit, what, forward)
    try:
        yield
    finally:
        for unit in units:
            del unit.module.forward
    units[-1].workspace = max(units[-1].workspace, run.peak - base)


def _kind(module: nn.Module, layers: Sequence[Any]) -> Any:
    """Equal for blocks that do the same to tensors of the same shapes."""
    numbers = [
        (name, key, value)
        for name, inner in module.named_modules()
        for key, value in vars(inner).items()
        if key != "layer_idx" and isinstance(value, bool | int | float | str)
    ]
    shapes = [(name, x.shape, x.dtype) for name, x in module.named_parameters()]
    specs = [(type(layer), getattr(layer, "template", None)) for layer in layers]
    return repr(module), str(numbers), str(shapes), str(specs)


def _signature(values: Any) -> Any:
    """Equal for arguments of the same shapes."""
    leaves, structure = tree_flatten(values)
    return tuple(map(_of_value, leaves)), str(structure)


def _of_value(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return tuple(value.shape), value.dtype, str(value.source)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return value if isinstance(value, bool | int | float | str | None) else type(value)
