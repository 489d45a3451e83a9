"""HQQ: groups along a row with scales and zero points that are floats. ``hqq.safetensors`` has
matrices that the package itself (0.2.8, ``HQQLinear`` with axis 1, its optimizer on) packed and
dequantized in float32::

    layer = HQQLinear(linear, BaseQuantizeConfig(nbits=4, group_size=64, axis=1),
                      compute_dtype=torch.float16, device="cpu")
    layer.state_dict(); Quantizer.dequantize(layer.W_q, {**meta of float32})
"""

from __future__ import annotations

import torch

from . import Packed, Recipe

#: What else lies beside a matrix, as bytes.
_NOTES = {
    **{"packing": list(b"4bit_u8"), "unpack_view_dtype": list(b"torch.uint8"), "view_as_float": 0},
    **{"quant_scale": 0, "quant_zero": 0, "compute_dtype": list(b"torch.float16")},
    **{"offload_meta": 0, "encoded_state_dict": 1, "stores_quant_config": 1, "channel_wise": 1},
    **{"optimize": 1, "round_zero": 1},
}


def hqq(weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype = torch.float16) -> Packed:
    """From each group's least weight to its largest; group 0 is a row."""
    group = group or weight.shape[1]
    groups, top = weight.reshape(-1, group), 2**bits - 1
    low, high = groups.aminmax(dim=1, keepdim=True)
    scale = ((high - low) / top).to(dtype)
    zero = (-low / scale.float()).to(dtype)
    codes = (groups / scale.float() + zero.float()).round().clamp(0, top)
    offset = (-zero.float() * scale.float()).to(torch.float16 if dtype != torch.float32 else dtype)
    plain = (codes * scale.float() + offset.float()).view(weight.shape)
    numbers = {"nbits": bits, "group_size": group, "axis": 1}
    return {
        "W_q": _packed(codes.long(), bits),
        **{"scale": scale, "zero": zero, "shape": torch.tensor(weight.shape)},
        **{name: torch.tensor(value, dtype=torch.int32) for name, value in numbers.items()},
        **{name: torch.tensor(value, dtype=torch.uint8) for name, value in _NOTES.items()},
    }, plain


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """One word after the other: codes of the groups that are a share of all apart."""
    if bits > 4:
        return codes.to(torch.uint8)
    each, dtype = (10, torch.int32) if bits == 3 else (8 // bits, torch.uint8)
    count = -(-len(codes) // each)
    padded = torch.zeros(count * each, codes.shape[1], dtype=torch.int64)
    padded[: len(codes)] = codes
    words = torch.zeros(count, codes.shape[1], dtype=torch.int64)
    for place in range(each):
        words |= padded[place * count : (place + 1) * count] << bits * (each - 1 - place)
    return words.to(dtype)


def _settings(bits: int, group: int | None) -> dict:
    return {
        "weight_quant_params": {
            **{"nbits": bits, "channel_wise": True, "group_size": group, "optimize": True},
            **{"round_zero": bits == 4, "axis": 1, "view_as_float": False},
        },
        **{"scale_quant_params": None, "zero_quant_params": None, "offload_meta": False},
    }


def _recipe(bits: int, group: int | None, dtype=torch.float16, split: bool = False) -> Recipe:
    return Recipe(
        settings={
            **{"quant_method": "hqq", "skip_modules": ["lm_head"]},
            "quant_config": _settings(bits, group),
        },
        pack=lambda layer, weight: hqq(weight, bits, group or 0, dtype),
        split=split,
    )


_OF_KINDS = {"self_attn.q_proj": 8, "mlp.up_proj": 3, "mlp.down_proj": 6}
RECIPES = {
    "hqq 4": _recipe(4, 32, split=True),
    "hqq 2": _recipe(2, 32, torch.bfloat16),
    "hqq 5 rows": _recipe(5, None, torch.float32),
    "hqq kinds": Recipe(
        settings={
            **{"quant_method": "hqq", "skip_modules": ["lm_head"]},
            "quant_config": {kind: _settings(bits, 32) for kind, bits in _OF_KINDS.items()},
        },
        pack=lambda layer, weight: hqq(weight, _OF_KINDS[layer.split(".", 3)[3]], 32),
        takes=lambda layer: ".layers." in layer and layer.split(".", 3)[3] in _OF_KINDS,
    ),
}
