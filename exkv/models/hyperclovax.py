"""HyperCLOVA X SEED Think (Naver, 2025): a Granite with norms on both sides of attention and MLP,
whose logits are multiplied, and not divided, by ``logits_scaling``."""

from dataclasses import replace

from . import granite
from .decoder import Decoder, SandwichLayer

FAMILY = replace(
    granite.FAMILY,
    architecture="HyperCLOVAXForCausalLM",
    model_type="hyperclovax",
    units=Decoder(
        layer=SandwichLayer,
        rename={
            "post_attention_layernorm": "post_norm1",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_norm2",
        },
    ),
    defaults={},
    refuses={"use_post_norm": True},
    multipliers={
        "embedding": "embedding_multiplier",
        "attention": "attention_multiplier",
        "residual": "residual_multiplier",
        "logits": "logits_scaling",
    },
    gguf=None,
)
