"""Live pressure: what to do when another program takes memory of a device while an engine runs.

A plan promises every call the memory that it needs, as it was when the plan was made. An engine
looks again between its steps, so that it preempts jobs before a call fails: calls of fewer rows
take less. Rows halve until their calls fit, and double again, a rung at a look, when memory
returns. Where even one row lacks memory it runs all the same: its error is handled as any other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from exkv import devices
from exkv.cache import KVCache
from exkv.models import Transformer
from exkv.planning.place import call_bytes
from exkv.planning.plan import Plan
from exkv.sizes import human

logger = logging.getLogger(__name__)

#: Seconds between two looks: the driver answers in less than a millisecond.
INTERVAL = 0.1


class Pressure:
    """How many rows have room for their calls, on the devices as they are now.

    Args:
        most: rows that the engine runs at once.
        calls: gives the caches of the calls that the engine makes; those of several rows have
            ``most``.
        clock: seconds.

    Attributes:
        rows: that have room, from 1 to ``most``.
        raised: how many times there were fewer than before.
    """

    def __init__(
        self,
        model: Transformer,
        most: int,
        calls: Callable[[], Sequence[KVCache]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows = most
        self.raised = 0
        self._model, self._most, self._calls, self._clock = model, most, calls, clock
        self._due = 0.0
        self._plan: Plan | None = None
        self._needed: dict[int, Mapping[torch.device, int]] = {}

    def look(self) -> int:
        """The rows that have room; asks the devices if the last look is :data:`INTERVAL` ago."""
        if self._clock() >= self._due:
            self._due = self._clock() + INTERVAL
            self._change_rows(self._fitting())
        return self.rows

    def _fitting(self) -> int:
        """Rows whose calls fit: at most one rung more than now."""
        rows = min(self._most, 2 * self.rows)
        free = {device: devices.available_memory(device) for device in self._call_bytes(rows)}
        while rows > 1 and any(need > free[d] for d, need in self._call_bytes(rows).items()):
            rows //= 2
        return rows

    def _call_bytes(self, rows: int) -> Mapping[torch.device, int]:
        """What the largest call of so many rows takes on each accelerator."""
        plan: Plan | None = getattr(self._model, "plan", None)
        if plan is None:
            return {}
        if plan is not self._plan:
            self._plan, self._needed = plan, {}
        if rows not in self._needed:
            self._needed[rows] = call_bytes(self._model, plan, self._calls(), most_rows=rows)
        return self._needed[rows]

    def _change_rows(self, rows: int) -> None:
        if rows < self.rows:
            self.raised += 1
        if rows != self.rows:
            free = [f"{human(devices.available_memory(d))} on {d}" for d in self._call_bytes(rows)]
            logger.warning(
                "%d rows at once have room for their calls, %d before: %s are free",
                rows,
                self.rows,
                ", ".join(free),
            )
        self.rows = rows
