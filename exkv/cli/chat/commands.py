"""Slash commands: a table, with a method and a line of help for each."""

from __future__ import annotations

import argparse
import contextlib
import copy
import difflib
import shlex
from collections.abc import Callable
from typing import NoReturn

from exkv.sampling import SamplingParams
from exkv.sampling.exllamav2 import PLAIN

from .flags import add_flags
from .reading import Reader
from .saved import read_conversation, write_conversation
from .session import Session, check_template, recommended

#: Command -> its argument, and what it does.
_HELP = {
    "/help": ("", "this list"),
    "/regen": ("", "answer the last message again"),
    "/edit": ("[TEXT]", "change the last message"),
    "/undo": ("", "remove the last message and its answer"),
    "/reset": ("", "start a new conversation"),
    "/system": ("[TEXT]", 'show or change the system message; "" removes it'),
    "/set": ("[NAME VALUE]", "show or change how tokens are sampled; VALUE may be default"),
    "/save": ("FILE", "write the conversation to a file"),
    "/load": ("FILE", "continue a saved conversation"),
    "/model": ("[MODEL FLAGS]", "show this model's plan; or another's, and load it if you agree"),
    "/stats": ("", "show each device's units and cache"),
    "/quit": ("", "leave; so does Ctrl-D"),
}
_FOOT = '''\
To send several lines, paste them, or put """ before and after. Ctrl-C stops an answer. To send a
message that begins with /, put a space before it.'''
NAMES = tuple(_HELP)
#: Other names of commands.
_ALIASES = {
    "/clear": "/reset",
    "/new": "/reset",
    "/exit": "/quit",
    "/bye": "/quit",
    "/q": "/quit",
    "/regenerate": "/regen",
    "/retry": "/regen",
    "/?": "/help",
}
#: Settings of the session besides those of SamplingParams.
_OWN = {"max_tokens": "most", "seed": "seed"}
_SHORT = {"repetition_penalty": "token_repetition_penalty"}


def mistaken_for_a_message(text: str) -> str | None:
    """A hint for a single word that was probably meant as a command; None for other messages."""
    word = text.strip().lower()
    name = _ALIASES.get(f"/{word}", f"/{word}")
    if text[:1].isspace() or name not in _HELP or word in ("system", "model", "set"):
        return None
    return f"({word} was not sent: the command is {name}. To send it, begin with a space)"


