"""Choose the bits of weights where experts may lie in host memory while their layers are on cards,
so that all devices' memory is nearly one room.

The options that lose least in the total memory of all devices are a lower bound. In slightly less
memory, the same search finds options for which ``experts`` finds a placement, too; bisection finds
how much less.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..plan import Budget, UnitCost
from .choose import Options, loss_of, narrowings, smallest_of
from .experts import fits_experts
from .knapsack import Item, least_lossy

#: Precision, as a share of the room, of the search for the largest room that has a placement.
_NEAR = 1e-3
#: The share of the room to give up if a choice with a placement turned out to have none.
_LESS = 4e-3


class BitsApart:
    """The search for a choice on these devices.

    Attributes:
        least: no choice loses less; infinite where none fits.
        costs: the choice that was found, or None.
    """

    def __init__(self, options: Sequence[Options], budgets: Sequence[Budget], order: str) -> None:
        self.options, self.budgets, self.order = options, budgets, order
        self._room = room_of_all(options, budgets)
        best = least_lossy_in_all(options, self._room)
        self.least = float("inf") if best is None else loss_of(best)
        self.costs: list[UnitCost] | None = None

    def search(self, below: float) -> None:
        """Find the choice, if one that loses less than ``below`` is possible."""
        low = sum(min(map(_least_held, each)) for each in self.options)
        room = high = self._room
        while self.least < below and high - low > _NEAR * high:
            tried = least_lossy_in_all(self.options, room)
            if tried is not None and fits_experts(tried, self.budgets, self.order):
                self.costs, self._room, low = tried, room, room
            else:
                high = room
            room = (low + high) // 2

    def shrink(self) -> None:
        """Choose again, in slightly less room."""
        self._room -= int(_LESS * self._room)
        self.costs = least_lossy_in_all(self.options, self._room)


def least_lossy_in_all(options: Sequence[Options], room: int) -> list[UnitCost] | None:
    """One option per unit that together lose least in one room, whose bytes may be divided freely;
    they count weights and caches, not calls. None where none fit."""
    best: list[UnitCost] | None = None
    for narrowed in narrowings(options):
        items = [
            Item(np.array(list(map(_least_held, each))), np.array([cost.loss for cost in each]))
            for each in narrowed
        ]
        if (chosen := least_lossy(items, room)) is not None:
            found = [each[option] for each, option in zip(narrowed, chosen, strict=True)]
            best = found if best is None else min(best, found, key=loss_of)
    return best


def _least_held(cost: UnitCost) -> int:
    """Bytes of a unit beside all units that it shares with."""
    others = max((cache for cache, _ in cost.shared_cache.values()), default=0)
    return cost.weights - sum(cost.shared.values()) + cost.cache - others


def room_of_all(options: Sequence[Options], budgets: Sequence[Budget]) -> int:
    """An upper bound of the bytes that devices have for weights and caches. On a card, they lie
    beside the call of some unit, and then include only units whose calls take no more; on the host,
    beside none, since experts there need no call's workspace."""
    return sum(
        budget.limit if budget.place == budget.place.memory else _room_of_card(options, budget)
        for budget in budgets
    )


def _room_of_card(options: Sequence[Options], budget: Budget) -> int:
    units = sorted(
        (smallest_of(each).call_on(budget), max(map(_least_held, each)))
        for each in options
        if each[0].pinned is None
    )
    room = held = 0
    for call, nbytes in units:
        held += nbytes
        room = max(room, min(budget.limit - call, held))
    return room
