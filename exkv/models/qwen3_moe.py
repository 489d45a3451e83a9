"""Qwen3-MoE (Qwen, 2025): a Qwen 3 with a mixture of experts in place of the MLP."""

from dataclasses import replace
from functools import partial

from exkv.checkpoint import windows
from exkv.checkpoint.gguf.names import EXPERTS, GGUFFamily
from exkv.layers import Experts, mixture_or_mlp

from . import qwen2, qwen2_moe
from .decoder import Decoder, rms_norm

FAMILY = replace(
    qwen2_moe.FAMILY,
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    units=Decoder(
        head_norm=rms_norm,
        mlp_of_layer=partial(mixture_or_mlp, experts=Experts),
        rename=qwen2_moe.NAMES,
    ),
    defaults=qwen2.FAMILY.defaults
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "norm_topk_prob": False,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_local_experts": 128,
    },
    windows=lambda values: windows.every_layer(values, windows.window_in_use(values)),
    aliases={"num_local_experts": "num_experts"},
    gguf=GGUFFamily(
        architecture="qwen3moe",
        names=EXPERTS,
        # As in llama.cpp, which normalizes the weights of the chosen experts to one.
        additions=lambda values: {"norm_topk_prob": True},
    ),
)
