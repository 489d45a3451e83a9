"""What decoder-only architectures share: embedding, layer, head, and the sequence of units.

An architecture is a file whose ``Decoder`` lists what its layers consist of. Read ``llama.py``
first, then the others, which show how they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from exkv.batch import Batch
from exkv.checkpoint import Facts, ModelConfig, facts_of
from exkv.layers import (
    MLP,
    Attention,
    Embedding,
    GatedMLP,
    LayerNorm,
    Linear,
    PlainModule,
    RMSNorm,
)
from exkv.layers.attention import Attend
from exkv.layers.descriptions import (
    EmbeddingTable,
    Layer,
    LogitsHead,
    describe,
    describes,
    try_describe,
)
from exkv.layers.linear import linear_at
from exkv.weights import FormatOf, Fused, Slice, Source, formats_of

from .mtp import mtp_unit
from .units import Pattern, UnitSpec, unit_spec


class TokenEmbedding(PlainModule):
    """The embedding table; ``scale`` multiplies the embeddings."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, scale: float = 1.0) -> None:
        super().__init__()
        size = (config.vocab_size, config.hidden_size)
        self.embed_tokens = Embedding(*size, dtype=dtype, scale=scale)

    def forward(self, ids: torch.Tensor, batch: Batch, cache: Attend | None) -> torch.Tensor:
        """ids (B, T) -> (B, T, hidden)."""
        return self.embed_tokens(ids)


#: Makes a norm of a given size.
MakeNorm = Callable[[int], RMSNorm | LayerNorm]


class ResidualLayer(PlainModule):
    """Attention and an MLP, each beside a residual path; ``forward`` maps x (B, T, hidden) to the
    same shape.

    Args:
        norm: makes the norms; None for RMS norms.

    Attributes:
        norms: role of a norm in the layer's description -> name of its module.
    """

    norms: ClassVar[dict[str, str]]
    input_layernorm: RMSNorm | LayerNorm
    post_attention_layernorm: RMSNorm | LayerNorm
    pre_feedforward_layernorm: RMSNorm | LayerNorm
    post_feedforward_layernorm: RMSNorm | LayerNorm

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        attention: nn.Module,
        mlp: MLP,
        norm: MakeNorm | None = None,
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        for name in self.norms.values():
            setattr(self, name, (norm or rms_norm(config, dtype))(config.hidden_size))
        self.multiplier = config.multipliers.residual

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x in place by the residual path's multiplier."""
        return x if self.multiplier == 1 else x.mul_(self.multiplier)


class DecoderLayer(ResidualLayer):
    """Norms before attention and MLP."""

    norms = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend) -> torch.Tensor:
        attended = self.times(self.self_attn(self.input_layernorm(x), batch, cache))
        x, normed = self.post_attention_layernorm.of_sum(x, attended)
        del attended  # free it before the MLP
        return x.add_(self.times(self.mlp(normed)))


class PostNormLayer(ResidualLayer):
    """Norms after attention and MLP (OLMo 2)."""

    norms = {
        "after_attention": "post_attention_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    }

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend) -> torch.Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, batch, cache))
        return x.add_(self.post_feedforward_layernorm(self.mlp(x)))


class SandwichLayer(ResidualLayer):
    """Norms before and after attention and MLP (Gemma 2, GLM 4)."""

    norms = {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    }

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(x), batch, cache)
        attended = self.times(self.post_attention_layernorm(attended))
        x, normed = self.pre_feedforward_layernorm.of_sum(x, attended)
        del attended  # free it before the MLP
        return x.add_(self.times(self.post_feedforward_layernorm(self.mlp(normed))))


class ParallelLayer(ResidualLayer):
    """Attention and MLP in parallel, both after one norm (Cohere, Phi)."""

    norms = {"before_attention": "input_layernorm"}

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend) -> torch.Tensor:
        normed = self.input_layernorm(x)
        total = x + self.self_attn(normed, batch, cache)
        return total.add_(self.mlp(normed))


class ParallelNormsLayer(ResidualLayer):
    """Attention and MLP in parallel, each after its own norm (GPT-NeoX)."""

    norms = DecoderLayer.norms

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend) -> torch.Tensor:
        total = x + self.self_attn(self.input_layernorm(x), batch, cache)
        return total.add_(self.mlp(self.post_attention_layernorm(x)))


def rms_norm(
    config: ModelConfig, dtype: torch.dtype, *, offset: bool = False
) -> Callable[[int], RMSNorm]:
    """A maker of norms by size; with ``offset`` their factor is 1 + weight (Gemma)."""
    return partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype, offset=offset)


