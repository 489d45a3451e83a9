"""Pages: which of a pool's pages hold the tokens of which row. Numbers only; no keys here.

A pool has pages of one size, and a page may be several rows' at once: forks, beams and jobs with
one beginning hold the same ones. Whoever writes to a page that others can see takes a copy first.

What a full page holds can be found again by its tokens, also when no row has it any more: pages
that nobody holds stay as they are until there is no other left. Then the one that was used longest
ago goes first, of those that no other one goes on from (RadixAttention's rule, Zheng et al., 2023).
It goes to the tier below, in host memory, where there is one, and comes back when a row wants it;
tiers are emptied by the same rule, each into the next.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

#: The tier of a :class:`KnownPage` that is nowhere any more.
GONE = -1


class OutOfPagesError(ValueError):
    """The rows need more pages than the pool has left; nothing has changed."""


class PageCopies(Protocol):
    """Whoever has the memory that pages stand for."""

    def copy_page(self, to: int, page: int) -> None:
        """Let a page of the pool hold what another one does."""

    def move_page(self, page: int, tier: int, to: int, to_tier: int) -> None:
        """Let page ``to`` of one tier hold what ``page`` of another one does."""


@dataclass(eq=False, slots=True)
class KnownPage:
    """A full page that can be found by its tokens and by those before them.

    Attributes:
        page: its number, in its tier.
        before: the page that it goes on from; None at the beginning of a text.
        tokens: its own; at the beginning of a text, behind what else tells it from others (an
            adapter).
        exact: whether it holds what running its tokens as a prompt would store, to the bit.
        tier: where it is: 0 for the pool itself, then tiers in host memory; :data:`GONE`.
        following: how many known pages go on from it, by their tier.
        used: when a row had it last.
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
        """A hash of its tokens and, as a chain, of all before."""
        return _key(self.before, self.tokens)


def _key(before: KnownPage | None, tokens: tuple[Hashable, ...]) -> int:
    return hash((0 if before is None else id(before), tokens))


class _Tier:
    """Pages in one memory: the free ones, what the others are known to hold, and a heap of those
    that may go; entries that are out of date are passed over.

    Args:
        rounds: whether what comes here is rounded.
    """

    def __init__(self, pages: int, rounds: bool) -> None:
        self.pages = pages
        self.rounds = rounds
        self.free = list(range(pages - 1, -1, -1))
        self.known: dict[int, KnownPage] = {}
        self.leaves: list[tuple[int, int, KnownPage]] = []


