"""The named kinds of cache: each a choice of the four properties.

For any other choice: ``KVCache(model, ..., storage=..., retention=..., residence=...,
growth=...)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from .base import CacheOwner, KVCache
from .checks import whole, whole_type
from .growth import Dynamic
from .paging.growth import PAGE, HostTier, Paged
from .residence import OnHost
from .retention import Sinks, Window
from .spec import LayerSpec, LayerWindows
from .storage import GROUP, Storage

#: Default ``window_length`` of window and sink caches.
WINDOW_LENGTH = 1024
#: Default ``residual_length`` of a cache with groups by channel.
RESIDUAL_LENGTH = 64


class Cache(KVCache):
    """Full precision, all tokens, on the layers' devices, allocated up front; in host memory with
    ``offloading``, as :class:`OffloadedStaticCache`."""

    @classmethod
    def compose(
        cls,
        spec: LayerSpec,
        config: LayerWindows,
        layer: int,
        *,
        offloading: bool = False,
        **options: Any,
    ) -> LayerSpec:
        spec = super().compose(spec, config, layer, **options)
        return replace(spec, residence=OnHost()) if offloading else spec


#: transformers' name of it.
StaticCache = Cache


class DynamicCache(KVCache):
    """Full precision, grown in blocks of ``block`` tokens; in host memory with ``offloading``, as
    :class:`OffloadedCache`."""

    @classmethod
    def compose(
        cls,
        spec: LayerSpec,
        config: LayerWindows,
        layer: int,
        *,
        block: int = 256,
        offloading: bool = False,
    ) -> LayerSpec:
        spec = replace(spec, growth=Dynamic(block))
        return replace(spec, residence=OnHost()) if offloading else spec


class HybridCache(KVCache):
    """Full precision; layers with a sliding window (``config.layer_types``) keep only that window.

    Lossless: such a layer never sees what its ring has evicted. Only going back (``trim``,
    ``crop``, another prompt) beyond what a ring holds costs a prefill.
    """

    @classmethod
    def compose(cls, spec: LayerSpec, config: LayerWindows, layer: int) -> LayerSpec:
        window = _sliding_window(config, layer)
        return spec if window is None else replace(spec, retention=Window(window))


class SlidingWindowCache(KVCache):
    """Full precision; every layer keeps the last ``window_length`` tokens (or its own window, if
    shorter) and evicts the others for good."""

    @classmethod
    def compose(
        cls,
        spec: LayerSpec,
        config: LayerWindows,
        layer: int,
        *,
        window_length: int = WINDOW_LENGTH,
    ) -> LayerSpec:
        length = whole_type("window_length", window_length)
        return replace(spec, retention=Window(_shorter_window(config, layer, length)))


class SinkCache(KVCache):
    """Full precision; ``window_length`` tokens: the first ``num_sink_tokens`` of the text, and the
    last ones. See :class:`exkv.cache.retention.Sinks`.

    Raises:
        ValueError: ``num_sink_tokens`` is not below ``window_length``.
    """

    @classmethod
    def compose(
        cls,
        spec: LayerSpec,
        config: LayerWindows,
        layer: int,
        *,
        window_length: int = WINDOW_LENGTH,
        num_sink_tokens: int = 4,
    ) -> LayerSpec:
        if whole_type("num_sink_tokens", num_sink_tokens) >= whole("window_length", window_length):
            raise ValueError(
                f"num_sink_tokens is {num_sink_tokens} of a window_length of {window_length}: some "
                "of the window must be left for the last tokens"
            )
        size = _shorter_window(config, layer, window_length - num_sink_tokens)
        return replace(spec, retention=Sinks(size, num_sink_tokens))


def _sliding_window(config: LayerWindows, layer: int) -> int | None:
    """The layer's sliding window; None if it sees all tokens."""
    return config.sliding_window if config.slides(layer) else None


def _shorter_window(config: LayerWindows, layer: int, length: int) -> int:
    """The smaller of ``length`` and the layer's own window."""
    window = _sliding_window(config, layer)
    return length if window is None else min(length, window)


class OffloadedCache(KVCache):
    """Full precision in host memory, grown in blocks; each layer's tokens are prefetched while the
    previous layer computes."""

    @classmethod
    def compose(
        cls, spec: LayerSpec, config: LayerWindows, layer: int, *, block: int = 256
    ) -> LayerSpec:
        return replace(spec, residence=OnHost(), growth=Dynamic(block))


class OffloadedStaticCache(KVCache):
    """Full precision in host memory, allocated up front."""

    @classmethod
    def compose(cls, spec: LayerSpec, config: LayerWindows, layer: int) -> LayerSpec:
        return replace(spec, residence=OnHost())


class Cache8bit(KVCache):
    """int8 with a scale for every 32 values of a head: 8.5 bits a value; attention reads them in
    place. ``dtype`` is not used."""

    @classmethod
    def compose(cls, spec: LayerSpec, config: LayerWindows, layer: int) -> LayerSpec:
        return replace(spec, storage=Storage(keys="int8", values="int8"))


