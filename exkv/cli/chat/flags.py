"""The flags of ``exkv chat`` besides those for loading; short forms are those of ExLlamaV2's."""

from __future__ import annotations

import argparse
from typing import Any

from exkv.cli.flags import add_loading_flags, count, whole
from exkv.sampling.exllamav2 import BOUNDS, PLAIN


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags but the model."""
    add_loading_flags(parser.add_argument_group("model and devices"))
    _add_sampling_flags(parser.add_argument_group("answers"))
    add = parser.add_argument_group("terminal").add_argument
    add("--raw", action="store_true", help="show answers as plain text, without rendering markdown")
    add("--no-history", action="store_true", help="don't store what is typed")


def _add_sampling_flags(flags: argparse._ArgumentGroup) -> None:
    add = flags.add_argument
    add("--system", metavar="TEXT", help="the system message")
    add(
        "--max-tokens",
        "--max-response-tokens",
        "-maxr",
        dest="max_response",
        type=count,
        default=1000,
        metavar="TOKENS",
        help="most tokens per answer (1000)",
    )
    add("--seed", "-seed", type=seed, metavar="N", help="makes answers reproducible")
    for name, setting in PLAIN.items():
        kind, meaning = BOUNDS[name].kind, f"{setting.does}; {BOUNDS[name].words}"
        value: dict[str, Any] = {"type": kind, "metavar": "N" if kind is int else "X"}
        if kind is bool:
            value = {"action": "store_const", "const": True}
        short = [setting.short] if setting.short else []
        flag = f"--{name.removeprefix('token_').replace('_', '-')}"
        add(flag, *short, dest=name, help=meaning, **value)


def seed(text: str) -> int:
    return whole(text, 0, 1 << 62)
