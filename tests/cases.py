"""Cases: checks over drawn ones, once for each backend or reference, and architectures with kinds
of cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

from exkv import CACHES, KVCache, PagedCache
from exkv.cache import LayerSpec
from exkv.cache.spec import LayerWindows

#: Architectures that meet every kind of cache: of attention to all, and with windows and soft caps.
_WITH_EACH = ("LlamaForCausalLM", "Gemma2ForCausalLM")
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
    two architectures meet each kind, and the others meet all of them between them; so do those that
    consist of others' parts, one each."""
    from tiny import RELATIVES  # which imports transformers, as all do who ask for architectures

    first = list(names).index(name)
    others = [kind for kind in CACHES if kind not in _WITH_ALL]
    if name in RELATIVES:
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
