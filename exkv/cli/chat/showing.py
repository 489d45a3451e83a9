"""Output of answers while they are generated: plain text in a pipe, markdown at a terminal.

At a terminal, a growing block of markdown is redrawn until the next one begins, so that text that
has scrolled away never changes. Control characters in a model's text are dropped there.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

#: Seconds between two drawings of the growing block.
_EVERY = 0.07
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_PARSER = MarkdownIt("commonmark").enable("table")


def answers_to(file: TextIO, *, raw: bool) -> Plain | Rendered:
    """Rendered markdown at a capable terminal, else plain text."""
    if not file.isatty():
        return Plain(file, bare=False)
    if raw or os.environ.get("TERM", "dumb") == "dumb":
        return Plain(file, bare=True)
    return Rendered(Console(file=file))


class Plain:
    """Text as it is generated; rich would expand its tabs.

    Args:
        bare: whether to drop control characters.
    """

    def __init__(self, file: TextIO, *, bare: bool) -> None:
        self._file, self._bare = file, bare

    @contextmanager
    def answer(self) -> Iterator[Callable[[str], None]]:
        try:
            yield self._show
        finally:  # also after a stopped answer
            self._show("\n")

    def _show(self, text: str) -> None:
        self._file.write(without_controls(text) if self._bare else text)
        self._file.flush()


class Rendered:
    """Markdown, block by block."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def answer(self) -> Iterator[Callable[[str], None]]:
        with Live(console=self._console, transient=True, auto_refresh=False) as live:
            growing = _Growing(live)
            try:
                yield growing.add
            finally:
                growing.finish()


class _Growing:
    """An unfinished answer: printed blocks, and the growing one."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._open = ""
        self._begun = False
        self._drawn = 0.0

    def add(self, piece: str) -> None:
        self._open += without_controls(piece)
        complete, self._open = split_complete(self._open) if "\n" in piece else ("", self._open)
        self._print(complete)
        if complete or time.monotonic() - self._drawn >= _EVERY:
            self._live.update(_Tail(_rendered(self._open)), refresh=True)
            self._drawn = time.monotonic()

    def finish(self) -> None:
        self._live.update("", refresh=True)
        self._print(self._open)

    def _print(self, text: str) -> None:
        if not text.strip():
            return
        if self._begun:
            self._live.console.print()
        self._live.console.print(_rendered(text))
        self._begun = True


def _rendered(text: str) -> Markdown:
    return Markdown(text, code_theme="ansi_dark", hyperlinks=False)


class _Tail:
    """The last lines of a text that fit on the screen."""

    def __init__(self, text: Markdown) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._text, options.update(height=None), pad=False)
        for line in lines[-max(console.height - 2, 1) :]:
            yield from line
            yield Segment.line()


def split_complete(text: str) -> tuple[str, str]:
    """Split markdown into blocks that later text can't change, and the rest.

    The last block may continue, and so may the one before it until the last has a complete line.
    """
    starts = [token.map[0] for token in _PARSER.parse(text) if token.map and token.level == 0]
    lines = text.splitlines(keepends=True)
    begun = [start for start in starts if start < len(lines) - (not text.endswith("\n"))]
    if len(begun) < 2:
        return "", text
    return "".join(lines[: begun[-1]]), "".join(lines[begun[-1] :])


def without_controls(text: str) -> str:
    """Drop control characters, except tabs and line ends."""
    return _CONTROLS.sub("", text)


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
