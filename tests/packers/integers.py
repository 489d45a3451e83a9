"""Integers in groups of inputs, as GPTQ and AWQ store them.

Weights are rounded to the nearest of 2^bits values between a group's ends; how they are stored is
what the formats define, bit by bit.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from . import Packed, Recipe

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers (n, count) -> int32 (n, count * bits / 32): the bits of all codes, the lowest bit
    of the first one first."""
    each = codes.numpy().astype(np.uint8)[..., None] >> np.arange(bits) & 1
    flat = each.reshape(len(codes), -1)
    padded = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32))).astype(np.uint8)
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32).copy())


def rounded(
    weight: torch.Tensor, bits: int, group_of: torch.Tensor, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (out, in), scales (out, groups) in fp16 and zero points (out, groups) of RTN."""
    groups, most = int(group_of.max()) + 1, 2**bits - 1
    scale, zero = torch.empty(len(weight), groups), torch.empty(len(weight), groups)
    for g in range(groups):
        part = weight[:, group_of == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale[:, g] = ((high - low) / most).half().float()
        zero[:, g] = 2 ** (bits - 1) if symmetric else (-low / scale[:, g]).round()
    zero = zero.clamp(0, most)
    codes = (weight / scale[:, group_of] + zero[:, group_of]).round().clamp(0, most)
    return codes.int(), scale.half(), zero.int()


def value(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group_of: torch.Tensor):
    """w = s[g] * (q - z[g])."""
    return scale.float()[:, group_of] * (codes - zero[:, group_of]).float()


def groups_of(layer: str, inputs: int, group: int, shuffled: bool) -> torch.Tensor:
    """The group of each input; sorted by some activation order or other."""
    group_of = torch.arange(inputs) // (inputs if group == -1 else group)
    if not shuffled:
        return group_of
    generator = torch.Generator().manual_seed(zlib.crc32(layer.encode()))
    return group_of[torch.randperm(inputs, generator=generator)]


def gptq(
    layer: str, weight: torch.Tensor, *, bits: int, group: int, sym: bool, act: bool, version: int
) -> Packed:
    group_of = groups_of(layer, weight.shape[1], group, act)
    codes, scale, zero = rounded(weight, bits, group_of, sym)
    stored = zero if version == 2 else (zero - 1) % 2**bits
    return {
        "qweight": packed_bits(codes, bits).T,
        "qzeros": packed_bits(stored.T.contiguous(), bits),
        "scales": scale.T,
        "g_idx": group_of.int(),
    }, value(codes, scale, zero, group_of)


def _gptq_recipe(
    bits: int, group: int, *, sym: bool, act: bool, version: int, split: bool = False
) -> Recipe:
    name = "gptq" if version == 1 else "gptq_v2"
    settings: dict[str, Any] = {"bits": bits, "group_size": group, "sym": sym, "desc_act": act}
    how = {"bits": bits, "group": group, "sym": sym, "act": act, "version": version}
    return Recipe(
        settings={"quant_method": "gptq", "checkpoint_format": name, **settings},
        pack=lambda layer, weight: gptq(layer, weight, **how),
        split=split,
    )


def _by_rules(layer: str, weight: torch.Tensor) -> Packed:
    how = {"bits": 4, "group": 32, "sym": True, "act": False, "version": 1}
    if "down_proj" in layer:
        how |= {"bits": 8, "group": 64}
    return gptq(layer, weight, **how)


_RULES = {
    "+:.*\\.down_proj": {"bits": 8, "group_size": 64},
    "-:.*\\.1\\.mlp\\.(up|gate)": {},
    ".*mlp.*": {"sym": True},
}


def awq(weight: torch.Tensor, group: int) -> Packed:
    group_of = groups_of("", weight.shape[1], group, False)
    codes, scale, zero = rounded(weight, 4, group_of, False)
    tensors = {
        "qweight": packed_bits(_in_awq_order(codes.T), 4),
        "qzeros": packed_bits(_in_awq_order(zero.T), 4),
        "scales": scale.T,
    }
    return tensors, value(codes, scale, zero, group_of)


def _in_awq_order(codes: torch.Tensor) -> torch.Tensor:
    """Integers (n, out), for whose every eight the i-th place takes the number ORDER[i]."""
    return codes.reshape(len(codes), -1, 8)[..., list(AWQ_ORDER)].reshape(len(codes), -1)


_AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}

RECIPES = {
    "gptq 4": _gptq_recipe(4, 32, sym=True, act=False, version=1),
    "gptq 4 asymmetric": _gptq_recipe(4, 64, sym=False, act=False, version=1),
    "gptq 4 act-order v2": _gptq_recipe(4, 32, sym=False, act=True, version=2, split=True),
    "gptq 8 rows": _gptq_recipe(8, -1, sym=True, act=True, version=1),
    "gptq 3": _gptq_recipe(3, 64, sym=False, act=True, version=1),
    "gptq 2": _gptq_recipe(2, 32, sym=False, act=False, version=2),
    "gptq rules": Recipe(
        settings={
            **{"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
            **{"desc_act": False, "lm_head": True, "dynamic": _RULES},
        },
        pack=_by_rules,
        takes=lambda layer: (
            ".1.mlp.up" not in layer and ".1.mlp.gate" not in layer and "embed" not in layer
        ),
    ),
    "awq": Recipe(
        settings={**_AWQ, "group_size": 64, "modules_to_not_convert": ["mlp"]},
        pack=lambda layer, weight: awq(weight, 64),
        takes=lambda layer: "self_attn" in layer,
        split=True,
    ),
    "awq rows": Recipe(
        settings={**_AWQ, "group_size": -1}, pack=lambda layer, weight: awq(weight, -1)
    ),
}
