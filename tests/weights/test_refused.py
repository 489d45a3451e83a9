"""Quantized checkpoints that are damaged, or contradict their settings: refused with the file, the
tensor, the number, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from packers import write
from safetensors.torch import load_file, save_file
from test_checkpoints import RECIPES
from tiny import llama, reference

from exkv import Model

LAYER = "model.layers.0.mlp.up_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Callable[[str], tuple[dict[str, Any], Tensors]]:
    """Recipe -> the config and the tensors of its folder."""
    theirs = reference(llama(num_hidden_layers=1))
    tensors = {name: value.clone() for name, value in theirs.state_dict().items()}
    config = {**theirs.config.to_dict(), "dtype": "float32"}

    def make(name: str) -> tuple[dict[str, Any], Tensors]:
        folder = tmp_path_factory.mktemp("sound")
        write(folder, config, tensors, RECIPES[name])
        text = (folder / "config.json").read_text()
        return json.loads(text), load_file(folder / "model.safetensors")

    return make


def load(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    Model(folder).load(devices=["cpu"])


def put(part: str, change: Callable[[torch.Tensor], torch.Tensor]):
    """Another tensor in the place of one of LAYER."""

    def damage(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{part}"] = change(tensors[f"{LAYER}.{part}"])

    return damage


def at(index: Any, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Other values at an index."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[index] = value
        return tensor

    return change


def drop(part: str):
    return lambda tensors: tensors.pop(f"{LAYER}.{part}")


#: Recipe, damage, and the words of the message.
DAMAGED = {
    "fp8 nan scale": (
        "fp8 blocks",
        put("weight_scale_inv", at(1, torch.nan)),
        rf"model.safetensors: {LAYER}: .* of 14 weight_scale_inv are not finite.*number 2.*again",
    ),
    "fp8 scale of another shape": (
        "fp8 blocks",
        put("weight_scale_inv", lambda t: t[:, :1]),
        rf"{LAYER}.weight_scale_inv in model.safetensors is \[7, 1\], expected \[7, 2\]",
    ),
    "fp8 scale missing": (
        "fp8 blocks",
        drop("weight_scale_inv"),
        rf"{LAYER}.weight' holds torch.float8_e4m3fn, and must hold one of: float32",
    ),
    "fp8 scale of integers": (
        "fp8 matrix",
        put("weight_scale", lambda t: t.int()),
        rf"{LAYER}.weight_scale' holds torch.int32, and must hold one of: float32",
    ),
    "fp8 two scales": (
        "fp8 matrix",
        lambda tensors: tensors.update({f"{LAYER}.weight_scale_inv": torch.ones(1)}),
        f"{LAYER} has both weight_scale_inv and weight_scale",
    ),
}
#: Recipe, changed settings, and the words of the message.
UNSOUND = {
    "fp8 fmt": ("fp8 blocks", {"fmt": "e5m2"}, "fmt 'e5m2' is not supported.*one of 'e4m3'"),
    "fp8 block": ("fp8 blocks", {"weight_block_size": [0, 8]}, r"weight_block_size \[0, 8\].*two"),
    "fp8 unknown": ("fp8 blocks", {"rotate": 3}, "'rotate' .3. is not known; known are: activat"),
    "fp8 list": ("fp8 blocks", {"ignored_layers": "lm_head"}, "ignored_layers 'lm_head'.*names"),
    "fp8 contradiction": (
        "fp8 blocks",
        {"ignored_layers": ["model.layers.0.mlp"]},
        "'model.layers.0.mlp' is not quantized, and .*safetensors has .*gate_proj.weight_scale_inv",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_tensors_are_refused(sound, tmp_path, name):
    recipe, damage, words = DAMAGED[name]
    config, tensors = sound(recipe)
    damage(tensors)
    with pytest.raises(ValueError, match=f"(?s){words}"):
        load(tmp_path, config, tensors)


@pytest.mark.parametrize("name", UNSOUND)
def test_settings_that_cannot_be_are_refused(sound, tmp_path, name):
    recipe, settings, words = UNSOUND[name]
    config, tensors = sound(recipe)
    config["quantization_config"] |= settings
    with pytest.raises(ValueError, match=f"(?s)quantization_config.*{words}"):
        load(tmp_path, config, tensors)
