"""DeepSeek-V2 and V2-Lite (DeepSeek, 2024): latent attention, routing by softmax scores of the
groups with the best single expert, shared experts, and dense layers first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from exkv.checkpoint import (
    ExpectedTensor,
    LatentHeads,
    ModelConfig,
    RoutedExpertsConfig,
    has_tensors,
)
from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import EXPERTS, GGUFFamily, shared
from exkv.checkpoint.value_checks import is_int, is_number
from exkv.layers import MLP, LatentAttention, mixture_or_mlp, routed_experts
from exkv.layers.latent import EachHead
from exkv.weights import FormatOf, Source, WeightFormat, formats_of
from exkv.weights.floats import FLOATS, FloatFormat

from . import qwen2_moe
from .decoder import Decoder
from .units import UnitSpec

_METHODS = ("greedy", "group_limited_greedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyExpertsConfig(RoutedExpertsConfig):
    """Experts of all groups ("greedy"), or of the ``topk_group`` groups with the best single
    experts ("group_limited_greedy")."""

    topk_method: str = "greedy"
    best_of_group = 1

    def __post_init__(self) -> None:
        if self.topk_method not in _METHODS:
            raise ValueError(
                f"topk_method {self.topk_method!r} is unknown; exkv knows {', '.join(_METHODS)}"
            )
        if self.topk_method == "greedy":
            object.__setattr__(self, "n_group", 1)
            object.__setattr__(self, "topk_group", 1)
        RoutedExpertsConfig.__post_init__(self)


#: From config, dtype, a layer's name in the checkpoint and its module, to sources.
_Made = Callable[[ModelConfig, torch.dtype, str, nn.Module], list[Source]]


def latent_units(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    mlp_of_layer: Callable[[ModelConfig, torch.dtype, int], MLP],
    rename: Mapping[str, str],
    rename_of_layer: Callable[[ModelConfig, int], Mapping[str, str]] | None = None,
    attention: Callable[..., nn.Module] = LatentAttention,
    beside: _Made = lambda config, dtype, name, layer: [],
    beside_apart: _Made = lambda config, dtype, name, layer: [],
) -> list[UnitSpec]:
    """The units of a model with latent attention.

    Args:
        attention: see :class:`Decoder`; may be of another kind in some layers.
        beside: makes the other parameters that are stored in larger tensors, except in GGUF files.
        beside_apart: makes the other parameters that GGUF files store in several tensors.
    """
    of_attention = ups_of(config, dtype)

    def ups(config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module) -> list[Source]:
        attention = layer.get_submodule("self_attn")
        if not isinstance(attention, LatentAttention):
            return []
        return of_attention(f"{name}.self_attn", attention)

    def made(config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module) -> list[Source]:
        return [*ups(config, dtype, name, layer), *beside(config, dtype, name, layer)]

    def made_apart(
        config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module
    ) -> list[Source]:
        return [*ups(config, dtype, name, layer), *beside_apart(config, dtype, name, layer)]

    decoder = Decoder(
        attention=attention,
        mlp_of_layer=mlp_of_layer,
        rename={**rename, **_OF_HEADS},
        rename_of_layer=rename_of_layer,
        made=made,
        made_apart=made_apart,
    )
    return decoder(config, dtype)


def ups_of(
    config: ModelConfig, dtype: torch.dtype
) -> Callable[[str, LatentAttention], list[Source]]:
    """From an attention module's name in the checkpoint, and the module, to the sources of
    ``key_up`` and ``value_up``."""
    formats = formats_of(config, dtype)
    layer = next((i for i in range(config.num_hidden_layers) if not config.state(i)), 0)
    apart = has_tensors(config, f"model.layers.{layer}.self_attn.k_b_proj.weight")
    return partial(_ups_of_heads if apart else _ups_in_one, config, dtype, formats)


def _ups_in_one(
    config: ModelConfig,
    dtype: torch.dtype,
    formats: FormatOf,
    attention: str,
    module: LatentAttention,
) -> list[Source]:
    """``key_up`` and ``value_up`` from one matrix, which has each head's keys before its values."""
    sizes, heads = _sizes(config)
    keys, both = sizes.qk_nope_head_dim, sizes.qk_nope_head_dim + sizes.v_head_dim
    parts = {
        _KEY_UP: lambda x: x.unflatten(0, (heads, both))[:, :keys].transpose(1, 2).flatten(0, 1),
        _VALUE_UP: lambda x: x.unflatten(0, (heads, both))[:, keys:].flatten(0, 1),
    }
    shape = heads * both, sizes.kv_lora_rank
    return [_dequantized(f"{attention}.kv_b_proj", shape, formats, dtype, parts)]


def _ups_of_heads(
    config: ModelConfig,
    dtype: torch.dtype,
    formats: FormatOf,
    attention: str,
    module: LatentAttention,
) -> list[Source]:
    """Likewise from one matrix per head, as GGUF files have had both since April 2025: in the
    file's format if that can be split between heads."""
    sizes, heads = _sizes(config)
    keys = heads, sizes.kv_lora_rank, sizes.qk_nope_head_dim
    values = heads, sizes.v_head_dim, sizes.kv_lora_rank
    return [
        _of_heads(f"{attention}.k_b_proj", keys, formats, dtype, _KEY_UP, module.key_up),
        _of_heads(f"{attention}.v_b_proj", values, formats, dtype, _VALUE_UP, module.value_up),
    ]


