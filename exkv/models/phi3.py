"""Phi-3, Phi-3.5 and Phi-4 (mini and 14B): a Llama with fused projections, in memory too.

The mini ones for long texts have longrope, whose frequencies depend on how long a text becomes; see
``exkv/models/transformer.py`` for the consequences for keys that were stored before.
"""

from exkv.checkpoint import windows
from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import FusedAttention, FusedGatedMLP

from .decoder import Decoder

FAMILY = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    units=Decoder(attention=FusedAttention, mlp=FusedGatedMLP),
    defaults={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
        "pad_token_id": 32000,
    },
    windows=windows.everywhere,
    partial_rotary_factor=1.0,
    rope_aliases={"su": "longrope", "yarn": "longrope"},
    original_max_position_embeddings=4096,
    gguf=GGUFFamily(
        architecture="phi3",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
)
