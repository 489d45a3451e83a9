"""Tokens a second to expect of models that are larger than the cards, with experts in host memory;
``python -m tests.bench larger``.

From configs alone: each is planned as by ``exkv plan MODEL --devices CARDS --cpu MEMORY``, and how
long a decode step takes is what ``exkv.planning.expected_time`` says, by the bandwidths that it
assumes. The table is docs/larger-than-my-cards.md's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from exkv import CACHES, Model, ModelConfig, PlacementError
from exkv.planning import CacheShape, Scenario, Workload, make_budgets
from exkv.planning.best import planned
from exkv.planning.expected_time import CARD, HOST, LINK, expected

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
HOSTS = ("32G", "64G", "96G", "192G")
#: Tokens of the one row's cache.
CONTEXT = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is planned."""

    models: tuple[str, ...] = setting(tuple(MODELS), choices=MODELS)


def model_of(name: str) -> Model:
    config, weights = MODELS[name]
    return Model(ModelConfig.from_dict(config), weights=weights)


def scenario_of(model: Model, cards: str, host: str, *, host_experts: bool = True) -> Scenario:
    """A full cache of one row beside logits of the last token."""
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


def measure(settings: Settings) -> dict[str, Any]:
    """Every model on all cards, with every size of host memory."""
    rates = {}
    for name in settings.models:
        model = model_of(name)
        rates[name] = {
            cards: {host: rate_of(scenario_of(model, cards, host)) for host in HOSTS}
            for cards in CARDS
        }
    return {"bandwidths": [CARD, HOST, LINK], "rates": rates}


def report(result: dict[str, Any]) -> list[str]:
    card, host, link = (f"{each / 1e9:,.0f} GB/s" for each in result["bandwidths"])
    return [
        f"Predicted tokens a second of one row behind {CONTEXT:,} tokens, by bandwidths that are "
        f"assumed: cards {card}, host memory {host}, link {link}.",
        table(result["rates"]),
    ]


def table(rates: dict[str, dict[str, dict[str, float | None]]]) -> str:
    headings = ["model", "cards", *HOSTS]
    rows = [
        row(name, cards, by_host) for name, of in rates.items() for cards, by_host in of.items()
    ]
    return markdown(headings, rows)


def row(name: str, cards: str, by_host: dict[str, float | None]) -> list[str]:
    weights = MODELS[name][1] or "mxfp4"
    rates = (by_host[host] for host in HOSTS)
    return [f"{name}, {weights}", cards, *("" if rate is None else f"{rate:.3g}" for rate in rates)]


QUICK = {"models": ("Qwen3-30B-A3B",)}
