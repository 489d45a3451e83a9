"""Kimi Linear 48B-A3B (Moonshot AI, 2025): three of four layers have Kimi's delta attention, the
others latent attention without positions; experts as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from exkv.checkpoint import LinearAttentionConfig, ModelConfig, has_tensors, windows
from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import part_of, shared
from exkv.checkpoint.value_checks import check_layers, is_int
from exkv.layers import KimiDelta, LatentAttention
from exkv.layers.separate_delta import separate_convolutions

from . import deepseek_v2, glm4_moe, qwen3_next
from .deepseek_v2 import latent_units
from .exaone_moe import LayerTypeExpertsConfig
from .granitemoehybrid import of_heads
from .units import UnitSpec

#: Names in Moonshot's files of the sizes of linear attention, in an object -> our names.
_NESTED = {
    "head_dim": ("linear_key_head_dim", "linear_value_head_dim"),
    "num_heads": ("linear_num_key_heads", "linear_num_value_heads"),
    "short_conv_kernel_size": ("linear_conv_kernel_dim",),
}


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(LayerTypeExpertsConfig, LinearAttentionConfig):
    """Layers of linear attention, and experts."""

    def __post_init__(self) -> None:
        LinearAttentionConfig.__post_init__(self)
        LayerTypeExpertsConfig.__post_init__(self)


def _unpacked(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes from ``linear_attn_config``."""
    stated = values.get("linear_attn_config") or {}
    if not isinstance(stated, dict):
        raise ValueError(f"linear_attn_config must be an object, not {stated!r}")
    there = {key: names for key, names in _NESTED.items() if key in stated}
    return {name: stated[key] for key, names in there.items() for name in names}


def _layers(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """``layer_types``, or the layers that ``linear_attn_config`` names, counted from one; if
    neither is given, every fourth layer except the first has latent attention."""
    check_layers(values["num_hidden_layers"])
    layers, types = values["num_hidden_layers"], values.get("layer_types")
    linear, full = windows.STATES[0], windows.FULL_ATTENTION
    if types is None:
        attend = _attending(values.get("linear_attn_config") or {}, layers)
        types = [full if layer in attend else linear for layer in range(layers)]
    return None, windows.check_layer_types(types, layers, None, windows.STATES[:1])


def _attending(stated: Mapping[str, Any], layers: int) -> list[int]:
    """The layers with latent attention."""
    full, linear = (stated.get(key) for key in ("full_attn_layers", "kda_layers"))
    if full is None or linear is None:
        return list(range(4, layers, 4))
    for each in (full, linear):
        if not isinstance(each, list) or not all(map(is_int, each)):
            raise ValueError(f"linear_attn_config: layers must be lists of integers, not {each!r}")
    if sorted(full + linear) != list(range(1, layers + 1)):
        raise ValueError(
            f"linear_attn_config: full_attn_layers {full!r} and kda_layers {linear!r} must be the "
            f"layers from 1 to num_hidden_layers {layers}, each once"
        )
    return [layer - 1 for layer in full]


def _attention(config: ModelConfig, dtype: torch.dtype, *, layer: int) -> nn.Module:
    if config.state(layer):
        return KimiDelta(config, dtype)
    return LatentAttention(config, dtype, layer=layer)


#: Checkpoint names of the parts of a layer.
_NAMES = {
    "self_attn.norm": "self_attn.o_norm",
    "self_attn.out_proj": "self_attn.o_proj",
    "mlp.correction": "mlp.gate.e_score_correction_bias",
    "mlp.shared_expert.": "mlp.shared_experts.",
}


def _names(config: ModelConfig, layer: int, *, saved: bool) -> dict[str, str]:
    """Names of a layer's MLP: transformers saves a dense one under the experts' name, Moonshot's
    files don't."""
    dense = config.settings(KimiLinearConfig).is_dense(layer)
    return {} if dense and not saved else {"mlp.": "block_sparse_moe."}


def _units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    dense = filter(config.settings(KimiLinearConfig).is_dense, range(config.num_hidden_layers))
    convolutions = partial(separate_convolutions, path="self_attn")
    mlps = (f"model.layers.{layer}.block_sparse_moe.gate_proj." for layer in dense)
    return latent_units(
        config,
        dtype,
        attention=_attention,
        mlp_of_layer=glm4_moe.MLP_OF_LAYER,
        rename=_NAMES,
        rename_of_layer=partial(_names, saved=has_tensors(config, *mlps)),
        beside=convolutions,
        beside_apart=convolutions,
    )


def _without_positions(values: Mapping[str, Any], types: tuple[str, ...]) -> tuple[bool, ...]:
    return (False,) * len(types)


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Both types of layers have equally many heads, as in llama.cpp."""
    heads, size = values.get("num_attention_heads"), values.get("kda_head_dim")
    return {
        **of_heads(values),
        **deepseek_v2.of_gguf(values),
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), size),
        "kda_head_dim": None,
    }


FAMILY = Family(
    architecture="KimiLinearForCausalLM",
    model_type="kimi_linear",
    units=_units,
    defaults={
        "vocab_size": 163840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "linear_num_key_heads": 32,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 1024,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
    },
    derived=_unpacked,
    windows=_layers,
    reads=("attention_bias",),
    refuses={
        **{"mla_use_nope": True, "rope_scaling": None, "use_grouped_topk": True},
        **{"moe_router_activation_func": "sigmoid", "moe_layer_freq": 1},
    },
    specific=KimiLinearConfig,
    rotated=_without_positions,
    latent=True,
    aliases={
        "max_position_embeddings": "model_max_length",
        "linear_key_head_dim": "linear_head_dim",
        "linear_value_head_dim": "linear_head_dim",
        "linear_num_key_heads": "linear_num_heads",
        "linear_num_value_heads": "linear_num_heads",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    },
    states=qwen3_next.states,
    gguf=replace(
        deepseek_v2.GGUF,
        architecture="kimi-linear",
        names={
            **deepseek_v2.GGUF.names,
            **shared("block_sparse_moe.shared_experts"),
            "ffn_gate_inp": "block_sparse_moe.gate",
            "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
            **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
            **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
            "ssm_beta": "self_attn.b_proj",
            "ssm_a": "self_attn.A_log",
            "ssm_dt.bias": "self_attn.dt_bias",
            "ssm_norm": "self_attn.o_norm",
        },
        rows={
            "attn_qkv": {f"self_attn.{x}_proj": part_of(3, i) for i, x in enumerate("qkv")},
        },
        dims={f"ssm_conv1d_{part}": 3 for part in "qkv"},
        restore={".A_log": lambda x: x.neg().log()},
        metadata={
            **deepseek_v2.GGUF.metadata,
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "kda.head_dim": "kda_head_dim",
        },
        marks={},
        assumed={},
        additions=_of_gguf,
    ),
)
