"""Qwen 3 VL (Qwen, 2025), text only: the Qwen 3 of a vision-language model. Its rotary positions
have three axes, which coincide for text."""

from exkv.checkpoint import windows
from exkv.checkpoint.families import beside_images
from exkv.checkpoint.gguf.names import GGUFFamily

from . import qwen3

FAMILY = beside_images(
    qwen3.FAMILY,
    "Qwen3VLForConditionalGeneration",
    "qwen3_vl",
    defaults=qwen3.FAMILY.defaults | {"max_position_embeddings": 128000},
    windows=windows.nowhere,
    rope_theta=5e5,
    rope_aliases={"mrope": "default"},
    gguf=GGUFFamily(architecture="qwen3vl"),
)
