"""Granite Swash 3B-A600M (IBM, 2026): a Granite Swash with experts, and a shared one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from exkv.checkpoint import ModelConfig
from exkv.checkpoint.gguf.names import part_of
from exkv.layers import SinkAttention
from exkv.weights import Source

from . import granite_swa, granitemoeshared
from .qwen3_vl_moe import stacked_experts


def _experts(config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module) -> list[Source]:
    """Experts under the names that a Granite 3 MoE has in transformers' memory."""
    path = "block_sparse_moe.experts"
    return stacked_experts(config, dtype, name, layer, inputs_first=False, path=path)


FAMILY = replace(
    granitemoeshared.FAMILY,
    architecture="GraniteMoeSWAForCausalLM",
    model_type="granitemoe_swa",
    units=replace(
        granitemoeshared.DECODER,
        attention=SinkAttention,
        rename={"mlp.gate": "block_sparse_moe.router", **granitemoeshared.SHARED},
        made=_experts,
    ),
    defaults=granitemoeshared.FAMILY.defaults | {"sliding_window": 128},
    derived=granite_swa.FAMILY.derived,
    windows=granite_swa.FAMILY.windows,
    rope_local_base_freq=1e4,
    rotated=granite_swa.FAMILY.rotated,
    gguf=replace(
        granite_swa.GGUF,
        names={
            **granite_swa.GGUF.names,
            **granitemoeshared.GGUF.names,
            "ffn_gate_inp": "block_sparse_moe.router",
        },
        rows={
            "ffn_up_shexp": {
                f"mlp.shared_expert.{part}_proj": part_of(2, i)
                for i, part in enumerate(("gate", "up"))
            },
        },
        marks={"expert_count": True},
    ),
)
