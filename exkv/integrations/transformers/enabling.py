"""``enable()``: ``model.generate(..., cache_implementation="exkv")``.

transformers' list of names for ``cache_implementation`` is fixed. So ``enable`` wraps ``generate``
and replaces exkv's names in a call by a cache. It also puts cache classes that were removed from
transformers back (``named.py``).
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import (
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    cache_utils,
)
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from exkv.cache import CACHES

from .cache import STATIC, HFCache
from .named import NAMED, NamedCache
from .versions import cache_argument, with_cache_renamed

#: Names that transformers removed, or now uses for its static cache.
_REMOVED = ("sink", "sliding_window", "hybrid")
#: Names that transformers has deprecated -> their kind.
_DEPRECATED = {
    "hybrid_chunked": "hybrid",
    "offloaded_hybrid": "offloaded_static",
    "offloaded_hybrid_chunked": "offloaded_static",
}
#: Arguments of ``generate`` that an ``HFCache`` replaces.
_SETTINGS = ("cache_implementation", "cache_config", "max_cache_len")
#: Kinds for the encoder's keys, whose number isn't known in advance.
_GROWING = {"static": "dynamic", "offloaded_static": "offloaded"}
#: The first arguments of ``generate``.
_POSITIONAL = ("inputs", "generation_config")
_stock_generate: Any = None
_stock_classes: list[tuple[Any, str, Any]] = []


def enable(kind: str = "dynamic", *, every_name: bool = False, **options: Any) -> None:
    """Let every model's ``generate`` take exkv's names for ``cache_implementation``: "exkv" for a
    cache of this kind; sink, sliding_window and hybrid; and kinds that only exkv has, e.g. "8bit".
    ``cache_config`` takes their settings, including ``kind``. Cache classes that transformers
    removed exist again, e.g. ``transformers.SinkCache``, and a cache can be passed as ``cache`` or
    ``past_key_values`` with every version. :func:`disable` undoes this.

    Args:
        every_name: whether names that transformers has itself are exkv's too: "offloaded" and
            "offloaded_static", for which transformers needs CUDA, "quantized", "dynamic", "static".
        options: settings of "exkv", which ``cache_config`` overrides.
    """
    global _stock_generate
    disable()
    # Executes transformers' __init__ again, which removes earlier additions; loading a model
    # imports it.
    importlib.import_module("transformers.processing_utils")
    _stock_generate = stock = GenerationMixin.generate
    names = _names(every_name)

    @functools.wraps(stock)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(_POSITIONAL, args, strict=False))
        kwargs = {**named, **with_cache_renamed(self, kwargs)}
        if isinstance(cache := kwargs.get(cache_argument(self)), NamedCache):
            cache.learn(self.config)
        kwargs = _with_cache(self, kwargs, names, {"kind": kind, **options})
        first = [kwargs.pop(name) for name in named]
        return stock(self, *first, *args[len(named) :], **kwargs)

    setattr(GenerationMixin, "generate", generate)  # noqa: B010  # a method for mypy
    for name, cache_class in NAMED.items():
        for module in _places():
            if name == "SinkCache" or not hasattr(module, name):  # 4.57 has one that only raises
                _stock_classes.append((module, name, getattr(module, name, None)))
                setattr(module, name, cache_class)


def _places() -> list[Any]:
    """Modules with transformers' classes: the package replaces itself in ``sys.modules``, and
    callers may hold an earlier instance."""
    now = sys.modules["transformers"]
    return [transformers, *([] if now is transformers else [now]), cache_utils]


def disable() -> None:
    """Undo :func:`enable`."""
    global _stock_generate
    if _stock_generate is not None:
        setattr(GenerationMixin, "generate", _stock_generate)  # noqa: B010
        _stock_generate = None
    while _stock_classes:
        module, name, cache_class = _stock_classes.pop()
        if cache_class is None:
            delattr(module, name)
        else:
            setattr(module, name, cache_class)


def _with_cache(
    model: PreTrainedModel, kwargs: dict[str, Any], names: set[str], defaults: dict[str, Any]
) -> dict[str, Any]:
    """Replace one of exkv's names in a call by a cache."""
    given = kwargs.get("generation_config")
    name = kwargs.get("cache_implementation") or getattr(given, "cache_implementation", None)
    if name not in names:
        return kwargs
    settings = kwargs.get("cache_config") or getattr(given, "cache_config", None) or {}
    kind = _DEPRECATED.get(name, name)
    settings = {**(defaults if name == "exkv" else {"kind": kind}), **settings}
    encoders = settings
    if settings["kind"] in STATIC and not {"max_seq_len", "max_cache_len"} & set(settings):
        encoders = {**settings, "kind": _GROWING[settings["kind"]]}
        settings["max_cache_len"] = _length(model, kwargs)
    rest = {key: value for key, value in kwargs.items() if key not in _SETTINGS}
    if isinstance(given, GenerationConfig):
        rest["generation_config"] = config = copy.deepcopy(given)
        config.cache_implementation = config.cache_config = None
    cache: Any = HFCache(model.config, **settings)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, HFCache(model.config, **encoders))
    elif settings["kind"] in STATIC and _compiles_prefill(model, kwargs):
        _allocate(cache, model, kwargs)
    return {**rest, cache_argument(model): cache}


