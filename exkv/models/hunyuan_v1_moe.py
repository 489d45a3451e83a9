"""Hunyuan A13B (Tencent, 2025): a Hunyuan with experts, and a shared one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from exkv.checkpoint import ExpertsConfig
from exkv.checkpoint.gguf.names import EXPERTS, GGUFFamily, shared
from exkv.layers import SharedExperts

from . import hunyuan_v1_dense, qwen2_moe
from .decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedExpertsConfig(ExpertsConfig):
    """Numbers of experts may be stated per layer, all equal."""

    def __post_init__(self) -> None:
        for key in ("num_local_experts", "num_experts_per_tok"):
            stated = getattr(self, key)
            if isinstance(stated, list) and stated and stated.count(stated[0]) == len(stated):
                object.__setattr__(self, key, stated[0])
        ExpertsConfig.__post_init__(self)


FAMILY = replace(
    hunyuan_v1_dense.FAMILY,
    architecture="HunYuanMoEV1ForCausalLM",
    model_type="hunyuan_v1_moe",
    units=Decoder(
        attention=hunyuan_v1_dense.RotatedNormAttention,
        mlp=SharedExperts,
        rename={
            "mlp.gate": "mlp.gate.wg",
            "mlp.shared_expert.": "mlp.shared_mlp.",
            **qwen2_moe.NAMES,
        },
    ),
    defaults=hunyuan_v1_dense.FAMILY.defaults | {"num_local_experts": 1, "num_experts_per_tok": 1},
    specific=ListedExpertsConfig,
    ignores=frozenset(
        (
            *("moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob"),
            *("decoder_sparse_step", "mlp_only_layers"),
        )
    ),
    aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
    gguf=GGUFFamily(
        architecture="hunyuan-moe",
        names={
            **hunyuan_v1_dense.GGUF_NORMS,
            **EXPERTS,
            **shared("mlp.shared_mlp"),
            "ffn_gate_inp": "mlp.gate.wg",
        },
    ),
)
