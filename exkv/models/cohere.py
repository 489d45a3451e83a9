"""Command R (Cohere, 2024): attention and MLP beside each other behind one norm without a bias,
positions that rotate neighbours, and logits times a factor."""

from __future__ import annotations

from functools import partial

from exkv.checkpoint.families import Family

from .decoder import Decoder, ParallelLayer, layer_norm

FAMILY = Family(
    architecture="CohereForCausalLM",
    model_type="cohere",
    units=Decoder(layer=ParallelLayer, norm=partial(layer_norm, bias=False)),
    defaults={
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 5,
        "eos_token_id": 255001,
    },
    reads=("attention_bias",),
    rope_theta=5e5,
    rope_interleaved=True,
    aliases={"rms_norm_eps": "layer_norm_eps"},
    multipliers={"logits": "logit_scale"},
)
