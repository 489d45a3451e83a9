"""Helium (Kyutai, 2025): a Llama whose rotary positions rotate adjacent pairs."""

from functools import partial

from exkv.checkpoint.families import Family
from exkv.layers import Attention

from .decoder import Decoder

FAMILY = Family(
    architecture="HeliumForCausalLM",
    model_type="helium",
    units=Decoder(attention=partial(Attention, out_bias=False)),
    defaults={
        "vocab_size": 48000,
        "hidden_size": 2560,
        "intermediate_size": 7040,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
        "pad_token_id": 3,
    },
    reads=("attention_bias", "mlp_bias"),
    rope_theta=1e5,
    rope_interleaved=True,
)
