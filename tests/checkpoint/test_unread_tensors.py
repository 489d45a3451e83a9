"""Tensors in a checkpoint that no layer reads: refused where they would change the output, named in
a warning where they belong to another model, and ignored where they change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import GEMMA4_SHARED, TINY, gemma4, reference, save

from exkv import Model

LAYER = "model.layers.1"


def with_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> Model:
    """A tiny Llama whose checkpoint also has these tensors."""
    save(reference(TINY["LlamaForCausalLM"](num_hidden_layers=2)), folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return Model(folder)


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.self_attn.q_norm.weight",
        f"{LAYER}.self_attn.q_proj.bias",
        f"{LAYER}.extra",
        "lm_head.bias",
        "model.norm.bias",
    ],
)
def test_unread_tensors_of_layers_are_refused(name, tmp_path):
    model = with_tensors(tmp_path, {name: torch.ones(4)})
    with pytest.raises(ValueError, match=f"no place for 1 of its tensors: {name}"):
        model.load(devices=["cpu"])


def test_unused_keys_of_sharing_layers_are_ignored(tmp_path, caplog):
    """Published checkpoints of Gemma 3n and 4 contain them."""
    folder = save(reference(gemma4(**GEMMA4_SHARED)), tmp_path)
    file = folder / "model.safetensors"
    tensors = {f"model.layers.{i}.self_attn.k_proj.weight": torch.ones(32, 64) for i in (4, 6)}
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    Model(folder).load(devices=["cpu"])
    assert caplog.messages == []
    tensors["model.layers.5.self_attn.o_norm.weight"] = torch.ones(4)
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no place for 1 of its tensors: model\.layers\.5"):
        Model(folder).load(devices=["cpu"])


def test_tensors_of_another_model_are_named_in_a_warning(tmp_path, caplog):
    others = {"vision_tower.layers.0.norm.weight": torch.ones(4), "mtp.weight": torch.ones(4)}
    with_tensors(tmp_path, others).load(devices=["cpu"])
    (message,) = caplog.messages
    assert "2 tensors are not read, e.g. mtp.weight" in message


def test_tensors_without_effect_are_ignored(tmp_path, caplog):
    harmless = {
        f"{LAYER}.self_attn.rotary_emb.inv_freq": torch.ones(4),
        f"{LAYER}.attention.masked_bias": torch.tensor(-1e9),
        f"{LAYER}.self_attn.k_scale": torch.ones(1),
        f"{LAYER}.mlp.up_proj.bias": torch.zeros(4),
    }
    with_tensors(tmp_path, harmless).load(devices=["cpu"])
    assert caplog.messages == []
