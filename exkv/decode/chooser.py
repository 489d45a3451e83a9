"""Choosers: the loop passes logits to one, and it hands out tokens to rows."""

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

#: A token, or the error if there is none.
Token: TypeAlias = int | ValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Tokens for some rows.

    Attributes:
        tokens: one for each row.
        placed: the same on the logits' device, int64 (rows,), if one call chose all there.
        details: per row, for the chooser's ``take``.
    """

    tokens: Sequence[Token]
    placed: Tensor | None = None
    details: Sequence[Any] = ()


class Chooser(ABC, Generic[R]):
    """Chooses tokens and hands them out."""

    @abstractmethod
    def choose(self, rows: Sequence[R], logits: Tensor) -> Choice:
        """Choose a token for each row; logits (rows, V)."""

    @abstractmethod
    def take(self, rows: Sequence[R], choice: Choice) -> list[Event]:
        """Give rows their tokens -> events of the tokens that became final. A row that ended has a
        ``reason``."""

    def ended(self, row: R) -> list[Event]:
        """The events of a row that something else than a token ended."""
        return []

    # Speculation ------------------------------------------------------------------------------

    def choose_ahead(self, rows: Sequence[R], logits: Tensor) -> Sequence[Token] | None:
        """A token for each row of logits; None if one depends on another. Rows may repeat."""
        return None

    def chosen(self, rows: Sequence[R], logits: Tensor, tokens: Sequence[Token]) -> Choice:
        """:meth:`choose` with tokens that were chosen ahead."""
        raise NotImplementedError

    def valid(self, row: R, proposed: list[int]) -> list[int]:
        """Truncate proposed tokens to those that the row may take."""
        return proposed

    def guessing(self, row: R) -> Guess:
        """The function by which a draft chooses for a row: with the row's settings and its next
        random numbers, which are not consumed."""
        raise NotImplementedError


def copied(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """A copy that draws the same numbers; an unrelated generator for None."""
    copy = torch.Generator(device)
    return copy if generator is None else copy.set_state(generator.get_state())
