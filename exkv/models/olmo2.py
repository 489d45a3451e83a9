"""OLMo 2 (OLMo team, 2024): norms after attention and MLP in place of those before, and norms over
all heads' queries and keys together."""

from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import POST_NORMS, GGUFFamily
from exkv.layers import WideNormAttention

from .decoder import Decoder, PostNormLayer, rms_norm

FAMILY = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    units=Decoder(attention=WideNormAttention, layer=PostNormLayer, head_norm=rms_norm),
    defaults={
        "vocab_size": 50304,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 1,
        "bos_token_id": None,
        "eos_token_id": 50279,
    },
    reads=("attention_bias",),
    gguf=GGUFFamily(
        architecture="olmo2", names=POST_NORMS, marks={"attention.sliding_window": False}
    ),
)
