"""Memory pressure: another program takes memory of a device while an engine runs.

A plan promises every call its memory, by what was free when the plan was made. An engine checks
again between its steps and preempts jobs before a call fails, since calls of fewer rows take less.
The number of rows is halved until their calls fit, and doubled again, once a check, when memory
returns. If even one row lacks memory it runs all the same: its error is handled as any other.
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

#: Seconds between two checks; the driver answers in less than a millisecond.
INTERVAL = 0.1


class Pressure:
    """The number of rows whose calls fit in the devices' current memory.

    Args:
        most: most rows that the engine runs at once.
        calls: gives the caches of the engine's calls; those of several rows have ``most``.
        clock: the time in seconds.

    Attributes:
        rows: rows whose calls fit, from 1 to ``most``.
        raised: how many times this number has fallen.
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
        """The rows that fit; asks the devices if the last check was :data:`INTERVAL` ago."""
        if self._clock() >= self._due:
            self._due = self._clock() + INTERVAL
            self._change_rows(self._fitting())
        return self.rows

    def _fitting(self) -> int:
        """Rows whose calls fit: at most twice as many as now."""
        rows = min(self._most, 2 * self.rows)
        free = {device: devices.available_memory(device) for device in self._call_bytes(rows)}
        while rows > 1 and any(need > free[d] for d, need in self._call_bytes(rows).items()):
            rows //= 2
        return rows

    def _call_bytes(self, rows: int) -> Mapping[torch.device, int]:
        """Bytes of the largest call of ``rows`` rows on each accelerator."""
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
                "calls of %d rows at once fit now, %d before: %s are free",
                rows,
                self.rows,
                ", ".join(free),
            )
        self.rows = rows
