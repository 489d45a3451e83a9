"""Gemma 2 (Gemma Team, 2024): windows in every other layer, norms before and after attention and
MLP, soft caps on scores and logits, and embeddings scaled by the square root of their size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from exkv.checkpoint import ModelConfig, windows
from exkv.checkpoint.families import Family, Specific
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.checkpoint.value_checks import set_floats
from exkv.layers import Attention

from .decoder import Decoder, Head, MakeNorm, SandwichLayer, rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(Specific):
    """Gemma's scores are divided by the square root of ``query_pre_attn_scalar``; a soft cap c, of
    scores or of logits, bounds x as c * tanh(x / c); None for none."""

    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        set_floats(self, ("query_pre_attn_scalar",))
        set_floats(self, ("attn_logit_softcapping", "final_logit_softcapping"), null=True)


#: The factor is 1 + weight.
gemma_norm = partial(rms_norm, offset=True)


def gemma_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """The square root of the embeddings' size, rounded to the dtype as the model was trained."""
    return root(config.hidden_size, dtype)


def root(size: int, dtype: torch.dtype) -> float:
    """The square root of a size, rounded to the dtype."""
    return torch.tensor(size**0.5).to(dtype).item()


def _attention(config: ModelConfig, dtype: torch.dtype, **options: Any) -> Attention:
    settings = config.settings(GemmaConfig)
    scale, softcap = settings.query_pre_attn_scalar**-0.5, settings.attn_logit_softcapping or 0.0
    return Attention(config, dtype, scale=scale, softcap=softcap, **options)


def _head(config: ModelConfig, dtype: torch.dtype, norm: MakeNorm) -> Head:
    softcap = config.settings(GemmaConfig).final_logit_softcapping
    return Head(config, dtype, norm=norm, softcap=softcap)


DECODER = Decoder(
    attention=_attention,
    layer=SandwichLayer,
    norm=gemma_norm,
    scale=gemma_scale,
    head=_head,
)


def gguf_scalar(values: Mapping[str, Any], largest: int) -> dict[str, Any]:
    """``query_pre_attn_scalar``, which GGUF leaves out: a head's features, except in the 27B, the
    model with ``largest`` layers, where it is ``hidden_size / heads``."""
    if values["num_hidden_layers"] != largest:
        return {"query_pre_attn_scalar": values["head_dim"]}
    return {"query_pre_attn_scalar": values["hidden_size"] // values["num_attention_heads"]}


GGUF = GGUFFamily(
    architecture="gemma2",
    names={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    norm_offset=1.0,
    metadata={
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope.freq_base_swa": "rope_local_base_freq",
    },
    additions=lambda values: gguf_scalar(values, 46),
)

FAMILY = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    units=DECODER,
    defaults={
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
    windows=windows.every_other,
    reads=("attention_bias",),
    act_key="hidden_activation",
    specific=GemmaConfig,
    gguf=GGUF,
)
