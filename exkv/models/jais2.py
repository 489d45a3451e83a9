"""Jais 2 (Inception, 2025): a Llama with LayerNorms, biases, and a squared-ReLU MLP without a
gate."""

from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import PlainMLP

from .decoder import Decoder, layer_norm

FAMILY = Family(
    architecture="Jais2ForCausalLM",
    model_type="jais2",
    units=Decoder(mlp=PlainMLP, norm=layer_norm),
    defaults={
        "vocab_size": 150272,
        "hidden_size": 3328,
        "intermediate_size": 26624,
        "num_attention_heads": 26,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "relu2",
        "attention_bias": True,
        "mlp_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 150024,
    },
    reads=("attention_bias", "mlp_bias"),
    aliases={"rms_norm_eps": "layer_norm_eps"},
    gguf=GGUFFamily(architecture="jais2"),
)
