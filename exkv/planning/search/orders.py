"""The orders in which devices may be filled: host by host, so that no host is entered twice.

An ``Orders`` is a graph of states, each a set of devices that are already filled or passed over.
``ranges`` and ``choose`` search along its moves.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..plan import Role

#: Sets of unlike devices that a search over all orders may visit; if more, only some are tried.
MAX_STATES = 1 << 12

#: A subset of the numbers of units from 0 to all.
_ANY, _NONE, _SOME = slice(None), slice(0, 1), slice(1, None)
_NOT_ALL, _ALL = slice(0, -1), slice(-1, None)


@dataclass(frozen=True, slots=True)
class Move:
    """A transition between states: a device is filled; or a host is entered, left or passed over.

    Attributes:
        before: the earlier state.
        device: the one that is filled, or None.
        role: of the device's host; None where it doesn't affect what the device has room for.
        placed: the numbers of units so far with which the move is possible; None for all.
        pays: those with which it costs the toll of a hop between hosts.
    """

    before: int
    device: int | None = None
    role: Role | None = None
    placed: slice | None = None
    pays: slice | None = None

    def masked(self, values: np.ndarray) -> np.ndarray:
        """Values of the earlier state, infinite where the move is not possible."""
        if self.placed is None:
            return values.copy()
        kept = np.full_like(values, np.inf)
        kept[self.placed] = values[self.placed]
        return kept


@dataclass(frozen=True, slots=True)
class Orders:
    """A set of orders, as a graph.

    Attributes:
        states: the moves to each state, all from earlier states. The first is the start, which no
            move leads to; in the last, all devices are done. Of equally good moves, the first is
            the one that fills earlier devices.
        behind: for each state, the devices that are still to be filled.
    """

    states: list[list[Move]]
    behind: list[list[int]]

    def generations(self) -> list[list[int]]:
        """The states except the start, in groups; all moves to a group's states come from earlier
        groups."""
        steps = [0]
        for moves in self.states[1:]:
            steps.append(1 + max(steps[move.before] for move in moves))
        groups: list[list[int]] = [[] for _ in range(max(steps))]
        for state, count in enumerate(steps[1:], 1):
            groups[count - 1].append(state)
        return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDevices:
    """A host's devices in groups, each filled in order.

    Attributes:
        by_role: whether its role affects what it has room for.
    """

    groups: Sequence[Sequence[int]]
    by_role: bool = False

    @property
    def devices(self) -> list[int]:
        return [device for group in self.groups for device in group]

    def roles(self, *, receives: bool | None) -> list[Role | None]:
        """Roles that it may have; those in which it is entered late come first."""
        if not self.by_role:
            return [None]
        entered = [True, False] if receives is None else [receives]
        return [Role(one, two) for one in entered for two in (True, False)]


def listed(hosts: Sequence[Sequence[int]], by_role: Sequence[bool], first: int | None) -> Orders:
    """The single order of listed devices, host by host."""
    made = [
        HostDevices(groups=[devices], by_role=role)
        for devices, role in zip(hosts, by_role, strict=True)
    ]
    return _Builder(made, [list(range(len(made)))], first).orders


def any_order(
    hosts: Sequence[Sequence[int]],
    by_role: Sequence[bool],
    first: int | None,
    kinds: Sequence[Hashable],
) -> Orders | None:
    """Every order of hosts, and of devices within a host; devices of one kind are interchangeable.
    None if there are too many unlike devices to try all orders.

    Args:
        first: the host that must come first, or None.
        kinds: of the devices.
    """
    made = [
        HostDevices(groups=_alike(devices, [kinds[d] for d in devices]), by_role=role)
        for devices, role in zip(hosts, by_role, strict=True)
    ]
    groups = _alike(range(len(hosts)), [tuple(kinds[d] for d in devices) for devices in hosts])
    return _Builder(made, groups, first).orders if _count(made, groups) <= MAX_STATES else None


def _alike(members: Sequence[int], kinds: Sequence[Hashable]) -> list[list[int]]:
    """The members of each kind."""
    found: dict[Hashable, list[int]] = {}
    for member, kind in zip(members, kinds, strict=True):
        found.setdefault(kind, []).append(member)
    return list(found.values())


def _count(hosts: Sequence[HostDevices], groups: Sequence[Sequence[int]]) -> int:
    """Sets of devices that may be filled: some hosts completely, and one in part."""
    return sum(
        len(group)
        * math.prod(len(other) + 1 for other in groups if other is not group)
        * math.prod(len(devices) + 1 for devices in hosts[group[0]].groups)
        for group in groups
    )


def by_size(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Every ``(0..c for c in counts)``, smaller sums first."""
    ranges = np.indices([count + 1 for count in counts]).reshape(len(counts), -1).T
    return sorted((tuple(map(int, row)) for row in ranges), key=sum)


