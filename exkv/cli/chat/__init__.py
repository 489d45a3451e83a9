"""``exkv chat MODEL``: talk to a model, at a terminal or through a pipe.

Answers go to standard output and everything else to standard error, so both can be pipes. ``flags``
has the flags, ``session`` the model in conversation, ``commands`` the slash commands, ``reading``
the input and ``showing`` the output.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from rich.console import Console

from exkv.cli.picture import page_console
from exkv.errors import OutOfMemoryError, PlacementError

from .commands import Commands, mistaken_for_a_message
from .flags import add_flags
from .reading import Reader, reader_for
from .session import Session
from .showing import answers_to, one_line


def add_to(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model",
        description="Load a model and talk to it. /help lists the commands. Exit status: 0, 1 the "
        "model doesn't fit, 2 invalid input.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a checkpoint's folder, or a GGUF file")
    add_flags(parser)
    parser.set_defaults(run=run, lasts=True)


def run(args: argparse.Namespace, program: str = "exkv chat") -> int:
    """Chat -> the exit status: 0, 1 for a model that does not fit, 2 for invalid input."""
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr] # TextIO has no such method
    try:
        return _converse(args, page_console(stderr=True))
    except PlacementError as error:
        return _fail(program, error, 1)
    except BrokenPipeError:  # the reader of the answers is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError) as error:
        return _fail(program, error, 2)
    except KeyboardInterrupt:  # while loading
        return 130


def _fail(program: str, error: Exception, status: int) -> int:
    print(f"{program}: {one_line(error)}", file=sys.stderr)
    return status


def _converse(args: argparse.Namespace, notes: Console) -> int:
    reader = reader_for(args)
    session = Session(args, answers_to(sys.stdout, raw=args.raw), notes)
    commands = Commands(session, reader)
    if reader.interactive:
        session.note("/help lists the commands; Ctrl-D leaves")
    while True:
        try:
            text = reader.message(commands.draft())
        except KeyboardInterrupt:
            commands.cancel()
            session.note("\n(Ctrl-D or /quit leaves)")
            continue
        if text is None:
            return 0
        try:
            if not _respond(session, commands, reader, text):
                return 0
        except (ValueError, OSError, OutOfMemoryError, PlacementError) as error:
            if not reader.interactive:
                raise  # a script must not go on without its message
            session.note(one_line(error))
        except KeyboardInterrupt:  # in the middle of a command
            if not reader.interactive:
                raise
            session.note("(stopped)")


def _respond(session: Session, commands: Commands, reader: Reader, text: str) -> bool:
    """Answer a message or run a command; False to quit."""
    if text.startswith("/"):
        return commands.do(text)
    hint = mistaken_for_a_message(text)
    if hint and reader.interactive:
        session.note(hint)
    elif text.strip():
        commands.say(text.strip())
    return True
