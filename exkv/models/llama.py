"""The Llama family: Llama 2 and 3.x, TinyLlama, and what shares their layout."""

from __future__ import annotations

import torch
from torch import nn

from exkv.batch import Batch
from exkv.config import ModelConfig
from exkv.layers import Attention, Embedding, GatedMLP, Linear, RMSNorm
from exkv.layers.attention import Attend

from .units import UnitSpec, unit_spec


class LlamaEmbedding(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)

    def forward(self, ids: torch.Tensor, batch: Batch, cache: Attend | None) -> torch.Tensor:
        """ids (B, T) -> (B, T, hidden)."""
        return self.embed_tokens(ids)


class LlamaLayer(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.mlp = GatedMLP(config, dtype)

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend) -> torch.Tensor:
        """x (B, T, hidden) -> (B, T, hidden)."""
        x = x + self.self_attn(self.input_layernorm(x), batch, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaHead(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend | None) -> torch.Tensor:
        """x (B, T, hidden) -> logits (B, T, vocabulary)."""
        return self.lm_head(self.norm(x))


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """Embedding, ``num_hidden_layers`` layers, head; names as in Hugging Face's checkpoints."""
    return [
        unit_spec(
            "model.embed_tokens", lambda: LlamaEmbedding(config, dtype), lambda n: f"model.{n}"
        ),
        *(_layer(config, dtype, index) for index in range(config.num_hidden_layers)),
        _head(config, dtype),
    ]


def _layer(config: ModelConfig, dtype: torch.dtype, index: int) -> UnitSpec:
    name = f"model.layers.{index}"
    return unit_spec(name, lambda: LlamaLayer(config, dtype), lambda n: f"{name}.{n}", layer=index)


def _head(config: ModelConfig, dtype: torch.dtype) -> UnitSpec:
    names = {"norm.weight": "model.norm.weight", "lm_head.weight": "lm_head.weight"}
    tied = {}
    if config.tie_word_embeddings:
        names["lm_head.weight"] = "model.embed_tokens.weight"
        tied = {"lm_head.weight": (0, "embed_tokens.weight")}
    return unit_spec("lm_head", lambda: LlamaHead(config, dtype), names.__getitem__, tied=tied)
