"""``python -m tests.bench hosts``: what 1 to 1,000 hosts give, by ``exkv.planning.pipeline``.

Nothing is measured: the cards' and links' figures are those of their data sheets. It prints the
tables of docs/hosts.md and writes its drawing with ``--svg docs/tokens-by-hosts.svg``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from exkv.planning.pipeline import Card, Work, many_sequences, one_sequence
from exkv.planning.plan import Link

from .common import markdown, svg_text

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
_COLOURS = ("#1f77b4", "#2ca02c", "#d62728")
_DASHES = ("2 3", "7 3", "")

Rate = Callable[[Work, Card, Link, int], float]
_PANELS: tuple[tuple[str, Rate], ...] = (
    ("one sequence", one_sequence),
    ("as many as there is room for", many_sequences),
)
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 360, 300, 60, 30, 70


def table(rate: Rate, counts: Sequence[int], digits: int) -> str:
    """Tokens a second by card and link, a column for each number of hosts."""
    rows = [
        [card, link, *(f"{rate(WORK, CARDS[card], LINKS[link], n):,.{digits}f}" for n in counts)]
        for card in CARDS
        for link in LINKS
    ]
    return markdown(["card", "link", *map(str, counts)], rows)


def drawing() -> str:
    """SVG: hosts beside tokens a second, both logarithmic; cards by colour, links by dash."""
    parts = [part for number, _ in enumerate(_PANELS) for part in _panel(number)]
    bottom = _TOP + _HEIGHT + 60
    for number, card in enumerate(CARDS):
        parts.append(svg_text(_LEFT, bottom + 18 * number, card, "start", _COLOURS[number]))
    for number, link in enumerate(LINKS):
        x, y = _LEFT + _WIDTH + _GAP, bottom + 18 * number
        parts.append(
            f'<path d="M{x} {y - 4}h40" stroke="#888" stroke-width="2" '
            f'stroke-dasharray="{_DASHES[number]}"/>'
        )
        parts.append(svg_text(x + 50, y, link, "start"))
    size = f"{_LEFT + 2 * _WIDTH + _GAP + 20} {bottom + 50}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" '
        'font-size="13">\n<title>Tokens a second of a 70B model over 1 to 1,000 hosts</title>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _panel(number: int) -> list[str]:
    """One of the two drawings: axes, then a line for each card and link."""
    title, rate = _PANELS[number]
    left = _LEFT + number * (_WIDTH + _GAP)
    hosts = sorted({round(10 ** (step / 20)) for step in range(61)})
    lines = {
        (card, link): [(n, rate(WORK, CARDS[card], LINKS[link], n)) for n in hosts]
        for card in CARDS
        for link in LINKS
    }
    low = math.floor(math.log10(min(y for line in lines.values() for _, y in line)))
    high = math.ceil(math.log10(max(y for line in lines.values() for _, y in line)))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        share = (math.log10(point[1]) - low) / (high - low)
        return left + math.log10(point[0]) / 3 * _WIDTH, _TOP + (1 - share) * _HEIGHT

    parts = [svg_text(left, _TOP - 10, f"tokens a second, {title}", "start")]
    parts += _axes(left, at, range(low, high + 1))
    for (card, link), line in lines.items():
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, line))
        colour = _COLOURS[list(CARDS).index(card)]
        dash = _DASHES[list(LINKS).index(link)]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dash}"/>'
        )
    return parts


def _axes(
    left: float, at: Callable[[tuple[float, float]], tuple[float, float]], powers: Sequence[int]
) -> list[str]:
    bottom = _TOP + _HEIGHT
    parts = [svg_text(left + _WIDTH / 2, bottom + 36, "hosts", "middle")]
    for power in range(4):
        x, _ = at((10**power, 10.0 ** powers[0]))
        parts.append(f'<path d="M{x:.1f} {bottom}V{_TOP}" stroke="#8884"/>')
        parts.append(svg_text(x, bottom + 18, f"{10**power:,}", "middle"))
    for power in powers:
        _, y = at((1, 10.0**power))
        parts.append(f'<path d="M{left} {y:.1f}h{_WIDTH}" stroke="#8884"/>')
        parts.append(svg_text(left - 6, y + 4, f"{10**power:,}", "end"))
    return parts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench hosts", description=__doc__)
    parser.add_argument("--svg", metavar="FILE", help="write the drawing")
    options = parser.parse_args(arguments)
    print(table(one_sequence, (1, 2, 4, 8, 80), 1))
    print()
    print(table(many_sequences, (1, 2, 4, 8, 16, 100, 1000), 0))
    if options.svg:
        Path(options.svg).write_text(drawing(), "utf-8")
    return 0
