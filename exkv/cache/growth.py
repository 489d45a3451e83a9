"""When a layer's storage is allocated: all at once, in blocks as tokens come, or as a pool of
pages that rows share (``paging.growth``).

One of four properties of a cache. Either way the planner counts what a full cache takes, since
that is what is promised. A growth may also lay tokens out in its own way (pages, say): see
:meth:`Growth.arranged`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .checks import whole_type

if TYPE_CHECKING:
    from .arrangement import Arrangement
    from .retention import Retention


class Growth(Protocol):
    """A value: two layers with equal ones grow alike."""

    def room_for(self, tokens: int, capacity: int) -> int:
        """Tokens a row to have room for, of ``capacity`` at most, once there are ``tokens``."""

    def last_room(self, capacity: int) -> int:
        """For how many there is room before the last step of growth; 0 where there is one step."""

    def kept(self, retention: Retention) -> Retention:
        """What is kept in what has grown so: what the retention keeps, or more."""

    def arranged(self, arrangement: Arrangement) -> Arrangement:
        """Where tokens lie in what has grown so: as the storage and the retention arrange them, or
        elsewhere, e.g. in pages (``paging.growth``)."""


@dataclass(frozen=True, slots=True)
class Static:
    """All of it, before the first token comes."""

    def room_for(self, tokens: int, capacity: int) -> int:
        return capacity

    def last_room(self, capacity: int) -> int:
        return 0

    def kept(self, retention: Retention) -> Retention:
        return retention

    def arranged(self, arrangement: Arrangement) -> Arrangement:
        return arrangement


@dataclass(frozen=True, slots=True)
class Dynamic:
    """In steps of ``block`` tokens: what is stored is copied once a block, not once a token. The
    first block may come in smaller steps of ``first`` tokens, for short texts.

    Raises:
        ValueError: a block of less than one token, or one that isn't a multiple of ``first``.
    """

    block: int = 256
    first: int | None = None

    def __post_init__(self) -> None:
        if whole_type("block", self.block) < 1:
            raise ValueError(f"a block of {self.block} tokens: it must be at least 1")
        if self.first is not None and (
            whole_type("first", self.first) < 1 or self.block % self.first
        ):
            raise ValueError(
                f"first steps of {self.first} tokens in a block of {self.block}: the block must "
                "be a multiple of them"
            )

    def room_for(self, tokens: int, capacity: int) -> int:
        step = self._step(tokens)
        return min(-(-max(tokens, 1) // step) * step, capacity)

    def last_room(self, capacity: int) -> int:
        step = self._step(capacity)
        return (capacity - 1) // step * step

    def _step(self, tokens: int) -> int:
        """The step that leads to room for so many."""
        return self.first if self.first and tokens <= self.block else self.block

    def kept(self, retention: Retention) -> Retention:
        return retention

    def arranged(self, arrangement: Arrangement) -> Arrangement:
        return arrangement
