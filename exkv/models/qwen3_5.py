"""Qwen 3.5 (Qwen, 2026), text only: a Qwen3-Next with an MLP in place of the experts, alone or
beside a model of images, whose three axes of rotary positions are one in a text."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from exkv.checkpoint import LinearAttentionConfig
from exkv.checkpoint.families import BESIDE_IMAGES
from exkv.layers import SplitGatedDelta

from . import qwen3_next
from .decoder import Decoder
from .qwen3_next import NAMES, linear_or_attention, norm

DECODER = Decoder(
    attention=partial(linear_or_attention, linear=SplitGatedDelta),
    norm=norm,
    head_norm=norm,
    rename=NAMES,
)

TEXT = replace(
    qwen3_next.FAMILY,
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    units=DECODER,
    defaults=qwen3_next.FAMILY.defaults
    | {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    specific=LinearAttentionConfig,
    aliases={},
    rope_aliases={"mrope": "default"},
    names=BESIDE_IMAGES,
)
FAMILY = replace(
    TEXT,
    architecture="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    text_config="text_config",
)