def layer_norm(
    config: ModelConfig, dtype: torch.dtype, *, bias: bool = True, offset: bool = False
) -> Callable[[int], LayerNorm]:
    """A maker of layer norms by size, with a bias by default."""
    return partial(LayerNorm, eps=config.rms_norm_eps, dtype=dtype, bias=bias, offset=offset)


class Head(PlainModule):
    """The last norm and the projection to logits.

    Args:
        norm: makes the norm; None for an RMS norm.
        softcap: c for c * tanh(logits / c); None for none.
        bias: whether the projection has a bias.
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
        return self.project(self.norm(x))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states that are normed already."""
        logits = self.lm_head(x)
        if self.multiplier != 1:
            logits.mul_(self.multiplier)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


@describes(TokenEmbedding)
def _embedding(embedding: TokenEmbedding) -> EmbeddingTable:
    return describe(embedding.embed_tokens)


def describe_layer(layer: ResidualLayer, *, residual: float = 1.0, parallel: bool = False) -> Layer:
    """Attention and an MLP, with the norms that the layer's type names."""
    there = {place: describe(getattr(layer, name)) for place, name in layer.norms.items()}
    return Layer(
        attention=try_describe(layer.self_attn) or layer.self_attn,
        mlp=try_describe(layer.mlp) or layer.mlp,
        **{**dict.fromkeys(SandwichLayer.norms), **there},
        residual=residual,
        parallel=parallel,
    )


describes(DecoderLayer)(lambda layer: describe_layer(layer, residual=layer.multiplier))
describes(PostNormLayer)(describe_layer)
describes(SandwichLayer)(lambda layer: describe_layer(layer, residual=layer.multiplier))
describes(ParallelLayer)(partial(describe_layer, parallel=True))
describes(ParallelNormsLayer)(partial(describe_layer, parallel=True))


