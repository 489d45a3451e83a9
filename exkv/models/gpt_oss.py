"""gpt-oss (OpenAI, 2025): a window on every other layer, a learned score beside those of the keys
that takes its share of the softmax, and experts of a clamped gate with biases.

The experts' matrices lie together in the checkpoint, gates and ups in turns: as floats, inputs
first, or packed (MXFP4), outputs first. They are taken apart when they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from exkv.checkpoint import ExpertsConfig, ModelConfig
from exkv.layers import ClampedExperts, SinkAttention
from exkv.layers.linear import linear_at
from exkv.weights import Slice, Source, sliced_source

from .decoder import DecoderLayer, decoder_units
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""

    def layer(index: int) -> DecoderLayer:
        attention = SinkAttention(config, dtype, layer=index)
        return DecoderLayer(config, dtype, attention, ClampedExperts(config, dtype))

    return decoder_units(
        config,
        dtype,
        layer,
        rename=lambda name: name.replace("mlp.gate", "mlp.router"),
        made=partial(_experts, config, dtype),
    )


#: A part of the experts' tensor, of which an expert's number picks one: gates and ups in turns.
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
    biases; ``size`` is (outputs, inputs) of an expert's."""
    count, (outputs, inputs) = config.settings(ExpertsConfig).num_local_experts, size
    all_of = [(kind, expert) for kind in kinds for expert in range(count)]
    linears = [linear_at(layer, f"mlp.experts.{expert}.{kind}") for kind, expert in all_of]
    biases = [
        Slice(name=f"mlp.experts.{expert}.{kind}.bias", of=_rows(expert, kind))
        for kind, expert in all_of
    ]

    def slices(of: Callable[[int, str], Callable[[torch.Tensor], torch.Tensor]]) -> list[Slice]:
        return [
            Slice(
                name=f"mlp.experts.{expert}.{kind}",
                of=of(expert, kind),
                format=linear.format,
                size=linear.size,
            )
            for (kind, expert), linear in zip(all_of, linears, strict=True)
        ]

    packed = linears[0].format.together(name, (count, outputs, inputs), slices(_rows))
    matrices = packed or sliced_source(name, (count, inputs, outputs), dtype, slices(_columns))
    return [matrices, sliced_source(f"{name}_bias", (count, outputs), dtype, biases)]


def _rows(expert: int, kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda whole: whole[expert, _ROWS[kind]]


def _columns(expert: int, kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda whole: whole[expert, :, _ROWS[kind]].T
