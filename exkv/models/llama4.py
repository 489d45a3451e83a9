"""Llama 4 Scout and Maverick (Meta, 2025), text only: layers that attend within a token's chunk of
positions, with rotary positions, and every fourth layer that attends to everything, without them
and with queries scaled by position; experts whose weights multiply their inputs, beside a shared
one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from exkv.batch import Batch
from exkv.checkpoint import ExpertsConfig, ModelConfig, QueryScaling, windows
from exkv.checkpoint.families import Family, beside_images
from exkv.checkpoint.gguf.names import GGUFFamily, shared
from exkv.checkpoint.value_checks import check_layers, check_size, is_int
from exkv.layers import MLP, Attention, GatedMLP, ScaledQueryAttention, SharedExperts
from exkv.layers.attention import describe_separate
from exkv.layers.descriptions import AttentionBlock, ExpertsBlock, Norm, NotDescribed, describes
from exkv.layers.mlp import describe_shared
from exkv.layers.rope import QUERIES
from exkv.layers.shared_keys import rms
from exkv.layers.split_experts import Meanwhile
from exkv.ops.experts import Routing

from . import qwen2_moe, smollm3
from .decoder import Decoder
from .qwen3_vl_moe import stacked_experts

CHUNKED, FULL = "chunked_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Settings(ExpertsConfig):
    """Chunks of ``attention_chunk_size`` positions in the layers that ``layer_types`` names, or,
    without it, in all that have rotary positions; None for none. ``use_qk_norm`` divides heads of
    queries and keys by their root mean square there. Layers not in ``moe_layers``, if that is
    stated, have an MLP of ``intermediate_size_mlp`` instead of experts."""

    norm_topk_prob: bool = False
    intermediate_size_mlp: int = 16384
    attention_chunk_size: int | None = 8192
    layer_types: tuple[str, ...] | None = None
    moe_layers: tuple[int, ...] | None = None
    use_qk_norm: bool = True

    def __post_init__(self) -> None:
        ExpertsConfig.__post_init__(self)
        check_size("intermediate_size_mlp", self.intermediate_size_mlp)
        if self.attention_chunk_size is not None:
            check_size("attention_chunk_size", self.attention_chunk_size)
        for key, known in (("layer_types", (CHUNKED, FULL)), ("moe_layers", None)):
            object.__setattr__(self, key, _list(key, getattr(self, key), known))
        if CHUNKED in (self.layer_types or ()) and self.attention_chunk_size is None:
            raise ValueError(f"layer_types has {CHUNKED!r}, and there is no attention_chunk_size")

    def is_dense(self, layer: int) -> bool:
        if self.moe_layers is None:
            return ExpertsConfig.is_dense(self, layer)
        return layer not in self.moe_layers

    def kind_of_layer(self, layer: int) -> Hashable:
        return self.is_dense(layer), self.layer_types and self.layer_types[layer]

    def chunk(self, layer: int, *, rotated: bool) -> int:
        """Positions of a chunk in this layer; 0 for none."""
        chunked = self.layer_types[layer] == CHUNKED if self.layer_types else rotated
        return self.attention_chunk_size or 0 if chunked else 0


def _list(key: str, values: Any, known: tuple[str, ...] | None) -> tuple[Any, ...] | None:
    """A list of these words, or of layers, as a tuple."""
    if values is None:
        return None
    good = is_int if known is None else known.__contains__
    if not isinstance(values, list | tuple) or not all(map(good, values)):
        what = "layers' numbers" if known is None else " and ".join(known)
        raise ValueError(f"{key} must be a list of {what}, not {values!r}")
    return tuple(values)


class _Attention(Attention):
    """Attention to a token's own chunk of positions, or to all, with heads of queries and keys
    divided by their root mean square after rotation."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, layer: int) -> None:
        super().__init__(config, dtype, layer=layer)
        settings, rotated = config.settings(Llama4Settings), config.rotates(layer)
        self.params = replace(self.params, chunk=settings.chunk(layer, rotated=rotated))
        self.eps = config.rms_norm_eps if settings.use_qk_norm and rotated else None
        self.dtype = dtype

    def heads(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x, batch)
        return (q, k, v) if self.eps is None else (rms(q, self.eps), rms(k, self.eps), v)


class _ScaledAttention(_Attention, ScaledQueryAttention):
    """Likewise, with queries scaled by position."""


@describes(_Attention)
def _described(attention: _Attention) -> AttentionBlock:
    block = describe_separate(attention)
    if attention.eps is None:
        return block
    nothing = torch.zeros(attention.head_dim, dtype=attention.dtype)
    norm = Norm(weight=nothing, eps=attention.eps, offset=True)
    return replace(block, query_norm=norm, key_norm=norm, normed_rotated=True)


@describes(_ScaledAttention)
def _described_scaled(attention: _ScaledAttention) -> AttentionBlock:
    return replace(_described(attention), query_factors=QUERIES)


