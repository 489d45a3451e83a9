"""Snapshots of recurrent states at the ends of pages of the prefix cache."""

from __future__ import annotations

from collections import OrderedDict

from exkv.cache.paging.pool import KnownPage
from exkv.cache.paging.swap import SwappedPages


class Snapshots:
    """The states of a model at the ends of pages of the prefix cache: copies in host memory, of
    which the least recently used one is evicted for a new one.

    A prompt leaves one after its last full page, where the next turn of its chat continues, and one
    after the last page that it shares with an earlier prompt.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[KnownPage, SwappedPages] = OrderedDict()

    def __contains__(self, page: KnownPage) -> bool:
        return page in self._kept

    def find(self, page: KnownPage) -> SwappedPages:
        """The states at the end of a page that has a snapshot."""
        self._kept.move_to_end(page)
        return self._kept[page]

    def add(self, page: KnownPage, states: SwappedPages) -> None:
        self._kept[page] = states
        self._kept.move_to_end(page)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
