"""Granite 3 and 4 dense (IBM, 2024): a Llama with multipliers of embeddings, scores, residuals and
logits, which the config gives."""

from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily

from .decoder import Decoder

#: Factors in GGUF files -> keys of config.json.
GGUF_FACTORS = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}

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
    gguf=GGUFFamily(architecture="granite", interleaved=True, metadata=GGUF_FACTORS),
)
