"""GLM 4 (Zhipu AI, 2025: GLM-4-0414): norms before and after attention and MLP, gate and up in one
matrix, and positions that rotate neighbours in half of each head."""

from functools import partial

from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import Attention, FusedGatedMLP

from .decoder import Decoder, SandwichLayer

_NAMES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


FAMILY = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    units=Decoder(
        attention=partial(Attention, out_bias=False),
        mlp=FusedGatedMLP,
        layer=SandwichLayer,
        rename=_NAMES,
    ),
    defaults={
        "vocab_size": 151552,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "pad_token_id": 151329,
        "bos_token_id": None,
        "eos_token_id": [151329, 151336, 151338],
    },
    reads=("attention_bias",),
    partial_rotary_factor=0.5,
    rope_interleaved=True,
    gguf=GGUFFamily(
        architecture="glm4",
        names={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
)
