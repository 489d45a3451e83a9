"""Tokens a second to expect of models that are larger than the cards, with experts in host memory;
``python -m tests.bench larger``.

From configs alone: each is planned as by ``exkv plan MODEL --devices CARDS --cpu MEMORY``, and how
long a decode step takes is what ``exkv.planning.expected_time`` says, by the bandwidths that it
assumes. The table is docs/larger-than-my-cards.md's.

Each case that fits is also planned for simulated cards of these sizes, and each placement loaded
there once, without memory behind it: planned and measured bytes of every device are compared.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from exkv import CACHES, Model, ModelConfig, PlacementError, devices, sim
from exkv.cli.simulate import HollowCheckpoint
from exkv.devices import CPU, rounded
from exkv.loading import LoadReport, load_units
from exkv.loading.report import LINES
from exkv.planning import CacheShape, Plan, Scenario, Workload, make_budgets
from exkv.planning.best import planned
from exkv.planning.expected_time import CARD, HOST, LINK, expected
from exkv.sizes import parse_cards

from .harness import markdown, setting

#: Of each model what its published config.json says of sizes, and what its weights become.
MODELS: dict[str, tuple[dict[str, Any], str | None]] = {
    "Qwen3-30B-A3B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "torch_dtype": "bfloat16",
        },
        "int4",
    ),
    "Qwen3-235B-A22B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "torch_dtype": "bfloat16",
        },
        "int4",
    ),
    "GLM-4.5-Air": (
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "vocab_size": 151552,
            "max_position_embeddings": 131072,
            "torch_dtype": "bfloat16",
        },
        "int4",
    ),
    "gpt-oss-120b": (
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
            "torch_dtype": "bfloat16",
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
        },
        None,
    ),
}
CARDS = ("8G", "12G", "24G", "24G,12G", "24G,24G")
HOSTS = ("32G", "64G", "96G", "128G", "192G")
#: Tokens of the one row's cache.
CONTEXT = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is planned."""

    models: tuple[str, ...] = setting(tuple(MODELS), choices=MODELS)
    dry: bool = setting(True, help="load each case on simulated devices, too")


def model_of(name: str) -> Model:
    config, weights = MODELS[name]
    return Model(ModelConfig.from_dict(config), weights=weights)


def scenario_of(
    model: Model, cards: str | list[str], host: str, *, host_experts: bool = True
) -> Scenario:
    """A full cache of one row beside logits of the last token.

    Args:
        cards: sizes, or names of devices.
    """
    shape = CacheShape.planned(model, CACHES["fp16"], CONTEXT, 1)
    return Scenario(
        workloads=(Workload.of(model, [shape], last_id_only=True),),
        budgets=tuple(make_budgets(cards, cpu=host)),
        host_experts=host_experts,
    )


def rate_of(scenario: Scenario) -> float | None:
    """Tokens a second; None where it doesn't fit."""
    try:
        scenario, (plan,), (costs,) = planned(scenario)
    except PlacementError:
        return None
    return expected(plan, costs, scenario.budgets, 1).tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model on cards beside host memory.

    Attributes:
        rate: tokens a second, None where it doesn't fit.
        seconds: of CPU, that planning took.
        experts: of these, in host memory.
        differing: bytes of all lines of all devices by which planned and measured ones differ; None
            where nothing was loaded.
    """

    model: str
    cards: str
    host: str
    rate: float | None
    seconds: float
    experts: int = 0
    differing: int | None = None


def cases_of(name: str, cards: str, dry: bool) -> list[Case]:
    """Every size of host memory, in a process that has no simulated devices yet."""
    sizes = parse_cards(cards)
    if dry:
        sim.enable(sizes, dry=True)
        devices.zeros_on = partial(_zeros_on, zeros_on=devices.zeros_on)
    found, stand_in = [], model_of(name)
    known: dict[tuple, int] = {}
    for host in HOSTS:
        model = model_of(name)
        began = time.process_time()
        rate = rate_of(scenario_of(model, cards, host))
        case = Case(
            model=name, cards=cards, host=host, rate=rate, seconds=time.process_time() - began
        )
        if dry and rate is not None:
            simulated = [f"sim:{card}" for card in range(len(sizes))]
            devices.memory = partial(_memory, parse_cards(host)[0], memory=devices.memory)
            case = _loaded(case, stand_in, simulated, known)
        found.append(case)
    return found


def _zeros_on(
    device: torch.device,
    shapes: Mapping[str, torch.Tensor],
    zeros_on: Callable[[torch.device, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Zeros of a load, those in host memory with the same memory behind all of one size: a model is
    larger than the machine that tries it."""
    if device != CPU:
        return zeros_on(device, shapes)
    return {
        name: _zeros(like.nbytes).view(like.dtype).view(like.shape) for name, like in shapes.items()
    }


