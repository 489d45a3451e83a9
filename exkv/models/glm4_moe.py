"""GLM-4.5 to 4.7 and Air (Zhipu AI, 2025): routing by sigmoid scores with a correction
bias, and a shared expert; dense layers first; rotary positions in half of each head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from exkv.checkpoint import ModelConfig, RoutedExpertsConfig
from exkv.checkpoint.families import Family, MTPNames, beside_images
from exkv.checkpoint.gguf.names import EXPERTS, GGUFFamily, shared
from exkv.layers import Attention, mixture_or_mlp, routed_experts

from . import qwen2_moe
from .decoder import Decoder, rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNormExpertsConfig(RoutedExpertsConfig):
    """Whether heads of queries and keys are normed (GLM-4.5, not Air)."""

    use_qk_norm: bool = False


def _attention(config: ModelConfig, dtype: torch.dtype, *, layer: int) -> Attention:
    normed = config.settings(HeadNormExpertsConfig).use_qk_norm
    norm = rms_norm(config, dtype) if normed else None
    return Attention(config, dtype, layer=layer, out_bias=False, head_norm=norm)


#: A layer's experts, or its MLP.
MLP_OF_LAYER = partial(
    mixture_or_mlp, experts=partial(routed_experts, sigmoid=True, corrected=True, exact=True)
)
#: Checkpoints name an expert's matrices like those of an MLP.
NAMES = {
    **qwen2_moe.NAMES,
    "mlp.correction": "mlp.gate.e_score_correction_bias",
    "mlp.shared_expert.": "mlp.shared_experts.",
}

GGUF = GGUFFamily(
    architecture="glm4moe",
    names={
        **EXPERTS,
        **shared("mlp.shared_experts"),
        "exp_probs_b.bias": NAMES["mlp.correction"],
        "post_attention_norm": "post_attention_layernorm",
        "nextn.enorm": "enorm",
        "nextn.hnorm": "hnorm",
        "nextn.eh_proj": "eh_proj",
        "nextn.shared_head_norm": "shared_head.norm",
    },
    additions=lambda values: {
        "first_k_dense_replace": values.get("first_k_dense_replace", 0),
    },
)

FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    units=Decoder(attention=_attention, mlp_of_layer=MLP_OF_LAYER, rename=NAMES),
    defaults={
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1408,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    reads=("attention_bias",),
    specific=HeadNormExpertsConfig,
    partial_rotary_factor=0.5,
    aliases={"num_local_experts": "n_routed_experts"},
    gguf=GGUF,
    mtp=MTPNames(),
)
#: The text model of a vision-language model (GLM-4.5V and 4.6V). Its rotary positions have three
#: axes, which coincide for text.
WITH_IMAGES = beside_images(
    FAMILY,
    "Glm4vMoeForConditionalGeneration",
    "glm4v_moe",
    defaults=FAMILY.defaults
    | {"vocab_size": 151424, "max_position_embeddings": 65536, "attention_bias": True},
    rope_aliases={"mrope": "default"},
    mtp=None,
)
