"""Qwen 2 VL and 2.5 VL (Qwen, 2024 and 2025), text only: the Qwen 2 of a vision-language model. Its
rotary positions have three axes, which coincide for text."""

from dataclasses import replace

from exkv.checkpoint.families import beside_images
from exkv.checkpoint.gguf.names import GGUFFamily

from . import qwen2

QWEN2_5 = beside_images(
    qwen2.FAMILY,
    "Qwen2_5_VLForConditionalGeneration",
    "qwen2_5_vl",
    defaults=qwen2.FAMILY.defaults
    | {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_window_layers": 80,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    rope_theta=1e6,
    rope_aliases={"mrope": "default"},
    gguf=GGUFFamily(architecture="qwen2vl"),
)
QWEN2 = replace(
    QWEN2_5,
    architecture="Qwen2VLForConditionalGeneration",
    model_type="qwen2_vl",
    gguf=None,  # llama.cpp has one name for both
)
