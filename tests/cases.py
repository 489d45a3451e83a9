"""Cases: checks over drawn ones, once for each backend or reference, and architectures with kinds
of cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

from exkv import CACHES, KVCache, PagedCache
from exkv.cache import LayerSpec
from exkv.cache.spec import LayerWindows
from exkv.ops.kv_formats import FORMATS

#: Architectures that meet every kind of cache: of attention to all, with windows and soft caps, and
#: with values that are the keys.
_WITH_EACH = ("LlamaForCausalLM", "Gemma2ForCausalLM", "DeepseekV3ForCausalLM")
_WITH_ALL = ("fp16", "4bit")


class RoomyPagedCache(PagedCache):
    """In a pool with room for forks, too, and pages so small that rows have several."""

    @classmethod
    def compose(
        cls,
        spec: LayerSpec,
        config: LayerWindows,
        layer: int,
        *,
        page: int = 16,
        pages: int | None = 64,
        **options: Any,
    ) -> LayerSpec:
        return super().compose(spec, config, layer, page=page, pages=pages, **options)


#: Every kind as tests of rows and forks make it.
KINDS = CACHES | {"paged": RoomyPagedCache}


def kinds_for(name: str, names: Iterable[str]) -> dict[str, type[KVCache]]:
    """Kinds of cache for one of these architectures. A layer asks its cache, whatever kind it is:
    three architectures meet each kind, and the others meet all of them between them; so do those
    that consist of others' parts, one each."""
    from tiny import RELATIVES  # which imports transformers, as all do who ask for architectures

    first = list(names).index(name)
    others = [kind for kind in CACHES if kind not in _WITH_ALL]
    if name in RELATIVES and name not in _WITH_EACH:
        others.append("4bit")
        return {kind: CACHES[kind] for kind in ("fp16", others[first % len(others)])}
    chosen = others if name in _WITH_EACH else others[first % 3 :: 3]
    return {kind: CACHES[kind] for kind in (*_WITH_ALL, *chosen)}


def check_cases(
    check: Callable[..., None], cases: Mapping[str, SearchStrategy], *args: Any, examples: int
) -> None:
    """``check(*args, **case)`` for cases that hypothesis draws from these strategies."""

    @settings(max_examples=examples)
    @given(**cases)
    def run(**case: Any) -> None:
        check(*args, **case)

    run()


def small_pages(kind: str) -> dict[str, int]:
    """Options with which a cache of a few tokens takes a few pages of them, and not of 256."""
    return {"page": 16} if kind == "paged" else {}


def bits(name: str) -> float:
    """Bits a value of a format of keys and values, without what its group shares."""
    layout = FORMATS[name].layout((1, 64, 1, 32), torch.float32)
    shape, dtype = layout[""]
    return 8 * math.prod(shape) * dtype.itemsize / (64 * 32)


def bits_of(spec: LayerSpec, tokens: int) -> tuple[float, float]:
    """Bits of keys and of values in a store of so many tokens; infinity where none is rounded."""
    rounds = not spec.storage.lossless and tokens > spec.storage.recent
    keys, values = map(bits, spec.storage.formats) if rounds else (math.inf, math.inf)
    return keys, values


def forgets(spec: LayerSpec, tokens: int) -> bool:
    """Whether a row of so many tokens is not kept whole."""
    return spec.retention.capacity(tokens) < tokens
