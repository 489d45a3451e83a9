"""``HFCache``: any kind of exkv's caches for a transformers model."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache, StaticCache

from exkv import devices
from exkv.cache import Dynamic, LayerSpec, Paged, Sinks, Static, Window, cache_kind
from exkv.checkpoint import ModelConfig
from exkv.checkpoint.families import FAMILIES
from exkv.layers.rope import RotaryTables

from . import file as cache_file
from . import snapshots
from .attention import NAME
from .family import layer_class
from .layer import UNLIMITED, Batches, HFLayer, after_crop
from .versions import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    SINCE_5,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

#: First step of growth, in tokens: short texts take no more than in transformers' caches.
_FIRST_STEP = 32
#: Kinds that are allocated at once, by default for the model's longest text.
STATIC = ("static", "offloaded_static")
#: Kinds that round keys and values.
ROUNDED = ("quantized", "8bit", "4bit", "2bit", "kivi")
#: Layers with keys and values, and a state of fixed size.
_HYBRID = ("hybrid", "hybrid_sliding")
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", *_HYBRID)
#: Layers with a state of fixed size, which stay transformers' own.
_STATES = ("conv", "linear_attention", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerKind:
    """How one of the model's layers is cached.

    Attributes:
        type, arguments: transformers' own.
        window: the layer's sliding window; 0 for none.
        spec: without its shape; None for transformers' own layer, a state of fixed size.
    """

    type: str
    arguments: dict[str, Any]
    window: int
    spec: LayerSpec | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Windows:
    """A ``LayerWindows`` of one layer."""

    sliding_window: int | None
    cache_layers: int

    def slides(self, layer: int) -> bool:
        return self.sliding_window is not None


class HFCache(DynamicCache):
    """Keys and values of a transformers model in exkv's storage; for ``cache=``, or
    ``past_key_values=`` before transformers 5.24.

    Args:
        config: the model's.
        kind: of cache, by exkv's names or Hugging Face's: see ``exkv.cache.make_cache``.
        max_seq_len: capacity in tokens per row, allocated at once. None for no limit and storage
            that grows; static kinds then take the model's ``max_position_embeddings``.
        max_cache_len: transformers' name of ``max_seq_len``.
        dtype: of stored floats; None for the keys'.
        options: the kind's settings, e.g. ``nbits``, ``window_length``, ``num_sink_tokens``.

    Raises:
        ValueError: an unknown kind, an invalid setting, or layers for which exkv has no cache.
        TypeError: a setting that the kind doesn't have.
    """

    def __new__(cls, config: Any = None, kind: str = "dynamic", **_: Any) -> HFCache:
        """Choose :class:`HFStaticCache` for static kinds, :class:`HFQuantizedCache` for kinds that
        round."""
        if cls is HFCache:
            cls = HFStaticCache if kind in STATIC else HFQuantizedCache if kind in ROUNDED else cls
        return super().__new__(cls)

    def __init__(
        self,
        config: PretrainedConfig,
        kind: str = "dynamic",
        *,
        max_seq_len: int | None = None,
        max_cache_len: int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        text = config.get_text_config(decoder=True)
        limit = max_cache_len if max_seq_len is None else max_seq_len
        kinds = _layer_kinds(text, kind, limit, options)
        rotates = any(each.spec and isinstance(each.spec.retention, Sinks) for each in kinds)
        batches = Batches(_rotary_tables(text, kind) if rotates else None)
        # No mask hides a cross-attention cache's padding after the encoder's tokens.
        static = kind in STATIC and limit is not None and not config.is_encoder_decoder
        shared = {"batches": batches, "dtype": dtype, "static": static}
        Cache.__init__(self, layers=[_layer(each, kind in STATIC, shared) for each in kinds])
        self.kind, self._config = kind, text
        self._snapshots: dict[int, list[Any]] = {}
        self._chain()
        if static:
            _lift_limits(self.attention_layers)

    def _chain(self) -> None:
        for layer, after in pairwise(self.attention_layers):
            layer.after = after

    @property
    def attention_layers(self) -> list[HFLayer]:
        """Layers in exkv's storage; the others have states of fixed size."""
        return [layer for layer in self.layers if isinstance(layer, HFLayer)]

    def nbytes(self) -> int:
        """Current bytes of keys and values on all devices."""
        return sum(layer.nbytes() for layer in self.attention_layers)

    def nbytes_by_device(self) -> dict[str, int]:
        """Bytes on each device, by its name."""
        total: dict[str, int] = {}
        for layer in self.attention_layers:
            for tensor in layer.store.tensors.values() if layer.store is not None else ():
                name = str(tensor.device)
                total[name] = total.get(name, 0) + devices.rounded(tensor.nbytes)
        return total

    def convert(self, **properties: Any) -> None:
        """Change ``storage`` or ``residence`` of every layer.

        Raises:
            torch.OutOfMemoryError: there is no room; earlier layers are converted, and the cache
                stays usable.
        """
        self._snapshots = {}
        for layer in self.attention_layers:
            layer.convert(**properties)

    def rollback(self, length: int) -> None:
        """Go back to ``length`` tokens per row after a failed call.

        Raises:
            ValueError: tokens that would become visible again were overwritten.
        """
        for layer in self.attention_layers:
            layer.rollback(length)

    # Files --------------------------------------------------------------------------------

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write all keys, values and states to a safetensors file, as they are stored.

        Raises:
            OSError: it can't be written; an existing file is unchanged.
        """
        cache_file.save(self, file)

    def load(
        self,
        file: str | os.PathLike[str],
        device: str | Mapping[int, str | torch.device] = "cpu",
    ) -> None:
        """Read a file that a cache of the same kind for the same model has written. The weights
        are not compared.

        Args:
            device: one for all layers, or layer -> device.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is another kind of file, or of another model or kind of cache.
        """
        cache_file.load(self, file, device)

    # Going back ---------------------------------------------------------------------------

    @property
    def snapshots(self) -> list[int]:
        """Lengths to which :meth:`crop` and :meth:`rewind` can always go back."""
        return sorted(self._snapshots)

    def snapshot(self, length: int | None = None) -> None:
        """Copy the current contents of layers that can't be cropped: rings, and states of fixed
        size.

        A snapshot lasts until rows change or the cache goes back further, and takes as much memory
        as those layers.

        Args:
            length: tokens so far, including left padding; needed if no layer has attention.
        """
        if length is None:
            length = self._known_length()
        self._snapshots[length] = snapshots.taken(self.layers)

    def _known_length(self) -> int:
        if not self.attention_layers:
            raise ValueError(
                "without attention, no layer of this cache knows the number of tokens: give it, "
                "snapshot(length)"
            )
        return max(layer.get_seq_length() for layer in self.attention_layers)

    def rewind(self, length: int) -> None:
        """Go back to the length of a snapshot.

        Raises:
            ValueError: there is none of this length.
        """
        if length not in self._snapshots:
            raise ValueError(f"there is no snapshot of {length} tokens: {self._known_snapshots()}")
        snapshots.put_back(self.layers, self._snapshots[length], length)
        self._snapshots = {n: kept for n, kept in self._snapshots.items() if n <= length}

    def _known_snapshots(self) -> str:
        known = ", ".join(map(str, self.snapshots)) or "no length"
        return f"there are snapshots of {known}; call snapshot() at points to go back to"

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens; a positive number is the number to keep.

        Raises:
            ValueError: tokens that would become visible again were overwritten.
            RuntimeError: a recurrent state can't go back, and there is no snapshot of that length.
                The cache is unchanged.
        """
        if not self.attention_layers:
            length, kept = 0, -1  # unknown, and no snapshot has this length
        else:
            length = self._known_length()
            kept = after_crop(length, tokens_to_remove)
        if kept < length and kept in self._snapshots:
            return self.rewind(kept)
        if kept < length and any(map(_is_recurrent, self.layers)):
            to = f" to {kept} of {length} tokens" if self.attention_layers else ""
            raise RuntimeError(
                f"this cache can't be cropped{to}: its recurrent states can't go back. For "
                f"rewind() and crop() {self._known_snapshots()}"
            )
        super().crop(tokens_to_remove)
        self._snapshots = {n: old for n, old in self._snapshots.items() if n <= kept}

    def reset(self) -> None:
        """Drop all tokens."""
        self._snapshots = {}
        super().reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row ``i`` by row ``beam_idx[i]``, and drop snapshots."""
        self._snapshots = {}
        super().reorder_cache(cast(torch.LongTensor, beam_idx))

    def activate_past_recording(self) -> None:
        """Record overwritten tokens from now on, so that layers that evict can be cropped."""
        for layer in self.layers:
            if isinstance(layer, HFLayer | LinearAttentionCacheLayerMixin):
                layer.activate_past_recording()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order, in all layers, and drop snapshots."""
        self._snapshots = {}
        rows = torch.arange(self._rows())[torch.as_tensor(indices).cpu()]
        for layer in self.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.reorder_cache(cast(torch.LongTensor, rows))
            else:
                layer.batch_select_indices(rows)  # type: ignore[union-attr]  # all have it

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, next to each other."""
        self.batch_select_indices(torch.arange(self._rows()).repeat_interleave(repeats))

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first tokens."""
        return self._rows() or -1

    def _rows(self) -> int:
        """Number of rows, from the first layer that has any."""
        for layer in self.layers:
            if isinstance(layer, HFLayer):
                return layer.batch_size
            if (keys := getattr(layer, "keys", None)) is not None:
                return len(keys)
            states = getattr(layer, "conv_states", {})
            if (state := states.get(0)) is not None:
                return len(state)
        return 0

    def __deepcopy__(self, memo: dict[int, Any]) -> HFCache:
        memo[id(self)] = other = copy.copy(self)
        other.layers = copy.deepcopy(self.layers, memo)
        other._snapshots = dict(self._snapshots)
        other._chain()
        return other

    def __repr__(self) -> str:
        return f"{type(self).__name__}(kind={self.kind!r}, layers={self.layers})"

    # Older forms --------------------------------------------------------------------------

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Most tokens per row; -1 for no limit."""
        return self.layers[layer_idx].get_max_length()

    @property
    def key_cache(self) -> list[torch.Tensor | None]:
        """Keys of every layer, (B, H_kv, N, D)."""
        return [self[index][0] for index in range(len(self))]

    @property
    def value_cache(self) -> list[torch.Tensor | None]:
        """Values of every layer."""
        return [self[index][1] for index in range(len(self))]

    def to_legacy_cache(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Keys and values of every layer as a tuple of pairs, copied."""
        pairs = []
        for index, (keys, values) in enumerate(map(self.__getitem__, range(len(self)))):
            if keys is not None and values is not None:
                length = self.get_seq_length(index)  # a static cache returns more
                pairs.append((keys[:, :, :length].clone(), values[:, :, :length].clone()))
        return tuple(pairs)

    @classmethod
    def from_legacy_cache(
        cls,
        past_key_values: Sequence[Sequence[torch.Tensor]],
        config: PretrainedConfig,
        kind: str = "dynamic",
        **options: Any,
    ) -> HFCache:
        """A cache with the contents of a tuple of (keys, values) pairs, (B, H_kv, N, D) each.

        Raises:
            ValueError: the number of pairs differs from that of attention layers.
        """
        cache = cls(config, kind, **options)
        layers = cache.attention_layers
        if len(past_key_values) != len(layers):
            raise ValueError(
                f"{len(past_key_values)} pairs of keys and values for {len(layers)} attention "
                "layers: give one pair per layer"
            )
        for layer, (keys, values, *_) in zip(layers, past_key_values, strict=True):
            layer.update(keys, values)
            layer.settle()
        return cache

    def __getitem__(self, layer_idx: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        layer = self.layers[layer_idx]
        return getattr(layer, "keys", None), getattr(layer, "values", None)

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, ...]]:
        """(keys, values, window) of every layer, as stock caches have them; no windows in 4.57."""
        for index, layer in enumerate(self.layers):
            keys, values = self[index]
            if not SINCE_5:
                yield keys, values
                continue
            window = layer.window if isinstance(layer, HFLayer) and layer.is_sliding else None
            yield keys, values, None if window is None else torch.tensor(window)


