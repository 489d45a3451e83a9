"""Drawings of lines and points as SVG, for pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]


def text(x: float, y: float, words: str, anchor: str = "start", colour: str = "#888") -> str:
    """A text whose ``anchor`` (start, middle or end) is at x."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def svg(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    """A whole file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="13">\n<title>{title}</title>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def key(x: float, y: float, dash: str) -> str:
    """A sample of a dash pattern, for a legend."""
    return f'<path d="M{x} {y}h40" stroke="#888" stroke-width="2" stroke-dasharray="{dash}"/>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A plot with axes, and the parts drawn so far.

    Attributes:
        x, y: evenly spaced ticks; the axes end at the first and the last.
        log: whether both axes are logarithmic.
        left, top, width, height: of the plot, in the file's units.
    """

    x: Sequence[float]
    y: Sequence[float]
    log: bool = False
    left: float = 60
    top: float = 30
    width: float = 560
    height: float = 300
    parts: list[str] = field(default_factory=list)

    def at(self, point: Point) -> Point:
        """A point's place in the file."""
        shares = []
        for value, ticks in zip(point, (self.x, self.y), strict=True):
            value, low, high = map(math.log10 if self.log else float, (value, ticks[0], ticks[-1]))
            shares.append((value - low) / (high - low))
        return self.left + shares[0] * self.width, self.top + (1 - shares[1]) * self.height

    def axes(self, below: str, above: str) -> None:
        bottom, right = self.top + self.height, self.left + self.width
        self.parts.append(text(self.left, self.top - 10, above))
        self.parts.append(text(self.left + self.width / 2, bottom + 38, below, "middle"))
        for tick in self.x:
            x, _ = self.at((tick, self.y[0]))
            self.parts.append(f'<path d="M{x:.1f} {bottom}V{self.top}" stroke="#8884"/>')
            self.parts.append(text(x, bottom + 18, f"{tick:,g}", "middle"))
        for tick in self.y:
            _, y = self.at((self.x[0], tick))
            self.parts.append(f'<path d="M{self.left} {y:.1f}H{right}" stroke="#8884"/>')
            self.parts.append(text(self.left - 6, y + 4, f"{tick:,g}", "end"))

    def line(self, points: Iterable[Point], colour: str, dash: str = "") -> None:
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.at, points))
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>'
        )

    def dot(self, point: Point, words: str, colour: str) -> None:
        x, y = self.at(point)
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        self.parts.append(text(x + 7, y - 5, words, colour=colour))
