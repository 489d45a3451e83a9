"""DeepSeek-V2 and V2-Lite (DeepSeek, 2024): latent attention, routing by softmax scores of the
groups with the best single expert, shared experts, and dense layers first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from exkv.checkpoint import ModelConfig, RoutedExpertsConfig
from exkv.checkpoint.families import Family
from exkv.layers import LatentAttention, mixture_or_mlp, routed_experts
from exkv.weights import Source, formats_of
from exkv.weights.floats import FLOATS

from . import qwen2_moe
from .decoder import Decoder

_METHODS = ("greedy", "group_limited_greedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyExpertsConfig(RoutedExpertsConfig):
    """Experts of all groups ("greedy"), or of the ``topk_group`` groups with the best single ones
    ("group_limited_greedy")."""

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


def key_and_value_ups(
    config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module
) -> list[Source]:
    """``key_up`` and ``value_up`` of the layer that the checkpoint calls ``name``, where they are
    one matrix, each head's keys before its values. In whatever format that is stored, they are
    floats here: products with a query's heads need other rows of it than a linear layer does."""
    sizes, heads = config.latent, config.num_attention_heads
    assert sizes is not None, "checked when the config was made"
    parts, rank = (sizes.qk_nope_head_dim, sizes.v_head_dim), sizes.kv_lora_rank
    matrix, size = f"{name}.self_attn.kv_b_proj", (heads * sum(parts), rank)
    format = formats_of(config, dtype)(matrix, size)
    expected = format.stored(size)
    if expected.keys() == {"weight"} and dtype in expected["weight"].dtypes:
        format = FLOATS[dtype]  # and not one that floats are converted to

    def convert(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            tensors = format.convert({each: stored[f"{matrix}.{each}"] for each in expected})
        except ValueError as error:
            raise ValueError(f"{matrix}: {error}") from None
        of_heads = format.dequantize(tensors, dtype).view(heads, sum(parts), rank)
        keys, values = of_heads.split(parts, dim=1)
        ups = keys.transpose(1, 2).contiguous(), values.contiguous()
        return dict(zip(_UPS, ups, strict=True))

    stored = {f"{matrix}.{each}": tensor for each, tensor in expected.items()}
    return [Source(stored=stored, parameters=_UPS, convert=convert)]


_UPS = ("self_attn.key_up", "self_attn.value_up")
#: Checkpoints name an expert's matrices like those of an MLP.
NAMES = {**qwen2_moe.NAMES, "mlp.shared_expert.": "mlp.shared_experts."}

FAMILY = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    units=Decoder(
        attention=LatentAttention,
        mlp_of_layer=partial(mixture_or_mlp, experts=partial(routed_experts, exact=True)),
        rename=NAMES,
        made=key_and_value_ups,
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
)
