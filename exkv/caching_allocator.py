"""A model of torch's caching allocator: what a card reserves for the memory requested from it.

CUDA gives memory in segments, and torch keeps them: a request of up to 1 MiB comes from segments of
2 MiB, one of less than 10 MiB from segments of 20 MiB, and a larger one from a segment of its own,
in multiples of 2 MiB. A freed block is kept for later requests; one that is larger than a request
is split. The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.13, and tests
compare them with that very allocator (``tests/torch_allocator``). ``exkv_ext/sim/segments.cpp``
implements them again, for simulated devices.

There is one stream, and no private pools: exkv's allocations are used on one stream.
"""

from __future__ import annotations

import bisect
import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass

#: Sizes are multiples of this.
BLOCK = 512
#: Requests up to SMALL come from segments of SMALL_SEGMENT; those below LARGE, from segments of
#: ``Rules.large_segment``; larger ones are rounded up to multiples of ROUND_LARGE.
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
LARGE, ROUND_LARGE = 10 << 20, 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What ``PYTORCH_ALLOC_CONF`` (or ``PYTORCH_CUDA_ALLOC_CONF``) may set.

    Attributes:
        expandable: whether each pool has one segment, which grows.
        max_split: blocks of this size or more are not split; None for no such limit.
        max_unsplit_rounding: bytes by which such a block may be larger than a request.
        power2_divisions: steps between two powers of two to which sizes are rounded; 0 for none.
        large_segment: bytes of a segment for medium requests.
    """

    expandable: bool = False
    max_split: int | None = None
    max_unsplit_rounding: int = 20 << 20
    power2_divisions: int = 0
    large_segment: int = 20 << 20

    @classmethod
    def from_env(cls) -> Rules:
        """The rules of this process, from the first variable that is set, as torch does."""
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        return cls.parse(next(filter(None, map(os.environ.get, names)), ""))

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> Rules:
        """Parse a text such as ``expandable_segments:True,max_split_size_mb:128``. Other settings
        are ignored, and so is a list of divisions by size."""
        pairs = (item.split(":", 1) for item in text.replace(" ", "").split(",") if ":" in item)
        values = {key: value for key, value in pairs}
        mebi = {key: int(value) << 20 for key, value in values.items() if value.isdecimal()}
        divisions = values.get("roundup_power2_divisions", "")
        return cls(
            expandable=values.get("expandable_segments", "") in ("True", "true"),
            max_split=mebi.get("max_split_size_mb"),
            max_unsplit_rounding=mebi.get("max_non_split_rounding_mb", 20 << 20),
            power2_divisions=int(divisions) if divisions.isdecimal() else 0,
            large_segment=mebi.get("large_segment_size_mb", 20 << 20),
        )

    def rounded(self, nbytes: int) -> int:
        """Bytes of a block for a request."""
        if self.power2_divisions > 1 and nbytes > BLOCK * self.power2_divisions:
            floor = 1 << (nbytes.bit_length() - 1)
            step = floor // self.power2_divisions
            return floor if nbytes == floor else floor + -(-(nbytes - floor) // step) * step
        return max(-(-nbytes // BLOCK), 1) * BLOCK

    def segment(self, size: int) -> int:
        """Bytes of a new segment for a block."""
        if size <= SMALL:
            return SMALL_SEGMENT
        if size < LARGE:
            return self.large_segment
        return -(-size // ROUND_LARGE) * ROUND_LARGE

    def request_size(self, nbytes: int) -> int:
        """Bytes to request for a long-lived allocation of ``nbytes``. If a medium segment holds
        only two of this size, the request is raised until it gets a segment of its own, which is
        half as large and is released as a whole."""
        alone = self.large_segment < 3 * nbytes and nbytes < LARGE and not self.expandable
        return LARGE if alone else nbytes

    def share(self, nbytes: int, among: Iterable[int] = ()) -> int:
        """Bytes reserved for each of many such allocations.

        An upper bound if nothing is freed, for any order of allocations, which may share segments
        with allocations of ``among`` bytes. Beside all shares, one segment of each kind may be
        open: see :meth:`open_segments`.
        """
        size = self.rounded(self.request_size(nbytes)) if nbytes else 0
        segment = self._page(size)
        if not size or self.expandable or size >= segment:
            return size and self._alone(size)
        others = {self.rounded(self.request_size(each)) for each in among if each}
        alike = {size, *(each for each in others if self._page(each) == segment)}
        if min(alike) >= LARGE:
            return self._alone(size)
        filled = _least_filled(tuple(sorted(alike)), segment)
        return max(-(-segment * size // filled), self._alone(size) if size >= LARGE else 0)

    def _alone(self, size: int) -> int:
        """Bytes reserved for a block that doesn't share its segment."""
        return size if self.expandable else self.segment(size)

    def open_segments(self, sizes: Iterable[int]) -> int:
        """Upper bound on what partly filled segments reserve beyond the shares of ``sizes``."""
        wanted = {self._page(size) for size in sizes if size and (self.expandable or size < LARGE)}
        return sum(wanted)

    def shares_segments(self, nbytes: int, other: int) -> bool:
        """Whether two long-lived allocations may lie in one segment."""
        small, large = sorted(self.rounded(self.request_size(each)) for each in (nbytes, other))
        page = self._page(large)
        both = small < LARGE and small + large <= page == self._page(small)
        return self.expandable or both

    def most_held_back(self, nbytes: int) -> int:
        """Bytes that an allocation can hold back of what is freed around it: the rest of its
        segment, or of the first and last page of an expandable one."""
        size = self.rounded(self.request_size(nbytes))
        return self._page(size) * 2 if self.expandable else max(self._page(size) - size, 0)

    def _page(self, nbytes: int) -> int:
        return SMALL_SEGMENT if nbytes <= SMALL else self.large_segment