class QuantizedCache(KVCache):
    """Keys and values in ``nbits`` (8, 4 or 2), with a scale for every 32 of them. The other keys
    of Hugging Face's ``cache_config`` are accepted and ignored (:attr:`IGNORED`).

    Args:
        nbits: bits of keys and values.
        key_bits, value_bits: override ``nbits`` for one of them; 16 for full precision. A list has
            those of each layer, as ``exkv plan --cache best --json`` says.
        axis: which 32 keys share a scale: ``"head"``, neighbours in one token's head, or
            ``"channel"``, one channel of 32 consecutive tokens, as in KIVI (Liu et al., 2024), with
            4 or 2 bits. Values are grouped by head either way.
        residual_length: how many of the last tokens a query sees in full precision, its own
            included: fewer than 32 are 32, but for 0 by head. None for 64 by channel, 0 by head.
        rotate: apply a Hadamard transform to heads (see :class:`Storage`); None for 4 and 2 bits by
            head only: it would spread the large channels that ``axis="channel"`` is for.

    A layer whose sliding window is at most ``residual_length`` stores it in full precision, and
    nothing else.

    Raises:
        ValueError: an unsupported number of bits, an unknown axis, a negative ``residual_length``.
    """

    IGNORED: ClassVar[Mapping[str, str]] = {
        **KVCache.IGNORED,
        "backend": "exkv has its own quantization",
        "axis_key": 'axis="head" or axis="channel" says what shares a scale',
        "axis_value": "values are grouped by head",
        "q_group_size": f"{GROUP} values share a scale",
        "compute_dtype": "computation is in the model's dtype",
    }
    #: What ``nbits`` and ``axis`` are by default.
    NBITS: ClassVar[int] = 4
    AXIS: ClassVar[str] = "head"

    @classmethod
    def compose(
        cls,
        spec: LayerSpec,
        config: LayerWindows,
        layer: int,
        *,
        nbits: int | None = None,
        key_bits: int | Sequence[int] | None = None,
        value_bits: int | Sequence[int] | None = None,
        axis: str | None = None,
        residual_length: int | None = None,
        rotate: bool | None = None,
    ) -> LayerSpec:
        nbits, axis = cls.NBITS if nbits is None else nbits, cls.AXIS if axis is None else axis
        given = {"key_bits": key_bits, "value_bits": value_bits}
        bits = [_bits_of_layer(name, each, nbits, config, layer) for name, each in given.items()]
        keys, values = _formats(bits[0], bits[1], axis)
        by_head = axis == "head"
        if residual_length is None:
            residual_length = 0 if by_head else RESIDUAL_LENGTH
        residual_length = whole("residual_length", residual_length, least=0)
        if residual_length or not by_head:
            residual_length = max(residual_length, GROUP)
        rotated = by_head and min(bits) < 8 if rotate is None else rotate
        storage = Storage(keys=keys, values=values, rotate=rotated, recent=residual_length)
        window = _sliding_window(config, layer)
        if window is not None and window <= residual_length:
            return replace(spec, retention=Window(window))
        return replace(spec, storage=storage)


def _bits_of_layer(
    name: str, bits: int | Sequence[int] | None, usual: int, config: LayerWindows, layer: int
) -> int:
    """One layer's bits, from one number for all layers or a list with one for each."""
    if not isinstance(bits, Sequence):
        return usual if bits is None else bits
    if len(bits) != config.cache_layers:
        raise ValueError(
            f"{name} has {len(bits)} numbers, and the model {config.cache_layers} layers: give one "
            "for each layer, or one for all"
        )
    return bits[layer]


#: Bits of a key or value by head -> format.
_FORMATS = {16: "float", 8: "int8", 4: "int4", 2: "int2"}
#: In descending order.
BITS_BY_HEAD = tuple(_FORMATS)
_BY_CHANNEL = {4: "int4c", 2: "int2c"}


def _formats(key_bits: int, value_bits: int, axis: str) -> tuple[str, str]:
    if axis not in ("head", "channel"):
        raise ValueError(f"axis is {axis!r}: it must be 'head' or 'channel'")
    for number in (key_bits, value_bits):
        if whole_type("nbits", number) not in _FORMATS:
            raise ValueError(f"there is no format of {number!r:.40} bits: choose 16, 8, 4 or 2")
    if axis == "head":
        return _FORMATS[key_bits], _FORMATS[value_bits]
    if key_bits not in _BY_CHANNEL:
        raise ValueError(
            f"there is no format of {key_bits} bits by channel: choose 4 or 2 for keys, or "
            "axis='head'"
        )
    return _BY_CHANNEL[key_bits], _FORMATS[value_bits]


def storage_of_bits(key_bits: int, value_bits: int) -> Storage:
    """Storage with groups by head, Hadamard-transformed below 8 bits like
    :class:`QuantizedCache`."""
    keys, values = _formats(key_bits, value_bits, "head")
    return Storage(keys=keys, values=values, rotate=min(key_bits, value_bits) < 8)


