"""The Llama family: Llama 2 and 3.x, TinyLlama, and what shares their layout."""

from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily

from .decoder import Decoder

FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    units=Decoder(),
    reads=("attention_bias", "mlp_bias"),
    gguf=GGUFFamily(
        architecture="llama",
        interleaved=True,
        marks={"expert_count": False},
        doubts={
            r"mistral.*v0\.1": "its layers see 4096 tokens, which GGUF doesn't say: longer texts "
            "are answered otherwise than by the folder that it was made of"
        },
    ),
)
