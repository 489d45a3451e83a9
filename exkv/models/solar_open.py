"""Solar Open (Upstage, 2025): a Llama with routing by sigmoid scores with a correction bias,
and a shared expert."""

from functools import partial

from exkv.checkpoint import RoutedExpertsConfig
from exkv.checkpoint.families import Family
from exkv.layers import Attention

from . import glm4_moe
from .decoder import Decoder

FAMILY = Family(
    architecture="SolarOpenForCausalLM",
    model_type="solar_open",
    units=Decoder(
        attention=partial(Attention, out_bias=False),
        mlp_of_layer=glm4_moe.MLP_OF_LAYER,
        rename=glm4_moe.NAMES,
    ),
    defaults={
        "vocab_size": 196608,
        "hidden_size": 4096,
        "intermediate_size": 1280,
        "moe_intermediate_size": 1280,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    reads=("attention_bias",),
    specific=RoutedExpertsConfig,
    rope_theta=1e6,
    partial_rotary_factor=1.0,
    aliases={
        "num_local_experts": "n_routed_experts",
        "intermediate_size": "moe_intermediate_size",
    },
)
