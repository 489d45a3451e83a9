"""The command ``exkv``: one file a subcommand, with its arguments and a ``run`` that returns the
exit status: 0 for yes, 1 for no, 2 for input that makes no sense."""

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
    # Most commands end soon. To look for garbage among all that torch makes when it is imported
    # takes a good part of a short command's time, most of it at the end, where all of it goes
    # anyway.
    gc.disable()
    atexit.register(gc.freeze)
    parser = Parser(prog="exkv", description="Language models over the devices that you have.")
    parser.add_argument("--version", action="version", version=f"exkv {__version__}")
    parser.set_defaults(lasts=False)  # whether a command goes on until somebody ends it
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan.add_to(commands)
    chat.add_to(commands)
    quantize.add_to(commands)
    serve.add_to(commands)
    cluster.add_to(commands)
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
