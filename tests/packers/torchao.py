"""torchao: integers by rows or groups, a byte each, and 8-bit floats. ``torchao.safetensors`` has
matrices that the package itself (0.18) packed and dequantized in float32: ``quantize_`` of a linear
layer, ``flatten_tensor_state_dict`` of its state and ``dequantize_affine``."""

from __future__ import annotations

from typing import Any

import torch

from . import Packed, Recipe
from .fp8 import blocks


def integers(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool, dtype=torch.float32
) -> Packed:
    """Signed ones; group 0 is a row."""
    groups = weight.reshape(len(weight), -1, group or weight.shape[1])
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    if symmetric:
        scale = (torch.maximum(-low, high) / (most + 0.5)).to(dtype)
        zero = torch.zeros_like(scale)
    else:
        scale = ((high - low) / (most - least)).to(dtype)
        zero = (least - (low / scale.float()).round()).clamp(least, most)
    wide, shift = scale.float().unsqueeze(2), zero.float().unsqueeze(2)
    codes = (groups / wide + shift).round().clamp(least, most)
    plain = ((codes - shift) * wide).view(weight.shape)
    return {
        "_weight_qdata": codes.to(torch.int8).view(weight.shape),
        "_weight_scale": scale,
        "_weight_zero_point": zero.to(torch.int8),
    }, plain


def float8(weight: torch.Tensor) -> Packed:
    tensors, plain = blocks(weight, 1, weight.shape[1])
    qdata, scale = tensors["weight"], tensors["weight_scale_inv"]
    return {"_weight_qdata": qdata, "_weight_scale": scale}, plain


def _config(kind: str, **data: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": 2, "_data": data}


def _dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def _groups(size: int) -> dict[str, Any]:
    return {"_type": "PerGroup", "_version": 1, "_data": {"group_size": size}}


_ROWS = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
INT8 = _config("Int8WeightOnlyConfig", group_size=None, granularity=_ROWS)
INT4 = _config(
    "IntxWeightOnlyConfig",
    weight_dtype=_dtype("int4"),
    granularity=_groups(32),
    mapping_type={"_type": "MappingType", "_data": "ASYMMETRIC"},
    scale_dtype=None,
)
FLOAT8 = _config(
    "Float8DynamicActivationFloat8WeightConfig",
    activation_dtype=_dtype("float8_e4m3fn"),
    weight_dtype=_dtype("float8_e4m3fn"),
    granularity=[_ROWS, _ROWS],
)


def settings(default: dict[str, Any]) -> dict[str, Any]:
    return {
        **{"quant_method": "torchao", "modules_to_not_convert": None},
        **{"include_input_output_embeddings": False, "untie_embedding_weights": False},
        "quant_type": {"default": default},
    }


_NAMES = {
    **{"model.layers.0.mlp.up_proj": FLOAT8, "re:.*q_proj": INT8, "model.layers.1.mlp": INT4},
    **{"re:.*k_proj": None, "_default": INT4},
}


def _by_name(layer: str, weight: torch.Tensor) -> Packed:
    if layer == "model.layers.0.mlp.up_proj":
        return float8(weight)
    if layer.endswith("q_proj"):
        return integers(weight, 8, 0, True)
    return integers(weight, 4, 32, False)


RECIPES = {
    "torchao int8": Recipe(
        settings=settings(INT8),
        pack=lambda layer, weight: integers(weight, 8, 0, True),
        split=True,
    ),
    "torchao int4": Recipe(
        settings=settings(INT4),
        pack=lambda layer, weight: integers(weight, 4, 32, False, torch.bfloat16),
    ),
    "torchao fp8": Recipe(settings=settings(FLOAT8), pack=lambda layer, weight: float8(weight)),
    "torchao names": Recipe(
        settings=settings(_config("FqnToConfig", fqn_to_config=_NAMES)),
        pack=_by_name,
        takes=lambda layer: ".layers." in layer and not layer.endswith("k_proj"),
    ),
}
