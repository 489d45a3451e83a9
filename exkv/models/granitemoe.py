"""Granite 3 MoE (IBM, 2024): a Granite with a mixture of experts in place of the MLP, whose
matrices are stored together in the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import torch
from torch import nn

from exkv.checkpoint import ModelConfig
from exkv.checkpoint.families import ExpertsConfig
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import Experts
from exkv.weights import Slice, Source, sliced_source

from . import granite
from .decoder import Decoder, matrix_slice


def experts(config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module) -> list[Source]:
    """Experts of the layer that the checkpoint calls ``name``: gates and ups, and downs."""
    count = config.settings(ExpertsConfig).num_local_experts
    hidden, inner = config.hidden_size, config.intermediate_size

    def slices(matrix: str, rows: slice) -> list[Slice]:
        names = [f"mlp.experts.{expert}.{matrix}" for expert in range(count)]
        return [matrix_slice(layer, each, itemgetter((i, rows))) for i, each in enumerate(names)]

    stored = f"{name}.block_sparse_moe"
    both = [*slices("w1", slice(inner)), *slices("w3", slice(inner, None))]
    downs, (ins, outs) = slices("w2", slice(None)), ("input_linear", "output_linear")
    return [
        sliced_source(f"{stored}.{ins}.weight", (count, 2 * inner, hidden), dtype, both),
        sliced_source(f"{stored}.{outs}.weight", (count, hidden, inner), dtype, downs),
    ]


NAMES = {"mlp.gate": "block_sparse_moe.router.layer"}

GGUF = GGUFFamily(
    architecture="granitemoe",
    names={
        "ffn_gate_inp": NAMES["mlp.gate"],
        "ffn_gate_exps": "mlp.experts.{}.w1",
        "ffn_up_exps": "mlp.experts.{}.w3",
        "ffn_down_exps": "mlp.experts.{}.w2",
    },
    interleaved=True,
    metadata=granite.GGUF_FACTORS,
    marks={"expert_shared_feed_forward_length": False},
)

FAMILY = replace(
    granite.FAMILY,
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    units=Decoder(
        mlp=Experts,
        rename=NAMES,
        made=experts,
    ),
    reads=("attention_bias",),
    specific=ExpertsConfig,
    stacked_experts=True,
    gguf=GGUF,
)
