"""OLMo hybrid as AI2's files state it, and with what it may have beside."""

from __future__ import annotations

import pytest
import torch
import transformers
from on_cpu import on_cpu
from safetensors.torch import load_file, save_file
from tiny import TINY, reference, save

from exkv import ModelConfig

NAME = "OlmoHybridForCausalLM"
IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))


def assert_same_logits(folder, theirs) -> None:
    model = on_cpu(folder)
    torch.testing.assert_close(model.forward(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_attending_layers_norms_have_ai2s_names_or_transformers(tmp_path):
    theirs = reference(TINY[NAME]())
    file = save(theirs, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    saved, stored = (f"model.layers.1.{x}.weight" for x in
                     ("feedforward_layer_norm", "post_attention_layernorm"))  # fmt: skip
    tensors[stored] = tensors.pop(saved)
    save_file(tensors, file)
    assert_same_logits(tmp_path, theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"linear_allow_neg_eigval": False},
    ],
    ids=str,
)
@torch.no_grad()
def test_positions_and_betas_are_as_stated(changes, tmp_path):
    theirs = reference(TINY[NAME](**changes))
    plain = reference(TINY[NAME]())
    assert not torch.allclose(theirs(IDS).logits, plain(IDS).logits, rtol=1e-2, atol=1e-2)
    assert_same_logits(save(theirs, tmp_path), theirs)


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"num_attention_heads": 20, "hidden_size": 640, "linear_num_value_heads": 40},
        {"linear_key_head_dim": 96, "linear_num_key_heads": 10},
        {"num_hidden_layers": 3},
    ],
    ids=str,
)
def test_sizes_and_layers_that_are_left_out_follow_from_attentions(stated):
    config = ModelConfig.from_dict({"architectures": [NAME], **stated})
    theirs = transformers.OlmoHybridConfig(**stated)
    assert list(config.layer_types) == theirs.layer_types
    for key in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
        assert getattr(config.specific, f"linear_{key}") == getattr(theirs, f"linear_{key}")


def test_sizes_that_are_none_are_refused():
    with pytest.raises(ValueError, match="linear_num_key_heads must be"):
        ModelConfig.from_dict({"architectures": [NAME], "linear_num_key_heads": 0})
