"""VaultGemma (Google, 2025): a Gemma 2 without the norms after attention and MLP."""

from dataclasses import replace

from . import gemma2
from .decoder import DecoderLayer

FAMILY = replace(
    gemma2.FAMILY,
    architecture="VaultGemmaForCausalLM",
    model_type="vaultgemma",
    units=replace(
        gemma2.DECODER,
        layer=DecoderLayer,
        rename={"post_attention_layernorm": "pre_feedforward_layernorm"},
    ),
    gguf=None,
)
