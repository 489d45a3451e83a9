"""MiniMax-M2 (MiniMax, 2025): norms over all heads' queries and keys together, rotary
positions in part of each head, and routing by sigmoid scores with a correction bias."""

from __future__ import annotations

from functools import partial

from exkv.checkpoint.families import ExpertsConfig, Family
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import Experts, WideNormAttention

from .decoder import Decoder, rms_norm

FAMILY = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    units=Decoder(
        attention=WideNormAttention,
        head_norm=rms_norm,
        mlp=partial(Experts, sigmoid=True, corrected=True),
        rename={"mlp.correction": "mlp.e_score_correction_bias", "mlp.": "block_sparse_moe."},
    ),
    defaults={
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "bos_token_id": 200034,
        "eos_token_id": 200020,
    },
    specific=ExpertsConfig,
    rope_theta=5e6,
    partial_rotary_factor=1.0,
    rotary_dim="rotary_dim",
    gguf=GGUFFamily(
        architecture="minimax-m2",
        names={
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
    ),
)
