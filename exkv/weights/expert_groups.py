"""Routed experts of one layer that a mix keeps in unlike bits, since some are chosen far more often
than others.

A mix (``on_load.class_of``) names ``mlp.experts.up_proj`` for all experts of a layer, or
``mlp.experts.up_proj[0-3,7]`` for these; the name without numbers is then of all others. What
rounding an expert loses counts as often as it is chosen. A bit is a factor of four in squared
error, and so experts make a group that are chosen equally often within a factor of four.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

#: In the name of a routed expert's parameter or matrix: the expert's index.
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
#: In the name of a class of matrices: that they are routed experts'.
_ROUTED = re.compile(r"(?:^|\.)experts\.")
_NUMBERS = re.compile(r"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]$")
#: Times as often as the mean, at least, of the groups' experts, but for the last one.
_EDGES = (8.0, 2.0, 0.5, 0.125)


def expert_of(parameter: str) -> int | None:
    """The routed expert that a unit's parameter belongs to, by its name; None for all others."""
    found = _EXPERT.search(parameter)
    return int(found[1]) if found else None


def groups_of(shares: Sequence[float]) -> list[tuple[int, ...]]:
    """Experts that are about equally often chosen, the hottest first.

    Args:
        shares: of tokens that choose each.
    """
    mean = math.fsum(shares) / len(shares)
    levels: dict[int, list[int]] = {}
    for expert, share in enumerate(shares):
        level = next((n for n, e in enumerate(_EDGES) if share >= e * mean), len(_EDGES))
        levels.setdefault(level, []).append(expert)
    return [tuple(levels[level]) for level in sorted(levels)]


def by_heat(
    losses: Mapping[str, Mapping[str, float]], shares: Sequence[float]
) -> dict[str, dict[str, float]]:
    """Losses of a unit's matrices with those of routed experts by groups, which lose their part of
    the class by how often they are chosen; the sums stay.

    Args:
        losses: class of matrices -> option -> loss.
        shares: see :func:`groups_of`.
    """
    groups, total = groups_of(shares), math.fsum(shares)
    most = max(groups, key=len)
    found: dict[str, dict[str, float]] = {}
    for name, lost in losses.items():
        if len(groups) == 1 or not is_routed(name):
            found[name] = dict(lost)
            continue
        for group in groups:
            part = math.fsum(shares[each] for each in group) / total
            of = name if group is most else f"{name}[{_numbers(group)}]"
            found[of] = {option: part * each for option, each in lost.items()}
    return found


def is_routed(name: str) -> bool:
    """Whether a class of matrices is of routed experts."""
    return bool(_ROUTED.search(name))


def name_among(names: Iterable[str]) -> Callable[[str, str], str | None]:
    """From a matrix's class and its name in the checkpoint to the one of these names, of a mix, by
    which it is kept; None for a matrix of which they say nothing."""
    whole, of_experts = dict[str, str](), dict[tuple[str, int], str]()
    for name in names:
        plain, experts = parsed(name)
        if experts is None:
            whole[plain] = name
        else:
            of_experts |= dict.fromkeys(((plain, each) for each in experts), name)

    def find(plain: str, layer: str) -> str | None:
        expert = expert_of(layer) if of_experts else None
        found = None if expert is None else of_experts.get((plain, expert))
        return found or whole.get(plain)

    return find


@lru_cache(4096)
def parsed(name: str) -> tuple[str, tuple[int, ...] | None]:
    """A class of matrices, and the experts that a name of a mix says, if it says any."""
    if not (found := _NUMBERS.search(name)):
        return name, None
    ends = [[int(end) for end in each.split("-")] for each in found[1].split(",")]
    return name[: found.start()], tuple(
        expert for each in ends for expert in range(each[0], each[-1] + 1)
    )


def _numbers(experts: Sequence[int]) -> str:
    """Ascending numbers, runs of them by their ends."""
    runs = itertools.groupby(enumerate(experts), lambda pair: pair[1] - pair[0])
    ends = [[expert for _, expert in run] for _, run in runs]
    return ",".join(f"{r[0]}" if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in ends)
