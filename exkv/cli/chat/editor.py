"""The terminal's editor, on prompt_toolkit: several lines, history, completion of commands."""

from __future__ import annotations

from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from .commands import NAMES
from .reading import is_open, unquoted


class Editor:
    """Enter sends; Alt-Enter, or Enter within ``\"\"\"``, starts a line; Tab completes commands.

    Args:
        history: file of earlier messages; None to keep them for this run only.
    """

    interactive = edits = True

    def __init__(self, history: Path | None) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=FileHistory(str(history)) if history else InMemoryHistory(),
            multiline=True,
            key_bindings=_bindings(),
            completer=WordCompleter(list(NAMES), sentence=True),
            complete_while_typing=False,
            prompt_continuation=". ",
            enable_open_in_editor=True,
        )

    def message(self, draft: str = "") -> str | None:
        try:
            return unquoted(self._session.prompt("> ", default=draft))
        except EOFError:
            return None

    def yes(self, question: str) -> bool:
        try:
            answer = PromptSession[str](history=InMemoryHistory()).prompt(f"{question} [y/N] ")
        except EOFError:
            return False
        return answer.strip().lower() in ("y", "yes")


def _bindings() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
