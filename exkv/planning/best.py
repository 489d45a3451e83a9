"""``weights="best"``: the way of keeping each unit's weights that loses least and fits.

Options and their ledger lines come from here, the search among them is ``search.choose``'s.
``best_cache`` also chooses the bits of a cache, layer by layer.

Where the losses of a layer's matrices are known, its options are the Pareto front of bytes and loss
over all mixes of them (``search.knapsack.front``), thinned: a dropped option is
covered by one that is smaller by at most 1/48 of the range from the unit's smallest option to its
largest. The workspace of a mix is only known once its ledger is made; until then the maximum over
its options stands for it. If the chosen mixes don't fit by their own ledger, each unit is kept in a
single option.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from exkv.errors import PlacementError
from exkv.weights.choice import Choice, Losses, known
from exkv.weights.expert_groups import is_routed, parsed
from exkv.weights.on_load import ALL_OPTIONS, AS_STORED, OPTIONS, mixed, options_of

from .fitting import fitted
from .from_disk import allowed, least_on_disk, may_be_left, most_on_disk, with_disk, with_rate
from .host_experts import with_host_experts
from .plan import PlacedUnit, Plan, UnitCost
from .scenario import Scenario, Workload
from .search.bits_apart import BitsApart
from .search.choose import least_lossy_units, loss_of
from .search.knapsack import Item, front
from .solve import plans_for

#: Most mixes of a unit's matrices that are considered.
_MOST_POINTS = 49
#: How many choices with experts in host memory are checked against their own ledgers.
_TRIES = 6
#: Tolerance for losses that are summed in another order.
_ROUNDING = 1e-9


def planned(scenario: Scenario) -> tuple[Scenario, tuple[Plan, ...], list[list[UnitCost]]]:
    """The scenario with everything open chosen, a plan for each workload, and the costs;
    PlacementError, as from ``exkv.planning.solve.plans_for``, where nothing fits."""
    usual = with_host_experts(_with_weights(scenario))
    costs = usual.costs(usual.peaks())
    with contextlib.suppress(PlacementError):
        return usual, usual.attempt(costs), costs
    asked, scenario = scenario, settled(scenario)
    costs = scenario.costs(scenario.peaks())
    try:
        return scenario, plans_for(scenario, costs), costs
    except PlacementError:
        if (found := beyond_memory(asked)) is None:
            raise
        return found


def beyond_memory(
    scenario: Scenario,
) -> tuple[Scenario, tuple[Plan, ...], list[list[UnitCost]]] | None:
    """Like :func:`planned`, where nothing fits, with some experts left on disk; None if that
    doesn't fit either. As few bytes as possible stay there: cards and memory are filled first."""
    if (most := may_be_left(scenario)) is None:
        return None
    most = with_rate(most)
    usual = settled(most).each(Workload.unplaced)
    allowance = most_on_disk(most)
    for nbytes in dict.fromkeys((least_on_disk(usual), allowance)):
        found = settled(with_disk(most, nbytes))
        costs = found.costs(found.peaks())
        with contextlib.suppress(PlacementError):
            plans = found.attempt(costs)
            if all(plan.fits for plan in plans):
                return found, tuple(allowed(plan, allowance) for plan in plans), costs
    return None


def settled(scenario: Scenario) -> Scenario:
    """The scenario with everything open chosen: how calls run, by ``fitting``, then each model's
    weights, and which experts lie in host memory. Where nothing fits, the weights have the fewest
    bits, so that a refusal says what is missing even then."""
    sized = fitted(scenario, lambda way: in_fewest_bits(way).fits())
    return with_host_experts(_with_weights(sized))


def _with_weights(scenario: Scenario) -> Scenario:
    """The scenario with the weights chosen for each model that leaves them open, one model after
    the other in placement order."""
    for position in scenario.placing:
        if scenario.workloads[position].model.losses() is not None:
            scenario = _with_model_chosen(scenario, position)
    return scenario


def in_fewest_bits(scenario: Scenario) -> Scenario:
    """The scenario with open weights as small as possible."""
    return scenario.each(_smallest)


def _smallest(workload: Workload) -> Workload:
    if (losses := workload.model.losses()) is None or workload.model.choice is not None:
        return workload
    return replace(workload, model=workload.model.chosen(_uniform_choice(losses, OPTIONS[-1])))


def _uniform_choice(losses: Losses, option: str) -> Choice:
    """One option for all units whose losses are known; the others stay as they are stored."""
    kept = {u: option if option in lost else AS_STORED for u, lost in losses.units.items()}
    return Choice.of(losses, kept)