class HFStaticCache(HFCache, StaticCache):
    """An :class:`HFCache` of a static kind. With a ``max_seq_len``, it returns keys and values at
    that length, as stock static caches do; those of encoder-decoders are never padded."""

    @property
    def is_compileable(self) -> bool:
        """True if, as for stock static caches, transformers must mask the padding; the attention
        "exkv" needs no mask."""
        padded = any(layer.full_length for layer in self.attention_layers)
        return padded and self._config._attn_implementation != NAME


class HFQuantizedCache(HFCache, QuantizedCache):
    """An :class:`HFCache` of a kind that rounds."""


def _lift_limits(layers: Sequence[HFLayer]) -> None:
    """Let windows slide on as in stock static caches, except before the first layer that keeps
    every token: those refuse a call that is too long before any of it is stored."""
    keeps_all = (at for at, layer in enumerate(layers) if not layer.is_sliding)
    for layer in layers[next(keeps_all, 0) :]:
        layer.lift_limit()


def _is_recurrent(layer: Any) -> bool:
    """Whether the layer has a state that sums up all tokens and can't be cropped."""
    return any(getattr(layer, "is_recurrent_states_initialized", {}).values())


def _layer_kinds(
    text: PretrainedConfig, kind: str, max_seq_len: int | None, options: dict[str, Any]
) -> list[_LayerKind]:
    """The kinds of the layers of a cache; arguments and errors are those of :class:`HFCache`."""
    layer_types, arguments = get_layer_types_and_kwargs(text)
    _check_layer_types(layer_types)
    made, grows = cache_kind(kind), max_seq_len is None and kind not in STATIC
    if max_seq_len is None:
        max_seq_len = UNLIMITED if grows else _longest_text(text, kind)
    spec = LayerSpec(
        batch_size=1, max_seq_len=max_seq_len, num_heads=1, head_dim=1, dtype=torch.float32
    )
    known = made.known_options(options)
    kinds = []
    for layer, (layer_type, kwargs) in enumerate(zip(layer_types, arguments, strict=True)):
        window, one = _window(layer_type, kwargs, kind), None
        if layer_type in _ATTENTION:
            windows = _Windows(sliding_window=window or None, cache_layers=len(layer_types))
            one = _without_pages(made.compose(spec, windows, layer, **known))
            if window and kind in STATIC:  # as in stock static caches
                one = replace(one, retention=Window(window))
            one = _growing(one) if grows else one
        kinds.append(_LayerKind(type=layer_type, arguments=kwargs, window=window, spec=one))
    return kinds


