"""The docs' tables of decoding, of what ``decode.py`` measured: ``python -m tests.bench pages``
prints those of the results that docs/measured.md names. A test holds the page to them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exkv import CACHES

from .decode import TRANSFORMERS
from .harness import ROOT, setting, show

RESULTS = ROOT / "tests" / "bench" / "results"
PAGE = ROOT / "docs" / "measured.md"
#: Our kind of cache -> how llama.cpp keeps keys and values beside which it is shown.
PEERS = {"fp16": "f16", "8bit": "q8_0"}
HEADINGS = ("share", "transformers'", "llama.cpp's", "beside transformers", "beside llama.cpp")

Rows = Mapping[tuple[str, int], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is printed."""

    results: tuple[Path, ...] = setting((), "of decode, as JSON; else those that the page names")


def table(model: Mapping[str, Any]) -> str:
    """One model and batch: the first kind of cache at every context, the others at the longest."""
    rows = {(row["engine"], row["context"]): row for row in model["rows"]}
    contexts = sorted({context for _, context in rows})
    engines = dict.fromkeys(engine for engine, _ in rows if engine.startswith("exkv "))
    count = model["batch"]
    title = f"{model['shape']}, {'one sequence' if count == 1 else f'{count} sequences'}"
    lines = [_line((title, *HEADINGS)), "|---|" + "---:|" * len(HEADINGS)]
    for index, engine in enumerate(engines):
        for context in contexts if index == 0 else contexts[-1:]:
            if (engine, context) in rows:  # not where no sample counts
                lines.append(_line(_cells(rows, engine, context, index == 0, len(lines) == 2)))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def _cells(rows: Rows, engine: str, context: int, first: bool, unit: bool) -> tuple[str, ...]:
    """One line. transformers' share stands in those of the first kind only, being the same."""
    kind = engine.removeprefix("exkv ")
    own, peer = rows[engine, context], PEERS.get(kind)
    theirs = rows.get((TRANSFORMERS, context)) if first else None
    cpp = rows.get((f"llama.cpp {peer}", context))
    note = "" if first else f"({peer}) "
    return (
        f"`{CACHES[kind].__name__}` after {context:,}{' tokens' if unit else ''}",
        show(own["share"]),
        f"{theirs['share']['median']:.2f}" if theirs else "",
        f"{note}{cpp['share']['median']:.2f}" if cpp else "",
        _ratio(own["times"].get(TRANSFORMERS)),
        _ratio(own["times"].get(f"llama.cpp {peer}")),
    )


def _ratio(value: float | None) -> str:
    """Format with two significant figures."""
    if value is None:
        return ""
    return f"{value:.{2 if value < 0.995 else 1 if value < 9.95 else 0}f}"


def named(text: str) -> list[Path]:
    """The decoding results that a page names, in order."""
    found = re.findall(r"`tests/bench/results/(decode-[^`]*\.json)`", text)
    return [RESULTS / name for name in dict.fromkeys(found)]


def tables(file: Path) -> list[str]:
    """The tables of one result, one for each model and batch."""
    return [table(model) for model in json.loads(file.read_text())["models"]]


def measure(settings: Settings) -> dict[str, Any]:
    files = settings.results or named(PAGE.read_text())
    return {"tables": [each for file in files for each in tables(file)]}


def report(result: dict[str, Any]) -> list[str]:
    return result["tables"]
