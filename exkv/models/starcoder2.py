"""StarCoder 2 (BigCode, 2024): LayerNorms, biases everywhere, and an MLP without a gate."""

from exkv.checkpoint import windows
from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import PlainMLP

from .decoder import Decoder, layer_norm

FAMILY = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    units=Decoder(
        mlp=PlainMLP,
        norm=layer_norm,
        rename={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
    ),
    defaults={
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": True,
        "mlp_bias": True,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "bos_token_id": None,  # transformers' defaults are outside of its vocabulary's
        "eos_token_id": None,
    },
    windows=windows.everywhere,
    reads=("attention_bias", "mlp_bias"),
    aliases={
        "rms_norm_eps": "norm_epsilon",
        "attention_bias": "use_bias",
        "mlp_bias": "use_bias",
    },
    gguf=GGUFFamily(
        architecture="starcoder2", names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    ),
)
