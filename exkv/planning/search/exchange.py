"""One good order of devices where there are too many to try all: found by moving one at a time.

Layers are mostly alike, so that a plan hardly depends on the order except for the first and the
last device, which have the embedding and the head. So each device is tried at both ends of its
host, and each host at both ends of the sequence. ``relaxation`` bounds what another order could
save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .offer import Offer
from .orders import Orders

#: Devices filled in total over all orders that are tried.
MOST_TRIED = 1 << 12


class Found(Protocol):
    """The result for one order."""

    @property
    def score(self) -> tuple[int, float, float]:
        """Units without a place, and the cost of the others; lower is better."""


def good_order(offer: Offer, search: Callable[[Orders], Found]) -> Orders:
    """The order with the lowest score among those tried, starting with the listed one."""
    hosts = offer.hosts
    orders = offer.in_order(hosts)
    least, left = search(orders).score, MOST_TRIED // len(offer.budgets) - 1
    better = True
    while better:
        better = False
        for to_front in (True, False):
            for device in range(len(offer.budgets)):
                for moved in _moved(hosts, device, to_front, hosts_move=offer.first is None):
                    if least == (0, 0.0, 0.0) or not left:
                        return orders
                    left -= 1
                    tried = offer.in_order(moved)
                    if (score := search(tried).score) < least:
                        hosts, orders, least, better = moved, tried, score, True
    return orders


def _moved(
    hosts: Sequence[Sequence[int]], device: int, to_front: bool, *, hosts_move: bool
) -> list[list[list[int]]]:
    """The order with the device moved to one end of its host; if it is there already, with its
    host moved to that end."""
    at = next(at for at, host in enumerate(hosts) if device in host)
    rest = [other for other in hosts[at] if other != device]
    host = [device, *rest] if to_front else [*rest, device]
    others = [list(each) for each in hosts]
    if host != list(hosts[at]):
        return [[*others[:at], host, *others[at + 1 :]]]
    del others[at]
    moved = [host, *others] if to_front else [*others, host]
    return [moved] if hosts_move and moved != [list(each) for each in hosts] else []
