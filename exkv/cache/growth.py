"""Growth: when a layer's storage is allocated. At once, in blocks as tokens come, or as a pool of
pages that rows share (``paging.growth``).

One of the four properties of a cache. The planner always counts a full cache, since that is what a
plan promises. A growth may also lay tokens out in its own way (pages, say): see
:meth:`Growth.arranged`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .checks import whole_type

if TYPE_CHECKING:
    from .arrangement import KVArrangement
    from .retention import Retention


class Growth(Protocol):
    """A value: layers with equal growths grow alike."""

    def room_for(self, tokens: int, capacity: int) -> int:
        """Room in tokens a row, at most ``capacity``, after growing to hold ``tokens``."""

    def last_room(self, capacity: int) -> int:
        """Room before the last step of growth; 0 if there is only one step."""

    def kept(self, retention: Retention) -> Retention:
        """The effective retention: ``retention``, or one that keeps more."""

    def arranged(self, arrangement: KVArrangement) -> KVArrangement:
        """The effective arrangement: ``arrangement``, or another one, e.g. in pages
        (``paging.growth``)."""


@dataclass(frozen=True, slots=True)
class Static:
    """Allocate everything up front."""

    def room_for(self, tokens: int, capacity: int) -> int:
        return capacity

    def last_room(self, capacity: int) -> int:
        return 0

    def kept(self, retention: Retention) -> Retention:
        return retention

    def arranged(self, arrangement: KVArrangement) -> KVArrangement:
        return arrangement


@dataclass(frozen=True, slots=True)
class Dynamic(Static):
    """Grow in steps of ``block`` tokens: stored tokens are copied once a block, not once a token.
    Within the first block, steps may be smaller: ``first`` tokens, for short texts.

    Raises:
        ValueError: ``block`` is below 1, or not a multiple of ``first``.
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
        """Step size for growing to hold ``tokens``."""
        return self.first if self.first and tokens <= self.block else self.block
