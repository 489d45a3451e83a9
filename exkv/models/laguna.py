"""Laguna (Poolside, 2026): windows in the layers that the config names, which have their own rotary
positions and number of query heads; a gate for each head; experts by corrected sigmoids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from exkv.batch import Batch
from exkv.checkpoint import ModelConfig, windows
from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import EXPERTS, GGUFFamily, shared
from exkv.checkpoint.value_checks import is_int, is_number
from exkv.layers import MLP, Attention, GatedMLP, Linear, SharedExperts
from exkv.layers.attention import Attend, describe_separate
from exkv.layers.descriptions import (
    AttentionBlock,
    ExpertsBlock,
    NotDescribed,
    describe,
    describes,
)
from exkv.layers.mlp import describe_shared
from exkv.ops.activations import SOFTPLUS, activated
from exkv.ops.experts import Routing

from . import qwen2_moe
from .decoder import Decoder, rms_norm
from .exaone_moe import LayerTypeExpertsConfig

_PER_HEAD, _PER_ELEMENT = (True, "per-head"), ("per-element",)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsByLayerConfig(LayerTypeExpertsConfig):
    """Number of query heads by layer, None for as many in each."""

    num_attention_heads_per_layer: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        LayerTypeExpertsConfig.__post_init__(self)
        heads = self.num_attention_heads_per_layer
        if heads is None:
            return
        if not isinstance(heads, list | tuple) or not all(is_int(x) and x > 0 for x in heads):
            raise ValueError(
                f"num_attention_heads_per_layer must be a list of sizes, not {heads!r}"
            )
        object.__setattr__(self, "num_attention_heads_per_layer", tuple(heads))

    @property
    def shared_inner(self) -> int | None:
        return self.shared_expert_intermediate_size

    def query_heads(self, layer: int, *, slides: bool) -> int | None:
        heads = self.num_attention_heads_per_layer
        if heads is not None and layer >= len(heads):
            raise ValueError(
                f"num_attention_heads_per_layer names {len(heads)} layers, and there is layer "
                f"{layer}"
            )
        return None if heads is None else heads[layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class LagunaConfig(HeadsByLayerConfig):
    """What the gates apply to: heads ("per-head", true) or their features ("per-element"); and c of
    router logits c * tanh(logits / c), 0 for none."""

    gating: str | bool = "per-head"
    moe_router_logit_softcapping: float = 0.0

    def __post_init__(self) -> None:
        HeadsByLayerConfig.__post_init__(self)
        cap = self.moe_router_logit_softcapping
        if not is_number(cap) or cap < 0:
            raise ValueError(
                f"moe_router_logit_softcapping must be a number, 0 or more, not {cap!r}"
            )
        if self.gating not in _PER_HEAD + _PER_ELEMENT:
            raise ValueError(
                f"gating {self.gating!r} is unknown; exkv knows true, 'per-head' and 'per-element'"
            )


class HeadGatedAttention(Attention):
    """Attention whose outputs are multiplied by gates from its input, one per head or one per
    feature of a head."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        layer: int,
        per_element: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(config, dtype, layer=layer, **options)
        gates = self.q_size if per_element else self.q_size // self.head_dim
        self.g_proj = Linear(config.hidden_size, gates, bias=False, dtype=dtype)

    def forward(self, x: Tensor, batch: Batch, cache: Attend) -> Tensor:
        q, k, v = self.heads(x, batch)
        attended = self.attend(q, k, v, batch, cache)
        gates = self.gate(self.g_proj(x)).unflatten(-1, (attended.shape[2], -1))
        return self.o_proj((attended * gates).flatten(2))

    def gate(self, x: Tensor) -> Tensor:
        """The factor, from the output of :attr:`g_proj`, which it may overwrite."""
        torch.ops.exkv.sigmoid_(x)
        return x


class SoftplusGatedAttention(HeadGatedAttention):
    """Head-gated attention with softplus."""

    def gate(self, x: Tensor) -> Tensor:
        return activated(x, SOFTPLUS)


@describes(HeadGatedAttention)
def _head_gated(attention: HeadGatedAttention) -> AttentionBlock:
    return replace(describe_separate(attention), gates=describe(attention.g_proj))


@describes(SoftplusGatedAttention)
def _softplus_gated(attention: SoftplusGatedAttention) -> AttentionBlock:
    return replace(_head_gated(attention), soft_plus=True)


