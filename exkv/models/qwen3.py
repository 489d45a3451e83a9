"""Qwen 3: a Llama with a norm over each head's queries and keys."""

from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily

from . import qwen2
from .decoder import Decoder, rms_norm

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    units=Decoder(head_norm=rms_norm),
    defaults=qwen2.FAMILY.defaults | {"head_dim": 128},
    windows=qwen2.late_layers,
    reads=("attention_bias",),
    gguf=GGUFFamily(architecture="qwen3"),
)