@functools.lru_cache(maxsize=4096)
def _least_filled(sizes: tuple[int, ...], segment: int) -> int:
    """The fewest bytes in use in a full segment: the smallest block for it does not fit into the
    rest. Best fit opens another only then, whatever the order.

    Args:
        sizes: of blocks, ascending; some of them below LARGE.
    """
    found = segment
    for position, smallest in enumerate(sizes):
        if smallest >= LARGE:
            break
        fills = _sums([size // BLOCK for size in sizes[position:]], segment // BLOCK)
        least = (segment - smallest) // BLOCK + 1
        beyond = fills >> least
        found = min(found, (least + (beyond & -beyond).bit_length() - 1) * BLOCK)
    return found


def _sums(numbers: Iterable[int], most: int) -> int:
    """The sums, up to ``most``, of any of the numbers with repetition, as a bit set."""
    sums, within = 1, (1 << (most + 1)) - 1
    for number in numbers:
        step = number
        while step <= most:
            sums = (sums | sums << step) & within
            step *= 2
    return sums


class Block:
    """A piece of a segment. ``small`` says which pool it belongs to."""

    __slots__ = ("address", "after", "before", "free", "mapped", "size", "small")

    def __init__(self, address: int, size: int, *, small: bool, mapped: bool = True) -> None:
        self.address, self.size, self.small, self.mapped = address, size, small, mapped
        self.free = True
        self.before: Block | None = None
        self.after: Block | None = None


class CachingAllocator:
    """The allocator of one device.

    Attributes:
        reserved: bytes of all segments; ``peak`` is the most there ever were.
        allocated: bytes of the blocks in use, which may be larger than requested.
    """

    def __init__(self, rules: Rules = Rules(), capacity: int | None = None) -> None:  # noqa: B008
        self.rules, self.capacity = rules, capacity
        self.reserved = self.peak = self.allocated = 0
        #: Free blocks of each pool by (size, address), and those without memory by address.
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._unmapped: dict[bool, list[tuple[int, Block]]] = {True: [], False: []}
        self._next_address = 1 << 40

    def allocate(self, nbytes: int) -> Block:
        """Allocate at least ``nbytes``; MemoryError if the device has no room."""
        size = self.rules.rounded(nbytes)
        small = size <= SMALL
        block = (
            self._best_fit(size, small=small)
            or self._new(size, small=small)
            or (self._release_fitting(size, small=small) and self._new(size, small=small))
            or (self._release_all() and self._new(size, small=small))
        )
        if not block:
            raise MemoryError(f"{nbytes} bytes, with {self.reserved} reserved of {self.capacity}")
        if self._splits(block, size):
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Return a block to its pool, merged with free neighbours."""
        self.allocated -= block.size
        block.free = True
        self._insert(self._merged(block))

    def empty_cache(self) -> None:
        """Release segments without a block in use."""
        self._release_all()

    # Finding --------------------------------------------------------------------------------

    def _best_fit(self, size: int, *, small: bool) -> Block | None:
        pool, limit = self._free[small], self.rules.max_split
        at = bisect.bisect_left(pool, (size,))
        if at == len(pool):
            return None
        if self.rules.expandable:
            while at + 1 < len(pool) and _room(pool[at + 1][2]) < _room(pool[at][2]):
                at += 1
        found = pool[at][2]
        if limit is not None:
            if size < limit <= found.size:
                return None
            if size >= limit and found.size >= size + self.rules.max_unsplit_rounding:
                return None
        del pool[at]
        return found

    def _splits(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.small or self.rules.expandable:
            return rest >= BLOCK
        limit = self.rules.max_split
        return rest > SMALL and (limit is None or size < limit)

    def _split(self, block: Block, size: int) -> None:
        """Keep ``size`` bytes; the rest is free."""
        self._insert(self._cut(block, size))

    @staticmethod
    def _cut(block: Block, size: int, *, mapped: bool = True) -> Block:
        """Cut a block after ``size`` bytes; returns the rest."""
        rest = Block(block.address + size, block.size - size, small=block.small, mapped=mapped)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        return rest

    def _insert(self, block: Block) -> None:
        bisect.insort(self._free[block.small], (block.size, block.address, block), key=_key)

    def _remove(self, block: Block) -> None:
        pool = self._free[block.small]
        del pool[bisect.bisect_left(pool, (block.size, block.address), key=_key)]

    def _merged(self, block: Block) -> Block:
        """Merge a free block with its free neighbours."""
        before, after = block.before, block.after
        if after is not None and after.free and after.mapped == block.mapped:
            self._forget(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        if before is not None and before.free and before.mapped == block.mapped:
            self._forget(before)
            before.size += block.size
            before.after = block.after
            if before.after is not None:
                before.after.before = before
            return before
        return block

    def _forget(self, block: Block) -> None:
        if block.mapped:
            self._remove(block)
        else:
            self._unmapped[block.small].remove((block.address, block))

    # Segments -------------------------------------------------------------------------------

    def _takes(self, nbytes: int) -> bool:
        """Reserve more bytes; False if the device has fewer."""
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)
        return True

    def _new(self, size: int, *, small: bool) -> Block | None:
        if self.rules.expandable:
            return self._expanded(size, small=small)
        nbytes = self.rules.segment(size)
        if not self._takes(nbytes):
            return None
        block = Block(self._next_address, nbytes, small=small)
        self._next_address += nbytes
        return block

    def _release_all(self) -> bool:
        """Release free segments, or the free pages of expandable ones."""
        for pool in self._free.values():
            for _, _, block in list(pool):
                if self.rules.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._remove(block)
                    self.reserved -= block.size
        return True

    def _release_fitting(self, size: int, *, small: bool) -> bool:
        """With ``max_split``, release free blocks that were too large for the request, the largest
        first, until there is room; False if that frees too little."""
        limit = self.rules.max_split
        if limit is None or self.rules.expandable:
            return False
        wanted = max(size, limit)
        pool = self._free[small]
        at = bisect.bisect_left(pool, (wanted,))
        if at < len(pool):
            self._drop(pool[at][2])
            return True
        freed = 0
        while freed < wanted and pool and pool[-1][0] >= limit:
            freed += pool[-1][0]
            self._drop(pool[-1][2])
        return freed >= wanted

    def _drop(self, block: Block) -> None:
        self._remove(block)
        self.reserved -= block.size

    # Expandable segments ----------------------------------------------------------------------

    def _page(self, *, small: bool) -> int:
        return SMALL_SEGMENT if small else self.rules.large_segment

    def _expanded(self, size: int, *, small: bool) -> Block | None:
        """Grow the pool's segment by pages until its last free block has ``size`` bytes; None if
        the device has no memory for them."""
        block = self._expandable(size, small=small)
        if not block.mapped:
            found = self._map(block, min(block.size, size))
        else:
            found = block
            self._remove(block)
        if found is None:
            return None
        while found.size < size:
            rest = found.after
            assert rest is not None and not rest.mapped
            self._insert(found)
            more = self._map(rest, min(size - found.size, rest.size))
            if more is None:
                return None
            found = more
        return found

    def _expandable(self, size: int, *, small: bool) -> Block:
        """The lowest unmapped block, or the free block before it, that starts ``size`` free bytes
        of address space; a new address range if there is none."""
        for _, block in self._unmapped[small]:
            start = block.before if block.before is not None and block.before.free else block
            each: Block | None = start
            room = 0
            while each is not None and each.free and room < size:
                room += each.size
                each = each.after
            if room >= size:
                return start
        page = self._page(small=small)
        address = -(-self._next_address // page) * page
        block = Block(address, page << 20, small=small, mapped=False)
        self._next_address = address + block.size
        self._unmapped[small].append((block.address, block))
        return block

    def _map(self, block: Block, nbytes: int) -> Block | None:
        """Map pages for the first ``nbytes`` of a block. Returns the merged free block, which is in
        no pool."""
        page = self._page(small=block.small)
        nbytes = -(-nbytes // page) * page
        if not self._takes(nbytes):
            return None
        self._unmapped[block.small].remove((block.address, block))
        block.mapped = True
        if nbytes < block.size:
            rest = self._cut(block, nbytes, mapped=False)
            bisect.insort(self._unmapped[block.small], (rest.address, rest), key=_first)
        return self._merged(block)

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages of a free block."""
        page = self._page(small=block.small)
        begin = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if begin >= end:
            return
        self._remove(block)
        if begin > block.address:
            rest = self._cut(block, begin - block.address)
            self._insert(block)
            block = rest
        if end < block.address + block.size:
            self._insert(self._cut(block, end - block.address))
        self.reserved -= block.size
        block.mapped = False
        block = self._merged(block)
        bisect.insort(self._unmapped[block.small], (block.address, block), key=_first)


def _room(block: Block) -> int:
    """Bytes to which a block can grow; blocks that can grow are chosen last."""
    grows = block.after is not None and not block.after.mapped
    return block.size + (block.after.size if grows and block.after else 0)


def _key(entry: tuple[int, int, Block]) -> tuple[int, int]:
    return entry[0], entry[1]


def _first(entry: tuple[int, Block]) -> int:
    return entry[0]
