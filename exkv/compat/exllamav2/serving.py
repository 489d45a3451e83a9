"""``import exllamav2``, served from here: by :func:`serve`, and for a script by ``__main__.py``."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

from .gone import instead_of

_HERE = __name__.rpartition(".")[0]
_THERE = "exllamav2"
#: ExLlamaV2's modules -> ours.
MODULES = {
    "": "",
    **{
        name: name
        for name in (
            *("cache", "config", "lora", "model", "model_init", "module", "tokenizer", "util"),
            *("version", "vlm", "generator", "generator.base", "generator.dynamic"),
            *("generator.dynamic_async", "generator.filters", "generator.hooks"),
            *("generator.sampler", "generator.streaming"),
        )
    },
    "generator.dynamic_embeddings": "generator.dynamic",
    "generator.filters.base": "generator.filters",
    "generator.filters.prefix": "generator.filters",
    "generator.filters.select": "generator.filters",
    "tokenizer.base": "tokenizer",
    "tokenizer.hf": "tokenizer",
    "tokenizer.tokenizer": "tokenizer",
    **dict.fromkeys(
        (
            *("vlm.mmprojector", "vlm.util", "vlm.vision_tower", "vlm.processor"),
            *("vlm.processor.pixtral", "vlm.processor.qwen2", "vlm.processor.siglip"),
        ),
        "vlm",
    ),
}


class _Refusal(importlib.abc.MetaPathFinder):
    """Says what to use where a module of ExLlamaV2's is asked for that isn't here."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.startswith(f"{_THERE}.") and (said := instead_of(name)):
            raise ModuleNotFoundError(f"exkv has no {name}: {said}", name=name)
        return None


def serve() -> None:
    """From now on ``import exllamav2`` gives exkv's; an installed ExLlamaV2 is not looked at.

    Raises:
        ImportError: ExLlamaV2 itself is imported already.
    """
    loaded = sys.modules.get(_THERE)
    if loaded is not None and loaded.__name__ != _HERE:
        raise ImportError(f"{_THERE} is imported already, from {loaded.__file__}")
    for there, here in MODULES.items():
        module = importlib.import_module(f"{_HERE}.{here}".rstrip("."))
        sys.modules[f"{_THERE}.{there}".rstrip(".")] = module
    if not any(isinstance(finder, _Refusal) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Refusal())
