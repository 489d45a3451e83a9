"""The attention "exkv" compared with transformers' "eager": logits in float32."""

from __future__ import annotations

import pytest
import torch
import transformers
from hf_families import given
from tiny import TINY, reference
from transformers import DynamicCache

from exkv.integrations.transformers import HFCache

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CONFIGS = {
    "soft caps and windows": TINY["Gemma2ForCausalLM"],
    "learned sinks": lambda: transformers.GptOssConfig(**SMALL, **EXPERTS, sliding_window=8),
    "chunks": lambda: transformers.Llama4TextConfig(
        **SMALL, **EXPERTS, attention_chunk_size=8, intermediate_size_mlp=96
    ),
    "a scale of its own": lambda: transformers.GraniteConfig(
        **{k: v for k, v in SMALL.items() if k != "head_dim"}, attention_multiplier=0.05
    ),
    "an attention of its own": lambda: transformers.BloomConfig(
        vocab_size=320, hidden_size=64, n_layer=2, n_head=4
    ),
    "keys and values of unlike width": lambda: transformers.DeepseekV3Config(
        **{k: v for k, v in SMALL.items() if k not in ("head_dim", "num_key_value_heads")},
        num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=12, first_k_dense_replace=2,
    ),
}  # fmt: skip
IDS = torch.randint(3, 300, (3, 24), generator=torch.Generator().manual_seed(2))


def masks():
    """No padding; left padding, once in every row; and padding between two turns."""
    left = torch.ones_like(IDS)
    left[1, :5] = left[2, :11] = 0
    between = left.clone()
    between[0, 14:16] = 0
    every = torch.ones_like(IDS)
    every[:, :13] = every[1, 13] = every[2, 13:15] = 0
    return {"none": torch.ones_like(IDS), "left": left, "every row": every, "between": between}


#: Models with masks, windows, soft caps and learned sinks.
OLDER = ("soft caps and windows", "learned sinks")


def marked(name):
    return pytest.param(name, marks=pytest.mark.older if name in OLDER else ())


@pytest.fixture(scope="module", params=map(marked, CONFIGS))
def model(request):
    return reference(CONFIGS[request.param]())


@torch.no_grad()
def logits(model, mask, cache=None):
    """Logits of real tokens, in one call or in three with a cache."""
    pieces = [slice(0, 24)] if cache is None else [slice(0, 16), slice(16, 23), slice(23, 24)]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    out = [
        model(
            IDS[:, piece],
            attention_mask=mask[:, : piece.stop],
            position_ids=positions[:, piece],
            **given(model, cache),
        ).logits
        for piece in pieces
    ]
    return torch.cat(out, dim=1)[mask.bool()]


@pytest.mark.parametrize("padding", ["none", "left", "every row", "between"])
def test_logits_match_eager(model, padding):
    mask = masks()[padding]
    model.set_attn_implementation("eager")
    expected = logits(model, mask, DynamicCache(config=model.config))
    model.set_attn_implementation("exkv")
    caches = [None, DynamicCache(config=model.config), HFCache(model.config, "hybrid")]
    for cache in [*caches, HFCache(model.config, "dynamic"), HFCache(model.config, "offloaded")]:
        found = logits(model, mask, cache)
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
