"""The command ``exkv``: one file for each subcommand, with its arguments and a ``run`` that returns
the exit status: 0 for yes, 1 for no, 2 for invalid input."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence

from exkv.version import __version__

from . import chat, cluster, plan, quantize, serve
from .flags import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; ``arguments`` default to the process's own."""
    # Garbage collection of the objects that importing torch creates takes much of a short
    # command's time, most of it at exit.
    gc.disable()
    atexit.register(gc.freeze)
    parser = Parser(prog="exkv", description="Run language models over the devices you have.")
    parser.add_argument("--version", action="version", version=f"exkv {__version__}")
    parser.set_defaults(lasts=False)  # whether a command runs until it is stopped
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (plan, chat, quantize, serve, cluster):
        command.add_to(commands)
    parsed = parser.parse_args(arguments)
    if parsed.lasts:
        gc.freeze()
        gc.enable()
    try:
        return parsed.run(parsed)
    except (ValueError, TypeError, OSError) as error:
        print(f"exkv {parsed.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
