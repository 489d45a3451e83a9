"""Hosts and the link between them as people write them: ``a=24G,24G b=12G,8G,cpu:32G``, ``10Gbit,
0.2ms``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from .plan import Budget, Link

#: What users give: for each host, in the order of filling, sizes of its cards as text
#: ("24G,24G,cpu:32G"), or budgets that a process there has made.
Hosts: TypeAlias = Mapping[str, str | Sequence[Budget]]

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_POWERS = {"k": 1e3, "m": 1e6, "g": 1e9}
_RATES = {f"{k}{unit}": n / 8 for k, n in _POWERS.items() for unit in ("bit", "bit/s", "bps")}
_RATES |= {f"{k}b/s": n for k, n in _POWERS.items()}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_FORMS = "a link looks like 10Gbit,0.2ms or 1.2GB/s,50us"


def parse_hosts(pieces: Iterable[str]) -> dict[str, str]:
    """``["a=24G,24G", "b=12G"]`` to the sizes by host.

    Raises:
        ValueError: a piece that is no host with its sizes, or a host twice.
    """
    hosts: dict[str, str] = {}
    for piece in pieces:
        name, equals, sizes = piece.partition("=")
        if not equals or not sizes:
            raise ValueError(f"hosts: {piece!r} says no sizes: write a=24G,24G for host a")
        if name in hosts:
            raise ValueError(f"hosts: {name} is listed twice: list all its cards together")
        hosts[name] = sizes
    return hosts


def checked_name(name: str) -> str:
    """The name, if a host can have it; ValueError else."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"hosts: {name!r} is no name: use letters, digits, and . _ -")
    return name


def parse_link(text: str) -> Link:
    """``"10Gbit,0.2ms"``: what the link carries a second (in decimal units), and the time of a
    message of no bytes, 0 where it is left out.

    Raises:
        ValueError: the text is no link.
    """
    rate, _, latency = text.partition(",")
    bandwidth = _number(rate, _RATES, text)
    if not bandwidth > 0:
        raise ValueError(f"link {text!r} carries nothing: {_FORMS}")
    return Link(bandwidth=bandwidth, latency=_number(latency, _TIMES, text) if latency else 0.0)


def _number(piece: str, units: Mapping[str, float], text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z/]+)", piece.strip().lower())
    if match is None or match[2] not in units:
        raise ValueError(f"{piece!r} in link {text!r} is not understood: {_FORMS}")
    return float(match[1]) * units[match[2]]