def _of_heads(
    matrix: str,
    shape: tuple[int, int, int],
    formats: FormatOf,
    dtype: torch.dtype,
    parameter: str,
    module: EachHead,
) -> Source:
    """One stored matrix per head."""
    format, name = module.format, parameter.removesuffix(".weight")
    if isinstance(format, FloatFormat):
        return _dequantized(matrix, shape, formats, dtype, {parameter: lambda x: x.flatten(0, 1)})
    stored = _stored(matrix, shape, format)

    def convert(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        flat = {each.rpartition(".")[2]: found[each].flatten(0, 1) for each in stored}
        return {f"{name}.{each}": x for each, x in format.convert(flat).items()}

    parameters = tuple(f"{name}.{each}" for each in format.names)
    return Source(stored=stored, parameters=parameters, convert=convert)


def _stored(matrix: str, shape: tuple[int, ...], format: WeightFormat) -> dict[str, ExpectedTensor]:
    """The tensors of a matrix of this shape, or of one per head."""
    expected = format.stored((math.prod(shape[:-1]), shape[-1]))
    return {
        f"{matrix}.{each}": replace(x, shape=(*shape[:-1], *x.shape[1:])) if shape[2:] else x
        for each, x in expected.items()
    }


def _sizes(config: ModelConfig) -> tuple[LatentHeads, int]:
    assert config.latent is not None, "checked when the config was made"
    return config.latent, config.num_attention_heads


def _dequantized(
    matrix: str,
    shape: tuple[int, ...],
    formats: FormatOf,
    dtype: torch.dtype,
    parts: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
) -> Source:
    """Parameters that are parts of a stored matrix of this shape, or of one per head. Whatever its
    stored format, they are floats here: products with a query's heads need other rows of it than a
    linear layer does."""
    size = math.prod(shape[:-1]), shape[-1]
    format = formats(matrix, size)
    expected, stored = format.stored(size), _stored(matrix, shape, format)
    if expected.keys() == {"weight"} and dtype in expected["weight"].dtypes:
        format = FLOATS[dtype]  # not one that floats are converted to
    of_heads = len(shape) > 2

    def convert(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        flat = {each: found[f"{matrix}.{each}"] for each in expected}
        if of_heads:
            flat = {each: x.flatten(0, 1) for each, x in flat.items()}
        try:
            whole = format.dequantize(format.convert(flat), dtype).view(shape)
        except ValueError as error:
            raise ValueError(f"{matrix}: {error}") from None
        return {name: of(whole).contiguous() for name, of in parts.items()}

    return Source(stored=stored, parameters=tuple(parts), convert=convert)


_KEY_UP, _VALUE_UP = "self_attn.key_up.weight", "self_attn.value_up.weight"
#: GGUF names in files with one matrix per head.
_OF_HEADS = {"self_attn.key_up": "self_attn.k_b_proj", "self_attn.value_up": "self_attn.v_b_proj"}
#: Checkpoints name an expert's matrices like those of an MLP.
NAMES = {**qwen2_moe.NAMES, "mlp.shared_expert.": "mlp.shared_experts."}


def of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of heads from the lengths of keys and values: those of all heads, which files since
    April 2025 state beside those of the single head that llama.cpp stores. YaRN's temperature is
    stated as a tenth of its value in config.json."""
    rotated = values.get("qk_rope_head_dim")
    keys = values.get("key_length_mla", values.get("head_dim"))
    scaling, tenth = values.get("rope_scaling"), values.get("log_multiplier")
    if scaling and tenth is not None and is_number(tenth):
        weight = round(10 * tenth, 6)
        scaling = {**scaling, "mscale": weight, "mscale_all_dim": weight}
    return {
        "q_lora_rank": values.get("q_lora_rank"),
        "qk_nope_head_dim": keys - rotated if is_int(keys) and is_int(rotated) else None,
        "v_head_dim": values.get("value_length_mla", values.get("value_length")),
        "rope_scaling": scaling,
        "n_group": values.get("n_group", 1),
        "topk_group": values.get("topk_group", 1),
        "first_k_dense_replace": values.get("first_k_dense_replace", 0),
        **dict.fromkeys(("head_dim", "num_key_value_heads", "partial_rotary_factor")),
        **dict.fromkeys(_OF_GGUF.values()),
    }


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    groups = values.get("n_group", 1)
    greedy = "greedy" if groups == 1 else "group_limited_greedy"
    return {**of_gguf(values), "topk_method": greedy}


#: Settings found only in a file's metadata.
_OF_GGUF = {
    "attention.key_length_mla": "key_length_mla",
    "attention.value_length": "value_length",
    "attention.value_length_mla": "value_length_mla",
    "rope.scaling.yarn_log_multiplier": "log_multiplier",
}
GGUF = GGUFFamily(
    architecture="deepseek2",
    names={
        **EXPERTS,
        **shared("mlp.shared_experts"),
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
    },
    metadata={
        **_OF_GGUF,
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.q_lora_rank": "q_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim",
    },
    marks={"expert_gating_func": (0, 1)},  # none, softmax
    assumed={"expert_group_count": "tokens take experts of all groups"},
    additions=_of_gguf,
)

FAMILY = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    units=partial(
        latent_units,
        mlp_of_layer=partial(mixture_or_mlp, experts=partial(routed_experts, exact=True)),
        rename=NAMES,
    ),
    defaults={
        "vocab_size": 102400,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
    },
    reads=("attention_bias", "mlp_bias"),
    refuses={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
    specific=GreedyExpertsConfig,
    rope_interleaved=True,
    latent=True,
    aliases={"num_local_experts": "n_routed_experts"},
    gguf=GGUF,
)