class _Experts(SharedExperts):
    """Experts chosen by sigmoids of bounded logits."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype, sigmoid=True, corrected=True)
        self.cap = config.settings(LagunaConfig).moe_router_logit_softcapping

    def route(self, x: Tensor) -> Routing:
        logits = self.gate(x).float()
        if self.cap > 0:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return self.router.route(logits, self.correction)


@describes(_Experts)
def _described(mlp: _Experts) -> ExpertsBlock:
    if mlp.cap > 0:
        raise NotDescribed("experts by bounded logits")
    return describe_shared(mlp)


def _attention(config: ModelConfig, dtype: torch.dtype, **options: Any) -> Attention:
    per_element = config.settings(LagunaConfig).gating in _PER_ELEMENT
    return SoftplusGatedAttention(config, dtype, per_element=per_element, **options)


def _mlp(config: ModelConfig, dtype: torch.dtype, layer: int) -> MLP:
    dense = config.settings(LagunaConfig).is_dense(layer)
    return GatedMLP(config, dtype) if dense else _Experts(config, dtype)


def as_stated(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """The layers that ``layer_types`` names."""
    return windows.by_layer(values, windows.sliding_window(values), lambda layer: False)


def heads_of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Number of query heads by layer, where they differ."""
    heads = values["num_attention_heads"]
    if not isinstance(heads, list) or not heads:
        return {}
    return {"num_attention_heads": heads[0], "num_attention_heads_per_layer": heads}


def positions_of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions by type of layer."""
    rotated, head = values.get("rotated_swa"), values.get("head_dim")
    full = {"rope_theta": values.get("rope_theta"), **values.get("rope_scaling", {})}
    full["partial_rotary_factor"] = values.get("partial_rotary_factor")
    sliding = {"rope_theta": values.get("rope_local_base_freq")}
    if is_int(rotated) and is_int(head) and head:
        sliding["partial_rotary_factor"] = rotated / head
    return {
        "rope_parameters": {windows.FULL_ATTENTION: full, windows.SLIDING_ATTENTION: sliding},
        **dict.fromkeys(("rope_theta", "rope_scaling", "partial_rotary_factor", "rotated_swa")),
        "rope_local_base_freq": None,
    }


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Every fourth layer, starting with the first, attends to everything; the gates' size gives
    their kind."""
    found = {**heads_of_gguf(values), **positions_of_gguf(values), "gate_rows": None}
    heads = found.get("num_attention_heads", values["num_attention_heads"])
    rows, layers = values.get("gate_rows"), values["num_hidden_layers"]
    if is_int(rows) and is_int(heads):
        found["gating"] = "per-head" if rows == heads else "per-element"
    if values.get("sliding_window") and values.get("layer_types") is None and is_int(layers):
        kinds = {True: windows.SLIDING_ATTENTION, False: windows.FULL_ATTENTION}
        found["layer_types"] = [kinds[layer % 4 != 0] for layer in range(layers)]
    return found


FAMILY = Family(
    architecture="LagunaForCausalLM",
    model_type="laguna",
    units=Decoder(
        attention=_attention,
        mlp_of_layer=_mlp,
        head_norm=rms_norm,
        rename={
            **qwen2_moe.NAMES,
            "mlp.correction": "mlp.experts.e_score_correction_bias",
        },
    ),
    defaults={
        "vocab_size": 100352,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "n_shared_experts": 0,
        "first_k_dense_replace": 1,
        "gating": True,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    windows=as_stated,
    reads=("attention_bias",),
    refuses={"moe_apply_router_weight_on_input": False},
    specific=LagunaConfig,
    ignores=frozenset(
        ("n_group", "topk_group", "moe_norm_min", "decoder_sparse_step", "mlp_only_layers")
    ),
    rope_theta=5e5,
    rope_local_base_freq=1e4,
    rope_parameters={
        windows.FULL_ATTENTION: {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
        windows.SLIDING_ATTENTION: {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
    partial_rotary_factor=1.0,
    aliases={
        "num_local_experts": "num_experts",
        "routed_scaling_factor": "moe_routed_scaling_factor",
    },
    gguf=GGUFFamily(
        architecture="laguna",
        names={
            **EXPERTS,
            **shared("mlp.shared_expert"),
            "exp_probs_b.bias": "mlp.experts.e_score_correction_bias",
            "attn_gate": "self_attn.g_proj",
        },
        metadata={
            "rope.freq_base_swa": "rope_local_base_freq",
            "rope.dimension_count_swa": "rotated_swa",
        },
        sizes={"blk.0.attn_gate.weight": "gate_rows"},
        assumed={
            "attention.sliding_window_pattern": "every fourth layer attends to everything, and the "
            "others have the window, if there is one"
        },
        additions=_of_gguf,
    ),
)
