"""What a load put where: predicted beside measured, per device, printable as a table."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from exkv import devices
from exkv.placement import UNBOUNDED, Ledger, UnitCost, human


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One device's lines in bytes; what was measured is None where the device keeps no count."""

    device: torch.device
    units: int
    weights: int
    cache: int
    workspace: int
    reserve: int
    limit: int
    measured_weights: int | None
    measured_cache: int | None
    measured_workspace: int | None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """``print(model.report)`` shows the table; ``devices`` holds the numbers."""

    devices: tuple[DeviceReport, ...]

    def table(self) -> Table:
        table = Table(title="predicted (measured)")
        table.add_column("device")
        for heading in ("units", "weights", "cache", "workspace", "reserve", "of"):
            table.add_column(heading, justify="right")
        for row in self.devices:
            table.add_row(
                str(row.device),
                str(row.units),
                _pair(row.weights, row.measured_weights),
                _pair(row.cache, row.measured_cache),
                _pair(row.workspace, row.measured_workspace),
                human(row.reserve),
                "" if row.limit == UNBOUNDED else human(row.limit + row.reserve),
            )
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=120).print(self.table())
        return text.getvalue().rstrip()


def _pair(predicted: int, measured: int | None) -> str:
    return human(predicted) if measured is None else f"{human(predicted)} ({human(measured)})"


class ReportBuilder:
    """Collects measurements while a load runs."""

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        self.ledgers = {ledger.device: ledger for ledger in ledgers}
        self._bytes: dict[tuple[torch.device, str], int] = {}

    def replan(self, ledgers: Sequence[Ledger]) -> None:
        self.ledgers.update({ledger.device: ledger for ledger in ledgers})

    @contextlib.contextmanager
    def allocation(self, device: torch.device, line: str) -> Iterator[None]:
        """Add what the block leaves allocated; nothing if it fails."""
        before = devices.allocated_memory(device)
        yield
        if before is not None:
            key = (device, line)
            taken = devices.allocated_memory(device) - before
            self._bytes[key] = self._bytes.get(key, 0) + taken

    @contextlib.contextmanager
    def peak(self, device: torch.device) -> Iterator[None]:
        """Raise the workspace line to the block's peak."""
        key = (device, "workspace")
        with devices.peak_memory(device) as peaks:
            yield
        self._bytes[key] = max(self._bytes.get(key, 0), *peaks)

    def finish(self, costs: Sequence[UnitCost], plan: Sequence[torch.device]) -> LoadReport:
        """The report for where the units really stand."""
        return LoadReport(tuple(self._row(ledger, costs, plan) for ledger in self.ledgers.values()))

    def _row(
        self, ledger: Ledger, costs: Sequence[UnitCost], plan: Sequence[torch.device]
    ) -> DeviceReport:
        here = [i for i, device in enumerate(plan) if device == ledger.device]
        stand = Ledger(device=ledger.device, limit=ledger.limit, reserve=ledger.reserve)
        for index in here:
            tied = sum(n for other, n in costs[index].shared.items() if other in here)
            stand = stand.with_unit(costs[index], tied)
        measured = {line: self._bytes.get((ledger.device, line)) for line in ("weights", "cache")}
        return DeviceReport(
            device=ledger.device,
            units=len(here),
            weights=stand.weights,
            cache=stand.cache,
            workspace=stand.workspace,
            reserve=ledger.reserve,
            limit=ledger.limit,
            measured_weights=measured["weights"],
            measured_cache=measured["cache"],
            measured_workspace=self._bytes.get((ledger.device, "workspace")),
        )
