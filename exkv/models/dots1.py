"""dots.llm1 (rednote, 2025): a Qwen 3 with routing by sigmoid scores with a correction
bias, and shared experts."""

from __future__ import annotations

from dataclasses import replace

from exkv.checkpoint import RoutedExpertsConfig, windows
from exkv.checkpoint.families import Family

from . import glm4_moe
from .decoder import Decoder, rms_norm

FAMILY = Family(
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    units=Decoder(head_norm=rms_norm, mlp_of_layer=glm4_moe.MLP_OF_LAYER, rename=glm4_moe.NAMES),
    defaults={
        "vocab_size": 152064,
        "hidden_size": 4608,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "norm_topk_prob": False,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    windows=lambda values: windows.late_layers(values, windows.sliding_window(values)),
    reads=("attention_bias",),
    specific=RoutedExpertsConfig,
    aliases={"num_local_experts": "n_routed_experts"},
    gguf=replace(glm4_moe.GGUF, architecture="dots1"),
)
