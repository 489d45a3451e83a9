"""The flags of ``exkv chat`` beside those that say what is loaded where.

The short forms are those of ExLlamaV2's own chat.
"""

from __future__ import annotations

import argparse

from exkv.cli.flags import add_loading_flags, count, whole

#: Flags that are fields of SamplingParams.
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "typical", "token_repetition_penalty")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All but the model."""
    add_loading_flags(parser.add_argument_group("model and devices"))
    _add_sampling_flags(parser.add_argument_group("answers"))
    add = parser.add_argument_group("terminal").add_argument
    add("--raw", action="store_true", help="show answers as they are: no markdown")
    add("--no-history", action="store_true", help="remember nothing that is typed")


def _add_sampling_flags(flags: argparse._ArgumentGroup) -> None:
    add = flags.add_argument
    add("--system", metavar="TEXT", help="what the model is told before everything else")
    add(
        "--max-tokens",
        "--max-response-tokens",
        "-maxr",
        dest="max_response",
        type=count,
        default=1000,
        metavar="TOKENS",
        help="the most tokens of an answer (1000)",
    )
    add("--seed", "-seed", type=seed, metavar="N", help="makes the answers repeatable")
    add("--temperature", "-temp", type=float, metavar="X", help="0 takes the likeliest token")
    add("--top-k", "-topk", type=int, metavar="N", help="keep the N likeliest tokens; 0: all")
    add("--top-p", "-topp", type=float, metavar="X", help="keep the likeliest with this mass")
    add("--min-p", "-minp", type=float, metavar="X", help="drop what is X times less likely")
    add("--typical", "-typical", type=float, metavar="X", help="mass of the typical set; 0: off")
    add(
        "--repetition-penalty",
        "-repp",
        dest="token_repetition_penalty",
        type=float,
        metavar="X",
        help="above 1 makes repeating less likely",
    )


def seed(text: str) -> int:
    return whole(text, 0, 1 << 62)
