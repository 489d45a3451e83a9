"""Qwen3-Next (Qwen, 2025): three of four layers have linear attention by the gated delta rule, the
others attention with a gate; experts and a shared one in place of the MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from exkv.batch import Batch
from exkv.checkpoint import (
    ExpertsConfig,
    LinearAttentionConfig,
    ModelConfig,
    StateTensor,
    facts_of,
    windows,
)
from exkv.checkpoint.families import Family, MTPNames
from exkv.checkpoint.gguf.names import EXPERTS, GGUFFamily, shared
from exkv.checkpoint.value_checks import is_int
from exkv.layers import (
    Attention,
    FusedGatedDelta,
    Linear,
    SharedExperts,
    SplitGatedDelta,
    mixture_or_mlp,
)
from exkv.layers.attention import Attend, describe_separate
from exkv.layers.descriptions import describes

from . import qwen2_moe
from .decoder import Decoder, rms_norm
from .units import UnitSpec


@dataclass(frozen=True, kw_only=True)
class LinearExpertsConfig(ExpertsConfig, LinearAttentionConfig):
    """Layers of linear attention, and experts."""

    def __post_init__(self) -> None:
        LinearAttentionConfig.__post_init__(self)
        ExpertsConfig.__post_init__(self)


class QueryGatedAttention(Attention):
    """Attention whose outputs are multiplied by the sigmoids of gates, which come from the same
    matrix as the queries: after those of each head."""

    def make_projections(self, hidden: int, bias: bool, dtype: torch.dtype) -> None:
        super().make_projections(hidden, bias, dtype)
        self.q_proj = Linear(hidden, 2 * self.q_size, bias=bias, dtype=dtype)

    def forward(self, x: Tensor, batch: Batch, cache: Attend) -> Tensor:
        projected = list(self.project(x))
        q, gate = projected[0].unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        projected[0] = q.flatten(2)
        q, k, v = self.rotated(projected, batch)
        attended = self.attend(q, k, v, batch, cache)
        gate = gate.contiguous()
        torch.ops.exkv.sigmoid_(gate)
        return self.o_proj(gate.mul_(attended).flatten(2))


describes(QueryGatedAttention)(lambda attention: replace(describe_separate(attention), gated=True))


def linear_or_attention(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    layer: int,
    linear: Callable[..., nn.Module],
    **options: Any,
) -> nn.Module:
    """``linear`` attention, or full attention in a layer that has keys and values."""
    if config.state(layer):
        return linear(config, dtype)
    return QueryGatedAttention(config, dtype, layer=layer, **options)


def states(config: ModelConfig) -> tuple[StateTensor, ...]:
    """The state of a layer of linear attention."""
    return config.settings(LinearAttentionConfig).state


#: Checkpoint names of the parts of linear attention.
NAMES = {
    f"self_attn.{name}": f"linear_attn.{name}"
    for name in ("in_proj", "conv1d", "A_log", "dt_bias", "norm", "out_proj")
}
norm = partial(rms_norm, offset=True)


def _units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """Interleave each head's rows of the projections, which GGUF files have separately."""
    linear = SplitGatedDelta if facts_of(config).apart else FusedGatedDelta
    return Decoder(
        attention=partial(linear_or_attention, linear=linear),
        mlp_of_layer=partial(mixture_or_mlp, experts=partial(SharedExperts, gated=True)),
        norm=norm,
        head_norm=norm,
        rename=NAMES | qwen2_moe.NAMES,
    )(config, dtype)


#: Metadata of the linear attention.
_HEADS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}


def head_sizes(own: Callable[[str], Any]) -> tuple[int, int, int]:
    """Features of a key, number of key heads, and value heads per key head."""
    keys = ("ssm.state_size", "ssm.group_count", "ssm.time_step_rank")
    size, heads, values = (own(key) for key in keys)
    for key, value in zip(keys, (size, heads, values), strict=True):
        if not is_int(value) or value < 1:
            raise ValueError(f"{key} is {value!r}; it must be a positive integer")
    if values % heads:
        raise ValueError(f"ssm.time_step_rank {values} is not a multiple of group_count {heads}")
    return size, heads, values // heads


def _of_heads(index: int, *, gates: bool) -> Callable[[Callable[[str], Any], int], torch.Tensor]:
    """The index-th part of what each key head has side by side, for all of them: query, key, its
    values and gates, or beta and the decay of values."""

    def rows(own: Callable[[str], Any], count: int) -> torch.Tensor:
        size, heads, values = head_sizes(own)
        each, rest = divmod(count, heads)
        sizes = [size, size, *[(each - 2 * size) // 2] * 2] if gates else [values, values]
        if rest or min(sizes) < 1 or sum(sizes) != each:
            raise ValueError(f"they are not those of {heads} heads of {sum(sizes)}")
        return torch.arange(count).view(heads, each).split(sizes, 1)[index].reshape(-1)

    return rows


def _mixed(own: Callable[[str], Any], count: int) -> torch.Tensor:
    """Queries, keys and values from :func:`_of_heads`, those of all heads together."""
    return torch.cat([_of_heads(index, gates=True)(own, count) for index in range(3)])


def of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of heads from their totals; and which layers are recurrent, without any after them."""
    inner, heads = values.get("ssm_inner_size"), values.get("linear_num_value_heads")
    recurrent, layers = values.get("recurrent_layers"), values.get("num_hidden_layers")
    linear, *_ = windows.STATES
    types = None
    if isinstance(recurrent, list) and is_int(layers):
        types = [linear if each else windows.FULL_ATTENTION for each in recurrent[:layers]]
    if is_int(inner) and is_int(heads) and heads:
        inner //= heads
    return {
        "linear_value_head_dim": inner,
        "layer_types": types,
        **dict.fromkeys(("ssm_inner_size", "recurrent_layers")),
    }


#: Files of the first weeks have the projections as checkpoints do (``ssm_in``).
GGUF = GGUFFamily(
    architecture="qwen3next",
    names={
        **EXPERTS,
        **shared("mlp.shared_expert"),
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_a": "linear_attn.A_log",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    rows={
        "ssm_in": {
            "linear_attn.in_proj_qkv": _mixed,
            "linear_attn.in_proj_z": _of_heads(3, gates=True),
        },
        "ssm_ba": {
            "linear_attn.in_proj_b": _of_heads(0, gates=False),
            "linear_attn.in_proj_a": _of_heads(1, gates=False),
        },
    },
    dims={"ssm_conv1d": 3, "ffn_gate_inp_shexp": 2},
    norm_offset=1.0,
    plain_norms=("linear_attn.norm.weight",),
    restore={"linear_attn.A_log": lambda x: x.neg().log()},
    metadata={
        **_HEADS,
        "ssm.inner_size": "ssm_inner_size",
        "attention.recurrent_layers": "recurrent_layers",
        "full_attention_interval": "full_attention_interval",
    },
    additions=of_gguf,
)

FAMILY = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    units=_units,
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "full_attention_interval": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_local_experts": 512,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    windows=windows.with_states,
    reads=("attention_bias",),
    refuses={"attn_output_gate": True, "mamba_ssm_dtype": "float32"},
    partial_rotary_factor=0.25,
    specific=LinearExpertsConfig,
    aliases={"num_local_experts": "num_experts"},
    states=states,
    mtp=MTPNames(
        layer="mtp.layers.0",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        norm="mtp.norm",
    ),
    gguf=GGUF,
)
