"""Groups of a layer's routed experts that a mix stores in different bits, since some are chosen far
more often than others.

A mix (``on_load.class_of``) names ``mlp.experts.up_proj`` for all experts of a layer, or
``mlp.experts.up_proj[0-3,7]`` for these; the name without numbers then means all others. The loss
of rounding an expert is weighted by how often it is chosen. One bit is a factor of four in squared
error, so the experts of a group are chosen equally often within a factor of four.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

#: The expert's index in the name of a routed expert's parameter or matrix.
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
#: Marks a class of matrices as those of routed experts.
_ROUTED = re.compile(r"(?:^|\.)experts\.")
_NUMBERS = re.compile(r"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]$")
#: Lower bounds of the groups, as multiples of the mean frequency; the last group has the rest.
_EDGES = (8.0, 2.0, 0.5, 0.125)


def expert_of(parameter: str) -> int | None:
    """Index of the routed expert that a unit's parameter, by its name, belongs to; None if none."""
    found = _EXPERT.search(parameter)
    return int(found[1]) if found else None


def groups_of(shares: Sequence[float]) -> list[tuple[int, ...]]:
    """Group experts that are chosen about equally often, the hottest first.

    Args:
        shares: share of tokens that choose each expert.
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
    """Split the losses of routed experts' matrices by groups, in proportion to how often these are
    chosen; sums stay the same.

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
    """Lookup from a matrix's class and its name in the checkpoint to the name of a mix, among
    these, that covers it; None if none does."""
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
    """Split a name of a mix into the class of matrices and its experts, if it names any."""
    if not (found := _NUMBERS.search(name)):
        return name, None
    ends = [[int(end) for end in each.split("-")] for each in found[1].split(",")]
    return name[: found.start()], tuple(
        expert for each in ends for expert in range(each[0], each[-1] + 1)
    )


def _numbers(experts: Sequence[int]) -> str:
    """Describe ascending numbers, runs by their ends: "0-3,7"."""
    runs = itertools.groupby(enumerate(experts), lambda pair: pair[1] - pair[0])
    ends = [[expert for _, expert in run] for _, run in runs]
    return ",".join(f"{r[0]}" if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in ends)
