"""Qwen 3.5 (Qwen, 2026), text only: a Qwen3-Next with an MLP in place of the experts, alone or as
part of a vision-language model, whose three axes of rotary positions coincide for text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from exkv.checkpoint import LinearAttentionConfig, ModelConfig, facts_of
from exkv.checkpoint.families import BESIDE_IMAGES
from exkv.checkpoint.gguf.names import Rows
from exkv.layers import SplitGatedDelta

from . import qwen3_next
from .decoder import Decoder
from .qwen3_next import NAMES, head_sizes, linear_or_attention, norm
from .units import UnitSpec


def _heads_of_values(*, behind_keys: bool = False) -> Rows:
    """Value heads, which files order by value head within a key head first, and by key head second;
    queries and keys may precede them."""

    def rows(own: Callable[[str], Any], count: int) -> torch.Tensor:
        size, groups, heads = head_sizes(own)
        before = 2 * size * groups * behind_keys
        if count <= before or (count - before) % (groups * heads):
            raise ValueError(f"they are not {before} and those of {groups * heads} heads")
        values = torch.arange(before, count).view(heads, groups, -1).transpose(0, 1).reshape(-1)
        return torch.cat((torch.arange(before), values))

    return rows


GGUF = replace(
    qwen3_next.GGUF,
    architecture="qwen35",
    rows={
        "attn_qkv": {"linear_attn.in_proj_qkv": _heads_of_values(behind_keys=True)},
        "attn_gate": {"linear_attn.in_proj_z": _heads_of_values()},
        "ssm_beta": {"linear_attn.in_proj_b": _heads_of_values()},
        "ssm_alpha": {"linear_attn.in_proj_a": _heads_of_values()},
        "ssm_conv1d": {"linear_attn.conv1d": _heads_of_values(behind_keys=True)},
        "ssm_dt.bias": {"linear_attn.dt_bias": _heads_of_values()},
        "ssm_a": {"linear_attn.A_log": _heads_of_values()},
    },
)


def decoder(config: ModelConfig) -> Decoder:
    """The parts of the layers, without experts."""
    linear = partial(SplitGatedDelta, transposed=facts_of(config).apart)
    return Decoder(
        attention=partial(linear_or_attention, linear=linear),
        norm=norm,
        head_norm=norm,
        rename=NAMES,
    )


def _units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    return decoder(config)(config, dtype)


TEXT = replace(
    qwen3_next.FAMILY,
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    units=_units,
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
    gguf=GGUF,
)
FAMILY = replace(
    TEXT,
    architecture="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    text_config="text_config",
    gguf=None,
)
