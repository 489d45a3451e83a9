"""Plans as people see them: a bar for each device, coloured by what fills it, and a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from exkv.planning import Ledger, Plan
from exkv.planning.plan import UNBOUNDED
from exkv.sizes import human

_BAR_WIDTH = 72


@dataclass(frozen=True, slots=True)
class Part:
    """What fills a piece of a bar: the letter where there is no colour, the colour, the bytes."""

    name: str
    letter: str
    colour: str
    nbytes: int


def draw(console: Console, plans: Sequence[Plan], names: Sequence[str]) -> None:
    """Bars, their legend, and the table."""
    devices = [stack(plans, names, position) for position in range(len(plans[-1].ledgers))]
    largest = max(_length(parts, plans[-1].ledgers[i]) for i, parts in enumerate(devices))
    for ledger, parts in zip(plans[-1].ledgers, devices, strict=True):
        line = Text(f"{ledger.device!s:>8} ")
        line.append_text(bar(parts, ledger, largest, colour=console.color_system is not None))
        line.append(f" {human(_length(parts, ledger))}")
        console.print(line, no_wrap=True, crop=False, highlight=False)
    console.print(_legend(devices, colour=console.color_system is not None), highlight=False)
    console.print(_table(devices, plans, names))


def stack(plans: Sequence[Plan], names: Sequence[str], position: int) -> list[Part]:
    """What fills the device at this position, from the bottom up."""
    first, last = plans[0].ledgers[position].budget, plans[-1].ledgers[position]
    parts = [
        Part("others", "o", "grey37", first.in_use_by_others),
        Part("this process", "p", "grey54", first.in_use),
    ]
    letters = iter(("W", "C", "D", "E"))
    colours = iter(("dodger_blue2", "green3", "deep_sky_blue1", "chartreuse1"))
    for name, plan in zip(names, plans, strict=False):
        prefix = "" if len(plans) == 1 else f"{name} "
        for line in ("weights", "cache"):
            nbytes = getattr(plan.ledgers[position], line)
            parts.append(Part(prefix + line, next(letters), next(colours), nbytes))
    logits = sum(plan.ledgers[position].logits for plan in plans)
    return [
        *parts,
        Part("logits", "l", "magenta", logits),
        Part("workspace", "w", "orange1", last.workspace),
        Part("margin", "m", "grey62", last.budget.margin),
        Part("reserve", "r", "grey46", last.budget.reserve),
    ]


def _length(parts: Sequence[Part], ledger: Ledger) -> int:
    """Bytes that the device's bar stands for: its capacity, where that is known."""
    if ledger.budget.capacity == UNBOUNDED:
        return sum(part.nbytes for part in parts)
    return ledger.budget.capacity


def bar(parts: Sequence[Part], ledger: Ledger, largest: int, *, colour: bool) -> Text:
    """Cells in proportion to bytes; what goes beyond the device is shown as ``!``."""
    length = _length(parts, ledger)
    cells = lambda nbytes: round(nbytes * _BAR_WIDTH / max(largest, 1))  # noqa: E731
    text, end, total = Text(), cells(length), 0
    for part in parts:
        start, total = min(cells(total), end), total + part.nbytes
        count = min(cells(total), end) - start
        text.append(("█" if colour else part.letter) * count, style=part.colour)
    used = min(cells(total), end)
    text.append(("░" if colour else "·") * (end - used), style="grey30")
    if total > length:
        text.append("!" * max(min(cells(total) - end, _BAR_WIDTH), 1), style="bold red")
    return text


def _legend(devices: Sequence[Sequence[Part]], *, colour: bool) -> Text:
    text = Text(" " * 9)
    for position, part in enumerate(devices[0]):
        if any(parts[position].nbytes for parts in devices):
            text.append("█" if colour else part.letter, style=part.colour)
            text.append(f" {part.name}   ")
    text.append("░" if colour else "·", style="grey30")
    text.append(" free")
    return text


def _table(devices: Sequence[Sequence[Part]], plans: Sequence[Plan], names: Sequence[str]) -> Table:
    """A row for each device, a column for each part that is anywhere, and the totals."""
    table = Table()
    table.add_column("device")
    for name in names[: len(plans)]:
        table.add_column("layers" if len(plans) == 1 else f"{name} layers", justify="right")
    shown = [i for i in range(len(devices[0])) if any(parts[i].nbytes for parts in devices)]
    for position in shown:
        table.add_column(devices[0][position].name, justify="right")
    table.add_column("free", justify="right")
    for index, (ledger, parts) in enumerate(zip(plans[-1].ledgers, devices, strict=True)):
        table.add_row(
            str(ledger.device),
            *(_layers(plan, index) for plan in plans),
            *(human(parts[position].nbytes) for position in shown),
            _free(parts, ledger),
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


def _layers(plan: Plan, position: int) -> str:
    """Which layers stand on the device, as ranges; ``+`` for embedding and head."""
    device = plan.ledgers[position].device
    here = [unit.name for unit in plan.units if unit.device == device]
    numbers = [int(name.rpartition(".")[2]) for name in here if name.rpartition(".")[2].isdigit()]
    others = [name.rpartition(".")[2] for name in here if not name.rpartition(".")[2].isdigit()]
    ranges = f"{numbers[0]}-{numbers[-1]}" if numbers else ""
    return " ".join(filter(None, [*_ends(others, first=True), ranges, *_ends(others, first=False)]))


def _ends(names: Sequence[str], *, first: bool) -> Iterator[str]:
    for name in names:
        if ("embed" in name) == first:
            yield "embed" if first else "head"
