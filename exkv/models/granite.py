"""Granite 3 and 4 dense (IBM, 2024): a Llama with multipliers of embeddings, scores, residuals and
logits, which the config gives."""

from exkv.checkpoint.families import Family

from .decoder import Decoder

FAMILY = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    units=Decoder(),
    defaults={"attention_multiplier": 1.0},
    reads=("attention_bias", "mlp_bias"),
    multipliers={
        "embedding": "embedding_multiplier",
        "attention": "attention_multiplier",
        "residual": "residual_multiplier",
        "logits_divisor": "logits_scaling",
    },
)
