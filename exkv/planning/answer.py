"""The result of a question about memory, in words and as values: what ``exkv plan`` prints, and
what a server reports about a model before loading it.

``scenario`` is the question, ``solve`` and ``best`` search.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from exkv.cache import BY_LOSS, CACHES
from exkv.errors import PlacementError
from exkv.layers.linear import Matrix
from exkv.layers.mlp import mixtures
from exkv.layers.split_experts import HostRates, rows_to_stream
from exkv.models import Unit
from exkv.sizes import human

from .best import beyond_memory, given_up, settled
from .best_cache import best_kind
from .expected_time import Expected, expected, where_experts_are
from .fitting import even_with
from .from_disk import in_memory, why_not
from .plan import Plan, UnitCost
from .scenario import Scenario
from .solve import extra_memory, nearest_changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A scenario and the outcome of planning it.

    Attributes:
        plans: one per model, in placement order; attempts where it does not fit.
        sentence: the answer in words.
        found: what was solved for, by name.
        remedies: changes that would make it fit; each is planned when the iterator reaches it.
        costs: of each plan's units, where host memory is on offer beside cards.
    """

    scenario: Scenario
    fits: bool
    plans: tuple[Plan, ...]
    sentence: str
    found: dict[str, Any] = dataclasses.field(default_factory=dict)
    remedies: Iterable[str] = ()
    costs: tuple[Sequence[UnitCost], ...] = ()


def fixed(scenario: Scenario) -> Answer:
    """Whether the scenario fits as it is."""
    asked, scenario = scenario, settled(scenario)
    costs = scenario.costs(scenario.peaks())
    try:
        plans = scenario.attempt(costs)
    except PlacementError as error:
        if (found := beyond_memory(asked)) is None:
            return _refusal(scenario, error)
        scenario, plans, costs = found
    least = min((plan.smallest_headroom for plan in plans), default=0)
    cards = {place for plan in plans for place in plan.places}
    hosts = {place.host for place in cards}
    where = _plural(len(cards), "device")
    if hosts != {""}:
        where += f" of {_plural(len(hosts), 'host')}"
    gap = max((plan.gap for plan in plans), default=0.0)
    near = next((f", {plan.near_best}" for plan in plans if plan.gap == gap > 0), "")
    return Answer(
        scenario=scenario,
        fits=True,
        plans=plans,
        sentence=f"It fits on {where}{near}; the smallest headroom is {human(least)}.",
        found={"devices": len(cards), "smallest_headroom": least, "gap": gap},
        costs=tuple(costs) if scenario.beside_host or any(p.from_disk for p in plans) else (),
    )


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def solved(scenario: Scenario, name: str, value: int, limit: int | None) -> Answer:
    """The answer for the largest value of a size that was found to fit; 0 where none does."""
    if value == 0:
        answer = fixed(scenario.resized(**{name: 1}))
        where = " into memory" if answer.fits else ""
        words = f"Not even {name}=1 fits{where}. {answer.sentence}"
        return replace(answer, sentence=words, found={name: 0})
    answer = fixed(scenario.resized(**{name: value}))
    why = "what the model was made for" if value == limit else "one more does not fit"
    words = f"The largest {name} is {value:,} ({why}). {answer.sentence}"
    return replace(answer, sentence=words, found={name: value, **answer.found})


def best_cache(scenario: Scenario) -> Answer:
    """The answer with the least lossy cache that fits, and the weights where they are open."""
    best = best_kind(scenario)
    if best is None:
        answer = fixed(scenario.as_kind(CACHES[BY_LOSS[-1]]))
        where = " into memory" if answer.fits else ""
        return replace(answer, sentence=f"No kind of cache fits{where}. {answer.sentence}")
    answer = fixed(best.scenario)
    words = f"The least lossy cache that fits is {best}. {answer.sentence}"
    return replace(answer, sentence=words, found={**best.values(), **answer.found})


def _refusal(scenario: Scenario, error: PlacementError) -> Answer:
    """What is missing, where, and how much more would be enough."""
    placed = scenario.that_fit()
    placed[scenario.placing[len(placed)]] = _attempted_plan(error)
    position, lacking = extra_memory(scenario)
    place = scenario.budgets[position].place
    return Answer(
        scenario=scenario,
        fits=False,
        plans=tuple(placed[position] for position in sorted(placed)),
        sentence=f"No room for {error.unit}{even_with(scenario)}: {human(lacking)} "
        f"({lacking:,} bytes) more on {place} would be enough{why_not(scenario)}.",
        found={"extra_memory": lacking, "extra_memory_on": str(place)},
        remedies=nearest_changes(scenario),
    )


