"""Pages: which of a pool's pages hold the tokens of which row. Numbers only; no keys here.

A pool has pages of one size, and a page may be several rows' at once: forks, beams and jobs with
one beginning hold the same ones. Whoever writes to a page that others can see takes a copy first.

What a full page holds can be found again by its tokens, also when no row has it any more: pages
that nobody holds stay as they are until there is no other left. Then the one that was used longest
ago goes first, of those that no other one goes on from (RadixAttention's rule, Zheng et al., 2023).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch


class OutOfPagesError(ValueError):
    """The rows need more pages than the pool has left; nothing has changed."""


@dataclass(eq=False, slots=True)
class KnownPage:
    """A full page that can be found by its tokens and by those before them.

    Attributes:
        before: the page that it goes on from; None at the beginning of a text.
        tokens: its own; at the beginning of a text, behind what else tells it from others (an
            adapter).
        following: how many known pages go on from it.
        used: when a row had it last.
    """

    page: int
    before: KnownPage | None
    tokens: tuple[Hashable, ...]
    following: int = 0
    used: int = 0

    @property
    def key(self) -> int:
        """A hash of its tokens and, as a chain, of all before."""
        return _key(self.before, self.tokens)


def _key(before: KnownPage | None, tokens: tuple[Hashable, ...]) -> int:
    return hash((0 if before is None else id(before), tokens))


class PagePool:
    """Pages by number: how many rows hold each, which are free, and what the known ones hold.

    Args:
        pages: how many there are.
        size: tokens of one.

    Attributes:
        holders: how many rows hold each page.
    """

    def __init__(self, pages: int, size: int) -> None:
        self.size = size
        self.holders = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        self._known: dict[int, KnownPage] = {}  # by page
        self._found: dict[int, KnownPage] = {}  # by key
        self._leaves: list[tuple[int, int, KnownPage]] = []  # a heap of those that may go
        self._idle = 0  # known pages that no row holds
        self._clock = 0

    @property
    def pages(self) -> int:
        """How many there are."""
        return len(self.holders)

    @property
    def available(self) -> int:
        """Pages that :meth:`take` could give."""
        return len(self._free) + self._idle

    @property
    def idle(self) -> int:
        """Pages that no row holds and that can be found by what is in them."""
        return self._idle

    def take(self) -> int:
        """A page whose contents mean nothing, for one row.

        Raises:
            OutOfPagesError: rows hold all of them.
        """
        if not self.available:
            raise OutOfPagesError(f"all {self.pages} pages of {self.size} tokens are in use")
        page = self._free.pop() if self._free else self._forget_oldest()
        self.holders[page] = 1
        return page

    def take_this(self, page: int) -> int:
        """The page of this number, held by one row more, free or not."""
        if not self.holders[page]:
            self._free.remove(page)
        self.holders[page] += 1
        return page

    def share(self, page: int) -> int:
        """The page, held by one row more."""
        if not self.holders[page]:
            self._idle -= 1
        self.holders[page] += 1
        return page

    def drop(self, page: int) -> None:
        """One row less holds it."""
        self.holders[page] -= 1
        if self.holders[page]:
            return
        known = self._known.get(page)
        if known is None:
            self._free.append(page)
            return
        self._clock += 1
        known.used = self._clock
        self._idle += 1
        self._offer(known)

    # Found again by content -----------------------------------------------------------------

    def find(self, before: KnownPage | None, tokens: Sequence[Hashable]) -> KnownPage | None:
        """The known page with these tokens behind those of ``before``."""
        wanted = tuple(tokens)
        known = self._found.get(_key(before, wanted))
        # A hash may be another's by chance; tokens are not.
        if known is None or known.before is not before or known.tokens != wanted:
            return None
        return known

    def remember(
        self, page: int, before: KnownPage | None, tokens: Sequence[Hashable]
    ) -> KnownPage:
        """Note what a page holds for good. Where another one is known for the same, that one is
        returned, and stands for both."""
        if (known := self.find(before, tokens)) is not None:
            return known
        known = KnownPage(page=page, before=before, tokens=tuple(tokens))
        if known.key in self._found or page in self._known:  # a hash by chance: it stays unknown
            return known
        self._found[known.key] = self._known[page] = known
        if before is not None:
            before.following += 1
        return known

    def forget(self, page: int) -> None:
        """It is about to be written to by the only row that holds it. (Those that go on from it
        can't be found any more either, and go when they are the oldest.)"""
        if (known := self._known.pop(page, None)) is None:
            return
        del self._found[known.key]
        if (before := known.before) is not None:
            before.following -= 1
            if not self.holders[before.page]:
                self._offer(before)

    def _offer(self, known: KnownPage) -> None:
        if not known.following:
            heapq.heappush(self._leaves, (known.used, known.page, known))

    def _forget_oldest(self) -> int:
        while True:
            used, page, known = heapq.heappop(self._leaves)
            leaf = self._known.get(page) is known and not known.following
            if leaf and known.used == used and not self.holders[page]:
                break
        self.forget(page)
        self._idle -= 1
        return page


class PageTable:
    """The rows of a cache in a pool.

    Attributes:
        rows: the pages of each row, in the order of its tokens.
    """

    def __init__(self, pool: PagePool, rows: int) -> None:
        self.pool = pool
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self._numbers = np.zeros((rows, 1), dtype=np.int32)

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens of a row take."""
        return -(-tokens // self.pool.size)

    def reserve(
        self, starts: Sequence[int], ends: Sequence[int], copy: Callable[[int, int], None]
    ) -> None:
        """See that the tokens from ``starts`` to ``ends`` of the first rows have pages that no
        other row sees; all of them or none.

        Args:
            copy: called with a page, and with that whose contents it gets.

        Raises:
            OutOfPagesError: there are too few.
        """
        size, pool = self.pool.size, self.pool
        wanted = self._missing(starts, ends)
        if len(wanted) > pool.available:
            raise OutOfPagesError(
                f"the call needs {len(wanted)} pages more, and {pool.available} of the pool's "
                f"{pool.pages} of {size} tokens are left: crop or reset rows, or give the cache "
                "more tokens"
            )
        for row, at in wanted:
            held, page = self.rows[row], pool.take()
            if at == len(held):
                held.append(page)
            else:
                if at * size < starts[row]:
                    copy(page, held[at])
                pool.drop(held[at])
                held[at] = page
            self._note(row, at, page)

    def _missing(self, starts: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
        """Rows, and which of their pages they lack or share; of those that share a page, the last
        one keeps it."""
        wanted: list[tuple[int, int]] = []
        copied: dict[int, int] = {}
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end <= start:
                continue
            held, first, last = self.rows[row], start // self.pool.size, self.pages_for(end)
            for at in range(first, min(len(held), last)):
                page = held[at]
                if self.pool.holders[page] - copied.get(page, 0) > 1:
                    copied[page] = copied.get(page, 0) + 1
                    wanted.append((row, at))
                else:
                    self.pool.forget(page)
            wanted += [(row, at) for at in range(len(held), last)]
        return wanted

    def hold(self, row: int, pages: Sequence[int]) -> None:
        """Let a row hold these pages behind its own, which are full; others may hold them too."""
        for page in pages:
            self.rows[row].append(self.pool.share(page))
            self._note(row, len(self.rows[row]) - 1, page)

    def cut(self, row: int, tokens: int) -> None:
        """Give up the pages behind the first so many tokens, the last one first."""
        held, kept = self.rows[row], self.pages_for(tokens)
        while len(held) > kept:
            self.pool.drop(held.pop())

    def replace(self, row: int, at: int, page: int) -> None:
        """Hold another page of the same contents as a row's page ``at``."""
        self.pool.share(page)
        self.pool.drop(self.rows[row][at])
        self.rows[row][at] = page
        self._note(row, at, page)

    def reorder(self, source: Sequence[int]) -> None:
        """Row ``i`` becomes what row ``source[i]`` was; rows after the last one are empty."""
        new = [[self.pool.share(page) for page in self.rows[row]] for row in source]
        for row in range(len(self.rows)):
            self.cut(row, 0)
            self.rows[row] = new[row] if row < len(new) else []
            for at, page in enumerate(self.rows[row]):
                self._note(row, at, page)

    def become(self, other: PageTable) -> None:
        """Hold pages of the same numbers as a table in another pool of the same size does; that
        pool's known pages are not known here."""
        for row, held in enumerate(other.rows):
            for at, page in enumerate(held):
                self.rows[row].append(self.pool.take_this(page))
                self._note(row, at, page)

    def release(self) -> None:
        """Give up all pages of all rows."""
        for row in range(len(self.rows)):
            self.cut(row, 0)

    def block_table(self, ends: Sequence[int]) -> torch.Tensor:
        """int32 (B, pages) of the first rows, which have so many tokens, on the host; it goes on
        to show what they hold. See ``exkv.ops.pages``."""
        width = max(self.pages_for(max(ends)), 1)
        self._widen(width)
        return torch.from_numpy(self._numbers[: len(ends), :width])

    def index(self, row: int, tokens: int) -> torch.Tensor:
        """Where the row's first tokens lie in the pool: int64 (N,), counted in tokens."""
        places = torch.arange(tokens)
        held = torch.tensor(self.rows[row], dtype=torch.int64)
        return held[places // self.pool.size] * self.pool.size + places % self.pool.size

    def _note(self, row: int, at: int, page: int) -> None:
        self._widen(at + 1)
        self._numbers[row, at] = page

    def _widen(self, width: int) -> None:
        rows, had = self._numbers.shape
        if width > had:
            more = np.zeros((rows, max(width, 2 * had) - had), dtype=np.int32)
            self._numbers = np.concatenate((self._numbers, more), axis=1)
