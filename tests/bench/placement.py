"""exkv's placement beside transformers' ``device_map``; ``python -m tests.bench placement``.

From configs alone: no weight is read, no device touched, nothing timed. Both place the same bf16
model in the same bytes a card, and one ledger judges both: weights, the cache at full length, the
workspace of exkv's largest call at that length, and logits, by
``exkv.planning.ledgers.plan_where``.

transformers gets what ``from_pretrained(device_map=..., max_memory=...)`` works with: its own
``get_balanced_memory`` and ``infer_auto_device_map`` on a model on meta, ``max_memory`` being the
limit of exkv's budget of each card (its size less the margin), and 1 TiB on the host. With no
``max_memory`` it would take all that is free on the cards (90 % on a single one, and of the host).
It counts weights alone, and keeps the largest layer's bytes free on the first card.

Two things are decided in transformers' favour: a layer that it puts on the CPU counts as kept
there, its cache too, although accelerate runs it on the first card; and its calls count with
exkv's workspace, prefill in chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from exkv import CACHES, Model, ModelConfig, Plan
from exkv.planning import Budget, CacheShape, Scenario, UnitCost, Workload, make_budgets
from exkv.planning.ledgers import plan_where
from exkv.planning.plan import Place
from exkv.planning.solve import plans_for

from .harness import markdown, setting
from .shapes import Shape


def _llama(hidden: int, intermediate: int, **counts: int) -> Shape:
    return Shape(vocab=32000, hidden=hidden, intermediate=intermediate, head_dim=128, **counts)


#: Sizes from the models' published configs: Llama 2 7B, 13B, 70B, and Code Llama 34B.
MODELS = {
    "7B": _llama(4096, 11008, layers=32, heads=32, kv_heads=32),
    "13B": _llama(5120, 13824, layers=40, heads=40, kv_heads=40),
    "34B": _llama(8192, 22016, layers=48, heads=64, kv_heads=8),
    "70B": _llama(8192, 28672, layers=80, heads=64, kv_heads=8),
}
#: What one may own, in the order in which it is given to both.
CARDS = {
    "8x80G": "80G," * 7 + "80G",
    "24+12": "24G,12G",
    "12+24": "12G,24G",
    "24+8": "24G,8G",
    "3x24+11": "24G,24G,24G,11G",
}
#: Kind and tokens; one row.
CONTEXTS = {"4k": ("fp16", 4096), "32k": ("fp16", 32768), "32k 8-bit": ("8bit", 32768)}
MODES = ("auto", "sequential")
OBJECTIVES = ("pack", "balance")
HOST = "1T"
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is compared."""

    models: tuple[str, ...] = setting(tuple(MODELS), choices=MODELS)
    cards: tuple[str, ...] = setting(tuple(CARDS), choices=CARDS)


# One model on one set of cards ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, built by both libraries, and the cards; the host is last in ``budgets``."""

    model: Model
    peer: Any
    budgets: tuple[Budget, ...]

    @classmethod
    def of(cls, shape: Shape, cards: str) -> Case:
        config = shape.config(torch.bfloat16) | {"max_position_embeddings": 32768}
        model = Model(ModelConfig.from_dict(config))
        return cls(model=model, peer=_on_meta(config), budgets=tuple(make_budgets(cards, cpu=HOST)))

    def scenario(self, context: str, objective: str = "pack") -> Scenario:
        kind, max_seq_len = CONTEXTS[context]
        cache = CacheShape.planned(self.model, CACHES[kind], max_seq_len, batch_size=1)
        workload = Workload.of(self.model, [cache])
        return Scenario(workloads=(workload,), budgets=self.budgets, objective=objective)

    def costs(self, context: str) -> list[UnitCost]:
        (workload,) = self.scenario(context).workloads
        return workload.costs(workload.peaks(self.budgets))

    def judge(self, costs: Sequence[UnitCost], devices: Sequence[torch.device]) -> Plan:
        """The ledgers of units on these devices, whether they fit or not."""
        return plan_where(costs, self.budgets, [*map(Place, devices)], "pack", "listed")


def _on_meta(config: Mapping[str, Any]) -> Any:
    """transformers' model on meta."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(LlamaConfig(**config), dtype=torch.bfloat16)


def device_map(case: Case, mode: str) -> dict[str, int | str]:
    """The map of ``from_pretrained(device_map=mode)``: module name -> card's index or "cpu"."""
    from transformers.integrations import accelerate

    # It says of every card that it isn't here.
    logging.getLogger("accelerate.utils.modeling").setLevel(logging.ERROR)
    whole = {"no_split_module_classes": case.peer._no_split_modules}
    memory = {map_key(budget.device): budget.limit for budget in case.budgets}
    if mode == "auto":
        memory = accelerate.get_balanced_memory(case.peer, max_memory=memory, **whole)
    return accelerate.infer_auto_device_map(case.peer, max_memory=memory, **whole)


def map_key(device: torch.device) -> int | str:
    """A device as transformers' maps name it."""
    return "cpu" if device.type == "cpu" else device.index


