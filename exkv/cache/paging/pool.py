"""Page accounting: which pages of a pool hold the tokens of which row. Numbers only; no tensors.

All pages of a pool have one size, and rows may share pages: forks, beams and jobs with a common
prefix hold the same ones. A write to a shared page copies it first (copy-on-write).

Full pages form a prefix cache: they can be found again by their tokens, even after the last row has
released them. Unreferenced pages are evicted only when no free page is left: least recently used
first, among those that no other cached page continues (RadixAttention's rule, Zheng et al., 2023).
An evicted page goes to the next tier in host memory, if there is one, and comes back when a row
needs it; tiers evict by the same rule, each into the next.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

#: The tier of an evicted :class:`KnownPage`.
GONE = -1


class OutOfPagesError(ValueError):
    """The rows need more pages than the pool has left; nothing has changed."""


class PageCopies(Protocol):
    """Copies pages; implemented by the owner of the memory behind the pool."""

    def copy_page(self, to: int, page: int) -> None:
        """Copy page ``page`` of the pool to page ``to``."""

    def move_page(self, page: int, tier: int, to: int, to_tier: int) -> None:
        """Copy ``page`` of one tier to page ``to`` of another."""


@dataclass(eq=False, slots=True)
class KnownPage:
    """A full page in the prefix cache, found by its tokens and those before them.

    Attributes:
        page: its number within its tier.
        before: the preceding page; None at the beginning of a text.
        tokens: the page's own tokens; on a first page, preceded by whatever else distinguishes it
            (an adapter).
        exact: whether its contents are bit-identical to running its tokens as a prompt.
        tier: 0 for the pool itself, then the tiers in host memory; :data:`GONE` once evicted.
        following: how many cached pages continue it, by their tier.
        used: clock value of its last release by a row.
    """

    page: int
    before: KnownPage | None
    tokens: tuple[Hashable, ...]
    exact: bool = True
    tier: int = 0
    following: list[int] = field(default_factory=list)
    used: int = 0

    @property
    def key(self) -> int:
        """Hash of its tokens, chained with the page before."""
        return _key(self.before, self.tokens)


def _key(before: KnownPage | None, tokens: tuple[Hashable, ...]) -> int:
    return hash((0 if before is None else id(before), tokens))


class _Tier:
    """Pages of one memory: free ones, cached ones, and a heap of eviction candidates (stale entries
    are skipped).

    Args:
        rounds: whether pages stored here are rounded.
    """

    def __init__(self, pages: int, rounds: bool) -> None:
        self.pages = pages
        self.rounds = rounds
        self.free = list(range(pages - 1, -1, -1))
        self.known: dict[int, KnownPage] = {}
        self.leaves: list[tuple[int, int, KnownPage]] = []


class PagePool:
    """Pages by number: reference counts, the free list, and the prefix cache.

    Args:
        pages: number of pages.
        size: tokens a page.
        tiers: for each tier in host memory, its number of pages and whether it rounds them.

    Attributes:
        holders: number of rows that hold each page.
        lost: whether the pages' contents were lost, see :meth:`lose`.
    """

    def __init__(self, pages: int, size: int, tiers: Sequence[tuple[int, bool]] = ()) -> None:
        self.size = size
        self.lost = False
        self.holders = [0] * pages
        self._tiers = [_Tier(pages, False), *(_Tier(count, rounds) for count, rounds in tiers)]
        self._found: dict[int, KnownPage] = {}  # by key
        self._idle = 0  # cached pages that no row holds
        self._clock = 0
        self._coming: Collection[KnownPage] = ()  # being brought back into the pool

    @property
    def pages(self) -> int:
        """Number of pages."""
        return len(self.holders)

    @property
    def available(self) -> int:
        """Pages that :meth:`take` can hand out."""
        return len(self._tiers[0].free) + self._idle

    @property
    def idle(self) -> int:
        """Cached pages that no row holds."""
        return self._idle

    @property
    def in_tiers(self) -> list[int]:
        """Cached pages in each tier in host memory."""
        return [len(tier.known) for tier in self._tiers[1:]]

    @property
    def tier_capacity(self) -> int:
        """Capacity of all tiers in host memory, in pages."""
        return sum(tier.pages for tier in self._tiers[1:])

    def take(self, copies: PageCopies | None = None) -> int:
        """Allocate a page with undefined contents to one row.

        Args:
            copies: for pools with tiers: moves an evicted page to one of them.

        Raises:
            OutOfPagesError: rows hold all pages.
        """
        if not self.available:
            raise OutOfPagesError(f"all {self.pages} pages of {self.size} tokens are in use")
        page = self._place(0, copies)
        assert page is not None, "some unreferenced page is always evictable"
        self.holders[page] = 1
        return page

    def take_this(self, page: int) -> int:
        """Add a reference to the page of this number, free or not."""
        if not self.holders[page]:
            self._tiers[0].free.remove(page)
        self.holders[page] += 1
        return page

    def share(self, page: int) -> int:
        """Add a reference to a page."""
        if not self.holders[page]:
            self._idle -= 1
        self.holders[page] += 1
        return page

    def drop(self, page: int) -> None:
        """Remove a reference; an unreferenced page is freed, or stays cached."""
        self.holders[page] -= 1
        if self.holders[page]:
            return
        known = self._tiers[0].known.get(page)
        if known is None:
            self._tiers[0].free.append(page)
            return
        self._clock += 1
        known.used = self._clock
        self._idle += 1
        self._offer(known)

    # Prefix cache ---------------------------------------------------------------------------

    def find(self, before: KnownPage | None, tokens: Sequence[Hashable]) -> KnownPage | None:
        """Find the cached page with these tokens after ``before``, in any tier."""
        wanted = tuple(tokens)
        known = self._found.get(_key(before, wanted))
        # Hashes may collide: compare the tokens.
        if known is None or known.before is not before or known.tokens != wanted:
            return None
        return known

    def needed_for(self, chain: Sequence[KnownPage]) -> int:
        """Available pages that :meth:`hold` would use up for this chain."""
        return sum(known.tier > 0 or not self.holders[known.page] for known in chain)

    def hold(self, chain: Sequence[KnownPage], copies: PageCopies | None = None) -> list[int]:
        """Add a reference to each page of a chain of cached pages, bringing back those in host
        memory.

        Raises:
            OutOfPagesError: too few pages are available to bring them back to.
        """
        if self.needed_for(chain) > self.available:
            raise OutOfPagesError(
                f"{len(chain)} cached pages need {self.needed_for(chain)} pages of the pool, and "
                f"{self.available} are left"
            )
        held = [self.share(known.page) for known in chain if not known.tier]
        coming = [known for known in chain if known.tier]
        self._coming = coming
        try:
            for known in coming:
                held.append(self.take(copies))
                self._bring_back(known, held[-1], copies)
        except BaseException:
            for page in reversed(held):
                self.drop(page)
            raise
        finally:
            self._coming = ()
            for known in coming:
                self._offer(known)
        return [known.page for known in chain]

    def _bring_back(self, known: KnownPage, page: int, copies: PageCopies | None) -> None:
        assert copies is not None, "a pool with tiers needs copies="
        old, tier = known.page, known.tier
        copies.move_page(old, tier, page, 0)
        self._settle(known, 0, page)
        self._tiers[tier].free.append(old)

    def remember(
        self, page: int, before: KnownPage | None, tokens: Sequence[Hashable], exact: bool = True
    ) -> KnownPage:
        """Add a full page that a row holds to the prefix cache.

        If a page with the same tokens is already cached, that one is returned. This page replaces
        it if it is in host memory, or inexact while this one is exact.
        """
        known = self.find(before, tokens)
        if known is not None and exact >= known.exact and (known.tier or exact > known.exact):
            self._give_way(known, page, exact)
        if known is not None:
            return known
        known = KnownPage(
            page=page,
            before=before,
            tokens=tuple(tokens),
            exact=exact,
            following=[0] * len(self._tiers),
        )
        if known.key in self._found or page in self._tiers[0].known:
            known.tier = GONE  # hash collision, or the page is cached under other tokens
            return known
        self._found[known.key] = self._tiers[0].known[page] = known
        if before is not None:
            before.following[0] += 1
        return known

    def _give_way(self, known: KnownPage, page: int, exact: bool) -> None:
        """Let a cached page refer to this page, which a row holds, instead of its old one."""
        if page in self._tiers[0].known:
            return
        old = known.page
        if known.tier:
            self._tiers[known.tier].free.append(old)
        elif not self.holders[old]:
            self._idle -= 1
            self._tiers[0].free.append(old)
        self._settle(known, 0, page)
        known.exact = exact

    def forget(self, page: int) -> None:
        """Remove a page from the prefix cache before its only holder writes to it. (Pages that
        continue it can no longer be found either, and are evicted in time.)"""
        if (known := self._tiers[0].known.get(page)) is not None:
            self._forget(known)

    def forget_tiers(self) -> None:
        """Drop all cached pages in host memory."""
        for tier in self._tiers[1:]:
            for known in list(tier.known.values()):
                tier.free.append(known.page)
                self._forget(known)

    def lose(self) -> None:
        """Invalidate all contents, in the pool and all tiers. Rows keep their pages; whoever
        recomputes them resets ``lost``."""
        self.forget_tiers()
        first = self._tiers[0]
        for known in list(first.known.values()):
            if not self.holders[known.page]:
                self._idle -= 1
                first.free.append(known.page)
            self._forget(known)
        self.lost = True

    def _forget(self, known: KnownPage) -> None:
        del self._found[known.key], self._tiers[known.tier].known[known.page]
        tier, known.tier = known.tier, GONE
        if (before := known.before) is not None:
            before.following[tier] -= 1
            self._offer(before)

    # Tiers ----------------------------------------------------------------------------------

    def _settle(self, known: KnownPage, tier: int, page: int) -> None:
        """Record the page's new tier and number."""
        old, known.tier = known.tier, tier
        del self._tiers[old].known[known.page]
        known.page, self._tiers[tier].known[page] = page, known
        known.exact &= not self._tiers[tier].rounds
        if (before := known.before) is not None:
            before.following[old] -= 1
            before.following[tier] += 1
            self._offer(before)
        self._offer(known)

    def _place(self, tier: int, copies: PageCopies | None) -> int | None:
        """Take a page of a tier off its free list, evicting if necessary; None if there is no such
        tier or nothing can be evicted."""
        if tier == len(self._tiers):
            return None
        if self._tiers[tier].free:
            return self._tiers[tier].free.pop()
        known = self._oldest(tier)
        if known is None:
            return None
        page, reachable = known.page, known.before is None or known.before.tier != GONE
        below = self._place(tier + 1, copies) if reachable else None
        self._idle -= tier == 0
        if below is None:
            self._forget(known)
            return page
        assert copies is not None, "a pool with tiers needs copies="
        copies.move_page(page, tier, below, tier + 1)
        self._settle(known, tier + 1, below)
        return page

    def _may_go(self, known: KnownPage) -> bool:
        """Whether a page can be evicted: no row holds it, and no page of its tier continues it."""
        if known.tier == GONE or known.following[known.tier] or known in self._coming:
            return False
        return known.tier > 0 or not self.holders[known.page]

    def _offer(self, known: KnownPage) -> None:
        if not self._may_go(known):
            return
        tier = self._tiers[known.tier]
        if len(tier.leaves) > 2 * tier.pages + 8:  # most entries are stale: rebuild
            tier.leaves = [
                (each.used, each.page, each) for each in tier.known.values() if self._may_go(each)
            ]
            heapq.heapify(tier.leaves)
        else:
            heapq.heappush(tier.leaves, (known.used, known.page, known))

    def _oldest(self, tier: int) -> KnownPage | None:
        leaves = self._tiers[tier].leaves
        while leaves:
            used, page, known = heapq.heappop(leaves)
            if (known.tier, known.page, known.used) == (tier, page, used) and self._may_go(known):
                return known
        return None