@describes(Head)
def _head(head: Head) -> LogitsHead:
    norm, projection = describe(head.norm), describe(head.lm_head)
    return LogitsHead(norm=norm, projection=projection, softcap=head.softcap, scale=head.multiplier)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The units of an architecture: embedding, ``num_hidden_layers`` layers, an MTP head if it is
    used, head. Called like ``Family.units``.

    Attributes:
        attention: makes a layer's attention, or the layer with a state in its place, from (config,
            dtype, layer=index); None, which ``layer`` then gets, for neither.
        mlp: makes its MLP from (config, dtype).
        mlp_of_layer: makes it from (config, dtype, index), where layers differ in it.
        layer: makes the layer from (config, dtype, attention, mlp, norm).
        norm: makes a maker of norms by size from (config, dtype).
        head_norm: likewise for norms over queries and keys; None for none.
        scale: of embeddings, from (config, dtype); None for the config's multiplier.
        head: makes the head from (config, dtype, norm=norm).
        embedding: makes the embedding from (config, dtype, scale=scale).
        unused: parts of a layer, from (config, index), that checkpoints may have and the model
            doesn't use.
        outside: prefixes, as ``rename`` sees them, of parts of layers that checkpoints store
            outside of the layers.
        rename: parts of a layer's parameters' names -> their names in checkpoints, in order.
        rename_of_layer: likewise from (config, index), where layers differ; after ``rename``.
        parts: number of layers for each one in the checkpoint.
        made: from config, dtype, the layer's name in the checkpoint and its module, on ``meta``, to
            the sources of parameters that are not stored as they are, or not separately; not called
            if the checkpoint has all of them separately.
        fused: matrices of a layer that checkpoints, but not GGUF files, store as one, by its name
            in the layer, from config.
        made_apart: as ``made``, for checkpoints that store them separately (GGUF files).
    """

    attention: Callable[..., nn.Module | None] = Attention
    mlp: Callable[[ModelConfig, torch.dtype], MLP] = GatedMLP
    mlp_of_layer: Callable[[ModelConfig, torch.dtype, int], MLP | None] | None = None
    layer: Callable[..., nn.Module] = DecoderLayer
    norm: Callable[[ModelConfig, torch.dtype], MakeNorm] = rms_norm
    head_norm: Callable[[ModelConfig, torch.dtype], MakeNorm] | None = None
    scale: Callable[[ModelConfig, torch.dtype], float] | None = None
    head: Callable[..., nn.Module] = Head
    embedding: Callable[..., nn.Module] = TokenEmbedding
    outside: tuple[str, ...] = ()
    unused: Callable[[ModelConfig, int], tuple[str, ...]] = lambda config, index: ()
    rename: Mapping[str, str] = field(default_factory=dict)
    rename_of_layer: Callable[[ModelConfig, int], Mapping[str, str]] | None = None
    parts: int = 1
    made: Callable[[ModelConfig, torch.dtype, str, nn.Module], list[Source]] | None = None
    fused: Callable[[ModelConfig], Sequence[Fused]] = lambda config: ()
    made_apart: Callable[[ModelConfig, torch.dtype, str, nn.Module], list[Source]] | None = None

    def __call__(self, config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
        facts, formats = facts_of(config), formats_of(config, dtype)
        norm = self.norm(config, dtype)
        scale = self.scale(config, dtype) if self.scale else config.multipliers.embedding
        patterns: dict[Hashable, Pattern] = {}
        return [
            unit_spec(
                "model.embed_tokens",
                partial(self.embedding, config, dtype, scale=scale),
                partial(_name_outside_layers, {"embed_tokens": facts.table}, facts),
                formats=formats,
            ),
            *(
                self._layer(config, dtype, index, facts, formats, patterns)
                for index in range(config.num_hidden_layers)
            ),
            *([self._mtp_head(config, dtype, facts, formats)] if config.mtp else ()),
            _head_spec(partial(self.head, config, dtype, norm=norm), facts, formats),
        ]

    def _layer(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        index: int,
        facts: Facts,
        formats: FormatOf,
        patterns: dict[Hashable, Pattern],
    ) -> UnitSpec:
        stored = f"{facts.layers}.{index // self.parts}"
        made = self.made_apart if facts.apart else self.made
        build, kind = partial(self._module, config, dtype, index), config.kind_of_layer(index)
        own = self.rename_of_layer(config, index) if self.rename_of_layer else {}
        names = {**self.rename, **own}
        if kind not in patterns:
            patterns[kind] = Pattern(build)
        return unit_spec(
            f"model.layers.{index}",
            build,
            partial(self._stored_name, layer=stored, facts=facts, names=names),
            formats=formats,
            layer=index,
            kind=kind,
            made=None if made is None else partial(made, config, dtype, stored),
            pattern=patterns[kind],
            unused=tuple(f"{stored}.{part}" for part in self.unused(config, index)),
            fused=[
                replace(each, name=f"{stored}.{each.name}")
                for each in (() if facts.apart else self.fused(config))
            ],
        )

    def _mtp_head(
        self, config: ModelConfig, dtype: torch.dtype, facts: Facts, formats: FormatOf
    ) -> UnitSpec:
        return mtp_unit(
            config,
            dtype,
            partial(self._module, config, dtype, config.num_hidden_layers),
            self.norm(config, dtype),
            facts=facts,
            formats=formats,
            stored_name=partial(_renamed, names=self.rename),
            made=self.made_apart if facts.apart else self.made,
        )

    def _module(self, config: ModelConfig, dtype: torch.dtype, index: int) -> nn.Module:
        heads = {} if self.head_norm is None else {"head_norm": self.head_norm(config, dtype)}
        attention = self.attention(config, dtype, layer=index, **heads)
        of_layer = self.mlp_of_layer
        mlp = of_layer(config, dtype, index) if of_layer else self.mlp(config, dtype)
        return self.layer(config, dtype, attention, mlp, self.norm(config, dtype))

    def _stored_name(self, name: str, layer: str, facts: Facts, names: Mapping[str, str]) -> str:
        stored = _renamed(name, names)
        outside = name.startswith(self.outside)
        return _name_outside_layers({}, facts, stored) if outside else f"{layer}.{stored}"


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name


def _name_outside_layers(names: Mapping[str, str], facts: Facts, name: str) -> str:
    """The checkpoint's name of a part outside the layers: from ``names``, or as for the last
    norm."""
    return names.get(name) or f"{facts.norm.rpartition('.')[0]}.{name}"


def _head_spec(head: Callable[[], nn.Module], facts: Facts, formats: FormatOf) -> UnitSpec:
    names = {"norm.weight": f"{facts.norm}.weight", "norm.bias": f"{facts.norm}.bias"}
    names |= {"lm_head": facts.head, "lm_head.bias": facts.bias}
    tied = {"lm_head": (0, "embed_tokens")} if facts.head == facts.table else {}
    stored = partial(_name_outside_layers, names, facts)
    return unit_spec("lm_head", head, stored, formats=formats, tied=tied)


def matrix_slice(layer: nn.Module, name: str, of: Callable[[torch.Tensor], torch.Tensor]) -> Slice:
    """The matrix of a layer's module that ``of`` takes from a stored tensor; (outputs, inputs)."""
    linear = linear_at(layer, name)
    return Slice(name=name, of=of, format=linear.format, size=linear.size)
