"""Gemma (Gemma Team, 2024): a Llama with norms whose factor is 1 + weight, and embeddings scaled by
the square root of their size."""

from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily

from .decoder import Decoder
from .gemma2 import gemma_norm, gemma_scale

FAMILY = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    units=Decoder(norm=gemma_norm, scale=gemma_scale),
    defaults={
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
    reads=("attention_bias",),
    gguf=GGUFFamily(architecture="gemma", norm_offset=1.0),
)
