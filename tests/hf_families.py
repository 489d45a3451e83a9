"""Tiny configs of transformers' encoder-decoders and of its models with states of one size."""

from __future__ import annotations

from typing import Any

import transformers

DECODER = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
BOTH = {
    "vocab_size": 320,
    "d_model": 64,
    **{f"{side}_{name}": n for side in ("encoder", "decoder")
       for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96))},
}  # fmt: skip
WHISPER = {
    **BOTH,
    "num_mel_bins": 16,
    "max_source_positions": 50,
    "max_target_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
T5 = {"vocab_size": 320, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
QWEN3_NEXT = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
FALCON_H1 = {
    "num_hidden_layers": 2,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
JAMBA = {
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
}
MAMBA = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}

#: Class of the model -> config.
ENCODER_DECODERS = {
    "WhisperForConditionalGeneration": lambda: transformers.WhisperConfig(**WHISPER),
    "BartForConditionalGeneration": lambda: transformers.BartConfig(**BOTH),
    "T5ForConditionalGeneration": lambda: transformers.T5Config(**T5, decoder_start_token_id=0),
}
WITH_STATES = {
    "MambaForCausalLM": lambda: transformers.MambaConfig(**MAMBA),
    "Mamba2ForCausalLM": lambda: transformers.Mamba2Config(
        **MAMBA, num_heads=8, head_dim=16, n_groups=1, chunk_size=8
    ),
    "JambaForCausalLM": lambda: transformers.JambaConfig(**DECODER, **HEADS, **JAMBA),
    "Qwen3NextForCausalLM": lambda: transformers.Qwen3NextConfig(**DECODER, **HEADS, **QWEN3_NEXT),
    "FalconH1ForCausalLM": lambda: transformers.FalconH1Config(**DECODER, **HEADS, **FALCON_H1),
}


def given(model: transformers.PreTrainedModel, cache: Any) -> dict[str, Any]:
    """A cache as an argument of ``generate`` and ``forward``, whose name changed in 5.24."""
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24):
        return {"cache": cache}
    return {"cache_params" if "Mamba" in type(model).__name__ else "past_key_values": cache}
