"""Tiny random checkpoints, written by transformers: real files in the real layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sentencepiece
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from exkv.checkpoint.families import FAMILIES

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

#: 4 layers, 8 query heads, 2 key heads: a few hundred kilobytes.
SIZES = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 224,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
#: Wider than hidden_size / num_attention_heads, for the architectures that know the key.
HEAD = {"head_dim": 32}
#: Shorter than the tests' prompts, so that every window is crossed.
WINDOW = 24

#: A config.json in the sizes of Llama 2 70B, with a longer context: to plan, never to load.
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}


def llama(rope: str = "default", **changes: Any) -> LlamaConfig:
    scaling = {} if ROPE[rope] is None else {"rope_scaling": dict(ROPE[rope])}
    return LlamaConfig(**{**SIZES, **HEAD, "tie_word_embeddings": False, **scaling, **changes})


def mistral(**changes: Any) -> MistralConfig:
    return MistralConfig(**{**SIZES, **HEAD, "sliding_window": WINDOW, **changes})


def mixtral(**changes: Any) -> MixtralConfig:
    small = {"num_local_experts": 4, "intermediate_size": 96}
    return MixtralConfig(**{**SIZES, **HEAD, **small, **changes})


def qwen2(**changes: Any) -> Qwen2Config:
    return Qwen2Config(**{**SIZES, **changes})


def qwen3(**changes: Any) -> Qwen3Config:
    return Qwen3Config(**{**SIZES, **HEAD, **changes})


def phi3(**changes: Any) -> Phi3Config:
    return Phi3Config(**{**SIZES, **changes})


def longrope(width: int = 8, trained: int = 64, **changes: Any) -> dict[str, Any]:
    """Fields for ``phi3``: factors for ``width`` pairs, other ones beyond ``trained`` tokens."""
    return {
        "original_max_position_embeddings": trained,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1 + 0.05 * i for i in range(width)],
            "long_factor": [2 + 0.5 * i for i in range(width)],
            **changes,
        },
    }


def gemma2(**changes: Any) -> Gemma2Config:
    """Soft-caps so low that they bend the tiny model's scores and logits."""
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    other = {"sliding_window": WINDOW, "query_pre_attn_scalar": 48}
    return Gemma2Config(**{**SIZES, **HEAD, **caps, **other, "pad_token_id": 0, **changes})


def gemma3(**changes: Any) -> Gemma3TextConfig:
    layers = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    other = {"sliding_window": WINDOW, "query_pre_attn_scalar": 48, "pad_token_id": 0}
    fields = {**SIZES, **HEAD, **other, "layer_types": layers, "rope_parameters": rope}
    return Gemma3TextConfig(**{**fields, **changes})


#: Architecture -> a tiny config of it.
TINY = {
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}
if MISSING := sorted(set(FAMILIES) - set(TINY)):
    raise LookupError(
        f"{', '.join(MISSING)} of exkv/checkpoint/families.py: add to TINY in {__file__} a "
        "function that makes a tiny config with transformers' class: see CONTRIBUTING.md, Add an "
        "architecture"
    )


def reference(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """transformers' model with random weights that are large enough to make answers differ, and
    random norms and biases, so that none of them can be forgotten unnoticed."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif "norm" in name:
                # Gemma's factor is 1 + weight.
                low = -0.5 if "gemma" in config.model_type else 0.5
                parameter.uniform_(low, low + 1)
            else:
                parameter.normal_(0, 0.06)
    return cast(model, dtype)


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with weights of this dtype. (``model.to(dtype)`` would round the rotary
    frequencies too, which loading a checkpoint does not.)"""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
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