def _with_model_chosen(scenario: Scenario, position: int) -> Scenario:
    whole, mixes = weight_options(scenario.workloads[position], scenario)
    budgets = scenario.budgets_of(position)
    for options in (mixes, whole):
        if options is None:
            continue
        costs = least_lossy_units(options, budgets, scenario.order)
        if scenario.may_have_host_experts(position):
            if found := _with_experts_apart(scenario, position, options, costs):
                return found
        elif costs:
            chosen = as_chosen(scenario, position, costs)
            if options is whole or chosen.places(position):
                return chosen
    costs = [min(each, key=lambda cost: cost.weights) for each in whole]
    return as_chosen(scenario, position, costs)


def weight_options(
    workload: Workload, scenario: Scenario
) -> tuple[list[list[UnitCost]], list[list[UnitCost]] | None]:
    """Each unit's options: all its matrices in one format, and, where their losses are known, all
    mixes of its matrices."""
    losses = workload.model.losses()
    assert losses is not None
    whole, sizes = unit_options(workload, scenario)
    if not losses.matrices:
        return whole, None
    return whole, [
        _mixes(each, losses.matrices[each[0].name], size) if size else each
        for each, size in zip(whole, sizes, strict=True)
    ]


def _with_experts_apart(
    scenario: Scenario,
    position: int,
    options: Sequence[Sequence[UnitCost]],
    costs: Sequence[UnitCost] | None,
) -> Scenario | None:
    """The choice that loses least when experts may lie in host memory, or None where none fits.

    The search uses costs that are approximate where calls are concerned; whether the result fits is
    then checked against its own ledger.

    Args:
        costs: the choice that loses least with whole units on each device; None where none fits.
    """
    search = BitsApart(options, scenario.budgets_of(position), scenario.order)
    search.search(float("inf") if costs is None else loss_of(costs))
    for _ in range(_TRIES):
        best = min((each for each in (search.costs, costs) if each), key=loss_of, default=None)
        if best is None:
            break
        lost = loss_of(best)
        settled = as_chosen(scenario, position, best, 1 - search.least / lost if lost else 0.0)
        if with_host_experts(settled).places(position):
            return settled
        if best is costs:
            costs = None
        else:
            search.shrink()
    return None


def as_chosen(
    scenario: Scenario, position: int, costs: Sequence[UnitCost], gap: float = 0.0
) -> Scenario:
    choice = Choice(
        kept={cost.name: cost.kept or AS_STORED for cost in costs},
        loss={cost.name: cost.loss for cost in costs},
        gap=gap if gap > _ROUNDING else 0.0,
    )
    workloads = list(scenario.workloads)
    model = workloads[position].model.chosen(choice)
    workloads[position] = replace(workloads[position], model=model)
    return replace(scenario, workloads=tuple(workloads))


#: Class of matrices -> option -> bytes of them.
_Sizes = dict[str, dict[str, int]]


def unit_options(
    workload: Workload, scenario: Scenario
) -> tuple[list[list[UnitCost]], list[_Sizes]]:
    """Each unit's ledger lines in every format that it can be kept in as a whole, and, for units
    that may be mixed, the bytes of its matrices by class."""
    losses = workload.model.losses()
    assert losses is not None
    ways, options = [], losses.options
    for option in options:
        there = replace(workload, model=workload.model.chosen(_uniform_choice(losses, option)))
        ways.append((there, there.peaks(scenario.budgets)))
    all_sizes = frozenset().union(*(there.allocated_sizes(peaks) for there, peaks in ways))
    costs = [there.costs(peaks, scenario.home, all_sizes) for there, peaks in ways]
    sizes: list[_Sizes] = []
    for units in zip(*(there.model.units for there, _ in ways), strict=True):
        names = losses.matrices.get(units[0].name, {})
        classes = units[-1].spec.classes_named(names)
        by_option = {o: u.class_bytes(classes) for o, u in zip(options, units, strict=True)}
        sizes.append({name: {o: each[name] for o, each in by_option.items()} for name in names})
    made = [
        [cost for cost in each if (cost.kept or AS_STORED) in losses.units[cost.name]]
        for each in zip(*costs, strict=True)
    ]
    return [list({cost.kept: cost for cost in each}.values()) for each in made], sizes


