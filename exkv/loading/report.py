"""The report of a load: predicted beside measured bytes per device, printable as a table."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console
from rich.table import Table

from exkv import devices
from exkv.devices import Memory
from exkv.planning import Ledger, Plan
from exkv.planning.best import given_up
from exkv.planning.plan import UNBOUNDED
from exkv.sizes import human

LINES = ("weights", "cache", "workspace", "logits", "staging", "allocator")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One device's planned and measured bytes.

    Attributes:
        ledger: predicted, in bytes.
        measured: line -> bytes; a line is left out where the device keeps no count (the host),
            or where nothing was read yet (``lazy=True``).
        after: the device's memory at the end of the load, with others' use as before it.
    """

    ledger: Ledger
    measured: Mapping[str, int] = field(default_factory=dict)
    after: Memory

    @property
    def device(self) -> torch.device:
        return self.ledger.device

    @property
    def units(self) -> int:
        return self.ledger.units

    def surprises(self) -> Iterator[str]:
        """A sentence for every line that is off by more than the device's margin, and by more than
        blocks may exceed the requested sizes."""
        tolerated = self.ledger.budget.margin + self.ledger.allocator
        for line, measured in self.measured.items():
            predicted = getattr(self.ledger, line)
            if line == "workspace":  # models loaded before may need more of it
                measured = max(measured, self.ledger.budget.promised_workspace)
            if abs(measured - predicted) > tolerated:
                yield (
                    f"{self.device}: {line} took {measured:,} bytes, and the plan has {predicted:,}"
                )

    def change(self) -> str:
        """A sentence on how the device's memory has changed since the load."""
        now = devices.memory(self.device)
        mine, others = (
            getattr(now, line) - getattr(self.after, line)
            for line in ("in_use", "in_use_by_others")
        )
        return (
            f"Since loading, on {self.device}: this process {mine:+,} bytes, others {others:+,}; "
            f"{now.available:,} are free, and a call may need {self.ledger.promised_call:,}"
        )


@dataclass(frozen=True, slots=True)
class LoadReport:
    """``print(model.report)`` shows the table; ``devices`` holds the numbers.

    Attributes:
        weights: with ``weights="best"`` the chosen formats, a line a device.
        fitted: phrases on what was made smaller than usual to fit.
        from_disk: a sentence on experts that are read from disk, if any are; a load logs it.
    """

    devices: tuple[DeviceReport, ...]
    weights: tuple[str, ...] = ()
    fitted: tuple[str, ...] = ()
    from_disk: str = ""

    def surprises(self) -> list[str]:
        return [sentence for row in self.devices for sentence in row.surprises()]

    def changes(self) -> list[str]:
        """:meth:`DeviceReport.change` of each device that holds units."""
        return [row.change() for row in self.devices if row.units]

    @property
    def remarks(self) -> list[str]:
        """Sentences below the table."""
        fitted = [f"To fit: {', '.join(self.fitted)}; the same answers."] if self.fitted else []
        return [*self.weights, *fitted]

    def table(self) -> Table:
        table = Table(title="predicted (measured)")
        table.add_column("device")
        staging = any(row.ledger.staging for row in self.devices)
        lines = [line for line in LINES if staging or line != "staging"]
        on_disk = any(row.ledger.from_disk for row in self.devices)
        for heading in ("units", *lines, "margin", "reserve", "of", *["on disk"] * on_disk):
            table.add_column(heading, justify="right")
        for row in self.devices:
            budget = row.ledger.budget
            table.add_row(
                str(row.ledger.place),
                str(row.units),
                *(_pair(getattr(row.ledger, line), row.measured.get(line)) for line in lines),
                human(budget.margin),
                human(budget.reserve),
                "" if budget.capacity == UNBOUNDED else human(budget.capacity),
                *[human(row.ledger.from_disk)] * on_disk,
            )
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=140).print(self.table())
        said = [self.from_disk] if self.from_disk else []
        return "\n".join([text.getvalue().rstrip(), *self.remarks, *said])


def _pair(predicted: int, measured: int | None) -> str:
    return human(predicted) if measured is None else f"{human(predicted)} ({human(measured)})"


class ReportBuilder:
    """Collects measurements while a load runs."""

    def __init__(self, before: Mapping[torch.device, Memory]) -> None:
        self._before = before
        self._bytes: dict[tuple[torch.device, str], int] = {}
        self._kept: dict[torch.device, dict[int, int]] = {}

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Discard the block's measurements if it fails."""
        measured, kept = dict(self._bytes), {on: dict(each) for on, each in self._kept.items()}
        try:
            yield
        except BaseException:
            self._bytes, self._kept = measured, kept
            raise

    @contextlib.contextmanager
    def allocation(self, device: torch.device, line: str) -> Iterator[None]:
        """Add to a line the bytes that the block leaves allocated; nothing if it fails."""
        before = _allocated(device)
        yield
        key = (device, line)
        self._bytes[key] = self._bytes.get(key, 0) + _allocated(device) - before

    @contextlib.contextmanager
    def growth(self, device: torch.device) -> Iterator[None]:
        """Raise the workspace line to the block's peak beyond what it leaves allocated."""
        before = _allocated(device)
        with devices.peak_memory(device) as peaks:
            yield
        left = _allocated(device) - before
        self._raise(device, "workspace", max(peaks, default=0) - left)

    @contextlib.contextmanager
    def probe(self, device: torch.device, *, kept_of: int | None) -> Iterator[None]:
        """Raise the workspace line to the block's peak and, if callers keep the output of the unit
        ``kept_of``, its part of the logits line to what the block leaves allocated."""
        before = _allocated(device)
        with devices.peak_memory(device) as peaks:
            yield
        self._raise(device, "workspace", max(peaks, default=0))
        if kept_of is not None:
            kept = self._kept.setdefault(device, {})
            kept[kept_of] = max(kept.get(kept_of, 0), _allocated(device) - before)
        self._bytes[device, "logits"] = sum(self._kept.get(device, {}).values())

    def _raise(self, device: torch.device, line: str, nbytes: int) -> None:
        key = (device, line)
        self._bytes[key] = max(self._bytes.get(key, 0), nbytes)

    def finish(self, plan: Plan, from_disk: str) -> LoadReport:
        """The report of the plan that was carried out."""
        rows = tuple(self._row(ledger) for ledger in plan.ledgers)
        return LoadReport(rows, tuple(given_up(plan)), plan.fitted, from_disk)

    def _row(self, ledger: Ledger) -> DeviceReport:
        counted = () if ledger.device.type == "cpu" else LINES
        lines = {line: self._bytes.get((ledger.device, line)) for line in counted}
        after = devices.memory(ledger.device)
        before = self._before.get(ledger.device, after)
        return DeviceReport(
            ledger=ledger,
            measured={line: size for line, size in lines.items() if size is not None},
            after=replace(after, in_use_by_others=before.in_use_by_others),
        )


def _allocated(device: torch.device) -> int:
    """Bytes in live tensors; 0 on the host, which keeps no such count."""
    return devices.allocated_memory(device) or 0
