"""``exkv serve`` whose engine runs out of memory now and then: every ``EXKV_OOM_EVERY``-th call of
the model, wherever one job can make room for another."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from exkv.cli import main
from exkv.engine.scheduler import Scheduler


def make_faulty(every: int) -> None:
    """Let calls fail as a device without memory does."""
    real, calls = Scheduler._in_memory, 0

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("none is left: this is a test")

    def in_memory(self: Scheduler, call: Callable[[], Any]) -> Any:
        nonlocal calls
        calls += 1
        fails = calls % every == 0 and len(self.rows.jobs) > 1
        return real(self, out_of_memory if fails else call)

    Scheduler._in_memory = in_memory  # type: ignore[method-assign] # that is the fault


if __name__ == "__main__":
    make_faulty(int(os.environ["EXKV_OOM_EVERY"]))
    sys.exit(main(sys.argv[1:]))
