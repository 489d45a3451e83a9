"""Draw plans: a bar for each device, coloured by what fills it, and a table.

No line is wider than the console, and no word is cut: bars get shorter, and a table's remaining
columns follow below it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from exkv.planning import Budget, Ledger, Place, Plan
from exkv.planning.plan import UNBOUNDED
from exkv.sizes import human

#: Characters of a line if the width of the page is unknown.
PAGE_WIDTH = 130
#: Most cells of the largest device's bar.
_BAR_WIDTH = 72
_NAME_WIDTH = 9
_FREE = "grey30"


def page_console(*, stderr: bool = False) -> Console:
    """The terminal, or a page of :data:`PAGE_WIDTH`."""
    console = Console(stderr=stderr, soft_wrap=False)
    return console if console.is_terminal else Console(stderr=stderr, width=PAGE_WIDTH)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a text as it is, without rich's markup."""
    console.print(text, style=style, highlight=False, markup=False)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar, drawn as its letter if there are no colours."""

    name: str
    letter: str
    colour: str
    nbytes: int


def draw(console: Console, plans: Sequence[Plan], names: Sequence[str]) -> None:
    """Draw the bars, their legend, and the table."""
    draw_bars(console, plans, names)
    for table in fitted(_table(plans, names), console):
        console.print(table)


def draw_bars(console: Console, plans: Sequence[Plan], names: Sequence[str]) -> None:
    """Draw a bar for each device and the legend; then list other models in memory, what was
    reduced to fit, and how far from optimal a plan may be."""
    places = _places(plans)
    devices = [stack(plans, names, place) for place in places]
    ledgers, colour = [_ledger(plans[-1], p) for p in places], console.color_system is not None
    sizes = [_length(parts, ledger) for parts, ledger in zip(devices, ledgers, strict=True)]
    labels = [f" {human(size)}" for size in sizes]
    room = console.width - _NAME_WIDTH - max(map(len, labels))
    # Bars of devices that are too small are extended by up to half.
    too_small = any(
        sum(part.nbytes for part in parts) > size
        for parts, size in zip(devices, sizes, strict=True)
    )
    width = max(min(_BAR_WIDTH, room * 2 // 3 if too_small else room), 1)
    host = ""
    for parts, ledger, label in zip(devices, ledgers, labels, strict=True):
        if ledger.place.host != host:
            host = ledger.place.host
            console.print(Text(host, style="bold"), no_wrap=True, crop=False, highlight=False)
        line = Text(f"{ledger.device!s:>{_NAME_WIDTH - 1}} ")
        line.append_text(bar(parts, ledger, max(sizes), colour=colour, width=width))
        line.append(label)
        console.print(line, no_wrap=True, crop=False, highlight=False)
    console.print(_legend(devices, colour=colour, width=console.width), highlight=False)
    for first in (_ledger(plans[0], place) for place in places):
        for other in first.budget.others:
            say(console, other)
    for name, plan in zip(names, plans, strict=False):
        if plan.fitted:
            say(console, f"To fit, the {name} has {', '.join(plan.fitted)}: the same answers.")
        if plan.gap:
            say(
                console,
                f"Not all orders of the devices were tried: the {name} is {plan.near_best}.",
            )


def _places(plans: Sequence[Plan]) -> list[Place]:
    """The places of all plans, grouped by host."""
    places = dict.fromkeys(ledger.place for plan in plans for ledger in plan.ledgers)
    hosts = list(dict.fromkeys(place.host for place in places))
    return sorted(places, key=lambda place: hosts.index(place.host))


def _ledger(plan: Plan, place: Place) -> Ledger:
    """The plan's ledger for this device, or an empty one."""
    nothing = Budget(device=place.device, host=place.host, capacity=UNBOUNDED)
    return next((each for each in plan.ledgers if each.place == place), Ledger.empty(nothing))


def fitted(table: Table, console: Console) -> Iterator[Table]:
    """Split a table into parts that fit the console: the first column, and as many of the others
    as there is room for."""
    first, *others = table.columns
    while others:
        for count in range(len(others), 0, -1):
            part = Table(title=table.title)
            part.rows = table.rows
            part.columns = [
                replace(column, _index=index)
                for index, column in enumerate([first, *others[:count]])
            ]
            unlimited = console.options.update(width=1 << 16)
            if Measurement.get(console, unlimited, part).maximum <= console.width:
                break
        yield part
        others = others[count:]


def as_svg(console: Console, title: str) -> str:
    """Export a console's recording with a position for each character, which holds in any font.
    rich sets each line's length instead, which not all programs follow."""

    def placed(match: re.Match[str]) -> str:
        start, width = float(match["x"]), float(match["width"])
        count = len(html.unescape(match["text"]))
        steps = " ".join(f"{start + index * width / count:g}" for index in range(count))
        return f'x="{steps}"{match["y"]}{match["rest"]}>{match["text"]}</text>'

    return _LINE.sub(placed, console.export_svg(title=title))


_LINE = re.compile(
    r'x="(?P<x>[\d.]+)"(?P<y> y="[\d.]+") textLength="(?P<width>[\d.]+)"(?P<rest>[^>]*)>'
    r"(?P<text>[^<]*)</text>"
)


