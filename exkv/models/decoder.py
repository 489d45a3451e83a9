"""What decoder-only architectures share: embedding, layer, head, and the row of units they make.

An architecture is a file that says what its layers consist of, by a ``Decoder`` or, where they
differ from each other or with the config, by a function that calls ``decoder_units``. Read
``llama.py`` first, then the others, which say how they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from exkv.batch import Batch
from exkv.checkpoint import Facts, ModelConfig, facts_of
from exkv.layers import MLP, Attention, Embedding, GatedMLP, LayerNorm, Linear, PlainModule, RMSNorm
from exkv.layers.attention import Attend
from exkv.layers.descriptions import (
    EmbeddingTable,
    Layer,
    LogitsHead,
    describe,
    describes,
    try_describe,
)
from exkv.weights import FormatOf, Source, formats_of

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


#: Makes a norm of so many values.
MakeNorm = Callable[[int], RMSNorm | LayerNorm]


class DecoderLayer(PlainModule):
    """Attention and an MLP, each behind a norm and beside a residual path.

    Args:
        norm: makes the norms; None for RMS norms.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        attention: Attention,
        mlp: MLP,
        norm: MakeNorm | None = None,
    ) -> None:
        super().__init__()
        norm = norm or rms_norm(config, dtype)
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = attention
        self.post_attention_layernorm = norm(config.hidden_size)
        self.mlp = mlp
        self.multiplier = config.multipliers.residual

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend) -> torch.Tensor:
        """x (B, T, hidden) -> (B, T, hidden)."""
        attended = self.times(self.self_attn(self.input_layernorm(x), batch, cache))
        x, normed = self.post_attention_layernorm.of_sum(x, attended)
        del attended  # not to be in the MLP's way
        return x.add_(self.times(self.mlp(normed)))

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """x times the residual path's multiplier, in its place."""
        return x if self.multiplier == 1 else x.mul_(self.multiplier)


class PostNormLayer(PlainModule):
    """The same with norms of what attention and MLP return, and none of what they take (OLMo 2)."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        attention: Attention,
        mlp: MLP,
        norm: MakeNorm | None = None,
    ) -> None:
        super().__init__()
        norm = norm or rms_norm(config, dtype)
        self.self_attn = attention
        self.post_attention_layernorm = norm(config.hidden_size)
        self.mlp = mlp
        self.post_feedforward_layernorm = norm(config.hidden_size)

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend) -> torch.Tensor:
        """x (B, T, hidden) -> (B, T, hidden)."""
        x = x + self.post_attention_layernorm(self.self_attn(x, batch, cache))
        return x.add_(self.post_feedforward_layernorm(self.mlp(x)))


class SandwichLayer(PlainModule):
    """Attention and an MLP, each between two norms (Gemma 2, GLM 4)."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        attention: Attention,
        mlp: MLP,
        norm: MakeNorm | None = None,
    ) -> None:
        super().__init__()
        norm = norm or rms_norm(config, dtype)
        size = config.hidden_size
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm, self.post_attention_layernorm = norm(size), norm(size)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(size), norm(size)

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend) -> torch.Tensor:
        """x (B, T, hidden) -> (B, T, hidden)."""
        attended = self.self_attn(self.input_layernorm(x), batch, cache)
        attended = self.post_attention_layernorm(attended)
        x, normed = self.pre_feedforward_layernorm.of_sum(x, attended)
        del attended  # not to be in the MLP's way
        return x.add_(self.post_feedforward_layernorm(self.mlp(normed)))


class ParallelLayer(PlainModule):
    """Attention and an MLP beside each other: both see the layer's input, behind one norm (Cohere,
    Phi) or, with ``own_norm``, behind one each (GPT-NeoX)."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        attention: Attention,
        mlp: MLP,
        norm: MakeNorm,
        *,
        own_norm: bool = False,
    ) -> None:
        super().__init__()
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = attention
        self.post_attention_layernorm = norm(config.hidden_size) if own_norm else None
        self.mlp = mlp

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend) -> torch.Tensor:
        """x (B, T, hidden) -> (B, T, hidden)."""
        normed = self.input_layernorm(x)
        total = x + self.self_attn(normed, batch, cache)
        if self.post_attention_layernorm is not None:
            normed = self.post_attention_layernorm(x)
        return total.add_(self.mlp(normed))


def rms_norm(
    config: ModelConfig, dtype: torch.dtype, *, offset: bool = False
) -> Callable[[int], RMSNorm]:
    """Makes norms of a size; with ``offset`` their factor is 1 + weight (Gemma)."""
    return partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype, offset=offset)


def layer_norm(
    config: ModelConfig, dtype: torch.dtype, *, bias: bool = True, offset: bool = False
) -> Callable[[int], LayerNorm]:
    """The same with LayerNorm's mean and, unless told otherwise, its bias."""
    return partial(LayerNorm, eps=config.rms_norm_eps, dtype=dtype, bias=bias, offset=offset)