def less(state: tuple[int, ...], group: int) -> tuple[int, ...]:
    """The set with one member of this kind fewer."""
    return _changed(state, group, -1)


def _changed(state: tuple[int, ...], group: int, by: int) -> tuple[int, ...]:
    return (*state[:group], state[group] + by, *state[group + 1 :])


class _Builder:
    """Build the graph: between sets of finished hosts, the sets of one host's devices."""

    def __init__(
        self, hosts: Sequence[HostDevices], groups: Sequence[Sequence[int]], first: int | None
    ) -> None:
        self.hosts, self.groups, self.first = hosts, groups, first
        self.orders = Orders([], [])
        none, *sets = by_size([len(group) for group in groups])
        done = {none: self._state([], self._behind(none))}
        for state in sets:
            moves = [
                move
                for group in (g for g in range(len(groups)) if state[g])
                for move in self._past(group, less(state, group), done)
            ]
            done[state] = self._state(moves, self._behind(state))

    def _state(self, moves: list[Move], behind: list[int]) -> int:
        self.orders.states.append(moves)
        self.orders.behind.append(behind)
        return len(self.orders.states) - 1

    def _behind(self, state: tuple[int, ...]) -> list[int]:
        """The devices of the hosts that are not in this set."""
        left = [group[count:] for group, count in zip(self.groups, state, strict=True)]
        return [device for group in left for host in group for device in self.hosts[host].devices]

    def _past(
        self, group: int, state: tuple[int, ...], done: Mapping[tuple[int, ...], int]
    ) -> Iterator[Move]:
        """The moves by which this group's next host is done: passed over, or filled."""
        host, before = self.groups[group][state[group]], done[state]
        if host != self.first:
            yield Move(before)
        if self.first is None:
            receives = None
        elif host == self.first:
            receives = False
        elif self.hosts[self.first].devices[0] in self._behind(state):
            return  # nothing precedes the first
        else:
            receives = True
        behind = self._behind(_changed(state, group, 1))
        for role in self.hosts[host].roles(receives=receives):
            entered = self._state([_enter(before, role, receives)], behind)
            filled = self._filled(host, entered, role, behind)
            placed = None if role is None else _NOT_ALL if role.sends else _ALL
            yield Move(filled, placed=placed)

    def _filled(self, host: int, entered: int, role: Role | None, behind: list[int]) -> int:
        """The state in which all of the host's devices are filled."""
        groups = self.hosts[host].groups
        none, *sets = by_size([len(group) for group in groups])
        inside = {none: entered}
        for state in sets:
            moves = [
                Move(inside[less(state, g)], device=group[state[g] - 1], role=role)
                for g, group in enumerate(groups)
                if state[g]
            ]
            left = [d for group, used in zip(groups, state, strict=True) for d in group[used:]]
            inside[state] = self._state(moves, [*left, *behind])
        return inside[state]


def _enter(before: int, role: Role | None, receives: bool | None) -> Move:
    """The move into a host that receives hidden states in this role, or doesn't.

    Args:
        receives: whether it always or never does; None: it does unless it is the first.
    """
    if receives is not None:
        return Move(before, pays=_ANY if receives else None)
    placed = None if role is None else _SOME if role.receives else _NONE
    return Move(before, placed=placed, pays=_SOME)
