"""Make ``import exllamav2`` import this package; ``__main__.py`` runs a script that way."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from .missing import instead_of, placeholder
from .version import __version__

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


class _Distribution(importlib.metadata.Distribution):
    """ExLlamaV2 as an installed distribution, for ``importlib.metadata``."""

    def read_text(self, filename: str) -> str | None:
        known = f"Metadata-Version: 2.1\nName: {_THERE}\nVersion: {__version__}\n"
        return known if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).parent / path


class _Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Finds ExLlamaV2's version, and placeholders for its modules that exkv doesn't have."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{_THERE}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        def named(name: str) -> type:
            if name.startswith("_"):  # requested by Python itself
                raise AttributeError(f"{module.__name__} has no {name!r}")
            return placeholder(
                name, module.__name__, instead_of(name) or instead_of(f"{module.__name__}.{name}")
            )

        vars(module)["__getattr__"] = named

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        if getattr(context, "name", None) == _THERE:
            yield _Distribution()


def serve() -> None:
    """Make ``import exllamav2`` import this package, even if ExLlamaV2 is installed.

    Raises:
        ImportError: ExLlamaV2 itself is already imported.
    """
    loaded = sys.modules.get(_THERE)
    if loaded is not None and loaded.__name__ != _HERE:
        raise ImportError(f"{_THERE} is already imported, from {loaded.__file__}")
    for there, here in MODULES.items():
        module = importlib.import_module(f"{_HERE}.{here}".rstrip("."))
        sys.modules[f"{_THERE}.{there}".rstrip(".")] = module
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
