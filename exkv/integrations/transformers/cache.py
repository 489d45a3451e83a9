"""``HFCache``: a cache of any of exkv's kinds for a model of transformers."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from exkv import devices
from exkv.cache import Dynamic, LayerSpec, Paged, Sinks, Static, cache_kind
from exkv.checkpoint import ModelConfig
from exkv.checkpoint.families import FAMILIES
from exkv.layers.rope import RotaryTables

from . import file as cache_file
from . import snapshots
from .attention import NAME
from .hybrid import HFHybridLayer
from .layer import UNLIMITED, Batches, HFLayer, after_crop
from .versions import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    SINCE_5,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

#: Tokens by which storage grows at first: a short text takes no more than transformers' caches.
_FIRST_STEP = 32
#: Kinds whose storage is there at once, for the model's longest text where nothing is said.
_STATIC = ("static", "offloaded_static")
#: Layers with keys and values by token, and those that have a state beside them.
_HYBRID = ("hybrid", "hybrid_sliding")
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", *_HYBRID)
#: Layers whose state has one size, whatever the text; transformers' own layers keep it.
_STATES = ("conv", "linear_attention", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Windows:
    """A ``LayerWindows`` of one layer."""

    sliding_window: int | None

    def slides(self, layer: int) -> bool:
        return self.sliding_window is not None


class HFCache(DynamicCache):
    """Keys and values of a transformers model as exkv keeps them; for ``cache=``, or
    ``past_key_values=`` before transformers 5.24.

    Args:
        config: the model's.
        kind: of cache, by exkv's names or Hugging Face's: see ``exkv.cache.make_cache``.
        max_seq_len: tokens that a row can hold, for which there is room at once; None for no limit,
            and storage that grows with the text, but for the static kinds, which take the model's
            ``max_position_embeddings`` then.
        max_cache_len: transformers' word for it.
        dtype: of stored floats; None for the keys'.
        options: what the kind takes, e.g. ``nbits``, ``window_length``, ``num_sink_tokens``.

    Raises:
        ValueError: an unknown kind, a setting that makes no sense, or layers that no cache of exkv
            can serve.
        TypeError: a setting that the kind doesn't have.
    """

    def __new__(cls, config: Any = None, kind: str = "dynamic", **_: Any) -> HFCache:
        """Of the static kinds a ``StaticCache`` as well, which others may check for."""
        return super().__new__(HFStaticCache if cls is HFCache and kind in _STATIC else cls)

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
        specs = layer_specs(config, kind, limit, **options)
        rotates = any(isinstance(spec.retention, Sinks) for spec in specs if spec is not None)
        batches = Batches(_rotary_tables(text, kind) if rotates else None)
        layer_types, arguments = get_layer_types_and_kwargs(text)
        static = kind in _STATIC and limit is not None
        Cache.__init__(
            self,
            layers=[
                _layer(layer_type, kwargs, spec, batches, dtype, static)
                for spec, layer_type, kwargs in zip(specs, layer_types, arguments, strict=True)
            ],
        )
        self.kind, self._config = kind, text
        self._snapshots: dict[int, list[Any]] = {}
        self._chain()

    def _chain(self) -> None:
        for layer, after in pairwise(self.attention_layers):
            layer.after = after

    @property
    def attention_layers(self) -> list[HFLayer]:
        """Those that exkv keeps; others hold a state of one size."""
        return [layer for layer in self.layers if isinstance(layer, HFLayer)]

    def nbytes(self) -> int:
        """Bytes that keys and values take now, wherever they lie."""
        return sum(layer.nbytes() for layer in self.attention_layers)

    def nbytes_by_device(self) -> dict[str, int]:
        """The same on each device, by its name."""
        total: dict[str, int] = {}
        for layer in self.attention_layers:
            for tensor in layer.store.tensors.values() if layer.store is not None else ():
                name = str(tensor.device)
                total[name] = total.get(name, 0) + devices.rounded(tensor.nbytes)
        return total

    def convert(self, **properties: Any) -> None:
        """Store the same in another way: ``storage`` or ``residence``, of every layer.

        Raises:
            torch.OutOfMemoryError: there is no room for the new; layers before are converted, and
                the cache can be used.
        """
        self._snapshots = {}
        for layer in self.attention_layers:
            layer.convert(**properties)

    def rollback(self, length: int) -> None:
        """Back to so many tokens a row after a call that failed.

        Raises:
            ValueError: a layer that forgets has overwritten what would be seen then.
        """
        for layer in self.attention_layers:
            layer.rollback(length)

    # Files --------------------------------------------------------------------------------

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write all keys, values and states to a safetensors file, as they are stored.

        Raises:
            OSError: it can't be written; what was there is as it was.
        """
        cache_file.save(self, file)

    def load(
        self,
        file: str | os.PathLike[str],
        device: str | Mapping[int, str | torch.device] = "cpu",
    ) -> None:
        """Take the contents of a file that a cache for the same model, of the same kind, was saved
        to. (Whether the weights are the same, nobody can tell here.)

        Args:
            device: of all layers, or layer -> device.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no such file, or another model's or kind's.
        """
        cache_file.load(self, file, device)

    # Going back ---------------------------------------------------------------------------

    @property
    def snapshots(self) -> list[int]:
        """Lengths to which :meth:`crop` and :meth:`rewind` can go back whatever the layers are."""
        return sorted(self._snapshots)

    def snapshot(self, length: int | None = None) -> None:
        """Note what layers are now that can't go back by themselves: rings, and states of one size.

        It is good until rows change or the cache goes back further, and takes as much memory as
        those layers.

        Args:
            length: tokens so far, left padding counted; needed where no layer has attention.
        """
        if length is None:
            length = self._known_length()
        self._snapshots[length] = snapshots.taken(self.layers)

    def _known_length(self) -> int:
        if not self.attention_layers:
            raise ValueError(
                "no layer of this cache knows how many tokens came, since none has attention: give "
                "their number, snapshot(length)"
            )
        return max(layer.get_seq_length() for layer in self.attention_layers)

    def rewind(self, length: int) -> None:
        """Back to a length of which there is a snapshot.

        Raises:
            ValueError: there is none.
        """
        if length not in self._snapshots:
            raise ValueError(f"there is no snapshot of {length} tokens: {self._what_there_is()}")
        snapshots.put_back(self.layers, self._snapshots[length], length)
        self._snapshots = {n: kept for n, kept in self._snapshots.items() if n <= length}

    def _what_there_is(self) -> str:
        known = ", ".join(map(str, self.snapshots)) or "no length"
        return f"there are snapshots of {known}; call snapshot() where you will want to go back to"

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; of a positive number, keep so many.

        Raises:
            ValueError: a layer that forgets has overwritten what would be seen then.
            RuntimeError: a recurrent state can't go back, and there is no snapshot of that length.
                The cache is as it was.
        """
        if not self.attention_layers:
            length, kept = 0, -1  # nobody knows, and none has a snapshot of that
        else:
            length = self._known_length()
            kept = after_crop(length, tokens_to_remove)
        if kept < length and kept in self._snapshots:
            return self.rewind(kept)
        if kept < length and any(map(_is_recurrent, self.layers)):
            which = f"to {kept} of {length} tokens" if self.attention_layers else "so"
            raise RuntimeError(
                f"this cache can't be cropped {which}: it has recurrent states, which don't go "
                f"back. For rewind() and crop() {self._what_there_is()}"
            )
        super().crop(tokens_to_remove)
        self._snapshots = {n: old for n, old in self._snapshots.items() if n <= kept}

    def reset(self) -> None:
        """Forget all tokens."""
        self._snapshots = {}
        super().reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``i`` what row ``beam_idx[i]`` was; snapshots are gone then."""
        self._snapshots = {}
        super().reorder_cache(cast(torch.LongTensor, beam_idx))

    def activate_past_recording(self) -> None:
        """From now on tokens can be taken back, although some layers forget others."""
        for layer in self.layers:
            if isinstance(layer, HFLayer | LinearAttentionCacheLayerMixin):
                layer.activate_past_recording()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order; of layers with a state, too. Snapshots are gone then."""
        self._snapshots = {}
        rows = torch.arange(self._rows())[torch.as_tensor(indices).cpu()]
        for layer in self.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.reorder_cache(cast(torch.LongTensor, rows))
            elif isinstance(layer, HFLayer):
                layer.batch_select_indices(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make every row into ``repeats`` rows beside each other."""
        self.batch_select_indices(torch.arange(self._rows()).repeat_interleave(repeats))

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first tokens."""
        return self._rows() or -1

    def _rows(self) -> int:
        """Rows of whatever layer has some."""
        for layer in self.layers:
            if isinstance(layer, HFLayer):
                return layer.batch_size
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
        """Tokens that there is room for at most; -1 for no limit."""
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
        for layer in self.attention_layers:
            keys, values = layer.keys, layer.values
            if keys is not None and values is not None:
                length = layer.get_seq_length()  # of a static cache, less than it hands out
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
            ValueError: there are more or fewer pairs than attention layers.
        """
        cache = cls(config, kind, **options)
        layers = cache.attention_layers
        if len(past_key_values) != len(layers):
            raise ValueError(
                f"{len(past_key_values)} pairs of keys and values for a model of {len(layers)} "
                "attention layers: give one for each"
            )
        for layer, (keys, values, *_) in zip(layers, past_key_values, strict=True):
            layer.update(keys, values)
            layer.settle()
        return cache

    def __getitem__(self, layer_idx: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        layer = self.layers[layer_idx]
        return (layer.keys, layer.values) if isinstance(layer, HFLayer) else (None, None)

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
    """An :class:`HFCache` of a static kind: with a ``max_seq_len``, keys and values are handed out
    at that length, as a stock static cache's."""

    @property
    def is_compileable(self) -> bool:
        """What stock static caches say, by which transformers makes masks that hide what lies
        behind the last token. The attention "exkv" needs none."""
        padded = any(layer.full_length for layer in self.attention_layers)
        return padded and self._config._attn_implementation != NAME


def _is_recurrent(layer: Any) -> bool:
    """Whether the layer has a state of all tokens, which none can be taken out of."""
    return any(getattr(layer, "is_recurrent_states_initialized", {}).values())


def layer_specs(
    config: PretrainedConfig, kind: str, max_seq_len: int | None = None, **options: Any
) -> list[LayerSpec | None]:
    """Each layer's spec, but for its shape; None for layers that keep a state of one size.

    Raises:
        ValueError, TypeError: as of :class:`HFCache`.
    """
    text = config.get_text_config(decoder=True)
    layer_types, arguments = get_layer_types_and_kwargs(text)
    _check_layer_types(layer_types)
    made, grows = cache_kind(kind), max_seq_len is None and kind not in _STATIC
    if max_seq_len is None:
        max_seq_len = UNLIMITED if grows else _longest_text(text, kind)
    spec = LayerSpec(
        batch_size=1, max_seq_len=max_seq_len, num_heads=1, head_dim=1, dtype=torch.float32
    )
    known = made.known_options(options)
    specs: list[LayerSpec | None] = []
    for layer, (layer_type, kwargs) in enumerate(zip(layer_types, arguments, strict=True)):
        windows = _Windows(sliding_window=_window(layer_type, kwargs) or None)
        one = None
        if layer_type in _ATTENTION:
            one = _without_pages(made.compose(spec, windows, layer, **known))
        specs.append(_growing(one) if one is not None and grows else one)
    return specs


def _growing(spec: LayerSpec) -> LayerSpec:
    """Storage that is there for the tokens that came, not for all that may come."""
    if spec.growth not in (Static(), Dynamic()):
        return spec
    return replace(spec, growth=Dynamic(first=_FIRST_STEP))


def _without_pages(spec: LayerSpec) -> LayerSpec:
    """Rows in order: a page table belongs to a cache of exkv's, and transformers' has none."""
    return replace(spec, growth=Static()) if isinstance(spec.growth, Paged) else spec


def _window(layer_type: str, arguments: dict[str, Any]) -> int:
    """Tokens that the model's layer sees; 0 for all. (Chunks are told by the mask alone.)"""
    slides = layer_type in ("sliding_attention", "hybrid_sliding")
    return arguments["sliding_window"] if slides else 0


def _layer(
    layer_type: str,
    arguments: dict[str, Any],
    spec: LayerSpec | None,
    batches: Batches,
    dtype: torch.dtype | None,
    static: bool,
) -> Any:
    """exkv's layer for keys and values, and transformers' own for a state of one size."""
    if spec is None:
        return DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**arguments)
    window = _window(layer_type, arguments)
    if layer_type in _HYBRID:
        states = arguments["number_of_states"]
        return HFHybridLayer(
            spec, states, window=window, dtype=dtype, batches=batches, static=static
        )
    return HFLayer(spec, window=window, dtype=dtype, batches=batches, static=static)


def _check_layer_types(layer_types: Sequence[str]) -> None:
    """ValueError for a kind of layer that no cache of exkv can serve."""
    unknown = sorted(set(layer_types) - {*_ATTENTION, *_STATES})
    if unknown:
        raise ValueError(
            f"the model has layers of type {', '.join(unknown)}; HFCache serves "
            f"{', '.join((*_ATTENTION, *_STATES))}: use transformers' DynamicCache for this model"
        )


def _longest_text(text: PretrainedConfig, kind: str) -> int:
    length = getattr(text, "max_position_embeddings", None)
    if length is None:
        raise ValueError(f"a cache of kind {kind!r} needs max_seq_len: the config tells no length")
    return length


def _rotary_tables(text: PretrainedConfig, kind: str) -> RotaryTables:
    """The model's rotary positions, by which queries are rotated back to the sinks."""
    refused = {key for family in FAMILIES.values() for key in family.refuses}
    values = {key: value for key, value in text.to_dict().items() if key not in refused}
    try:
        return RotaryTables(ModelConfig.from_dict(values))
    except ValueError as error:
        raise ValueError(
            f"a cache of kind {kind!r} must know the model's rotary positions, and exkv doesn't "
            f"know this one's: {error}"
        ) from None
