"""8-bit floats: weight / scale rounded to e4m3, a scale a matrix, a row or a block."""

from __future__ import annotations

import torch

from . import Packed, Recipe

LARGEST = 448.0  # of e4m3


def _powers(scale: torch.Tensor) -> torch.Tensor:
    """The next power of two."""
    return torch.exp2(torch.ceil(torch.log2(scale)))


def blocks(
    weight: torch.Tensor, high: int, wide: int, dtype: torch.dtype = torch.float32
) -> Packed:
    """A scale a block, block after block."""
    out, inputs = weight.shape
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-out // high), -(-inputs // wide))
    plain = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
            scale = weight[part].abs().max() / LARGEST
            powers = dtype in (torch.uint8, torch.float8_e8m0fnu)
            scale = _powers(scale) if powers else scale.to(dtype).float()
            stored[part] = (weight[part] / scale).clamp(-LARGEST, LARGEST).to(stored.dtype)
            plain[part] = stored[part].float() * scale
            scales[i, j] = scale
    if dtype == torch.uint8:  # 2^(byte - 127)
        scales = scales.log2().add(127).to(torch.uint8)
    return {"weight": stored, "weight_scale_inv": scales.to(dtype)}, plain


def _renamed(packed: Packed, shape: tuple[int, ...]) -> Packed:
    tensors, plain = packed
    scale = tensors["weight_scale_inv"].reshape(shape)
    return {"weight": tensors["weight"], "weight_scale": scale}, plain


_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [32, 64],
}
_PLAIN = {"quant_method": "fp8", "activation_scheme": "static"}
_BY_ROW = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}

RECIPES = {
    "fp8 blocks": Recipe(
        settings={**_BLOCKS, "modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]},
        pack=lambda layer, weight: blocks(weight, 32, 64),
        takes=lambda layer: ".layers." in layer and "layers.1.mlp" not in layer,
        split=True,
    ),
    "fp8 blocks bf16": Recipe(
        settings=_BLOCKS, pack=lambda layer, weight: blocks(weight, 32, 64, torch.bfloat16)
    ),
    "fp8 blocks ue8m0": Recipe(
        settings={**_BLOCKS, "scale_fmt": "ue8m0"},
        pack=lambda layer, weight: blocks(weight, 32, 64, torch.float8_e8m0fnu),
    ),
    "fp8 blocks bytes": Recipe(
        settings=_BLOCKS, pack=lambda layer, weight: blocks(weight, 32, 64, torch.uint8)
    ),
    "fp8 matrix": Recipe(
        settings=_PLAIN, pack=lambda layer, weight: _renamed(blocks(weight, *weight.shape), ())
    ),
    "fp8 rows": Recipe(
        settings=_PLAIN,
        pack=lambda layer, weight: _renamed(blocks(weight, 1, weight.shape[1]), (len(weight),)),
    ),
    "fbgemm": Recipe(
        settings=_BY_ROW,
        pack=lambda layer, weight: _renamed(blocks(weight, 1, weight.shape[1]), (len(weight), 1)),
        split=True,
    ),
}
