"""Data that units pass on beside the hidden state, in one tensor with it: embeddings of later
layers, and keys and values that these attend to. So it reaches any device or host that has a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from exkv.batch import Batch
from exkv.checkpoint import ModelConfig
from exkv.checkpoint.shared_keys import SharedKeysConfig
from exkv.layers import Embedding, Linear, PlainModule
from exkv.layers.attention import Attend
from exkv.layers.shared_keys import KeysAndValues
from exkv.ops.activations import ACTIVATIONS

from .decoder import Decoder, Head, MakeNorm
from .gemma2 import root
from .units import UnitSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The layout of x (B, T, ``width``), in which ``hidden`` features are the hidden states.

    Attributes:
        per_layer: features of a layer's embedding.
        embeddings: where those of all layers are.
        keys: layer -> where its keys are, and their shape; its values follow directly.
    """

    width: int
    hidden: int
    per_layer: int
    embeddings: slice
    keys: Mapping[int, tuple[slice, tuple[int, int]]]

    @classmethod
    def of(cls, config: ModelConfig) -> Carried:
        settings = config.settings(SharedKeysConfig)
        hidden, per_layer = (
            settings.streams * config.hidden_size,
            settings.hidden_size_per_layer_input,
        )
        begin = hidden + per_layer * config.num_hidden_layers
        embeddings, keys = slice(hidden, begin), {}
        for layer in config.shared_keys:
            shape = config.heads(layer)
            keys[layer] = slice(begin, begin + math.prod(shape)), shape
            begin += 2 * math.prod(shape)
        return cls(
            width=begin, hidden=hidden, per_layer=per_layer, embeddings=embeddings, keys=keys
        )

    def hidden_of(self, x: Tensor) -> Tensor:
        """The hidden states (B, T, ``hidden``)."""
        return x[..., : self.hidden].contiguous()

    def embedding_of(self, x: Tensor, layer: int) -> Tensor:
        """The layer's embeddings (B, T, ``per_layer``)."""
        return x[..., self.embeddings].unflatten(-1, (-1, self.per_layer))[..., layer, :]

    def keys_of(self, x: Tensor, layer: int) -> KeysAndValues:
        """Keys and values that the layer has made."""
        at, shape = self.keys[layer]
        size = at.stop - at.start
        both = x[..., at.start : at.stop + size].split(size, -1)
        keys, values = (each.unflatten(-1, shape).contiguous() for each in both)
        return keys, values

    def joined(
        self,
        hidden: Tensor,
        x: Tensor,
        *,
        embeddings: Tensor | None = None,
        made: tuple[int, KeysAndValues] | None = None,
    ) -> Tensor:
        """Hidden states and what x carries (B, T, ``width``), with new embeddings of all layers, or
        with keys and values that a layer has made."""
        if self.width == self.hidden:
            return hidden
        out = x.new_empty(x.shape)
        out[..., : self.hidden] = hidden
        out[..., self.hidden :] = x[..., self.hidden :]
        if embeddings is not None:
            out[..., self.embeddings] = embeddings
        if made is not None:
            layer, both = made
            at, _ = self.keys[layer]
            size = at.stop - at.start
            for begin, each in zip((at.start, at.stop), both, strict=True):
                out[..., begin : begin + size] = each.flatten(-2)
        return out


#: GGUF names of the parts of layers' embeddings, in layers and outside.
GGUF_NAMES = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GGUF_ENDS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
GGUF_SIZES = {"per_layer_token_embd.weight": "vocab_size_per_layer_input"}
GGUF_METADATA = {
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}


