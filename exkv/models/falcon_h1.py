"""Falcon-H1 (TII, 2025): attention and Mamba 2 in parallel in every layer, and multipliers of the
inputs and outputs of each of their parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exkv.batch import Batch
from exkv.checkpoint import ModelConfig, windows
from exkv.checkpoint.families import Family, TensorNames
from exkv.checkpoint.mamba import ExpandedMamba2Config
from exkv.checkpoint.value_checks import check_layers, check_size, is_number, set_floats
from exkv.layers import MLP, Attention, GatedMLP, Mamba2, PlainModule
from exkv.layers.attention import Attend, describe_separate
from exkv.layers.descriptions import (
    AttentionBlock,
    GatedBlock,
    Layer,
    Norm,
    Outputs,
    StateBlock,
    describe,
    describes,
    parameter,
)
from exkv.layers.mamba import GatedNorm, ssd_block
from exkv.layers.recurrent import KeepsState
from exkv.ops.activations import ACTIVATIONS

from . import bamba
from .decoder import Decoder, DecoderLayer, MakeNorm, describe_layer
from .granitemoehybrid import GGUF_MAMBA, mamba_states, of_inner

_FACTORS = (
    *("key_multiplier", "attention_in_multiplier", "attention_out_multiplier"),
    *("ssm_in_multiplier", "ssm_out_multiplier"),
)


@dataclass(frozen=True, kw_only=True)
class ParallelMambaConfig(ExpandedMamba2Config):
    """Mamba's heads have ``mamba_d_ssm`` features in total, optionally with a norm, before or after
    their gate. Multipliers apply to the MLP's gate and its output; to keys, to attention's inputs
    and outputs, to Mamba's, and to the parts of its projection: gate, heads, what is written to
    states and read from them, steps."""

    mamba_d_ssm: int | None = 1024
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    mlp_multipliers: tuple[float, ...] = (1.0, 1.0)
    ssm_multipliers: tuple[float, ...] = (1.0,) * 5

    def __post_init__(self) -> None:
        if self.mamba_d_ssm is not None:
            check_size("mamba_d_ssm", self.mamba_d_ssm)
        ExpandedMamba2Config.__post_init__(self)
        set_floats(self, _FACTORS)
        for key, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
            object.__setattr__(self, key, _factors(key, count, getattr(self, key)))

    def wanted(self) -> tuple[str, int]:
        if self.mamba_d_ssm is None:
            return ExpandedMamba2Config.wanted(self)
        return "mamba_d_ssm", self.mamba_d_ssm


def _factors(key: str, count: int, values: Any) -> tuple[float, ...]:
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list | tuple) or not all(map(is_number, values)):
        raise ValueError(f"{key} must be a list of numbers, not {values!r:.80}")
    if len(values) != count:
        raise ValueError(f"{key} must be {count} numbers, not {len(values)}")
    return tuple(map(float, values))


class NormBeforeGate(GatedNorm):
    """Norm first, then gate."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.normed(x.float()).mul_(F.silu(gate.float())).to(x.dtype)


class Gate(PlainModule):
    """A gate without a norm."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate (B, T, size) -> the same shape."""
        return F.silu(gate).mul_(x)


class ScaledMamba2(Mamba2):
    """Mamba 2 with multipliers."""

    def make_norm(self, config: ModelConfig, dtype: torch.dtype) -> nn.Module:
        sizes = config.settings(ParallelMambaConfig)
        if not sizes.mamba_rms_norm:
            return Gate()
        made = NormBeforeGate if sizes.mamba_norm_before_gate else GatedNorm
        return made(sizes.inner, sizes.mamba_n_groups, config.rms_norm_eps, dtype=dtype)

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        settings = config.settings(ParallelMambaConfig)
        super().__init__(config, dtype, out_bias=settings.projectors_bias)
        self.before, self.behind = settings.ssm_in_multiplier, settings.ssm_out_multiplier
        self.factors = settings.ssm_multipliers

    def forward(self, x: Tensor, batch: Batch, cache: KeepsState) -> Tensor:
        return super().forward(x * self.before, batch, cache).mul_(self.behind)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        gate, mixed, steps = super().project(x)
        inner, shared = self.settings.inner, self.settings.shared
        parts = (gate, *mixed.split((inner, shared, shared), dim=-1), steps)
        for part, factor in zip(parts, self.factors, strict=True):
            part.mul_(factor)
        return gate, mixed, steps


