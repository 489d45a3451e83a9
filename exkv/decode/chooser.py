"""What a row goes on with: the loop hands logits to a chooser, and the chooser tokens to rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias

import torch
from torch import Tensor

from .job import Event
from .rows import R
from .speculation.draft import Guess

#: A token, or why there is none.
Token: TypeAlias = int | ValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen for some rows.

    Attributes:
        tokens: one for each row.
        placed: the same int64 (rows,) where the logits lie, if that is a device and all were
            chosen there in one call.
        details: of each row, what its chooser wants to know when it hands the token out.
    """

    tokens: Sequence[Token]
    placed: Tensor | None = None
    details: Sequence[Any] = ()


class Chooser(ABC, Generic[R]):
    """Chooses tokens and hands them out."""

    @abstractmethod
    def choose(self, rows: Sequence[R], logits: Tensor) -> Choice:
        """A token for each of these rows; logits (rows, V)."""

    @abstractmethod
    def take(self, rows: Sequence[R], choice: Choice) -> list[Event]:
        """Give rows their tokens: what became final. A row that has ended has a ``reason``."""

    def ended(self, row: R) -> list[Event]:
        """What is told of a row that was ended by others."""
        return []

    # Where tokens are proposed ----------------------------------------------------------------

    def choose_ahead(self, rows: Sequence[R], logits: Tensor) -> Sequence[Token] | None:
        """A token by each row of logits, if none of them depends on what is chosen before; a row
        may be there several times."""
        return None

    def chosen(self, rows: Sequence[R], logits: Tensor, tokens: Sequence[Token]) -> Choice:
        """As :meth:`choose`, of tokens that were chosen ahead."""
        raise NotImplementedError

    def valid(self, row: R, proposed: list[int]) -> list[int]:
        """The first of these tokens, as far as they may follow."""
        return proposed

    def guessing(self, row: R) -> Guess:
        """How a draft chooses for a row: as the row will by the model's logits, with the same
        random numbers, which stay to be drawn."""
        raise NotImplementedError


def copied(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """One that will draw the same numbers; any other one of this device for None."""
    copy = torch.Generator(device)
    return copy if generator is None else copy.set_state(generator.get_state())