def _mixes(
    whole: Sequence[UnitCost], losses: Mapping[str, Mapping[str, float]], sizes: _Sizes
) -> list[UnitCost]:
    """A unit's options over all mixes of its matrices.

    Args:
        whole: its ledger lines with all matrices in one format; in the first, as they are stored.
        losses: class of matrices -> option -> loss.
    """
    alike = {cost.kept: cost for cost in whole}
    points, found = front([item_of(sizes[name], losses[name]) for name in sizes], _MOST_POINTS)
    rest = whole[0].weights - sum(each[AS_STORED] for each in sizes.values())
    made = []
    for nbytes, loss, chosen in zip(points.sizes, points.losses, found, strict=True):
        kept = {n: known(losses[n])[option] for n, option in zip(sizes, chosen, strict=True)}
        of = [alike[option] for option in set(kept.values())]
        weights = rest + int(nbytes)
        experts = _expert_bytes(whole[0].experts, sizes, kept)
        unread = _unread(experts, whole[0].chosen) - _unread(whole[0].experts, whole[0].chosen)
        traffic = whole[0].traffic - whole[0].weights + weights - round(unread)
        made.append(
            replace(
                whole[0],
                weights=weights,
                traffic=traffic if whole[0].traffic else 0,
                experts=experts,
                segments=max(cost.segments for cost in of),
                workspace={k: max(cost.workspace[k] for cost in of) for k in of[0].workspace},
                reserved={k: max(cost.reserved[k] for cost in of) for k in of[0].reserved},
                kept=mixed(kept),
                loss=float(loss),
            )
        )
    return made


def _expert_bytes(stored: Sequence[int], sizes: _Sizes, kept: Mapping[str, str]) -> tuple[int, ...]:
    """Bytes of each expert in a mix; the matrices of all experts are alike."""
    found, named = list(stored), {name: parsed(name) for name in kept if is_routed(name)}
    for name, (plain, experts) in named.items():
        if experts is None:
            apart = {e for other, of in named.values() if other == plain for e in of or ()}
            experts = tuple(each for each in range(len(stored)) if each not in apart)
        less = sizes[name][AS_STORED] - sizes[name][kept[name]]
        for expert in experts:
            found[expert] -= less // len(experts)
    return tuple(found)


def _unread(experts: Sequence[int], chosen: Sequence[float]) -> float:
    """Bytes of experts that a decode step is not expected to read."""
    return sum(size * (1 - share) for size, share in zip(experts, chosen, strict=True))


def item_of(sizes: Mapping[str, int], losses: Mapping[str, float]) -> Item:
    """A class of matrices with all options whose losses are known, in their order, as a knapsack
    item."""
    options = known(losses)
    return Item(
        np.array([sizes[option] for option in options]),
        np.array([losses[option] for option in options]),
    )


def weights_loss(scenario: Scenario) -> float:
    """Summed loss over all units of all models."""
    chosen = (workload.model.choice for workload in scenario.workloads)
    return sum(sum(choice.loss.values()) for choice in chosen if choice)


# In words ---------------------------------------------------------------------------------------


def given_up(plan: Plan) -> list[str]:
    """How the weights are kept, one line per device; empty for a plan that has chosen none."""
    lines = []
    for ledger in plan.ledgers:
        units = [u for u in plan.units if u.place == ledger.place and u.kept is not None]
        if units:
            loss = sum(unit.loss for unit in units)
            lines.append(f"{ledger.place}: {', '.join(_ranges(units))}; loss {100 * loss:.2g} %")
    return lines


def _ranges(units: Sequence[PlacedUnit]) -> Iterator[str]:
    """Runs of neighbouring units with the same option, in words."""
    for kept, group in groupby(units, key=lambda unit: _option_range(unit.kept or AS_STORED)):
        names = [unit.name.rpartition(".")[2] for unit in group]
        layers = [name for name in names if name.isdigit()]
        first, last = (layers or [""])[0], (layers or [""])[-1]
        said = {
            "embedding": names[0] == "embed_tokens",
            f"layer {first}": len(layers) == 1,
            f"layers {first}-{last}": len(layers) > 1,
            "head": names[-1] == "lm_head",
        }
        yield f"{' and '.join(words for words, so in said.items() if so)} {kept}"


def _option_range(kept: str) -> str:
    """The option, or for a mix the range of options that its matrices have."""
    options = options_of(kept)
    if isinstance(options, str):
        return kept
    places = [ALL_OPTIONS.index(option) for option in options.values()]
    return f"{ALL_OPTIONS[max(places)]} to {ALL_OPTIONS[min(places)]}"
