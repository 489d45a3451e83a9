"""Phi-3.5-MoE (Microsoft, 2024): LayerNorms, biases, longrope, and experts that are chosen one by
one, each weighted among those that are nearly as good (SparseMixer).

Beyond the trained length, longrope's long factors apply, as in Microsoft's own code; transformers
keeps the short ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exkv.checkpoint import ModelConfig, windows
from exkv.checkpoint.families import ExpertsConfig, Family
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.checkpoint.value_checks import set_floats
from exkv.layers import Experts

from .decoder import Decoder, Head, MakeNorm, layer_norm

#: ``short_mscale`` and ``long_mscale`` of Phi-3.5-MoE.
_MSCALE = 1.243163121016122


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMixerConfig(ExpertsConfig):
    """``router_jitter_noise`` is the routing's tolerance; the head may have a bias."""

    router_jitter_noise: float = 0.01
    lm_head_bias: bool = False

    def __post_init__(self) -> None:
        ExpertsConfig.__post_init__(self)
        set_floats(self, ("router_jitter_noise",))


def _experts(config: ModelConfig, dtype: torch.dtype) -> Experts:
    tolerance = config.settings(SparseMixerConfig).router_jitter_noise
    return Experts(config, dtype, tolerance=tolerance)


def _head(config: ModelConfig, dtype: torch.dtype, norm: MakeNorm) -> Head:
    bias = config.settings(SparseMixerConfig).lm_head_bias
    return Head(config, dtype, norm=norm, bias=bias)


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Phi-3.5-MoE's own factor of cosines and sines, in place of the one that the converter
    computes as for Phi-3."""
    scaling = values.get("rope_scaling", {})
    if scaling.get("rope_type") != "longrope":
        return {}
    return {"rope_scaling": {**scaling, "attention_factor": _MSCALE}}


FAMILY = Family(
    architecture="PhimoeForCausalLM",
    model_type="phimoe",
    units=Decoder(mlp=_experts, norm=layer_norm, head=_head, rename={"mlp.": "block_sparse_moe."}),
    defaults={
        "vocab_size": 32064,
        "hidden_size": 4096,
        "intermediate_size": 6400,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 16,
    },
    windows=windows.everywhere,
    reads=("attention_bias",),
    refuses={"num_experts_per_tok": 2},
    specific=SparseMixerConfig,
    ignores=frozenset(
        (
            *("moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob"),
            *("decoder_sparse_step", "mlp_only_layers"),
        )
    ),
    rope_theta=1e6,
    rope_keys={"short_mscale": "attention_factor", "long_mscale": "attention_factor"},
    gguf=GGUFFamily(
        architecture="phimoe",
        names={
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
        additions=_of_gguf,
    ),
)
