"""A stopwatch, which scripts import from ExLlamaV2's ``util``."""

from __future__ import annotations

import time
from types import TracebackType

from .missing import missing_from, placeholder

SeqTensor = placeholder("SeqTensor", __name__)


class Timer:
    """``with Timer() as timer: ...``; then ``timer.interval`` has the seconds."""

    interval: float = 0.0

    def __enter__(self) -> Timer:
        self._started = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.interval = time.perf_counter() - self._started


__getattr__ = missing_from(__name__)
