"""NVIDIA's ModelOpt: 4-bit and 8-bit floats, as ``export_hf_checkpoint`` of 0.46 writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import Packed, Recipe, every_projection
from .fp8 import blocks
from .mxfp4 import flat
from .nvfp4 import pack as nvfp4


def _settings(algorithm: str, **more: Any) -> dict[str, Any]:
    return {
        **{"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]},
        **{"producer": {"name": "modelopt", "version": "0.46.1"}, **more},
    }


def _groups(bits: int, **more: int) -> dict[str, Any]:
    part = {"dynamic": False, "num_bits": bits, "type": "float", **more}
    both = {"input_activations": part, "weights": part}
    return {"config_groups": {"group_0": {**both, "targets": ["Linear"]}}}


def _recipe(
    settings: dict[str, Any], pack: Callable[[torch.Tensor], Packed], split: bool = False
) -> Recipe:
    return Recipe(settings=settings, pack=lambda layer, weight: pack(weight), split=split)


def floats4(weight: torch.Tensor) -> Packed:
    tensors, plain = nvfp4(weight, "weight", "weight_scale_2")
    return {**tensors, "input_scale": torch.tensor(0.01)}, plain


def _floats8(weight: torch.Tensor, high: int, wide: int, shape: tuple[int, ...]) -> Packed:
    tensors, plain = blocks(weight, high, wide)
    scale = tensors["weight_scale_inv"].reshape(shape)
    return {"weight": tensors["weight"], "weight_scale": scale}, plain


def _powers(weight: torch.Tensor) -> Packed:
    tensors, plain = blocks(weight, 1, 32, torch.uint8)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, plain


def _mixed(layer: str, weight: torch.Tensor) -> Packed:
    return floats4(weight) if ".mlp." in layer else _floats8(weight, *weight.shape, ())


_LAYERS = {
    **{f"model.layers.0.mlp.{name}_proj": {"quant_algo": "NVFP4"} for name in ("up", "down")},
    "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
}

RECIPES = {
    "modelopt nvfp4": _recipe(_settings("NVFP4", **_groups(4, group_size=16)), floats4, split=True),
    "modelopt mxfp4": _recipe(_settings("mxfp4"), lambda weight: flat(weight, "weight")),
    "modelopt fp8": _recipe(
        _settings("FP8", **_groups(8)), lambda weight: _floats8(weight, *weight.shape, ())
    ),
    "modelopt fp8 rows": _recipe(
        _settings("FP8_PER_CHANNEL_PER_TOKEN"),
        lambda weight: _floats8(weight, 1, weight.shape[1], (len(weight),)),
    ),
    "modelopt mxfp8": _recipe(_settings("MXFP8"), _powers),
    "modelopt mixed": Recipe(
        settings=_settings("MIXED_PRECISION", quantized_layers=_LAYERS),
        pack=_mixed,
        takes=lambda layer: every_projection(layer) and layer in _LAYERS,
    ),
}