def where(case: Case, found: Mapping[str, int | str]) -> list[torch.device]:
    """The device of each of exkv's units, which have the names of transformers' modules; the
    last norm, some KiB, counts with the head."""
    devices = {map_key(budget.device): budget.device for budget in case.budgets}
    return [devices[nearest(unit.name, found)] for unit in case.model.units]


def nearest(name: str, found: Mapping[str, int | str]) -> int | str:
    """A map's entry for a module, or for the closest module around it."""
    parts = name.split(".")
    around = (".".join(parts[:end]) for end in range(len(parts), -1, -1))
    return next(found[module] for module in around if module in found)


# Figures ----------------------------------------------------------------------------------------


def figures(plan: Plan) -> dict[str, Any]:
    """A plan's figures; bytes are summed over the cards."""
    cards = [ledger for ledger in plan.ledgers if ledger.device.type != "cpu"]
    used = [ledger.headroom for ledger in cards if ledger.units]
    on_cpu = [unit.name for unit in plan.units if unit.device.type == "cpu"]
    return {
        "layers_on_cpu": sum(".layers." in name for name in on_cpu),
        "units": {str(ledger.device): ledger.units for ledger in plan.ledgers},
        "headroom": {str(ledger.device): ledger.headroom for ledger in cards},
        "smallest_headroom": min(used),
        "idle": sum(max(ledger.headroom, 0) for ledger in cards),
        "verdict": "overflows" if min(used) < 0 else "fits with CPU" if on_cpu else "fits",
    }


def theirs(case: Case, mode: str) -> dict[str, Any]:
    """transformers' map, which ignores the cache, and its figures with each cache."""
    devices = where(case, device_map(case, mode))
    plans = {context: case.judge(case.costs(context), devices) for context in CONTEXTS}
    return {"contexts": {context: figures(plan) for context, plan in plans.items()}}


def ours(case: Case, objective: str) -> dict[str, Any]:
    """exkv's plan for each cache; ``fits_on_cards`` plans without the host."""
    contexts = {}
    for context in CONTEXTS:
        scenario = case.scenario(context, objective)
        (plan,) = plans_for(scenario)
        alone = replace(scenario, budgets=case.budgets[:-1])
        contexts[context] = figures(plan) | {"fits_on_cards": alone.fits()}
    return {"contexts": contexts}


def compare(name: str, cards: str) -> dict[str, Any]:
    """All figures of one model on one set of cards."""
    case = Case.of(MODELS[name], CARDS[cards])
    return {
        "model": name,
        "cards": cards,
        "layers": MODELS[name].layers,
        "weight_bytes": sum(cost.weights for cost in case.costs("4k")),
        "limits": {str(budget.device): budget.limit for budget in case.budgets},
        "transformers": {mode: theirs(case, mode) for mode in MODES},
        "exkv": {objective: ours(case, objective) for objective in OBJECTIVES},
    }


def measure(settings: Settings) -> dict[str, Any]:
    """Every model on all cards."""
    import accelerate

    cases = [compare(name, cards) for name in settings.models for cards in settings.cards]
    return {"accelerate": accelerate.__version__, "cases": cases}


def report(result: dict[str, Any]) -> list[str]:
    """transformers' "auto" beside exkv's "balance"."""
    return [
        f"accelerate {result['accelerate']}. bf16 weights, an fp16 cache of one row, the host as "
        "overflow, and for both the same bytes a card: its size less 768 MiB.",
        'auto: the split of transformers\' `device_map="auto"`; exkv: its plan under `balance`, '
        "made for the cache. On CPU: decoder layers, exkv's with a 4k cache. Headroom in GiB: the "
        "least, with a 4k cache, over the cards that hold something; in brackets what lies idle on "
        "all cards while layers are on the CPU. 4k / 32k: with a cache of that many tokens, "
        "`overflows` means that a card lacks memory beside that split, `fits with CPU` that none "
        "does, with part of the model on the host. A layer that auto puts there counts as run "
        "there; accelerate runs it on the first card, which then holds more than is counted here.",
        _table(result["cases"]),
    ]


def _table(cases: Sequence[dict[str, Any]]) -> str:
    headings = ["model on cards"]
    for engine in ("auto", "exkv"):
        headings += [f"{engine}: {what}" for what in ("on CPU", "headroom", "4k / 32k")]
    return markdown(headings, [_row(case) for case in cases])


def _row(case: dict[str, Any]) -> list[str]:
    cells = [f"{case['model']} on {case['cards']}"]
    for split in (case["transformers"]["auto"], case["exkv"]["balance"]):
        short, long = split["contexts"]["4k"], split["contexts"]["32k"]
        moved, room = short["layers_on_cpu"], f"{short['smallest_headroom'] / _GIB:.1f}"
        cells += [
            f"{moved} of {case['layers']}" if moved else "0",
            f"{room} ({short['idle'] / _GIB:.1f})" if moved else room,
            f"{short['verdict']} / {long['verdict']}",
        ]
    return cells


QUICK = {"models": ("7B",), "cards": ("24+8",)}
