"""Bound runs: stretches of units on one device that a decode step goes through in one call.

There are two ways through a model. The readable one calls module after module, on any device, over
any cache, and every hook fires. The other is a :class:`BoundRun`: a maximal stretch of units on one
device, embedding and head included, bound once to weights and to a cache's tensors, and called with
what changes: ids or hidden states, lengths, rotary factors. A module is bound where its exact type
describes it (``exkv.layers.descriptions``); everything else goes the readable way, with the same
results.

On the CPU a run is native code (``native_run.py``), on a GPU a captured graph (``graph_run.py``).
Which units are bound, and for how long: ``runs.py``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import torch

from exkv.batch import Lengths, RotaryTables

#: Tokens of a call, in all rows, for which the time between calls of modules is worth saving.
MOST_TOKENS = 16


class Logits(IntEnum):
    """Which tokens' logits are wanted of a call: none, each row's last one's, all, or those of
    every real token, row after row, as if each had come in a call of its own."""

    NONE = 0
    LAST = 1
    ALL = 2
    EACH = 3


class BoundRun(Protocol):
    """Units that one call runs.

    Attributes:
        count: how many they are.
    """

    count: int

    def takes(self, lengths: Lengths, logits: Logits) -> bool:
        """Whether it can run rows that hold and bring so many tokens."""

    def __call__(
        self, x: torch.Tensor, lengths: Lengths, rotary: RotaryTables, logits: Logits
    ) -> torch.Tensor | None:
        """Token ids int64 (B, T), or (B, T, hidden) for a run without the embedding, wherever they
        lie -> logits (B, 1 or T, vocabulary), or (N, 1, vocabulary) of each of N real tokens, or
        (B, T, hidden) for a run without the head or where none are wanted. None where it was
        released meanwhile; nothing has happened then."""

    def release(self) -> None:
        """Let go of all tensors; it is not called again."""
