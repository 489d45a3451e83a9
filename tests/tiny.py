"""Tiny random checkpoints, written by transformers: real files in the real layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sentencepiece
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROPE = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def llama(rope: str = "default", **changes: Any) -> LlamaConfig:
    """A config of a few hundred kilobytes: 4 layers, 8 query heads, 2 key heads."""
    fields = {
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 224,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    scaling = {} if ROPE[rope] is None else {"rope_scaling": dict(ROPE[rope])}
    return LlamaConfig(**{**fields, **scaling, **changes})


def reference(
    config: LlamaConfig, dtype: torch.dtype = torch.float32, seed: int = 0
) -> LlamaForCausalLM:
    """transformers' model with random weights that are large enough to make answers differ, and
    random norms and biases, so that none of them can be forgotten unnoticed."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.06)
    return cast(model, dtype)


def cast(model: LlamaForCausalLM, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model with weights of this dtype. (``model.to(dtype)`` would round the rotary
    frequencies too, which loading a checkpoint does not.)"""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def save(model: LlamaForCausalLM, folder: Path, **options: Any) -> Path:
    """Write the checkpoint as users get it."""
    model.save_pretrained(folder, **options)
    return folder


def save_tokenizer(folder: Path, vocab_size: int = 320) -> Path:
    """A sentencepiece model beside the weights: bytes, a few pieces, <s> 1 and </s> 2."""
    text = ["the key is in the kitchen", "anna put the red ball in the garden", "where is it"]
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text * 20),
            model_writer=file,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    return folder
