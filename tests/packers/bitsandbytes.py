"""bitsandbytes: 4 bits that number one of 16 values, by blocks, and int8 by rows."""

from __future__ import annotations

import json

import torch

from . import Packed, Recipe

#: QLoRA, appendix E.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
#: A sign, two bits of exponent and one of mantissa.
_HALF = (0, 0.0625, 8, 12, 4, 6, 2, 3)
FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in _HALF)


def four_bits(weight: torch.Tensor, kind: str, block: int, nested: bool) -> Packed:
    quant_map = torch.tensor(NF4 if kind == "nf4" else FP4)
    flat = weight.reshape(-1, block)
    absmax, tensors, state = flat.abs().amax(1), {}, {}
    if nested:
        tensors, state, absmax = _nested(absmax)
    else:
        tensors = {"weight.absmax": absmax}
    codes = (flat / absmax[:, None]).unsqueeze(-1).sub(quant_map).abs().argmin(-1)
    plain = (quant_map[codes] * absmax[:, None]).reshape(weight.shape)
    pairs = codes.reshape(-1, 2)
    state = {"blocksize": block, "dtype": "float32", "shape": list(weight.shape), **state}
    text = json.dumps({"quant_type": kind, **state}).encode()
    return {
        "weight": (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8)[:, None],
        "weight.quant_map": quant_map,
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(text), dtype=torch.uint8),
        **tensors,
    }, plain


def _nested(absmax: torch.Tensor) -> tuple[dict, dict, torch.Tensor]:
    """Absmax less their mean, in 8 bits by blocks of 256."""
    quant_map, offset = torch.linspace(-1, 1, 256), absmax.mean()
    blocks = (absmax - offset).split(256)
    largest = torch.stack([block.abs().max() for block in blocks])
    found = [
        (block / top).unsqueeze(-1).sub(quant_map).abs().argmin(-1)
        for block, top in zip(blocks, largest, strict=True)
    ]
    codes = torch.cat(found)
    of_block = largest[torch.arange(len(absmax)) // 256]
    tensors = {
        "weight.absmax": codes.to(torch.uint8),
        "weight.nested_absmax": largest,
        "weight.nested_quant_map": quant_map,
    }
    state = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
    return tensors, state, quant_map[codes] * of_block + offset


def eight_bits(weight: torch.Tensor) -> Packed:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    plain = codes.float() * (largest / 127)[:, None]
    return {
        "weight": codes,
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }, plain


def _four(kind: str, block: int, nested: bool, split: bool = False) -> Recipe:
    return Recipe(
        settings={
            **{"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False},
            **{
                "_load_in_4bit": True,
                "bnb_4bit_quant_type": kind,
                "bnb_4bit_quant_storage": "uint8",
            },
            **{"bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": "float32"},
            **{"llm_int8_threshold": 6.0, "llm_int8_skip_modules": ["lm_head"]},
        },
        pack=lambda layer, weight: four_bits(weight, kind, block, nested),
        split=split,
    )


RECIPES = {
    "nf4": _four("nf4", 64, False),
    "nf4 nested": _four("nf4", 64, True, split=True),
    "fp4": _four("fp4", 256, False),
    "int8": Recipe(
        settings={
            **{"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True},
            **{"llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False},
        },
        pack=lambda layer, weight: eight_bits(weight),
        split=True,
    ),
}
