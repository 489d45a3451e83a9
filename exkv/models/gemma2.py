"""Gemma 2 (Gemma Team, 2024): windows on every other layer, norms before and after attention and
MLP, soft-caps on scores and logits, and embeddings scaled by the root of their size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from exkv.batch import Batch
from exkv.checkpoint import GemmaConfig, ModelConfig
from exkv.layers import Attention, GatedMLP, PlainModule, RMSNorm
from exkv.layers.attention import Attend
from exkv.layers.descriptions import Layer, describe, describes, try_describe

from .decoder import Head, TokenEmbedding, decoder_units
from .units import UnitSpec


class GemmaLayer(PlainModule):
    """Attention and an MLP, each between two norms.

    Args:
        head_norm: makes a norm over a head's queries or keys (Gemma 3).
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        index: int,
        head_norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        settings = config.settings(GemmaConfig)
        self.self_attn = Attention(
            config,
            dtype,
            layer=index,
            head_norm=head_norm,
            scale=settings.query_pre_attn_scalar**-0.5,
            softcap=settings.attn_logit_softcapping or 0.0,
        )
        self.mlp = GatedMLP(config, dtype)
        norm = partial(gemma_norm(config, dtype), config.hidden_size)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend) -> torch.Tensor:
        """x (B, T, hidden) -> (B, T, hidden)."""
        attended = self.self_attn(self.input_layernorm(x), batch, cache)
        attended = self.post_attention_layernorm(attended)
        x, normed = self.pre_feedforward_layernorm.of_sum(x, attended)
        del attended  # not to be in the MLP's way
        return x.add_(self.post_feedforward_layernorm(self.mlp(normed)))


@describes(GemmaLayer)
def _layer(layer: GemmaLayer) -> Layer:
    return Layer(
        attention=describe(layer.self_attn),
        mlp=try_describe(layer.mlp) or layer.mlp,
        before_attention=describe(layer.input_layernorm),
        after_attention=describe(layer.post_attention_layernorm),
        before_mlp=describe(layer.pre_feedforward_layernorm),
        after_mlp=describe(layer.post_feedforward_layernorm),
    )


def gemma_norm(config: ModelConfig, dtype: torch.dtype) -> Callable[[int], RMSNorm]:
    """Makes norms of a size whose factor is 1 + weight."""
    return partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype, offset=True)


def gemma_units(
    config: ModelConfig, dtype: torch.dtype, layer: Callable[[int], nn.Module]
) -> list[UnitSpec]:
    """The units around Gemma's layers."""
    # Rounded to the dtype, as the model was trained.
    scale = torch.tensor(config.hidden_size**0.5).to(dtype).item()
    softcap = config.settings(GemmaConfig).final_logit_softcapping
    return decoder_units(
        config,
        dtype,
        layer,
        embedding=lambda: TokenEmbedding(config, dtype, scale=scale),
        head=lambda: Head(config, dtype, norm_offset=True, softcap=softcap),
    )


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""
    return gemma_units(config, dtype, lambda index: GemmaLayer(config, dtype, index))