def stack(plans: Sequence[Plan], names: Sequence[str], place: Place) -> list[Part]:
    """The parts of a device's bar, from the bottom up."""
    ledgers = [_ledger(plan, place) for plan in plans]
    first, last = ledgers[0].budget, ledgers[-1]
    parts = [
        Part("others", "o", "grey37", first.in_use_by_others),
        Part("this process", "p", "grey54", first.in_use),
    ]
    letters = iter(("W", "C", "D", "E"))
    colours = iter(("dodger_blue2", "green3", "deep_sky_blue1", "chartreuse1"))
    for name, ledger in zip(names, ledgers, strict=False):
        prefix = "" if len(plans) == 1 else f"{name} "
        for line in ("weights", "cache"):
            nbytes = getattr(ledger, line)
            parts.append(Part(prefix + line, next(letters), next(colours), nbytes))
    work = max(ledger.workspace for ledger in ledgers)
    most = max(ledger.promised_call for ledger in ledgers)
    return [
        *parts,
        Part("logits", "l", "magenta", sum(ledger.logits for ledger in ledgers)),
        Part("workspace", "w", "orange1", work),
        Part("transport", "t", "yellow3", sum(ledger.transport for ledger in ledgers)),
        Part("staging", "s", "gold3", sum(ledger.staging for ledger in ledgers)),
        Part("allocator", "a", "yellow4", sum(ledger.segments for ledger in ledgers) + most - work),
        Part("context", "x", "grey50", last.budget.overhead),
        Part("margin", "m", "grey62", last.budget.margin),
        Part("reserve", "r", "grey46", last.budget.reserve),
    ]


def _length(parts: Sequence[Part], ledger: Ledger) -> int:
    """Bytes of the device's bar: its capacity, if known."""
    if ledger.budget.capacity == UNBOUNDED:
        return sum(part.nbytes for part in parts)
    return ledger.budget.capacity


def bar(
    parts: Sequence[Part], ledger: Ledger, largest: int, *, colour: bool, width: int = _BAR_WIDTH
) -> Text:
    """Cells in proportion to bytes, ``width`` of them for the largest device; up to half as many
    ``!`` show bytes beyond the device's capacity."""
    length = _length(parts, ledger)
    cells = lambda nbytes: round(nbytes * width / max(largest, 1))  # noqa: E731
    text, end, total = Text(), cells(length), 0
    for part in parts:
        start, total = min(cells(total), end), total + part.nbytes
        count = min(cells(total), end) - start
        text.append_text(_cells(part.letter, part.colour, count, colour=colour))
    used = min(cells(total), end)
    text.append_text(_cells("·", _FREE, end - used, colour=colour))
    if total > length:
        text.append("!" * max(min(cells(total) - end, width // 2), 1), style="bold red")
    return text


def _cells(letter: str, shade: str, count: int, *, colour: bool) -> Text:
    """Part of a bar: coloured cells, which need no font, or letters."""
    return Text(" " * count, style=f"on {shade}") if colour else Text(letter * count)


def _legend(devices: Sequence[Sequence[Part]], *, colour: bool, width: int) -> Text:
    """Explain each colour or letter, on as many lines as needed."""
    entries = [
        Text.assemble(_cells(part.letter, part.colour, 1, colour=colour), f" {part.name}")
        for position, part in enumerate(devices[0])
        if any(parts[position].nbytes for parts in devices)
    ]
    entries.append(Text.assemble(_cells("·", _FREE, 1, colour=colour), " free"))
    indent = " " * _NAME_WIDTH
    lines = [Text(indent)]
    for entry in entries:
        if len(lines[-1]) > _NAME_WIDTH:
            if len(lines[-1]) + 3 + len(entry) > width:
                lines.append(Text(indent))
            else:
                lines[-1].append("   ")
        lines[-1].append_text(entry)
    return Text("\n").join(lines)


def _table(plans: Sequence[Plan], names: Sequence[str]) -> Table:
    """A row for each device, a column for each part that isn't empty, and the totals."""
    places = _places(plans)
    devices = [stack(plans, names, place) for place in places]
    table = Table()
    table.add_column("device")
    for name in names[: len(plans)]:
        table.add_column("layers" if len(plans) == 1 else f"{name} layers", justify="right")
    shown = [i for i in range(len(devices[0])) if any(parts[i].nbytes for parts in devices)]
    for position in shown:
        table.add_column(devices[0][position].name, justify="right")
    table.add_column("free", justify="right")
    on_disk = [sum(_ledger(plan, place).from_disk for plan in plans) for place in places]
    if any(on_disk):
        table.add_column("on disk", justify="right")
    for place, parts, left, after in zip(
        places, devices, on_disk, [*places[1:], None], strict=True
    ):
        table.add_row(
            str(place),
            *(_layers(plan, place) for plan in plans),
            *(human(parts[position].nbytes) for position in shown),
            _free(parts, _ledger(plans[-1], place)),
            *([human(left)] if any(on_disk) else []),
            end_section=after is not None and after.host != place.host,
        )
    if len(devices) > 1:
        sums = [sum(parts[position].nbytes for parts in devices) for position in shown]
        table.add_section()
        table.add_row("all", *("" for _ in plans), *map(human, sums), "")
    return table


def _free(parts: Sequence[Part], ledger: Ledger) -> Text | str:
    if ledger.budget.capacity == UNBOUNDED:
        return ""
    free = ledger.budget.capacity - sum(part.nbytes for part in parts)
    return human(free) if free >= 0 else Text(f"{human(-free)} over", style="bold red")


def _layers(plan: Plan, place: Place) -> str:
    """The layers on the device as a range, with "embed" and "head"."""
    here = [unit.name for unit in plan.units if unit.place == place]
    numbers = [int(name.rpartition(".")[2]) for name in here if name.rpartition(".")[2].isdigit()]
    others = [name.rpartition(".")[2] for name in here if not name.rpartition(".")[2].isdigit()]
    ranges = f"{numbers[0]}-{numbers[-1]}" if numbers else ""
    return " ".join(filter(None, [*_ends(others, first=True), ranges, *_ends(others, first=False)]))


def _ends(names: Sequence[str], *, first: bool) -> Iterator[str]:
    if any(("embed" in name) == first for name in names):
        yield "embed" if first else "head"