class ScaledAttention(Attention):
    """Attention with multipliers; that of keys is part of the scale of the scores."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, layer: int) -> None:
        settings = config.settings(ParallelMambaConfig)
        scale = settings.key_multiplier * config.head_dim**-0.5
        super().__init__(config, dtype, layer=layer, scale=scale)
        self.before, self.behind = (
            settings.attention_in_multiplier,
            settings.attention_out_multiplier,
        )

    def forward(self, x: Tensor, batch: Batch, cache: Attend) -> Tensor:
        return super().forward(x * self.before, batch, cache).mul_(self.behind)


class ScaledMLP(GatedMLP):
    """A gated MLP with multipliers."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.factor, self.behind = config.settings(ParallelMambaConfig).mlp_multipliers

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).mul_(self.factor)
        ACTIVATIONS[self.act].gate(gate, self.up_proj(x))
        return self.down_proj(gate).mul_(self.behind)


class ParallelMambaLayer(DecoderLayer):
    """Attention and Mamba in parallel after one norm, and an MLP after another."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        attention: nn.Module,
        mlp: MLP,
        norm: MakeNorm | None = None,
    ) -> None:
        super().__init__(config, dtype, attention, mlp, norm)
        self.mamba = ScaledMamba2(config, dtype)

    def forward(self, x: Tensor, batch: Batch, cache: Any) -> Tensor:
        normed = self.input_layernorm(x)
        both = self.mamba(normed, batch, cache)
        both.add_(self.self_attn(normed, batch, cache))
        del normed  # free it before the MLP
        x, normed = self.post_attention_layernorm.of_sum(x, both)
        del both
        return x.add_(self.mlp(normed))


@describes(NormBeforeGate)
def _norm_before_gate(norm: NormBeforeGate) -> Norm:
    return Norm(weight=parameter(norm, "weight"), eps=norm.eps, offset=False)


@describes(ScaledMamba2)
def _mamba(layer: ScaledMamba2) -> StateBlock:
    gatings = {GatedNorm: "gate_then_norm", NormBeforeGate: "normed_and_gated", Gate: "gate"}
    gating = gatings[type(layer.norm)]
    block = ssd_block(layer, None if gating == "gate" else describe(layer.norm), gating)
    inner, shared, heads = (
        *(layer.settings.inner, layer.settings.shared, layer.settings.mamba_n_heads),
    )
    sizes = (inner, inner, shared, shared, heads)
    parts = [Outputs(projection=i, size=size) for i, size in enumerate(sizes)]
    gate, *mixed, step = parts
    assert block.recurrence is not None
    return replace(
        block,
        inputs=tuple(
            replace(part, scale=factor)
            for part, factor in zip(block.inputs[0].split(*sizes), layer.factors, strict=True)
        ),
        sources=(-1,) * len(sizes),
        mixed=tuple(mixed),
        gate=gate,
        output=replace(block.output, scale=layer.behind),
        recurrence=replace(block.recurrence, step=step),
        input_scale=layer.before,
    )


@describes(ScaledAttention)
def _attention(attention: ScaledAttention) -> AttentionBlock:
    block = describe_separate(attention)
    output = replace(block.output, scale=attention.behind)
    return replace(block, output=output, input_scale=attention.before)


@describes(ScaledMLP)
def _mlp(mlp: ScaledMLP) -> GatedBlock:
    return GatedBlock(
        gate=replace(describe(mlp.gate_proj), scale=mlp.factor),
        up=describe(mlp.up_proj),
        down=replace(describe(mlp.down_proj), scale=mlp.behind),
        act=mlp.act,
    )


@describes(ParallelMambaLayer)
def _both(layer: ParallelMambaLayer) -> Layer:
    return replace(describe_layer(layer), beside=describe(layer.mamba))


def _windows(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """Each layer has both."""
    check_layers(values["num_hidden_layers"])
    return None, (windows.HYBRID,) * values["num_hidden_layers"]


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """All multipliers are part of the weights."""
    sizes = {**of_inner(values), "mamba_d_ssm": values.get("mamba_inner")}
    return {**sizes, "mamba_norm_before_gate": False}


FAMILY = Family(
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    units=Decoder(
        attention=ScaledAttention, mlp=ScaledMLP, layer=ParallelMambaLayer, rename=bamba.NAMES
    ),
    defaults={
        "vocab_size": 128000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
    },
    windows=_windows,
    reads=("attention_bias", "mlp_bias"),
    specific=ParallelMambaConfig,
    multipliers={"embedding": "embedding_multiplier", "logits": "lm_head_multiplier"},
    names=(TensorNames(norm="model.final_layernorm"),),
    states=mamba_states,
    # llama.cpp applies norms, if there are any, after the gate.
    gguf=replace(
        GGUF_MAMBA,
        architecture="falcon-h1",
        names={**bamba.GGUF_NAMES, "ffn_norm": "pre_ff_layernorm.weight"},  # there by this name
        ends=bamba.GGUF_ENDS,
        additions=_of_gguf,
    ),
)
