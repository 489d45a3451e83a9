"""FlexOlmo (Ai2, 2025): an OLMo 2 with experts in place of the MLP."""

from dataclasses import replace

from exkv.checkpoint.families import ExpertsConfig
from exkv.layers import Experts, WideNormAttention

from . import olmo2, qwen2_moe
from .decoder import Decoder, PostNormLayer, rms_norm

FAMILY = replace(
    olmo2.FAMILY,
    architecture="FlexOlmoForCausalLM",
    model_type="flex_olmo",
    units=Decoder(
        attention=WideNormAttention,
        mlp=Experts,
        layer=PostNormLayer,
        head_norm=rms_norm,
        rename=qwen2_moe.NAMES,
    ),
    defaults=olmo2.FAMILY.defaults
    | {
        "vocab_size": 100352,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "num_local_experts": 7,
        "num_experts_per_tok": 5,
        "norm_topk_prob": False,
        "pad_token_id": 100277,
        "eos_token_id": 100257,
    },
    specific=ExpertsConfig,
    rope_theta=5e5,
    aliases={"num_local_experts": "num_experts"},
    gguf=None,
)
