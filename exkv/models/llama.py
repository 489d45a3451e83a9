"""The Llama family: Llama 2 and 3.x, TinyLlama, and what shares their layout."""

from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily

from .decoder import Decoder

FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    units=Decoder(),
    reads=("attention_bias", "mlp_bias"),
    gguf=GGUFFamily(architecture="llama", interleaved=True),
)