class FollowedPool(PagePool):
    """A pool on a host other than the driver of a distributed model: the driver allocates, rows
    hold the pages that :meth:`PageTable.show` is given, and nothing is counted here."""

    def take(self, copies: PageCopies | None = None) -> int:
        raise AssertionError("the driver allocates pages before each call")

    def take_this(self, page: int) -> int:
        return page

    def share(self, page: int) -> int:
        return page

    def drop(self, page: int) -> None:
        pass


class PageTable:
    """The pages of a cache's rows.

    Attributes:
        rows: the pages of each row, in token order.
    """

    def __init__(self, pool: PagePool, rows: int) -> None:
        self.pool = pool
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self._numbers = np.zeros((rows, 1), dtype=np.int32)

    def pages_for(self, tokens: int) -> int:
        """Pages needed for ``tokens`` tokens of a row."""
        return -(-tokens // self.pool.size)

    def reserve(
        self, starts: Sequence[int], ends: Sequence[int], copies: PageCopies | None = None
    ) -> None:
        """Allocate exclusive pages for tokens ``starts`` to ``ends`` of the first rows, all or
        none.

        Args:
            copies: copies shared pages before they are written to; None if there are none.

        Raises:
            OutOfPagesError: too few pages are available.
        """
        size, pool = self.pool.size, self.pool
        wanted = self._missing(starts, ends)
        if len(wanted) > pool.available:
            raise OutOfPagesError(
                f"the call needs {len(wanted)} more pages, and {pool.available} of the pool's "
                f"{pool.pages} of {size} tokens are left: crop or reset rows, or give the cache "
                "more tokens"
            )
        for row, at in wanted:
            held, page = self.rows[row], pool.take(copies)
            if at == len(held):
                held.append(page)
            else:
                if at * size < starts[row]:
                    assert copies is not None, "a shared page is copied before it is written to"
                    copies.copy_page(page, held[at])
                pool.drop(held[at])
                held[at] = page
            self._note(row, at, page)

    def _missing(self, starts: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
        """``(row, index)`` of pages to allocate: missing ones, and shared ones; of several rows
        that share a page, the last keeps it."""
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
        """Append full pages to a row; other rows may hold them too."""
        self._add(row, [self.pool.share(page) for page in pages])

    def hold_known(
        self, row: int, chain: Sequence[KnownPage], copies: PageCopies | None = None
    ) -> None:
        """Let an empty row hold cached pages; see :meth:`PagePool.hold`."""
        self._add(row, self.pool.hold(chain, copies))

    def _add(self, row: int, pages: Sequence[int]) -> None:
        for page in pages:
            self.rows[row].append(page)
            self._note(row, len(self.rows[row]) - 1, page)

    def cut(self, row: int, tokens: int) -> None:
        """Truncate a row to ``tokens``, releasing later pages from the last one back."""
        held, kept = self.rows[row], self.pages_for(tokens)
        while len(held) > kept:
            self.pool.drop(held.pop())

    def replace(self, row: int, at: int, page: int) -> None:
        """Replace a row's page at index ``at`` by another one with the same contents."""
        self.pool.share(page)
        self.pool.drop(self.rows[row][at])
        self.rows[row][at] = page
        self._note(row, at, page)

    def reorder(self, source: Sequence[int]) -> None:
        """Set row ``i`` to old row ``source[i]``; later rows become empty."""
        new = [[self.pool.share(page) for page in self.rows[row]] for row in source]
        for row in range(len(self.rows)):
            self.cut(row, 0)
            self.rows[row] = new[row] if row < len(new) else []
            for at, page in enumerate(self.rows[row]):
                self._note(row, at, page)

    def show(self, rows: Sequence[Sequence[int]]) -> None:
        """Set the pages of the first rows, in a :class:`FollowedPool`."""
        for row, pages in enumerate(rows):
            self.rows[row] = list(pages)
            for at, page in enumerate(pages):
                self._note(row, at, page)

    def become(self, other: PageTable) -> None:
        """Take pages of the same numbers as a table of another pool of equal size; the prefix cache
        is not copied."""
        for row, held in enumerate(other.rows):
            for at, page in enumerate(held):
                self.rows[row].append(self.pool.take_this(page))
                self._note(row, at, page)

    def release(self) -> None:
        """Release all pages of all rows."""
        for row in range(len(self.rows)):
            self.cut(row, 0)

    def block_table(self, ends: Sequence[int]) -> torch.Tensor:
        """Block table, int32 (B, pages) on the host, for the first rows with ``ends`` tokens; a
        live view. See ``exkv.ops.pages``."""
        width = max(self.pages_for(max(ends)), 1)
        self._widen(width)
        return torch.from_numpy(self._numbers[: len(ends), :width])

    def index(self, row: int, tokens: int) -> torch.Tensor:
        """Positions in the pool of a row's first ``tokens`` tokens: int64 (N,), in tokens."""
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
