"""GLM 4 9B (Zhipu AI, 2024: glm-4-9b-hf): a GLM-4-0414 without norms after attention and MLP."""

from dataclasses import replace
from functools import partial

from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import Attention, FusedGatedMLP

from . import glm4
from .decoder import Decoder

FAMILY = replace(
    glm4.FAMILY,
    architecture="GlmForCausalLM",
    model_type="glm",
    units=Decoder(attention=partial(Attention, out_bias=False), mlp=FusedGatedMLP),
    gguf=GGUFFamily(architecture="chatglm", names={"ffn_up": "mlp.gate_up_proj"}),
)