class Head(PlainModule):
    """The last norm and the projection to logits.

    Args:
        norm: makes the norm; None for an RMS norm.
        softcap: c for c * tanh(logits / c); None for none.
        bias: whether the projection has one.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        norm: MakeNorm | None = None,
        softcap: float | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm = (norm or rms_norm(config, dtype))(size)
        self.lm_head = Linear(size, config.vocab_size, bias=bias, dtype=dtype)
        self.multiplier = config.multipliers.logits / config.multipliers.logits_divisor
        self.softcap = softcap

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend | None) -> torch.Tensor:
        """x (B, T, hidden) -> logits (B, T, vocabulary)."""
        logits = self.lm_head(self.norm(x))
        if self.multiplier != 1:
            logits.mul_(self.multiplier)
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
        residual=layer.multiplier,
    )


@describes(PostNormLayer)
def _post_norm_layer(layer: PostNormLayer) -> Layer:
    return Layer(
        attention=describe(layer.self_attn),
        mlp=try_describe(layer.mlp) or layer.mlp,
        before_attention=None,
        after_attention=describe(layer.post_attention_layernorm),
        before_mlp=None,
        after_mlp=describe(layer.post_feedforward_layernorm),
    )


@describes(SandwichLayer)
def _sandwich_layer(layer: SandwichLayer) -> Layer:
    return Layer(
        attention=describe(layer.self_attn),
        mlp=try_describe(layer.mlp) or layer.mlp,
        before_attention=describe(layer.input_layernorm),
        after_attention=describe(layer.post_attention_layernorm),
        before_mlp=describe(layer.pre_feedforward_layernorm),
        after_mlp=describe(layer.post_feedforward_layernorm),
    )


@describes(ParallelLayer)
def _parallel_layer(layer: ParallelLayer) -> Layer:
    own = layer.post_attention_layernorm
    return Layer(
        attention=describe(layer.self_attn),
        mlp=try_describe(layer.mlp) or layer.mlp,
        before_attention=describe(layer.input_layernorm),
        after_attention=None,
        before_mlp=None if own is None else describe(own),
        after_mlp=None,
        parallel=True,
    )


@describes(Head)
def _head(head: Head) -> LogitsHead:
    norm, projection = describe(head.norm), describe(head.lm_head)
    return LogitsHead(norm=norm, projection=projection, softcap=head.softcap, scale=head.multiplier)


def decoder_units(
    config: ModelConfig,
    dtype: torch.dtype,
    layer: Callable[[int], nn.Module],
    *,
    embedding: Callable[[], nn.Module] | None = None,
    head: Callable[[], nn.Module] | None = None,
    rename: Callable[[str], str] = str,
    made: Callable[[str, nn.Module], list[Source]] | None = None,
) -> list[UnitSpec]:
    """Embedding, ``num_hidden_layers`` layers, head; names as in Hugging Face's checkpoints.

    Args:
        layer: builds the module of the layer of an index.
        embedding, head: the same for the ends; None for the plain ones.
        rename: from a parameter or module of a layer to its name in the checkpoint, where it
            comes behind ``model.layers.<index>.``; by default the names are the same.
        made: from a layer's name in the checkpoint and its module, on ``meta``, to the sources of
            parameters that are not stored as they are, or not by themselves.
    """
    scale = config.multipliers.embedding
    embedding = embedding or (lambda: TokenEmbedding(config, dtype, scale=scale))
    formats, facts = formats_of(config, dtype), facts_of(config)
    table = {"embed_tokens": facts.table}

    def layer_spec(index: int) -> UnitSpec:
        stored = f"{facts.layers}.{index}"
        return unit_spec(
            f"model.layers.{index}",
            lambda: layer(index),
            lambda n: f"{stored}.{rename(n)}",
            formats=formats,
            layer=index,
            kind="sliding" if config.slides(index) else "full",
            made=None if made is None else partial(made, stored),
        )

    return [
        unit_spec("model.embed_tokens", embedding, table.__getitem__, formats=formats),
        *map(layer_spec, range(config.num_hidden_layers)),
        _head_spec(head or (lambda: Head(config, dtype)), facts, formats),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The units of an architecture whose layers are of one kind. Called as ``Family.units`` is.

    Attributes:
        attention: makes a layer's attention, of (config, dtype, layer=index).
        mlp: makes its MLP, of (config, dtype).
        layer: makes the layer, of (config, dtype, attention, mlp, norm).
        norm: makes what makes a norm of a size, of (config, dtype).
        head_norm: the same for norms over queries and keys; None for none.
        rename, made: see :func:`decoder_units`; the latter takes config and dtype first.
    """

    attention: Callable[..., Attention] = Attention
    mlp: Callable[[ModelConfig, torch.dtype], MLP] = GatedMLP
    layer: Callable[..., nn.Module] = DecoderLayer
    norm: Callable[[ModelConfig, torch.dtype], MakeNorm] = rms_norm
    head_norm: Callable[[ModelConfig, torch.dtype], MakeNorm] | None = None
    rename: Callable[[str], str] = str
    made: Callable[[ModelConfig, torch.dtype, str, nn.Module], list[Source]] | None = None

    def __call__(self, config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
        norm = self.norm(config, dtype)
        heads = {} if self.head_norm is None else {"head_norm": self.head_norm(config, dtype)}

        def layer(index: int) -> nn.Module:
            attention = self.attention(config, dtype, layer=index, **heads)
            return self.layer(config, dtype, attention, self.mlp(config, dtype), norm)

        return decoder_units(
            config,
            dtype,
            layer,
            head=lambda: Head(config, dtype, norm=norm),
            rename=self.rename,
            made=None if self.made is None else partial(self.made, config, dtype),
        )


def _head_spec(head: Callable[[], nn.Module], facts: Facts, formats: FormatOf) -> UnitSpec:
    names = {"norm.weight": f"{facts.norm}.weight", "norm.bias": f"{facts.norm}.bias"}
    names |= {"lm_head": facts.head, "lm_head.bias": f"{facts.head}.bias"}
    tied = {"lm_head": (0, "embed_tokens")} if facts.head == facts.table else {}
    return unit_spec("lm_head", head, names.__getitem__, formats=formats, tied=tied)
