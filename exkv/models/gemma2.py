"""Gemma 2 (Gemma Team, 2024): windows on every other layer, norms before and after attention and
MLP, soft-caps on scores and logits, and embeddings scaled by the root of their size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from exkv.checkpoint import ModelConfig, windows
from exkv.checkpoint.families import Family, Specific
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.checkpoint.value_checks import set_floats
from exkv.layers import Attention, GatedMLP

from .decoder import Head, SandwichLayer, TokenEmbedding, decoder_units, rms_norm
from .units import UnitSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(Specific):
    """Gemma's scores are divided by the root of ``query_pre_attn_scalar``; a soft-cap c bounds a
    number x as c * tanh(x / c), the scores' or the logits', None for none."""

    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        set_floats(self, ("query_pre_attn_scalar",))
        set_floats(self, ("attn_logit_softcapping", "final_logit_softcapping"), null=True)


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


def gguf_scalar(values: Mapping[str, Any], largest: int) -> dict[str, Any]:
    """What Gemma's scores are divided by the root of, which GGUF leaves out: a head's features,
    but ``hidden_size / heads`` in the 27B, which is the one of ``largest`` layers."""
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
    units=units,
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