def _attempted_plan(error: PlacementError) -> Plan:
    assert error.plan is not None, "a refusal carries the attempted plan"
    return error.plan


def weights_chosen(answer: Answer) -> list[str]:
    """The weight formats chosen, one line per device, and the distance from the optimum."""
    lines = [line for plan in answer.plans for line in given_up(plan)]
    choices = (workload.model.choice for workload in answer.scenario.workloads)
    gap = max((choice.gap for choice in choices if choice), default=0.0)
    return [*lines, f"other bits could lose at most {100 * gap:.2g} % less"] if gap else lines


def expectations(answer: Answer) -> list[Expected]:
    """Expected speed of each plan, where host memory takes what the cards have no room for."""
    pairs = zip(answer.plans, answer.costs, answer.scenario.workloads, strict=False)
    budgets = answer.scenario.budgets
    return [expected(plan, costs, budgets, workload.rows) for plan, costs, workload in pairs]


def disk_sentences(answer: Answer) -> list[str]:
    """What is read from disk: one sentence for each plan that reads any."""
    return [each.from_disk for each in expectations(answer) if each.from_disk]


def experts_placed(answer: Answer) -> list[str]:
    """Where experts are, one line per device with their layers; empty unless some are in host
    memory while their layers are elsewhere."""
    pairs = zip(answer.plans, answer.costs, strict=False)
    apart = (each for each in pairs if each[0].host_experts)
    return [line for plan, costs in apart for line in where_experts_are(plan, costs)]


def prompts_sent(answer: Answer) -> list[str]:
    """The number of rows from which an expert in host memory is sent to a card, one line per
    plan."""
    pairs = zip(answer.plans, answer.scenario.workloads, strict=False)
    rows = [
        _rows_to_stream(next(unit for unit in workload.model.units if unit.host_experts))
        for plan, workload in pairs
        if plan.host_experts
    ]
    return [
        f"For prompts, an expert on the host that {_plural(count, 'token')} or more have chosen is "
        "sent to its card."
        for count in rows
    ]


def _rows_to_stream(unit: Unit) -> int:
    """The row count by the rates that a model uses by default."""
    with torch.device("meta"):
        mixture = next(mixtures(unit.spec.build()))
    expert = mixture.expert(0)
    assert expert is not None
    sizes = [part.size for part in expert.modules() if isinstance(part, Matrix)]
    weights = sum(outputs * inputs for outputs, inputs in sizes)
    return rows_to_stream(max(unit.expert_bytes), weights, HostRates())


def gains(answer: Answer) -> Iterator[str]:
    """Further changes that would speed up a model with experts in host memory, each one planned:
    one more card, or fewer bits."""
    if not answer.fits or not any(plan.host_experts for plan in answer.plans):
        return
    for words, scenario in in_memory(answer.scenario).larger():
        with contextlib.suppress(PlacementError):
            found = fixed(scenario)
            if found.fits:
                yield f"{words}: {expectations(found)[0]} to expect"


def host_cache_bytes(scenario: Scenario) -> int:
    """Bytes that caches in host memory take, wherever their layers are placed."""
    return sum(workload.host_cache_bytes() for workload in scenario.workloads)


def as_values(answer: Answer, names: Sequence[str], seconds: float) -> dict[str, Any]:
    """The answer as JSON values: the plans by these names, and what would fit if it doesn't."""
    plans = [json.loads(plan.to_json()) for plan in answer.plans]
    return {
        "fits": answer.fits,
        "answer": answer.sentence,
        "found": answer.found,
        "weights": weights_chosen(answer),
        "would_fit": list(answer.remedies),
        "experts": experts_placed(answer),
        "expected": [dataclasses.asdict(each) for each in expectations(answer)],
        "from_disk": disk_sentences(answer),
        "prompts": prompts_sent(answer),
        "gains": list(gains(answer)),
        "host_cache_bytes": host_cache_bytes(answer.scenario),
        "plans": dict(zip(names, plans, strict=False)),
        "seconds": round(seconds, 3),
        "torch": torch.__version__,
    }
