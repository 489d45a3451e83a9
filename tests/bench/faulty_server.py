"""``exkv serve`` whose model runs out of memory now and then: in every ``EXKV_OOM_EVERY``-th pass
through its units, whoever asks for it, before it or, every other time, when all has been written.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from exkv.cli import main
from exkv.models import Transformer


def make_faulty(every: int) -> None:
    """Have forward calls fail as if a device were out of memory."""
    real, passes = Transformer.forward_chunk, 0

    def forward_chunk(self: Transformer, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        nonlocal passes
        passes += 1
        fails = passes % every == 0
        found = None if fails and passes // every % 2 else real(self, *args, **kwargs)
        if fails:
            raise torch.OutOfMemoryError("none is left: this is a test")
        return found

    Transformer.forward_chunk = forward_chunk  # type: ignore[method-assign] # that is the fault


if __name__ == "__main__":
    make_faulty(int(os.environ["EXKV_OOM_EVERY"]))
    sys.exit(main(sys.argv[1:]))