def _length(model: PreTrainedModel, call: Mapping[str, Any]) -> int | None:
    """Capacity of a stock static cache for this call: the longest (decoder's) text except its last
    token, or ``max_cache_len``. None if the call has no length."""
    wanted, length, new = (
        _setting(model, call, name) for name in ("max_cache_len", "max_length", "max_new_tokens")
    )
    prompt, has_encoder = _prompt(model, call), model.config.is_encoder_decoder
    if new and (prompt is not None or has_encoder):
        length = new + (1 if prompt is None else prompt.shape[1])
    return max(length - 1, wanted or 0) if length else wanted


def _setting(model: PreTrainedModel, call: Mapping[str, Any], name: str) -> Any:
    """An argument of a call, or its value in the call's or the model's generation config."""
    config = call.get("generation_config") or model.generation_config
    return call.get(name) or getattr(config, name, None)


def _prompt(model: PreTrainedModel, call: Mapping[str, Any]) -> torch.Tensor | None:
    """The decoder's prompt, (B, T, ...)."""
    has_encoder = model.config.is_encoder_decoder
    names = ("decoder_input_ids",) if has_encoder else ("inputs", "input_ids", "inputs_embeds")
    return next((call[name] for name in names if call.get(name) is not None), None)


def _compiles_prefill(model: PreTrainedModel, call: Mapping[str, Any]) -> bool:
    """Whether the prompt runs in a graph, which should not allocate: transformers compiles the
    model for chunked prefill, or the user has compiled it."""
    compiled = hasattr(model.forward, "_torchdynamo_orig_callable") or model._compiled_call_impl
    return bool(compiled or _setting(model, call, "prefill_chunk_size"))


def _allocate(cache: HFCache, model: PreTrainedModel, call: Mapping[str, Any]) -> None:
    """Allocate a cache before the call, as transformers would; on one device."""
    shape = getattr(model, "_get_static_cache_init_shape", lambda: None)()  # since 5.23
    prompt = _prompt(model, call)
    if shape is None or prompt is None:
        return
    beams, sequences = (_setting(model, call, x) for x in ("num_beams", "num_return_sequences"))
    rows = len(prompt) * max(beams or 1, sequences or 1)
    heads, width = shape
    cache.early_initialization(rows, heads, width, model.dtype, model.device)


def _names(every: bool) -> set[str]:
    """Names that ``cache_implementation`` takes."""
    if every:
        return {"exkv", *CACHES, *ALL_CACHE_IMPLEMENTATIONS}
    return {"exkv", *_REMOVED, *(set(CACHES) - set(ALL_CACHE_IMPLEMENTATIONS))}