class Commands:
    """The slash commands of a session."""

    def __init__(self, session: Session, reader: Reader) -> None:
        self._session, self._reader = session, reader
        self._draft: str | None = None
        self._table: dict[str, Callable[[str], object]] = {
            name: getattr(self, f"_{name[1:]}") for name in _HELP if name != "/quit"
        }

    def draft(self) -> str:
        """The message that is being edited, or ""."""
        return self._draft or ""

    def cancel(self) -> None:
        """Cancel editing a message."""
        self._draft = None

    def say(self, text: str) -> None:
        """Send a message to the model, replacing one that is being edited."""
        if self._draft is not None:
            self._draft = None
            self._session.conversation.undo()
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C just as the answer was complete
            self._session.answer(text)

    def do(self, text: str) -> bool:
        """Run a /command; False to quit.

        Raises:
            ValueError, OSError, PlacementError: it failed, and nothing has changed.
        """
        self.cancel()
        name, _, rest = text.partition(" ")
        name = _ALIASES.get(name.strip(), name.strip())
        if name == "/quit":
            return False
        if name not in self._table:
            self._unknown(name)
        elif rest.strip() and not _HELP[name][0]:
            raise ValueError(f"{name} takes no argument, but got {rest.strip()[:40]!r}")
        else:
            self._table[name](rest.strip())
        return True

    def _unknown(self, name: str) -> None:
        near = difflib.get_close_matches(name, [*_HELP, *_ALIASES], 1)
        meant = f"did you mean {near[0]}? " if near else ""
        self._session.note(f"unknown command {name}; {meant}/help lists the commands")

    def _help(self, rest: str) -> None:
        lines = [f"{f'{name} {what}':<22} {help}" for name, (what, help) in _HELP.items()]
        self._session.note("\n".join([*lines, _FOOT]))

    # The conversation -------------------------------------------------------------------------

    def _reset(self, rest: str) -> None:
        self._session.conversation.reset()
        self._session.answers = 0
        self._session.note("(a new conversation)")

    def _undo(self, rest: str) -> None:
        message = self._undo_last()
        self._session.note(f"(removed: {_shortened(message)})")

    def _regen(self, rest: str) -> None:
        if self._session.settings.is_greedy:
            self._session.note("(decoding is greedy: /set temperature 0.8 for another answer)")
        self.say(self._undo_last())

    def _edit(self, rest: str) -> None:
        if rest:
            self._undo_last()
            self.say(rest)
        elif self._reader.edits:
            self._draft = self._last()
        else:
            raise ValueError("give /edit NEW TEXT: this input has no editor")

    def _last(self) -> str:
        """The user's last message."""
        sent = [m["content"] for m in self._session.conversation.messages if m["role"] == "user"]
        if not sent:
            raise ValueError("there is no message yet")
        return sent[-1]

    def _undo_last(self) -> str:
        """Remove the user's last message and its answer -> the message."""
        message = self._last()
        self._session.conversation.undo()
        return message

    def _system(self, rest: str) -> None:
        conversation = self._session.conversation
        if not rest:
            self._session.note(conversation.system or "(nothing)")
            return
        before = conversation.system
        conversation.tell(None if rest == '""' else rest)
        try:
            check_template(conversation)
        except ValueError:
            conversation.tell(before)
            raise
        self._session.note("(from the next answer on)")

    # Files ------------------------------------------------------------------------------------

    def _save(self, rest: str) -> None:
        file = _one_path("/save", rest)
        write_conversation(file, self._session.name, self._session.conversation.messages)
        self._session.note(f"(saved to {file})")

    def _load(self, rest: str) -> None:
        system, turns = read_conversation(_one_path("/load", rest))
        conversation = self._session.conversation
        before = conversation.system, conversation.messages
        conversation.system, conversation.messages = system, []
        conversation.reset()
        try:
            check_template(conversation)
        except ValueError:
            conversation.system, conversation.messages = before
            raise
        conversation.messages += turns
        for message in turns:
            self._session.note(f"{message['role']}: {_shortened(message['content'])}")

    # Settings ---------------------------------------------------------------------------------

    def _set(self, rest: str) -> None:
        session = self._session
        if not rest:
            values = {name: getattr(session, own) for name, own in _OWN.items()}
            values |= {name: getattr(session.settings, name) for name in sorted(PLAIN)}
            session.note("\n".join(f"{name} {value}" for name, value in values.items()))
            return
        name, _, value = rest.replace("=", " ").partition(" ")
        name, value = _SHORT.get(name, name).replace("-", "_"), value.strip()
        if name in _OWN:
            setattr(session, _OWN[name], self._own_value(name, value))
        elif name in PLAIN:
            self._set_sampling(name, value)
        else:
            near = difflib.get_close_matches(name, [*_OWN, *sorted(PLAIN)], 1)
            raise ValueError(
                f"there is no setting {name!r}" + (f": did you mean {near[0]}?" if near else "")
            )
        now = getattr(session, _OWN[name]) if name in _OWN else getattr(session.settings, name)
        session.note(f"({name} is {now})")

    def _own_value(self, name: str, value: str) -> int | None:
        if value == "default":
            return self._session.args.max_response if name == "max_tokens" else None
        least = 1 if name == "max_tokens" else 0
        if not value.isascii() or not value.isdigit() or int(value) < least or len(value) > 18:
            raise ValueError(f"{name} is {value!r}; it must be a whole number from {least}")
        return int(value)

    def _set_sampling(self, name: str, value: str) -> None:
        session, chosen = self._session, dict(self._session.chosen)
        if value == "default":
            chosen.pop(name, None)
        else:
            chosen[name] = _number(name, value)
        session.settings = recommended(session.args.model, chosen)
        session.chosen = chosen

    # Models -----------------------------------------------------------------------------------

    def _model(self, rest: str) -> None:
        session = self._session
        if not rest:
            session.note(session.name)
            session.show_statistics()
            return
        args = self._flags(rest)
        session.planned(args)
        if self._reader.yes(f"Load it, and unload {session.name}?"):
            session.replace_model(args)
            session.note(f"({session.name} continues this conversation)")
        else:
            session.note(f"({session.name} stays loaded)")

    def _flags(self, rest: str) -> argparse.Namespace:
        """This model's flags, updated by the given ones."""
        parser = _Parser(prog="/model", add_help=False, allow_abbrev=False)
        parser.add_argument("model", metavar="MODEL")
        add_flags(parser)
        before = copy.copy(self._session.args)
        before.model = None
        return parser.parse_args(shlex.split(rest), before)

    def _stats(self, rest: str) -> None:
        self._session.show_statistics()


class _Parser(argparse.ArgumentParser):
    """Raises ValueError for invalid flags."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}")


def _number(name: str, text: str) -> int | float | bool:
    """Convert a value's text to the setting's type."""
    kind = type(getattr(SamplingParams(), name))
    if kind is bool:
        words = {"true": True, "on": True, "false": False, "off": False}
        if text.lower() not in words:
            raise ValueError(f"{name} is {text!r}; it must be on or off")
        return words[text.lower()]
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        number = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} is {text!r}; it must be {number}, or default") from None


def _one_path(command: str, rest: str) -> str:
    paths = shlex.split(rest)
    if len(paths) != 1:
        raise ValueError(f"{command} takes one file name: {command} FILE")
    return paths[0]


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 70 else line[:69] + "…"
