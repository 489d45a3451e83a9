"""Granite 3 MoE (IBM, 2024): a Granite with a mixture of experts in place of the MLP, whose
matrices lie together in the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from exkv.checkpoint import ModelConfig
from exkv.checkpoint.families import ExpertsConfig
from exkv.layers import Experts
from exkv.layers.linear import linear_at
from exkv.weights import Slice, Source, sliced_source

from . import granite
from .decoder import Decoder


def _experts(config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module) -> list[Source]:
    """Experts of the layer that the checkpoint calls ``name``: gates and ups, and downs."""
    count = config.settings(ExpertsConfig).num_local_experts
    hidden, inner = config.hidden_size, config.intermediate_size

    def slices(matrix: str, first: int, rows: int) -> list[Slice]:
        names = [f"mlp.experts.{expert}.{matrix}" for expert in range(count)]
        linears = [linear_at(layer, each) for each in names]
        return [
            Slice(
                name=each,
                of=partial(_rows, expert, slice(first, first + rows)),
                format=linear.format,
                size=linear.size,
            )
            for expert, (each, linear) in enumerate(zip(names, linears, strict=True))
        ]

    stored = f"{name}.block_sparse_moe"
    both = [*slices("w1", 0, inner), *slices("w3", inner, inner)]
    return [
        sliced_source(f"{stored}.input_linear.weight", (count, 2 * inner, hidden), dtype, both),
        sliced_source(
            f"{stored}.output_linear.weight", (count, hidden, inner), dtype, slices("w2", 0, hidden)
        ),
    ]


def _rows(expert: int, rows: slice, whole: torch.Tensor) -> torch.Tensor:
    return whole[expert, rows]


FAMILY = replace(
    granite.FAMILY,
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    units=Decoder(
        mlp=Experts,
        rename=lambda name: name.replace("mlp.gate", "block_sparse_moe.router.layer"),
        made=_experts,
    ),
    reads=("attention_bias",),
    specific=ExpertsConfig,
    stacked_experts=True,
)