class PagePool:
    """Pages by number: how many rows hold each, which are free, and what the known ones hold.

    Args:
        pages: how many there are.
        size: tokens of one.
        tiers: of each tier in host memory how many pages it has, and whether it rounds them.

    Attributes:
        holders: how many rows hold each page.
        lost: whether what pages had stored is gone, see :meth:`lose`.
    """

    def __init__(self, pages: int, size: int, tiers: Sequence[tuple[int, bool]] = ()) -> None:
        self.size = size
        self.lost = False
        self.holders = [0] * pages
        self._tiers = [_Tier(pages, False), *(_Tier(count, rounds) for count, rounds in tiers)]
        self._found: dict[int, KnownPage] = {}  # by key
        self._idle = 0  # known pages that no row holds
        self._clock = 0
        self._coming: Collection[KnownPage] = ()  # back into the pool

    @property
    def pages(self) -> int:
        """How many there are."""
        return len(self.holders)

    @property
    def available(self) -> int:
        """Pages that :meth:`take` could give."""
        return len(self._tiers[0].free) + self._idle

    @property
    def idle(self) -> int:
        """Pages that no row holds and that can be found by what is in them."""
        return self._idle

    @property
    def in_tiers(self) -> list[int]:
        """Pages in each tier in host memory."""
        return [len(tier.known) for tier in self._tiers[1:]]

    @property
    def in_tiers_at_most(self) -> int:
        """Pages of all tiers in host memory."""
        return sum(tier.pages for tier in self._tiers[1:])

    def take(self, copies: PageCopies | None = None) -> int:
        """A page whose contents mean nothing, for one row.

        Args:
            copies: for pools with tiers: moves what was in it to one of them.

        Raises:
            OutOfPagesError: rows hold all of them.
        """
        if not self.available:
            raise OutOfPagesError(f"all {self.pages} pages of {self.size} tokens are in use")
        page = self._place(0, copies)
        assert page is not None, "of pages that nobody holds one has none after it that is held"
        self.holders[page] = 1
        return page

    def take_this(self, page: int) -> int:
        """The page of this number, held by one row more, free or not."""
        if not self.holders[page]:
            self._tiers[0].free.remove(page)
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
        known = self._tiers[0].known.get(page)
        if known is None:
            self._tiers[0].free.append(page)
            return
        self._clock += 1
        known.used = self._clock
        self._idle += 1
        self._offer(known)

    # Found again by content -----------------------------------------------------------------

    def find(self, before: KnownPage | None, tokens: Sequence[Hashable]) -> KnownPage | None:
        """The known page with these tokens behind those of ``before``, in whatever tier."""
        wanted = tuple(tokens)
        known = self._found.get(_key(before, wanted))
        # A hash may be another's by chance; tokens are not.
        if known is None or known.before is not before or known.tokens != wanted:
            return None
        return known

    def needed_for(self, chain: Sequence[KnownPage]) -> int:
        """How many of the pages that are :attr:`available` it takes to :meth:`hold` these."""
        return sum(known.tier > 0 or not self.holders[known.page] for known in chain)

    def hold(self, chain: Sequence[KnownPage], copies: PageCopies | None = None) -> list[int]:
        """Known pages, each going on from the one before it, held by one row more; those in host
        memory come back.

        Raises:
            OutOfPagesError: there are too few pages for these to come back to.
        """
        if self.needed_for(chain) > self.available:
            raise OutOfPagesError(
                f"{len(chain)} known pages need {self.needed_for(chain)} of the pool, and "
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
        assert copies is not None, "a pool with tiers is told who moves pages"
        old, tier = known.page, known.tier
        copies.move_page(old, tier, page, 0)
        self._settle(known, 0, page)
        self._tiers[tier].free.append(old)

    def remember(
        self, page: int, before: KnownPage | None, tokens: Sequence[Hashable], exact: bool = True
    ) -> KnownPage:
        """Note what a page that a row holds has in it for good.

        Where another one is known for the same, that one is returned and stands for both; but what
        lies in host memory gives way to this page, and what is not exact to one that is.
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
            known.tier = GONE  # a hash by chance, or held for something else: it stays unknown
            return known
        self._found[known.key] = self._tiers[0].known[page] = known
        if before is not None:
            before.following[0] += 1
        return known

    def _give_way(self, known: KnownPage, page: int, exact: bool) -> None:
        """What is known to lie somewhere else lies in this page, which a row holds."""
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
        """It is about to be written to by the only row that holds it. (Those that go on from it
        can't be found any more either, and go when they are the oldest.)"""
        if (known := self._tiers[0].known.get(page)) is not None:
            self._forget(known)

    def forget_tiers(self) -> None:
        """Nothing that lies in host memory can be found any more."""
        for tier in self._tiers[1:]:
            for known in list(tier.known.values()):
                tier.free.append(known.page)
                self._forget(known)

    def lose(self) -> None:
        """What was stored is gone, from all pages and tiers: none is found any more. Rows hold
        their pages, and who runs their tokens again takes ``lost`` back."""
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
        """Note that it lies there now."""
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
        """A page of a tier that holds nothing, and is not among the free ones any more; None where
        there is no such tier, or nothing in it may go."""
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
        assert copies is not None, "a pool with tiers is told who moves pages"
        copies.move_page(page, tier, below, tier + 1)
        self._settle(known, tier + 1, below)
        return page

    def _may_go(self, known: KnownPage) -> bool:
        """Whether no row holds it, and no other page of its tier goes on from it."""
        if known.tier == GONE or known.following[known.tier] or known in self._coming:
            return False
        return known.tier > 0 or not self.holders[known.page]

    def _offer(self, known: KnownPage) -> None:
        if not self._may_go(known):
            return
        tier = self._tiers[known.tier]
        if len(tier.leaves) > 2 * tier.pages + 8:  # as they grow, most are out of date
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
    """A pool whose pages another process gives out, of a model that lies on several hosts: rows
    hold what they are told to (:meth:`PageTable.show`), and nothing is counted here."""

    def take(self, copies: PageCopies | None = None) -> int:
        raise AssertionError("the driver gives out pages before it has a call made")

    def take_this(self, page: int) -> int:
        return page

    def share(self, page: int) -> int:
        return page

    def drop(self, page: int) -> None:
        pass


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
        self, starts: Sequence[int], ends: Sequence[int], copies: PageCopies | None = None
    ) -> None:
        """See that the tokens from ``starts`` to ``ends`` of the first rows have pages that no
        other row sees; all of them or none.

        Args:
            copies: copies what lies in pages that others see; None where there are none such.

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
            held, page = self.rows[row], pool.take(copies)
            if at == len(held):
                held.append(page)
            else:
                if at * size < starts[row]:
                    assert copies is not None, "a page that others see is copied before a write"
                    copies.copy_page(page, held[at])
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
        self._add(row, [self.pool.share(page) for page in pages])

    def hold_known(
        self, row: int, chain: Sequence[KnownPage], copies: PageCopies | None = None
    ) -> None:
        """Let an empty row hold known pages; see :meth:`PagePool.hold`."""
        self._add(row, self.pool.hold(chain, copies))

    def _add(self, row: int, pages: Sequence[int]) -> None:
        for page in pages:
            self.rows[row].append(page)
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

    def show(self, rows: Sequence[Sequence[int]]) -> None:
        """Let the first rows hold these pages of a :class:`FollowedPool`, and nothing else."""
        for row, pages in enumerate(rows):
            self.rows[row] = list(pages)
            for at, page in enumerate(pages):
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
