"""The loading flags, declared once for ``exkv plan``, ``chat`` and ``serve``, each of which may
leave out or change some.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from exkv.cache import CACHES
from exkv.checkpoint import DTYPES
from exkv.planning.plan import OBJECTIVES, ORDERS
from exkv.sizes import parse_sizes
from exkv.weights.on_load import BEST, INTEGERS

_MOST = 1 << 30


class Parser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists all arguments)\n")


def add_loading_flags(
    flags: argparse._ActionsContainer,
    *,
    leave_out: Collection[str] = (),
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Add all flags but the model.

    Args:
        leave_out: flags that the command doesn't have.
        changes: flag -> arguments of ``add_argument`` that replace the default ones.
    """
    changes = changes or {}
    assert {*leave_out, *changes} <= {names[0] for names in _FLAGS}, "unknown flag"
    for names, default in _FLAGS.items():
        if names[0] not in leave_out:
            flags.add_argument(*names, **{**default, **changes.get(names[0], {})})


def unknowns(args: argparse.Namespace) -> list[str]:
    """The flags whose value the planner is to find, such as "--cache best"."""
    sought = {"max_seq_len": "max", "batch_size": "max", "cache": "best"}
    flags = {name: f"--{name.replace('_', '-')} {value}" for name, value in sought.items()}
    return [flag for name, flag in flags.items() if getattr(args, name) == sought[name]]


# Values ------------------------------------------------------------------------------------------


def gpu_split(text: str) -> list[float] | None:
    if text == "auto":
        return None
    try:
        split = [float(size) for size in text.split(",")]
        if all(map(math.isfinite, split)):
            return split
        raise ValueError
    except ValueError:
        message = f"{text!r} is neither auto nor GB per device, such as 20,24"
        raise argparse.ArgumentTypeError(message) from None


def whole(text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
    return int(text)


def count(text: str) -> int:
    return whole(text, 1, _MOST)


def number(text: str) -> int:
    return whole(text, 0, _MOST)


def sizes(text: str) -> int | list[int]:
    """Parse one size for every device, or a list of sizes; 0 is allowed."""
    pieces = [piece.strip() for piece in text.split(",")]
    try:
        parsed = [0 if piece == "0" else parse_sizes(piece)[0] for piece in pieces]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return parsed if len(parsed) > 1 else parsed[0]


def text_of(name: str) -> str:
    """Read a text file."""
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise argparse.ArgumentTypeError(f"{name!r} can't be read: {reason}") from None


def _words(table: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {meaning}" for name, meaning in table.items())


# The flags ---------------------------------------------------------------------------------------

_FLAGS: dict[tuple[str, ...], dict[str, Any]] = {
    ("--devices",): {
        "type": lambda text: text.split(","),
        "metavar": "NAMES",
        "help": "devices in the order in which to fill them, such as cuda:0,cuda:1,cpu (all)",
    },
    ("--gpu-split", "-gs"): {
        "type": gpu_split,
        "metavar": "GB,GB",
        "help": "GB to use on each device, such as 20,24; or auto (the default): all free memory",
    },
    ("--reserve", "--reserve-vram"): {
        "dest": "reserve",
        "type": sizes,
        "metavar": "SIZES",
        "help": "memory to leave free: on every device, 1G; or one size per device, 1G,0",
    },
    ("--cluster",): {
        "metavar": "HOST:PORT",
        "help": "use several hosts: listen at this address for those of --hosts, which run `exkv "
        "cluster up HOST:PORT`; torchrun, ray or ray://HOST:PORT: use the hosts that it starts; "
        "local: simulate hosts by processes of this machine",
    },
    ("--hosts",): {
        "nargs": "+",
        "metavar": "NAME[=LIST]",
        "help": "hosts that join this machine, each with limits for its devices: b=24G,24G c",
    },
    ("--max-seq-len", "--length", "-l"): {
        "type": count,
        "metavar": "TOKENS",
        "help": "capacity of the cache (as many tokens as fit, up to the model's positions)",
    },
    ("--cache",): {
        "choices": [*CACHES, BEST],
        "default": "fp16",
        "help": "kind of cache (fp16); best: the least lossy that fits, chosen per layer with "
        "--calibration",
    },
    ("--chunk-size",): {
        "type": count,
        "metavar": "TOKENS",
        "help": "most tokens per prefill step (2048, or fewer if only they fit)",
    },
    ("--weights",): {
        "choices": [*INTEGERS, BEST],
        "help": "quantize float weights while loading; best: the bits per unit that fit and lose "
        "least",
    },
    ("--calibration",): {
        "type": text_of,
        "metavar": "FILE",
        "help": "a text to calibrate quantization with; --weights best also measures on it what "
        "fewer bits cost, and plans count how often each expert is chosen",
    },
    ("--dtype",): {"choices": DTYPES, "help": "of activations and float weights (the model's)"},
    ("--draft",): {
        "metavar": "MODEL",
        "help": "a small model that proposes tokens for this one to verify, for speed; mtp: the "
        "model's own head, if the checkpoint has one",
    },
    ("--embed-cpu",): {
        "action": "store_true",
        "default": None,
        "help": "keep the embedding in host memory (only if the model doesn't fit otherwise)",
    },
    ("--objective",): {"choices": OBJECTIVES, "default": "pack", "help": _words(OBJECTIVES)},
    ("--order",): {
        "choices": ORDERS,
        "default": "listed",
        "help": "any: fill devices in any order",
    },
    ("--no-host-experts",): {
        "dest": "host_experts",
        "action": "store_false",
        "help": "move whole layers to the host if the cards have no room, never single experts",
    },
    ("--no-disk-experts",): {
        "dest": "disk_experts",
        "action": "store_false",
        "help": "refuse a model with more experts than memory has room for, instead of reading "
        "them from its file as they are chosen",
    },
}
