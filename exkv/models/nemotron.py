"""Nemotron 4 and Minitron (NVIDIA, 2024): LayerNorms whose factor is 1 + weight, a squared-ReLU MLP
without a gate, and positions that rotate half of each head."""

from functools import partial

from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import PlainMLP

from .decoder import Decoder, layer_norm

FAMILY = Family(
    architecture="NemotronForCausalLM",
    model_type="nemotron",
    units=Decoder(mlp=PlainMLP, norm=partial(layer_norm, offset=True)),
    defaults={
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 48,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "relu2",
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    reads=("attention_bias", "mlp_bias"),
    partial_rotary_factor=0.5,
    aliases={"rms_norm_eps": "norm_eps"},
    gguf=GGUFFamily(architecture="nemotron", norm_offset=1.0),
)
