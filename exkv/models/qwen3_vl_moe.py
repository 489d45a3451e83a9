"""Qwen 3 VL 30B-A3B and 235B-A22B (Qwen, 2025), text only: the Qwen3-MoE of a vision-language
model.

The experts' matrices are stored together, gates before ups: inputs first in Qwen's files, outputs
first in those that transformers 5 saves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from exkv.checkpoint import (
    CheckpointError,
    ExpertsConfig,
    ModelConfig,
    facts_of,
    open_checkpoint,
)
from exkv.checkpoint.gguf.names import EXPERTS, GGUFFamily
from exkv.layers import Experts, mixture_or_mlp
from exkv.weights import Slice, Source, sliced_source

from . import qwen2_moe, qwen3_moe, qwen3_vl
from .decoder import Decoder, matrix_slice, rms_norm
from .units import UnitSpec

Made: TypeAlias = Callable[[ModelConfig, torch.dtype, str, nn.Module], list[Source]]


def stacked_experts(
    config: ModelConfig,
    dtype: torch.dtype,
    name: str,
    layer: nn.Module,
    *,
    inputs_first: bool,
    path: str = "mlp.experts",
    module: str = "mlp",
) -> list[Source]:
    """Experts of the layer that the checkpoint calls ``name``, at ``path`` in it; empty for a dense
    layer. ``module`` is the layer's name for them."""
    if not isinstance(getattr(layer, module), Experts):
        return []
    count, hidden, inner = _sizes(config)

    def slices(matrix: str, rows: slice) -> list[Slice]:
        def of(expert: int, whole: torch.Tensor) -> torch.Tensor:
            return whole[expert].T[rows] if inputs_first else whole[expert][rows]

        names = [f"{module}.experts.{expert}.{matrix}" for expert in range(count)]
        return [matrix_slice(layer, each, partial(of, i)) for i, each in enumerate(names)]

    both, down = (count, 2 * inner, hidden), (count, hidden, inner)
    if inputs_first:
        both, down = (count, hidden, 2 * inner), (count, inner, hidden)
    stacks = {
        "gate_up_proj": (both, [*slices("w1", slice(inner)), *slices("w3", slice(inner, None))]),
        "down_proj": (down, slices("w2", slice(None))),
    }
    sources = []
    for stack, (shape, parts) in stacks.items():
        stored, format = f"{name}.{path}.{stack}", parts[0].format
        assert format is not None, "a matrix has one"
        packed = None if inputs_first else format.together(stored, shape, parts)
        sources.append(packed or sliced_source(stored, shape, dtype, parts))
    return sources


def _sizes(config: ModelConfig) -> tuple[int, int, int]:
    """Number of experts, and their outer and inner sizes."""
    settings = config.settings(ExpertsConfig)
    inner = settings.moe_intermediate_size or config.intermediate_size
    return settings.num_local_experts, config.hidden_size, inner


def experts_as_stored(config: ModelConfig) -> Made | None:
    """``Decoder.made`` for experts that the checkpoint stores together; None if each has its own
    matrices, or if there is no checkpoint."""
    shape = _shape_of_stacked(config)
    if shape is None:
        return None
    _, hidden, inner = _sizes(config)
    return partial(stacked_experts, inputs_first=shape[1:] != (hidden, inner))


def _shape_of_stacked(config: ModelConfig) -> tuple[int, ...] | None:
    """The shape of the checkpoint's tensor of a layer's matrices ``down``."""
    settings = config.settings(ExpertsConfig)
    layers = range(config.num_hidden_layers)
    sparse = next((layer for layer in layers if not settings.is_dense(layer)), None)
    if config.path is None or sparse is None:
        return None
    name = f"{facts_of(config).layers}.{sparse}.mlp.experts.down_proj"
    try:
        checkpoint = open_checkpoint(config.path)
    except (OSError, CheckpointError):
        return None  # loading will report it
    with checkpoint:
        return tuple(checkpoint.info(name).shape) if name in checkpoint else None


def _units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    return Decoder(
        head_norm=rms_norm,
        mlp_of_layer=partial(mixture_or_mlp, experts=Experts),
        rename=qwen2_moe.NAMES,
        made=experts_as_stored(config) or partial(stacked_experts, inputs_first=True),
    )(config, dtype)


FAMILY = replace(
    qwen3_vl.FAMILY,
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe",
    units=_units,
    defaults=qwen3_moe.FAMILY.defaults
    | {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "norm_topk_prob": True,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_local_experts": 60,
    },
    refuses={"sliding_window": None},
    specific=ExpertsConfig,
    ignores=frozenset(("norm_topk_prob", "shared_expert_intermediate_size")),
    aliases={"num_local_experts": "num_experts"},
    stacked_experts=True,
    gguf=GGUFFamily(architecture="qwen3vlmoe", names=EXPERTS),
)
