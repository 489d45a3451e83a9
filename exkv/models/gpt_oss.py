"""gpt-oss (OpenAI, 2025): a window in every other layer, a learned score beside those of the keys
that takes its share of the softmax, and experts with a clamped gate and biases.

The experts' matrices are stored together, gates and ups interleaved: as floats, inputs first, or
packed (MXFP4), outputs first. They are separated when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from exkv.checkpoint import ExpertsConfig, ModelConfig, windows
from exkv.checkpoint.families import ClampedExpertsConfig, Family
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import ClampedExperts, SinkAttention
from exkv.weights import Slice, Source, sliced_source

from .decoder import Decoder, matrix_slice

#: An expert's rows of the stored tensor: gates and ups are interleaved.
_ROWS = {"w1": slice(0, None, 2), "w3": slice(1, None, 2), "w2": slice(None)}


def _experts(config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module) -> list[Source]:
    """Experts of the layer that the checkpoint calls ``name``."""
    hidden, inner = config.hidden_size, config.intermediate_size
    stored = f"{name}.mlp.experts"
    return [
        *_matrices(
            config, dtype, layer, f"{stored}.gate_up_proj", ("w1", "w3"), (2 * inner, hidden)
        ),
        *_matrices(config, dtype, layer, f"{stored}.down_proj", ("w2",), (hidden, inner)),
    ]


def _matrices(
    config: ModelConfig,
    dtype: torch.dtype,
    layer: nn.Module,
    name: str,
    kinds: tuple[str, ...],
    size: tuple[int, int],
) -> list[Source]:
    """The experts' matrices of these kinds, which the checkpoint has in one tensor, and their
    biases; ``size`` is an expert's (outputs, inputs)."""
    count, (outputs, inputs) = config.settings(ExpertsConfig).num_local_experts, size
    names = {
        f"mlp.experts.{expert}.{kind}": (expert, _ROWS[kind])
        for kind in kinds
        for expert in range(count)
    }
    biases = [Slice(name=f"{path}.bias", of=itemgetter(rows)) for path, rows in names.items()]
    by_rows = [matrix_slice(layer, path, itemgetter(rows)) for path, rows in names.items()]
    by_columns = [replace(each, of=partial(_columns, each.of)) for each in by_rows]
    format = by_rows[0].format
    assert format is not None, "a matrix has one"
    packed = format.together(name, (count, outputs, inputs), by_rows)
    matrices = packed or sliced_source(name, (count, inputs, outputs), dtype, by_columns)
    return [matrices, sliced_source(f"{name}_bias", (count, outputs), dtype, biases)]


def _columns(rows: Callable[[torch.Tensor], torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    return rows(whole.transpose(1, 2))


def _untruncated(values: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN's band edges are not rounded, which GGUF can't state."""
    scaling = values.get("rope_scaling")
    return {"rope_scaling": {**scaling, "truncate": False}} if scaling else {}


FAMILY = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    units=Decoder(
        attention=SinkAttention,
        mlp=ClampedExperts,
        rename={"mlp.gate": "mlp.router"},
        made=_experts,
    ),
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    windows=windows.every_other,
    reads=("attention_bias",),
    specific=ClampedExpertsConfig,
    rope_theta=150000.0,
    rope_parameters={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    stacked_experts=True,
    gguf=GGUFFamily(
        architecture="gpt-oss",
        names={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps": "mlp.experts.{}.w1",
            "ffn_up_exps": "mlp.experts.{}.w3",
            "ffn_down_exps": "mlp.experts.{}.w2",
        },
        additions=_untruncated,
    ),
)
