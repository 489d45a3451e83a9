"""Kimi Linear as Moonshot's files state it, and what they may get wrong."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from on_cpu import on_cpu
from safetensors.torch import load_file, save_file
from tiny import TINY, reference, save

from exkv import ModelConfig

NAME = "KimiLinearForCausalLM"
IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))
#: What its config.json states about its layers.
LINEAR = {
    "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
    "kda_layers": [i for i in range(1, 28) if i % 4 and i != 27],
    **{"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4},
}


def read(**changes) -> ModelConfig:
    return ModelConfig.from_dict({"architectures": [NAME], **changes})


def test_an_object_of_linear_attentions_settings_is_read_as_transformers_does():
    stated = {**LINEAR, "head_dim": 64, "num_heads": 16, "short_conv_kernel_size": 3}
    config = read(linear_attn_config=stated, first_k_dense_replace=2)
    theirs = transformers.KimiLinearConfig(linear_attn_config=stated, first_k_dense_replace=2)
    assert list(config.layer_types) == theirs.layer_types
    dense = [config.specific.is_dense(layer) for layer in range(27)]
    assert dense == [kind == "dense" for kind in theirs.mlp_layer_types]
    assert [list(tensor.shape) for tensor in config.state(0)] == [[2, 3 * 16 * 64], [16, 64, 64]]
    assert config.state(3) is None


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ([1], "linear_attn_config must be an object"),
        ({**LINEAR, "kda_layers": LINEAR["kda_layers"][1:]}, "must be the layers from 1 to"),
        ({**LINEAR, "full_attn_layers": "4,8"}, "must be lists of integers"),
        ({**LINEAR, "head_dim": 0}, "linear_key_head_dim"),
    ],
)
def test_settings_that_name_no_layers_are_refused(stated, message):
    with pytest.raises(ValueError, match=message):
        read(linear_attn_config=stated)


def test_attention_with_positions_is_refused():
    with pytest.raises(ValueError, match="mla_use_nope False is not supported"):
        read(mla_use_nope=False)


@torch.no_grad()
def test_a_dense_layers_mlp_has_moonshots_names_or_transformers(tmp_path):
    theirs = reference(TINY[NAME]())
    folder = save(theirs, tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    saved = "layers.0.block_sparse_moe."
    assert f"model.{saved}up_proj.weight" in tensors
    save_file({key.replace(saved, "layers.0.mlp."): x for key, x in tensors.items()}, file)
    values = json.loads((folder / "config.json").read_text())
    sizes = {"head_dim": values.pop("linear_head_dim"), "num_heads": values.pop("linear_num_heads")}
    lists = {"kda_layers": [1], "full_attn_layers": [2]}
    values |= {"linear_attn_config": {**sizes, **lists}, "first_k_dense_replace": 1}
    del values["layer_types"], values["mlp_layer_types"]
    (folder / "config.json").write_text(json.dumps(values))
    model = on_cpu(folder)
    torch.testing.assert_close(model.forward(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-4)
