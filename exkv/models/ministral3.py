"""Ministral 3 (Mistral AI, 2025): a Mistral with YaRN, whose queries grow by steps beyond the
trained length."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from exkv.checkpoint import ModelConfig, QueryScaling, windows
from exkv.checkpoint.families import Family, beside_images
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.checkpoint.value_checks import check_size, is_number
from exkv.layers import Attention, ScaledQueryAttention

from .decoder import Decoder

#: Defaults for a config.json without rotary settings.
_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


_TRAINED = "original_max_position_embeddings"


def query_scaling(
    values: Mapping[str, Any], *, unstated: Mapping[str, Any] = _ROPE
) -> QueryScaling | None:
    """Steps of the trained length; none without ``llama_4_scaling_beta``. ``unstated`` applies if
    there are no rotary settings."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or unstated
    growth = rope.get("llama_4_scaling_beta")
    if not growth:
        return None
    if not is_number(growth) or growth < 0:
        raise ValueError(f"llama_4_scaling_beta must be a positive number, not {growth!r}")
    length: Any = rope[_TRAINED] if _TRAINED in rope else values.get(_TRAINED)
    check_size(_TRAINED, length)
    return QueryScaling(growth=growth, length=length)


def _attention(config: ModelConfig, dtype: torch.dtype, *, layer: int) -> Attention:
    kind = ScaledQueryAttention if config.query_scaling else Attention
    return kind(config, dtype, layer=layer)


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN's temperature and the queries' growth belong to the scaling."""
    beside = {key: values.get(key) for key in ("mscale_all_dim", "llama_4_scaling_beta")}
    scaling = {**values.get("rope_scaling", {}), **beside, "mscale": beside["mscale_all_dim"]}
    return {"rope_scaling": scaling, **dict.fromkeys(beside)}


FAMILY = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    units=Decoder(attention=_attention),
    defaults={
        "vocab_size": 131072,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 11,
    },
    windows=windows.everywhere,
    query_scaling=query_scaling,
    rope_theta=1e6,
    rope_parameters=_ROPE,
    gguf=GGUFFamily(
        architecture="mistral3",
        interleaved=True,
        metadata={
            "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
            "attention.temperature_scale": "llama_4_scaling_beta",
        },
        additions=_of_gguf,
    ),
)
#: The text model of a vision-language model; in Mistral Small 3.1 and 3.2 it is a Mistral.
WITH_IMAGES = beside_images(
    FAMILY,
    "Mistral3ForConditionalGeneration",
    "mistral3",
    defaults=FAMILY.defaults
    | {
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "pad_token_id": None,
    },
    query_scaling=partial(query_scaling, unstated={}),
    rope_theta=1e9,
    rope_parameters={},
)
