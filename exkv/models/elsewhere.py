"""The interface to units in other processes, which are placed on ``devices.ELSEWHERE``.

Every process makes the same call and runs its own units; the hidden state is sent and received
where the process changes (``exkv.cluster``).
"""

from __future__ import annotations

from typing import Protocol

import torch

from exkv.batch import Lengths

from .bound_run import Logits


class Transport(Protocol):
    """Sends hidden states (B, T, hidden size) to other processes, and receives them."""

    def pass_on(
        self, x: torch.Tensor, done: int, end: int, lengths: Lengths
    ) -> tuple[torch.Tensor, int]:
        """Send the output of the unit before ``done``, if that is local; return the input and index
        of the next local unit before ``end``, or anything and ``end``."""

    def hand(
        self, x: torch.Tensor | None, source: int, target: int, lengths: Lengths
    ) -> torch.Tensor | None:
        """Hand the output of unit ``source`` to the process of ``target``, where it is returned;
        elsewhere None is."""

    def give_embedded(self, x: torch.Tensor, target: int) -> None:
        """Send embeddings of a call's tokens to the process of unit ``target``, which waits for
        them when it reaches that unit."""

    def embedded(self, rows: int, tokens: int) -> torch.Tensor:
        """The embeddings of a call's tokens (B, T, hidden), from the process that has the table."""

    def logits(self, x: torch.Tensor, lengths: Lengths, wanted: Logits) -> torch.Tensor | None:
        """The call's logits in the process that asked for them, None in others."""
