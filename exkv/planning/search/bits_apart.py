"""Which weights to keep in how many bits where experts may lie in host memory while their layers
are on cards, so that all devices' memory is nearly one room.

The options that lose least in the memory of all devices together are a lower bound. With a little
less of it the same search finds options for which ``experts`` finds a placement, too; how much less
that is is found by halving.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..plan import Budget, UnitCost
from .choose import Options, loss_of, narrowings, smallest_of
from .experts import fits_experts
from .knapsack import Item, least_lossy

#: The share of the room to which the most that has a placement is found.
_NEAR = 1e-3
#: The share of the room that is given up where what had a placement turned out to have none.
_LESS = 4e-3


class BitsApart:
    """The choice for these devices.

    Attributes:
        least: no choice loses less; infinite where none fits.
        costs: the choice that was found, None where none was.
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
        """Choose again, in a little less room."""
        self._room -= int(_LESS * self._room)
        self.costs = least_lossy_in_all(self.options, self._room)


def least_lossy_in_all(options: Sequence[Options], room: int) -> list[UnitCost] | None:
    """One option of every unit that lose least in one room, whose bytes may be divided at will:
    those of weights and caches, not of calls. None where none fit."""
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
    """Bytes that devices have for weights and caches at most: a card beside the call of some unit,
    and then no more than units whose calls take no more; host memory beside none, for experts
    need none there."""
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