def _attention(config: ModelConfig, dtype: torch.dtype, *, layer: int) -> Attention:
    scaled = config.query_scaling is not None and not config.rotates(layer)
    return (_ScaledAttention if scaled else _Attention)(config, dtype, layer=layer)


class WeightedInputExperts(SharedExperts):
    """Experts whose weights multiply their inputs, not their outputs."""

    def run(self, x: Tensor, routing: Routing, meanwhile: Meanwhile | None = None) -> Tensor:
        ones, total = torch.ones_like(routing.weights[:, :1]), torch.zeros_like(x)
        chosen, order = routing.chosen.sort(-1)  # summed in the order of experts, as all are
        weights = routing.weights.gather(-1, order)
        for choice in range(chosen.shape[1]):
            one = slice(choice, choice + 1)
            inputs = x * weights[:, one].to(x.dtype)
            alone = Routing(chosen=chosen[:, one].contiguous(), weights=ones)
            total += self.sum(inputs, alone, meanwhile)
        return total


@describes(WeightedInputExperts)
def _weighted(mlp: WeightedInputExperts) -> ExpertsBlock:
    if mlp.on_host:
        raise NotDescribed("experts of weighted inputs in host memory")
    return replace(describe_shared(mlp), weighs_inputs=True)


def _mlp(config: ModelConfig, dtype: torch.dtype, layer: int) -> MLP:
    settings = config.settings(Llama4Settings)
    if settings.is_dense(layer):
        return GatedMLP(config, dtype, settings.intermediate_size_mlp)
    return WeightedInputExperts(config, dtype, sigmoid=True)


def _windows(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """No window; ``layer_types`` state chunks, one for each layer."""
    check_layers(values["num_hidden_layers"])
    layers, types = values["num_hidden_layers"], values.get("layer_types")
    if isinstance(types, list | tuple) and len(types) != layers:
        raise ValueError(
            f"layer_types names {len(types)} layers, and num_hidden_layers is {layers}"
        )
    return None, ()


def _query_scaling(values: Mapping[str, Any]) -> QueryScaling | None:
    """A step every ``floor_scale`` positions; some files have a number in place of true."""
    tuned = values["attn_temperature_tuning"]
    if not is_int(tuned) and not isinstance(tuned, bool):
        raise ValueError(f"attn_temperature_tuning must be true or false, not {tuned!r}")
    if not tuned:
        return None
    return QueryScaling(growth=values["attn_scale"], length=values["floor_scale"], offset=1)


def _rotated(values: Mapping[str, Any], types: tuple[str, ...]) -> tuple[bool, ...]:
    """As in SmolLM 3; an empty list states nothing."""
    stated = {"no_rope_layers": values.get("no_rope_layers") or None}
    named = ("num_hidden_layers", "no_rope_layer_interval")
    return smollm3.rotated({**{key: values[key] for key in named}, **stated}, types)


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """What files leave out, as llama.cpp has it: Maverick, with 128 experts, doesn't divide heads
    by their root mean square; a window of 0 stands for rotary positions in all layers and no
    chunks."""
    found = {"use_qk_norm": values.get("num_local_experts") != 128}
    layers: Any = values.get("num_hidden_layers")
    if values.get("sliding_window", 0) is not None or not is_int(layers):
        return found
    return {
        **found,
        "attention_chunk_size": None,
        "attn_temperature_tuning": False,
        "no_rope_layers": [1] * layers,
    }


GGUF = GGUFFamily(
    architecture="llama4",
    names={
        **shared("feed_forward.shared_expert"),
        **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        **{
            f"ffn_{part}_exps": f"feed_forward.experts.{{}}.{part}_proj"
            for part in ("gate", "up", "down")
        },
        "ffn_gate_inp": "feed_forward.router",
    },
    metadata={
        "feed_forward_length": "intermediate_size_mlp",
        "expert_feed_forward_length": "intermediate_size",
    },
    additions=_of_gguf,
)

FAMILY = Family(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    units=Decoder(
        attention=_attention,
        mlp_of_layer=_mlp,
        rename={
            **qwen2_moe.NAMES,
            **{"mlp.gate": "mlp.router", "mlp.router_proj": "mlp.gate_proj", "mlp": "feed_forward"},
        },
        made=partial(stacked_experts, inputs_first=True, path="feed_forward.experts"),
    ),
    defaults={
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
    windows=_windows,
    reads=("attention_bias",),
    specific=Llama4Settings,
    ignores=frozenset(
        ("norm_topk_prob", "moe_intermediate_size", "shared_expert_intermediate_size")
        + ("mlp_only_layers",)
    ),
    rope_theta=500000.0,
    rope_interleaved=True,
    rotated=_rotated,
    query_scaling=_query_scaling,
    aliases={"decoder_sparse_step": "interleave_moe_layer_step"},
    stacked_experts=True,
    gguf=GGUF,
)
#: The text model of a vision-language model, as in all published checkpoints.
WITH_IMAGES = beside_images(FAMILY, "Llama4ForConditionalGeneration", "llama4")
