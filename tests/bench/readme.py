"""The tables of decoding in docs/measured.md, made of what ``decode.py`` measured: ``python -m
tests.bench readme``. What is between the two comments named in ``MARKERS`` is
replaced, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from exkv import CACHES

from .common import Spread, machine_line
from .decode import TRANSFORMERS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "bench" / "results"
PAGE = ROOT / "docs" / "measured.md"
WIDTH = 104  # of the lines there
MARKERS = ("<!-- bench:decode -->", "<!-- /bench:decode -->")
#: Our kind of cache -> how llama.cpp keeps keys and values beside which it is shown.
PEERS = {"fp16": "f16", "8bit": "q8_0"}
HEADINGS = ("share", "transformers'", "llama.cpp's", "beside transformers", "beside llama.cpp")

Rows = Mapping[tuple[str, int], Mapping[str, Any]]


def newest() -> Path:
    """The result of ``decode`` with the latest date; of several the last by name.

    Raises:
        FileNotFoundError: there is none.
    """
    files = sorted(RESULTS.glob("decode-*.json"))
    if not files:
        raise FileNotFoundError(f"no decode-*.json in {RESULTS}; run python -m tests.bench decode")
    return max(files, key=lambda file: (json.loads(file.read_text())["machine"]["date"], file.name))


def block(file: Path) -> str:
    """The tables of one result, a model and batch each, and where they come from.

    Raises:
        ValueError: the file is none that the page's readers have.
    """
    if not file.resolve().is_relative_to(RESULTS):
        raise ValueError(f"{file} is not in {RESULTS}; put it there, since the page names it")
    result = json.loads(file.read_text())
    name = file.resolve().relative_to(ROOT)
    version = result["machine"].get("llama_cpp")
    about = machine_line(result["machine"]) + (f"; llama-cpp-python {version}" if version else "")
    rounds = result["settings"]["rounds"]
    source = f"*{about}; {rounds} rounds. Every figure: `{name.as_posix()}`.*"
    source = textwrap.fill(source, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join([*map(table, result["models"]), source])


def table(model: Mapping[str, Any]) -> str:
    """One model and batch: the first kind of cache at every context, others at the longest."""
    rows = {(row["engine"], row["context"]): row for row in model["rows"]}
    contexts = sorted({context for _, context in rows})
    engines = dict.fromkeys(engine for engine, _ in rows if engine.startswith("exkv "))
    count = model.get("batch", 1)  # results before there were batches name none
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
        Spread(**own["share"]).text(),
        f"{theirs['share']['median']:.2f}" if theirs else "",
        f"{note}{cpp['share']['median']:.2f}" if cpp else "",
        _ratio(own["times"].get(TRANSFORMERS)),
        _ratio(own["times"].get(f"llama.cpp {peer}")),
    )


def _ratio(value: float | None) -> str:
    """With two figures that count."""
    if value is None:
        return ""
    return f"{value:.{2 if value < 0.995 else 1 if value < 9.95 else 0}f}"


def named(text: str) -> list[Path]:
    """The results that a page's tables say they are made of, in order."""
    found = re.findall(r"`tests/bench/results/(decode-[^`]*\.json)`", text)
    return [RESULTS / name for name in found]


def renewed(text: str, files: Iterable[Path]) -> str:
    """A page's text with the tables of these results.

    Raises:
        ValueError: it hasn't exactly one pair of ``MARKERS``, in their order.
    """
    begin, end = MARKERS
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the text must have one {begin} and behind it one {end}, a line each")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return "\n\n".join([before + begin, *map(block, files), end + after])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables into docs/measured.md."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench readme", description=__doc__)
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        help="decode's --json; else the newest of tests/bench/results",
    )
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        files = options.results or [newest()]
        text = renewed(options.page.read_text(), files)
    except (OSError, ValueError) as reason:
        parser.error(str(reason))
    options.page.write_text(text)
    print(f"{options.page}: tables of {', '.join(file.name for file in files)}")
    return 0