def _fewer_bits(storage: Storage, bits: int) -> Storage:
    """A storage of ``bits`` bits, fewer than ``storage`` has; ValueError otherwise."""
    fewer = storage_of_bits(bits, bits)
    least = min(number for number, kind in _FORMATS.items() if kind in storage.formats)
    if bits >= least:
        raise ValueError(
            f"rounded_bits is {bits}: it must be less than the {least} bits that the cache stores; "
            "use host_tokens for pages in full"
        )
    return fewer


class PagedCache(QuantizedCache):
    """Pages of ``page`` tokens, allocated from a pool as rows grow; forks, beams and jobs of an
    ``exkv.Engine`` with a common prefix share them. Full precision, or ``nbits``.

    With ``batch_size`` 1, the default, ``max_seq_len`` is the size of the pool in tokens.

    Args:
        page: tokens a page, a multiple of 16.
        pages: size of the pool; None for enough to fill all rows.
        host_tokens: capacity, in tokens, of a host memory tier for evicted pages of the prefix
            cache; they come back unchanged.
        rounded_tokens, rounded_bits: a further tier in 8, 4 or 2 bits, for pages evicted from the
            first. Pages come back rounded, and only for jobs that allow it: see
            ``exkv.Job.approximate_reuse``.
        nbits, key_bits, value_bits, rotate: as in :class:`QuantizedCache`; 16 is full precision.

    Raises:
        ValueError: an invalid number, or ``rounded_bits`` that are not fewer than those of keys and
            values.
    """

    NBITS: ClassVar[int] = 16

    @classmethod
    def compose(
        cls,
        spec: LayerSpec,
        config: LayerWindows,
        layer: int,
        *,
        page: int = PAGE,
        pages: int | None = None,
        host_tokens: int = 0,
        rounded_tokens: int = 0,
        rounded_bits: int = 8,
        **options: Any,
    ) -> LayerSpec:
        composed = super().compose(spec, config, layer, **options)
        size = Paged(page).page
        tiers = []
        if whole_type("host_tokens", host_tokens):
            tiers.append(HostTier(pages=-(-host_tokens // size)))
        if whole_type("rounded_tokens", rounded_tokens):
            rounded = _fewer_bits(composed.storage, rounded_bits)
            tiers.append(HostTier(pages=-(-rounded_tokens // size), storage=rounded))
        return replace(composed, growth=Paged(page, pages, tuple(tiers)))


class Cache4bit(QuantizedCache):
    """4 bits a value, rotated, with a scale and an offset for every 32: 5 bits in all."""


class Cache2bit(QuantizedCache):
    """2 bits a value, rotated, with a scale and an offset for every 32: 3 bits in all."""

    NBITS: ClassVar[int] = 2


class KiviCache(Cache2bit):
    """KIVI's layout: 2 bits a value, keys by channel and values by head, 3 bits in all, and the
    last 64 tokens in full precision. ``Cache2bit`` with ``axis="channel"``."""

    AXIS: ClassVar[str] = "channel"


#: The kinds by the names that commands take; lossless ones first, then quantized ones, then those
#: that evict tokens. The contract tests run over this table.
CACHES: dict[str, type[KVCache]] = {
    "fp16": Cache,
    "dynamic": DynamicCache,
    "paged": PagedCache,
    "hybrid": HybridCache,
    "offloaded": OffloadedCache,
    "offloaded_static": OffloadedStaticCache,
    "8bit": Cache8bit,
    "4bit": Cache4bit,
    "2bit": Cache2bit,
    "kivi": KiviCache,
    "sliding_window": SlidingWindowCache,
    "sink": SinkCache,
}

#: Kinds that keep every token on its layer's device, the least lossy first.
BY_LOSS = ("fp16", "hybrid", "8bit", "4bit", "2bit")

_HUGGING_FACE = {"static": Cache, "quantized": QuantizedCache}


def make_cache(cache_implementation: str, model: CacheOwner, **cache_config: Any) -> KVCache:
    """Build a cache by Hugging Face's name: dynamic, static, offloaded, offloaded_static,
    quantized, sliding_window, sink, hybrid; or by exkv's, see ``exkv.CACHES``.

    Args:
        cache_config: options of the kind: ``max_seq_len``, ``batch_size``, ``dtype``, and e.g.
            ``nbits``, ``window_length``, ``num_sink_tokens``.

    Raises:
        ValueError: an unknown name, or an invalid number.
        TypeError: an option that the kind doesn't have.
        PlacementError: the model is loaded, and there is no room.
    """
    return cache_kind(cache_implementation)(model, **cache_config)


def cache_kind(name: str) -> type[KVCache]:
    """The kind of cache of this name, see :func:`make_cache`.

    Raises:
        ValueError: an unknown name.
    """
    kinds = CACHES | _HUGGING_FACE
    if name not in kinds:
        raise ValueError(f"cache_implementation {name!r} is none of {', '.join(kinds)}")
    return kinds[name]
