"""Input: lines of a pipe, or an editor at a terminal.

A message is a line, or the text between two lines with ``\"\"\"``. In the editor, pasted lines stay
together, Alt-Enter starts a line, and the arrow keys recall messages of earlier runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Protocol

QUOTES = '"""'
_PROMPT, _MORE = "> ", ". "


class Reader(Protocol):
    """Asks for one message after another.

    Attributes:
        interactive: whether a person types and can correct mistakes.
        edits: whether a draft can be edited.
    """

    interactive: bool
    edits: bool

    def message(self, draft: str = "") -> str | None:
        """The next message, without its quotes; None at the end of input.

        Args:
            draft: initial text, for a reader that edits.
        """

    def yes(self, question: str) -> bool:
        """Ask a question; for a script the answer is yes."""


def reader_for(args: argparse.Namespace) -> Reader:
    """An editor if input and output are a capable terminal, else lines."""
    able = os.environ.get("TERM", "dumb") != "dumb" or sys.platform == "win32"
    if able and sys.stdin.isatty() and sys.stdout.isatty():
        from .editor import Editor  # which a pipe never needs

        return Editor(None if args.no_history else history_file())
    return Lines()


def history_file() -> Path | None:
    """File of earlier messages, readable by the user alone; None if it can't be written."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(state) / "exkv" / "chat_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        return file if os.access(file, os.R_OK | os.W_OK) else None
    except OSError:
        return None


def is_open(text: str) -> bool:
    """Whether a text begins with quotes that are still open."""
    text = text.strip()
    return text.startswith(QUOTES) and (len(text) < 6 or not text.endswith(QUOTES))


def unquoted(text: str) -> str:
    """Strip the quotes around a message; a space before it keeps a slash from being a command."""
    bare = text.strip()
    if not bare.startswith(QUOTES) or is_open(bare):
        return text
    return " " + bare[3:-3].strip("\n")


class Lines:
    """Reads lines from a pipe or a simple terminal."""

    edits = False

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        if self.interactive:
            with contextlib.suppress(ImportError):  # not on every platform
                import readline  # noqa: F401 - gives input() its editing

    def message(self, draft: str = "") -> str | None:
        text = line = self._line(_PROMPT)
        while line and is_open(text):
            line = self._line(_MORE)
            text += line
        if not line and text:
            raise ValueError(f"the input ended before the {QUOTES} that ends a message")
        return unquoted(text.rstrip("\r\n")) if text else None

    def yes(self, question: str) -> bool:
        if not self.interactive:
            return True
        return self._line(f"{question} [y/N] ").strip().lower() in ("y", "yes")

    def _line(self, prompt: str) -> str:
        """Read a line with its end; "" at the end of input. No prompt is written to a pipe."""
        if not self.interactive:
            return sys.stdin.readline()
        if not sys.stdout.isatty():
            sys.stderr.write(prompt)
            sys.stderr.flush()
            return sys.stdin.readline()
        try:
            return input(prompt) + "\n"
        except EOFError:
            print()
            return ""
