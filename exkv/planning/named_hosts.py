"""Hosts and the link between them as users write them: ``a=24G,24G b=12G,8G,cpu:32G``, ``10Gbit,
0.2ms``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from .plan import Budget, Link

#: What users give: for each host, in filling order, sizes of its cards as text ("24G,24G,cpu:32G"),
#: or budgets made by a process there.
Hosts: TypeAlias = Mapping[str, str | Sequence[Budget]]

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_POWERS = {"k": 1e3, "m": 1e6, "g": 1e9}
_RATES = {f"{k}{unit}": n / 8 for k, n in _POWERS.items() for unit in ("bit", "bit/s", "bps")}
_RATES |= {f"{k}b/s": n for k, n in _POWERS.items()}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_FORMS = "a link looks like 10Gbit,0.2ms or 1.2GB/s,50us"


def parse_hosts(pieces: Iterable[str]) -> dict[str, str]:
    """Parse ``["a=24G,24G", "b=12G"]`` into sizes by host.

    Raises:
        ValueError: a piece that is not a host with its sizes, or a host listed twice.
    """
    hosts: dict[str, str] = {}
    for piece in pieces:
        name, equals, sizes = piece.partition("=")
        if not equals or not sizes:
            raise ValueError(f"hosts: {piece!r} has no sizes: write a=24G,24G for host a")
        if name in hosts:
            raise ValueError(f"hosts: {name} is listed twice: list all its cards together")
        hosts[name] = sizes
    return hosts


def checked_name(name: str) -> str:
    """The name, if it is a valid host name; ValueError otherwise."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"hosts: {name!r} is not a name: use letters, digits, and . _ -")
    return name


def parse_link(text: str) -> Link:
    """Parse ``"10Gbit,0.2ms"``: bandwidth per second in decimal units, and the time of an empty
    message, 0 if left out.

    Raises:
        ValueError: the text is not a link.
    """
    rate, _, latency = text.partition(",")
    bandwidth = _number(rate, _RATES, text)
    if not bandwidth > 0:
        raise ValueError(f"link {text!r} has no bandwidth: {_FORMS}")
    return Link(bandwidth=bandwidth, latency=_number(latency, _TIMES, text) if latency else 0.0)


def _number(piece: str, units: Mapping[str, float], text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z/]+)", piece.strip().lower())
    if match is None or match[2] not in units:
        raise ValueError(f"can't read {piece!r} in link {text!r}: {_FORMS}")
    return float(match[1]) * units[match[2]]
