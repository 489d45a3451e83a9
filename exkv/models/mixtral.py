"""Mixtral (Jiang et al., 2024): a Mistral with a mixture of experts in place of the MLP."""

from exkv.checkpoint import windows
from exkv.checkpoint.families import ExpertsConfig, Family
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import Experts

from . import mistral
from .decoder import Decoder

FAMILY = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    units=Decoder(mlp=Experts, rename={"mlp.": "block_sparse_moe."}),
    defaults=mistral.FAMILY.defaults | {"rms_norm_eps": 1e-5, "sliding_window": None},
    windows=windows.everywhere,
    specific=ExpertsConfig,
    rope_theta=1e6,
    gguf=GGUFFamily(
        architecture="llama",
        interleaved=True,
        names={
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        },
        marks={"expert_count": True},
    ),
)
