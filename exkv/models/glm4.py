"""GLM 4 (Zhipu AI, 2025: GLM-4-0414): norms before and after attention and MLP, gate and up in one
matrix, and positions that rotate adjacent pairs in half of each head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from exkv.checkpoint.families import Family, beside_images
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.checkpoint.value_checks import is_int
from exkv.layers import Attention, FusedGatedMLP

from .decoder import Decoder, SandwichLayer

_NAMES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}

DECODER = Decoder(
    attention=partial(Attention, out_bias=False),
    mlp=FusedGatedMLP,
    layer=SandwichLayer,
    rename=_NAMES,
)


def _pairs(own: Callable[[str], Any], count: int, *, heads: str) -> torch.Tensor | None:
    """Rows of queries or keys of a text model beside a vision model (GLM-4.1V), whose file has the
    rotated ones in half-split order, since llama.cpp rotates no pairs with three axes."""
    sections = own("rope.dimension_sections")
    if not isinstance(sections, list) or not any(sections):
        return None
    number, rotated = own(f"attention.{heads}"), own("rope.dimension_count")
    good = is_int(number) and is_int(rotated) and number > 0 and count % number == 0
    if not good or rotated % 2 or not 0 < rotated <= count // number:
        raise ValueError(
            f"they are not {number!r} heads, of attention.{heads}, of which {rotated!r} features "
            "are rotated, by rope.dimension_count"
        )
    rows = torch.arange(count).view(number, -1)
    pairs = rows[:, :rotated].unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
    return torch.cat((pairs, rows[:, rotated:]), 1).flatten()


FAMILY = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    units=DECODER,
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
        rows={
            "attn_q": {"self_attn.q_proj": partial(_pairs, heads="head_count")},
            "attn_k": {"self_attn.k_proj": partial(_pairs, heads="head_count_kv")},
        },
    ),
)
#: The text model of a vision-language model (GLM-4.1V). Its rotary positions have three axes, which
#: coincide for text.
WITH_IMAGES = beside_images(
    FAMILY,
    "Glm4vForConditionalGeneration",
    "glm4v",
    units=replace(DECODER, attention=partial(Attention, qkv_bias=True, out_bias=False)),
    defaults={
        "vocab_size": 151552,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    reads=(),
    partial_rotary_factor=1.0,
    rope_aliases={"mrope": "default"},
)
