"""Bound runs: stretches of units on one device that a decode step runs in one call.

A model runs by one of two routes. The readable one calls module after module, on any device, over
any cache, and every hook fires. A :class:`BoundRun` is a maximal stretch of units on one device,
embedding and head included, bound once to weights and a cache's tensors, and called with ids or
hidden states, lengths, and rotary factors. A module is bound if its exact type describes it
(``exkv.layers.descriptions``); all others take the readable route, with the same results.

On the CPU a run is native code (``native_run.py``), on a GPU a captured graph (``graph_run.py``).
``runs.py`` chooses the units, and for how long they are bound.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import torch

from exkv.batch import Lengths, RotaryTables

#: Tokens of a call, in all rows, up to which the overhead of module calls matters.
MOST_TOKENS = 16


class Logits(IntEnum):
    """Which tokens' logits a call returns: none, each row's last, all, or every real token's, row
    after row, with the bits of single-token calls."""

    NONE = 0
    LAST = 1
    ALL = 2
    EACH = 3


class BoundRun(Protocol):
    """``count`` units that one call runs."""

    count: int

    def takes(self, lengths: Lengths, logits: Logits) -> bool:
        """Whether it can run rows of these lengths."""

    def __call__(
        self, x: torch.Tensor, lengths: Lengths, rotary: RotaryTables, logits: Logits
    ) -> torch.Tensor | None:
        """Token ids int64 (B, T), or (B, T, hidden) for a run without the embedding, on any device
        -> logits (B, 1 or T, vocabulary), or (N, 1, vocabulary) of N real tokens, or (B, T, hidden)
        without the head or without logits. None, with no effect, if it was released meanwhile."""

    def release(self) -> None:
        """Drop all tensors; it is not called again."""
