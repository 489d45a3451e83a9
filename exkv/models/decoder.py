"""What decoder-only architectures share: embedding, layer, head, and the row of units they make.

An architecture is a file that says what its layers consist of, and hands them to
``decoder_units``; read ``llama.py`` first, then the others, which say how they differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from exkv.batch import Batch
from exkv.checkpoint import Facts, ModelConfig, facts_of
from exkv.layers import MLP, Attention, Embedding, Linear, PlainModule, RMSNorm
from exkv.layers.attention import Attend
from exkv.layers.descriptions import (
    EmbeddingTable,
    Layer,
    LogitsHead,
    describe,
    describes,
    try_describe,
)
from exkv.weights import FormatOf, formats_of

from .units import UnitSpec, unit_spec


class TokenEmbedding(PlainModule):
    """The embedding table; ``scale`` multiplies what is looked up."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, scale: float = 1.0) -> None:
        super().__init__()
        size = (config.vocab_size, config.hidden_size)
        self.embed_tokens = Embedding(*size, dtype=dtype, scale=scale)

    def forward(self, ids: torch.Tensor, batch: Batch, cache: Attend | None) -> torch.Tensor:
        """ids (B, T) -> (B, T, hidden)."""
        return self.embed_tokens(ids)


class DecoderLayer(PlainModule):
    """Attention and an MLP, each behind a norm and beside a residual path."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, attention: Attention, mlp: MLP
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.mlp = mlp

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend) -> torch.Tensor:
        """x (B, T, hidden) -> (B, T, hidden)."""
        attended = self.self_attn(self.input_layernorm(x), batch, cache)
        x, normed = self.post_attention_layernorm.of_sum(x, attended)
        del attended  # not to be in the MLP's way
        return x.add_(self.mlp(normed))


class Head(PlainModule):
    """The last norm and the projection to logits.

    Args:
        norm_offset: whether the norm's factor is 1 + weight.
        softcap: c for c * tanh(logits / c); None for none.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        norm_offset: bool = False,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(size, eps, dtype=dtype, offset=norm_offset)
        self.lm_head = Linear(size, config.vocab_size, bias=False, dtype=dtype)
        self.softcap = softcap

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend | None) -> torch.Tensor:
        """x (B, T, hidden) -> logits (B, T, vocabulary)."""
        logits = self.lm_head(self.norm(x))
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


@describes(TokenEmbedding)
def _embedding(embedding: TokenEmbedding) -> EmbeddingTable:
    return describe(embedding.embed_tokens)


@describes(DecoderLayer)
def _layer(layer: DecoderLayer) -> Layer:
    return Layer(
        attention=describe(layer.self_attn),
        mlp=try_describe(layer.mlp) or layer.mlp,
        before_attention=describe(layer.input_layernorm),
        after_attention=None,
        before_mlp=describe(layer.post_attention_layernorm),
        after_mlp=None,
    )


@describes(Head)
def _head(head: Head) -> LogitsHead:
    norm, projection = describe(head.norm), describe(head.lm_head)
    return LogitsHead(norm=norm, projection=projection, softcap=head.softcap)


def decoder_units(
    config: ModelConfig,
    dtype: torch.dtype,
    layer: Callable[[int], nn.Module],
    *,
    embedding: Callable[[], nn.Module] | None = None,
    head: Callable[[], nn.Module] | None = None,
    rename: Callable[[str], str] = str,
) -> list[UnitSpec]:
    """Embedding, ``num_hidden_layers`` layers, head; names as in Hugging Face's checkpoints.

    Args:
        layer: builds the module of the layer of an index.
        embedding, head: the same for the ends; None for the plain ones.
        rename: from a parameter or module of a layer to its name in the checkpoint, where it
            comes behind ``model.layers.<index>.``; by default the names are the same.
    """
    embedding = embedding or (lambda: TokenEmbedding(config, dtype))
    formats, facts = formats_of(config, dtype), facts_of(config)
    table = {"embed_tokens": facts.table}

    def layer_spec(index: int) -> UnitSpec:
        name = f"model.layers.{index}"
        return unit_spec(
            name,
            lambda: layer(index),
            lambda n: f"{name}.{rename(n)}",
            formats=formats,
            layer=index,
            kind="sliding" if config.slides(index) else "full",
        )

    return [
        unit_spec("model.embed_tokens", embedding, table.__getitem__, formats=formats),
        *map(layer_spec, range(config.num_hidden_layers)),
        _head_spec(head or (lambda: Head(config, dtype)), facts, formats),
    ]


def _head_spec(head: Callable[[], nn.Module], facts: Facts, formats: FormatOf) -> UnitSpec:
    names = {"norm.weight": "model.norm.weight", "lm_head": facts.head}
    tied = {"lm_head": (0, "embed_tokens")} if facts.head == facts.table else {}
    return unit_spec("lm_head", head, names.__getitem__, formats=formats, tied=tied)