class CarryingEmbedding(PlainModule):
    """The embedding table, and the table of the layers' own embeddings; ids (B, T) -> (B, T,
    width).

    Args:
        scale: factor of embeddings from the first.
        scale_of_layers: factor of those from the second.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, scale: float, scale_of_layers: float
    ) -> None:
        super().__init__()
        settings = config.settings(SharedKeysConfig)
        self.carried = Carried.of(config)
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, dtype=dtype, scale=scale
        )
        self.rows, size = settings.vocab_size_per_layer_input, self.carried.per_layer
        self.embed_tokens_per_layer = None
        if size:
            shape = self.rows, size * config.num_hidden_layers
            self.embed_tokens_per_layer = Embedding(*shape, dtype=dtype, scale=scale_of_layers)

    def forward(self, ids: Tensor, batch: Batch, cache: Attend | None) -> Tensor:
        tokens = self.embed_tokens(ids)
        x = tokens.new_zeros((*ids.shape, self.carried.width))
        x[..., : tokens.shape[-1]] = tokens
        del tokens  # free it before the layers' own
        if self.embed_tokens_per_layer is not None:
            known = torch.where(ids < self.rows, ids, 0)  # as transformers does
            x[..., self.carried.embeddings] = self.embed_tokens_per_layer(known)
        return x


def carrying(decoder: Decoder) -> Callable[[ModelConfig, torch.dtype], list[UnitSpec]]:
    """``Family.units`` for a decoder whose layers may carry something: its embedding and head then
    carry it, too."""

    def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
        if config.handed_on == config.hidden_size:
            return decoder(config, dtype)
        size = config.settings(SharedKeysConfig).hidden_size_per_layer_input
        embedding = partial(CarryingEmbedding, scale_of_layers=root(size, dtype))
        return replace(decoder, embedding=embedding, unused=_unused)(config, dtype)

    return units


def _unused(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Parts that published checkpoints have in layers that use others' keys and values."""
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    given = config.kv_source(layer) is not None
    return tuple(f"self_attn.{part}" for part in parts) if given else ()


class CarryingHead(Head):
    """A head that extracts the hidden state from the carried tensor."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(config, dtype, **options)
        self.carried = Carried.of(config)

    def forward(self, x: Tensor, batch: Batch, cache: Attend | None) -> Tensor:
        return super().forward(self.carried.hidden_of(x), batch, cache)


class LayerEmbeddings(PlainModule):
    """What the first layer adds to the layers' embeddings: a projection of the token embedding."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, norm: MakeNorm) -> None:
        super().__init__()
        size = config.settings(SharedKeysConfig).hidden_size_per_layer_input
        outputs = size * config.num_hidden_layers
        self.projection = Linear(config.hidden_size, outputs, bias=False, dtype=dtype)
        self.norm, self.size = norm(size), size
        self.scale = config.hidden_size**-0.5

    def forward(self, tokens: Tensor, looked_up: Tensor) -> Tensor:
        """tokens (B, T, hidden), looked_up (B, T, layers * size) -> the same as looked_up."""
        projected = self.projection(tokens).mul_(self.scale).unflatten(-1, (-1, self.size))
        return self.norm(projected).flatten(-2).add_(looked_up).mul_(2**-0.5)


class LayerEmbedding(PlainModule):
    """What a layer makes of its embedding, gated by the hidden state."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, norm: MakeNorm) -> None:
        super().__init__()
        hidden, size = (
            config.hidden_size,
            config.settings(SharedKeysConfig).hidden_size_per_layer_input,
        )
        self.gate = Linear(hidden, size, bias=False, dtype=dtype)
        self.projection = Linear(size, hidden, bias=False, dtype=dtype)
        self.norm, self.act = norm(hidden), config.hidden_act

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """hidden (B, T, hidden), embedding (B, T, size) -> (B, T, hidden)."""
        gate = self.gate(hidden)
        ACTIVATIONS[self.act].gate(gate, embedding.contiguous())
        return self.norm(self.projection(gate))


#: Parts of layers -> their names in checkpoints; those of the first layer are outside the layers.
NAMES = {
    "layer_embeddings.projection": "per_layer_model_projection",
    "layer_embeddings.norm": "per_layer_projection_norm",
    "layer_embedding.gate": "per_layer_input_gate",
    "layer_embedding.projection": "per_layer_projection",
    "layer_embedding.norm": "post_per_layer_input_norm",
}
OUTSIDE = ("layer_embeddings.",)
