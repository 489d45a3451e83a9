"""ERNIE 4.5 (Baidu, 2025), dense: a Llama whose positions rotate adjacent pairs, as its config
says."""

from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily

from .decoder import Decoder

FAMILY = Family(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    units=Decoder(),
    defaults={
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    reads=("attention_bias", "mlp_bias"),
    rope_theta=5e5,
    rope_interleaved=True,
    aliases={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
    gguf=GGUFFamily(architecture="ernie4_5"),
)
