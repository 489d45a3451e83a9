"""Arcee (Arcee AI, 2025: AFM): a Llama with a squared-ReLU MLP without a gate."""

from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import PlainMLP

from .decoder import Decoder

FAMILY = Family(
    architecture="ArceeForCausalLM",
    model_type="arcee",
    units=Decoder(mlp=PlainMLP),
    defaults={
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "relu2",
        "bos_token_id": None,  # transformers' defaults are outside the vocabulary
        "eos_token_id": None,
    },
    reads=("attention_bias", "mlp_bias"),
    gguf=GGUFFamily(architecture="arcee", interleaved=True),
)
