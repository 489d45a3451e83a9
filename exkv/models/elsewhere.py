"""What a forward call asks of whoever knows the units that are in other processes.

They are placed on ``devices.ELSEWHERE``. Every process makes the same call, each runs its own
units, and the hidden state is sent and received where the process changes: ``exkv.cluster``.
"""

from __future__ import annotations

from typing import Protocol

import torch

from exkv.batch import Lengths

from .bound_run import Logits


class Transport(Protocol):
    """Takes hidden states (B, T, hidden size) to other processes, and brings them from there."""

    def pass_on(
        self, x: torch.Tensor, done: int, end: int, lengths: Lengths
    ) -> tuple[torch.Tensor, int]:
        """Hand on what the unit before ``done`` made, if that one is here; then what goes into the
        next unit before ``end`` that is here, and its index, or anything and ``end``."""

    def logits(self, x: torch.Tensor, lengths: Lengths, wanted: Logits) -> torch.Tensor | None:
        """The call's logits in the process that has asked for them, None in every other one."""
