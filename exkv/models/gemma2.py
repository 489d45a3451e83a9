"""Gemma 2 (Gemma Team, 2024): windows on every other layer, norms before and after attention and
MLP, soft-caps on scores and logits, and embeddings scaled by the root of their size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from exkv.checkpoint import GemmaConfig, ModelConfig
from exkv.layers import Attention, GatedMLP

from .decoder import Head, SandwichLayer, TokenEmbedding, decoder_units, rms_norm
from .units import UnitSpec


def gemma_layer(
    config: ModelConfig,
    dtype: torch.dtype,
    index: int,
    head_norm: Callable[[int], nn.Module] | None = None,
) -> SandwichLayer:
    """A layer; ``head_norm`` makes a norm over a head's queries or keys (Gemma 3)."""
    settings = config.settings(GemmaConfig)
    attention = Attention(
        config,
        dtype,
        layer=index,
        head_norm=head_norm,
        scale=settings.query_pre_attn_scalar**-0.5,
        softcap=settings.attn_logit_softcapping or 0.0,
    )
    norm = rms_norm(config, dtype, offset=True)
    return SandwichLayer(config, dtype, attention, GatedMLP(config, dtype), norm)


def gemma_units(
    config: ModelConfig,
    dtype: torch.dtype,
    layer: Callable[[int], nn.Module],
    softcap: float | None = None,
) -> list[UnitSpec]:
    """The units around Gemma's layers, of any version."""
    # Rounded to the dtype, as the model was trained.
    scale = torch.tensor(config.hidden_size**0.5).to(dtype).item()
    norm = rms_norm(config, dtype, offset=True)
    return decoder_units(
        config,
        dtype,
        layer,
        embedding=lambda: TokenEmbedding(config, dtype, scale=scale),
        head=lambda: Head(config, dtype, norm=norm, softcap=softcap),
    )


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""
    softcap = config.settings(GemmaConfig).final_logit_softcapping
    return gemma_units(config, dtype, lambda index: gemma_layer(config, dtype, index), softcap)
