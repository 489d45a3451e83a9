"""What 1 to 1,000 hosts give by ``pipeline.py``'s arithmetic: ``python -m tests.bench hosts``.

Nothing is measured: the cards' and links' figures are those of their data sheets. It prints the
tables of docs/hosts.md and draws its picture with ``--svg docs/tokens-by-hosts.svg``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from exkv.planning.plan import Link

from . import chart
from .harness import markdown, setting
from .pipeline import Card, Work, many_sequences, one_sequence

#: 70B in 4.5 bits a weight, 80 layers with 8 heads of 128 for keys and values in 16 bits, sequences
#: of 8,192 tokens.
WORK = Work(units=80, weights=40e9, parameters=70.6e9, cache=8192 * 327680, hidden=16384)

#: Memory, bytes a second, dense 16-bit operations a second; PCIe 4 and 5 x16, and for the mini PC,
#: whose memory is one, its disk.
CARDS = {
    "24 GB, 936 GB/s (RTX 3090)": Card(memory=24e9, bandwidth=936e9, flops=71e12, beside=25e9),
    "80 GB, 3.35 TB/s (H100)": Card(memory=80e9, bandwidth=3.35e12, flops=989e12, beside=50e9),
    "96 GB, 256 GB/s (Ryzen AI Max)": Card(memory=96e9, bandwidth=256e9, flops=50e12, beside=6e9),
}
LINKS = {
    "1 Gbit, 0.5 ms": Link(bandwidth=0.125e9, latency=5e-4),
    "10 Gbit, 0.2 ms": Link(bandwidth=1.25e9, latency=2e-4),
    "100 Gbit, 10 us": Link(bandwidth=12.5e9, latency=1e-5),
}
COLOURS = dict(zip(CARDS, ("#1f77b4", "#2ca02c", "#d62728"), strict=True))
DASHES = dict(zip(LINKS, ("2 3", "7 3", ""), strict=True))
Rate = Callable[[Work, Card, Link, int], float]
#: Title -> rate, numbers of hosts in the table, digits.
RATES: dict[str, tuple[Rate, tuple[int, ...], int]] = {
    "one sequence": (one_sequence, (1, 2, 4, 8, 80), 1),
    "as many as there is room for": (many_sequences, (1, 2, 4, 8, 16, 100, 1000), 0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The drawing, if any."""

    svg: Path | None = setting(None, "write the drawing there")


def rates(title: str, counts: list[int]) -> dict[tuple[str, str], list[float]]:
    """Card, link -> tokens a second for each number of hosts."""
    rate = RATES[title][0]
    return {
        (card, link): [rate(WORK, CARDS[card], LINKS[link], count) for count in counts]
        for card, link in product(CARDS, LINKS)
    }


def table(title: str) -> str:
    """Tokens a second by card and link, a column for each number of hosts."""
    _, counts, digits = RATES[title]
    rows = [
        [card, link, *(f"{value:,.{digits}f}" for value in values)]
        for (card, link), values in rates(title, list(counts)).items()
    ]
    return markdown(["card", "link", *map(str, counts)], rows)


def drawing() -> str:
    """SVG: hosts beside tokens a second, both logarithmic; cards by colour, links by dash."""
    hosts = sorted({round(10 ** (step / 20)) for step in range(61)})
    parts: list[str] = []
    for number, title in enumerate(RATES):
        lines = rates(title, hosts)
        every = [value for line in lines.values() for value in line]
        low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))
        powers = [10.0**power for power in range(low, high + 1)]
        panel = chart.Panel(
            x=(1, 10, 100, 1000), y=powers, log=True, left=60 + number * 430, width=360
        )
        panel.axes("hosts", f"tokens a second, {title}")
        for (card, link), values in lines.items():
            panel.line(zip(hosts, values, strict=True), COLOURS[card], DASHES[link])
        parts += panel.parts
    for number, (card, link) in enumerate(zip(CARDS, LINKS, strict=True)):
        y = 390 + 18 * number
        parts += [
            chart.text(60, y, card, colour=COLOURS[card]),
            chart.key(490, y - 4, DASHES[link]),
        ]
        parts.append(chart.text(540, y, link))
    return chart.svg("Tokens a second of a 70B model over 1 to 1,000 hosts", 870, 440, parts)


def measure(settings: Settings) -> dict[str, Any]:
    if settings.svg:
        settings.svg.write_text(drawing(), "utf-8")
    return {"tables": [table(title) for title in RATES]}


def report(result: dict[str, Any]) -> list[str]:
    return result["tables"]