def _growing(spec: LayerSpec) -> LayerSpec:
    """Make storage grow with the tokens."""
    if spec.growth not in (Static(), Dynamic()):
        return spec
    return replace(spec, growth=Dynamic(first=_FIRST_STEP))


def _without_pages(spec: LayerSpec) -> LayerSpec:
    """Replace pages by contiguous rows: transformers' caches have no block table."""
    return replace(spec, growth=Static()) if isinstance(spec.growth, Paged) else spec


def _window(layer_type: str, arguments: Mapping[str, Any], kind: str) -> int:
    """The layer's sliding window; 0 for none. A chunk counts as a window in static caches and in
    those of kind "hybrid", as in stock ones; otherwise only masks know it."""
    slides = ["sliding_attention", "hybrid_sliding"]
    if kind in (*STATIC, "hybrid"):
        slides.append("chunked_attention")
    return arguments["sliding_window"] if layer_type in slides else 0


def _layer(kind: _LayerKind, is_static: bool, shared: Mapping[str, Any]) -> Any:
    """Make exkv's layer for keys and values, or transformers' own for a state of fixed size.

    Args:
        shared: further arguments of :class:`HFLayer`.
    """
    spec, hybrid = kind.spec, kind.type in _HYBRID
    if spec is None:
        return DYNAMIC_LAYER_TYPE_MAPPING[kind.type](**kind.arguments)
    made = layer_class(
        slides=bool(kind.window) and spec.retention == Window(kind.window),
        static=is_static,
        lossless=spec.storage.lossless,
        hybrid=hybrid,
    )
    states = (kind.arguments["number_of_states"],) if hybrid else ()
    return made(spec, *states, window=kind.window, **shared)


def _check_layer_types(layer_types: Sequence[str]) -> None:
    """Raise ValueError for a type of layer for which exkv has no cache."""
    unknown = sorted(set(layer_types) - {*_ATTENTION, *_STATES})
    if unknown:
        raise ValueError(
            f"the model has layers of type {', '.join(unknown)}; HFCache supports "
            f"{', '.join((*_ATTENTION, *_STATES))}: use transformers' DynamicCache for this model"
        )


def _longest_text(text: PretrainedConfig, kind: str) -> int:
    length = getattr(text, "max_position_embeddings", None)
    if length is None:
        raise ValueError(f"a cache of kind {kind!r} needs max_seq_len: the config has no length")
    return length


def _rotary_tables(text: PretrainedConfig, kind: str) -> RotaryTables:
    """The model's rotary tables, with which queries are rotated for the sinks."""
    refused = {key for family in FAMILIES.values() for key in family.refuses}
    values = {key: value for key, value in text.to_dict().items() if key not in refused}
    try:
        return RotaryTables(ModelConfig.from_dict(values))
    except ValueError as error:
        raise ValueError(
            f"a cache of kind {kind!r} needs the model's rotary positions, but exkv doesn't know "
            f"this model's: {error}"
        ) from None