def _memory(
    host: int, device: torch.device, memory: Callable[[torch.device], devices.Memory]
) -> devices.Memory:
    """What a device has, this machine's memory aside."""
    if device == CPU:
        return devices.Memory(capacity=host, in_use=0, in_use_by_others=0)
    return memory(device)


@cache
def _zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def _loaded(case: Case, model: Model, cards: list[str], known: dict[tuple, int]) -> Case:
    """Carried out on simulated devices.

    Args:
        known: what differs by places of units and experts.
    """
    scenario, (plan,), _ = planned(scenario_of(model, cards, case.host))
    where = tuple((unit.place, unit.host_experts) for unit in plan.units)
    if where not in known:
        known[where] = _differing(scenario, plan, model)
    apart = sum(len(unit.host_experts) for unit in plan.units)
    return replace(case, experts=apart, differing=known[where])


def _differing(scenario: Scenario, plan: Plan, model: Model) -> int:
    """Bytes by which a load differs from its plan."""
    shape = scenario.workloads[0].promise.caches[0]
    tokens = shape.kind(model, shape.max_seq_len, shape.batch_size)
    real = replace(scenario, workloads=(Workload.under(plan, model, [tokens]),))
    reports: list[LoadReport] = []
    steps = load_units(
        model,
        real,
        plan=plan,
        checkpoint=HollowCheckpoint(model),
        lazy=False,
        on_loaded=lambda plan, report: reports.append(report),
    )
    for _ in steps:
        pass
    differing = sum(
        abs(getattr(row.ledger, line) - row.measured.get(line, 0))
        for row in reports[-1].devices
        for line in LINES
        if row.device != CPU
    )
    differing += abs(plan_on_host(plan) - held_on_host(model))
    model.unload()
    model.forget_cache(tokens)
    return differing


def plan_on_host(plan: Plan) -> int:
    """Bytes of weights that are to lie in host memory."""
    whole = sum(unit.weights for unit in plan.units if unit.device == CPU)
    return whole + sum(unit.host_weights for unit in plan.units)


def held_on_host(model: Model) -> int:
    """Bytes of weights that do, each tensor's rounded as plans count them."""
    modules = (unit.module for unit in model.units if unit.module is not None)
    tensors = (tensor for module in modules for tensor in module.parameters())
    return sum(rounded(tensor.nbytes) for tensor in tensors if tensor.device == CPU)


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """Every model on all cards, with every size of host memory."""
    cases: list[Case] = []
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for name in settings.models:
            for cards in CARDS:
                cases += pool.apply(cases_of, (name, cards, settings.dry))
                found = list(map(asdict, cases))
                yield {"bandwidths": [CARD, HOST, LINK], "cases": found}


def report(result: dict[str, Any]) -> list[str]:
    card, host, link = (f"{each / 1e9:,.0f} GB/s" for each in result["bandwidths"])
    return [
        f"Predicted tokens a second of one row behind {CONTEXT:,} tokens, by bandwidths that are "
        f"assumed: cards {card}, host memory {host}, link {link}.",
        table(result["cases"]),
        "Each of them:",
        cases_table(result["cases"]),
    ]


def table(cases: list[dict[str, Any]]) -> str:
    rates: dict[tuple[str, str], dict[str, float | None]] = {}
    for case in cases:
        rates.setdefault((case["model"], case["cards"]), {})[case["host"]] = case["rate"]
    rows = [row(name, cards, by_host) for (name, cards), by_host in rates.items()]
    return markdown(["model", "cards", *HOSTS], rows)


def cases_table(cases: list[dict[str, Any]]) -> str:
    headings = ["model", "cards", "host memory", "tokens/s", "plan, s of CPU"]
    headings += ["experts on the host", "bytes that differ"]
    rows = [
        [
            *(case["model"], case["cards"], case["host"]),
            "" if case["rate"] is None else f"{case['rate']:.3g}",
            f"{case['seconds']:.2f}",
            "" if case["differing"] is None else f"{case['experts']:,}",
            "" if case["differing"] is None else f"{case['differing']:,}",
        ]
        for case in cases
    ]
    return markdown(headings, rows)


def wrong(result: dict[str, Any]) -> list[str]:
    """Cases whose bytes differ."""
    return [
        f"{case['model']} on {case['cards']} beside {case['host']}: {case['differing']:,} bytes"
        for case in result["cases"]
        if case["differing"]
    ]


def row(name: str, cards: str, by_host: dict[str, float | None]) -> list[str]:
    weights = MODELS[name][1] or "mxfp4"
    rates = (by_host[host] for host in HOSTS)
    return [f"{name}, {weights}", cards, *("" if rate is None else f"{rate:.3g}" for rate in rates)]


QUICK = {"models": ("Qwen3-30B-A3B",)}
