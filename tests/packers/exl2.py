"""EXL2: sorted inputs in groups of falling bits, scales of 4 bits, squared."""

from __future__ import annotations

import torch

from . import Packed, Recipe
from .integers import groups_of, packed_bits


def exl2(layer: str, weight: torch.Tensor, bits_of: list[tuple[int, int]]) -> Packed:
    """Pack a matrix.

    Args:
        bits_of: bits of each group and its inputs, in order; the last takes what is left.
    """
    outputs, inputs = weight.shape
    perm = groups_of(layer, inputs, 1, True)  # sorted input k is the model's perm[k]
    sorted_weight, padded = weight[:, perm], -(-outputs // 32) * 32
    rows, scales, largest, groups = [], [], [], []
    plain = torch.empty_like(weight)
    begin, row = 0, 0
    for bits, size in bits_of:
        part = sorted_weight[:, begin : begin + size]
        codes, nibble, top = _group(part, bits)
        groups += [bits, row]
        scale = (nibble + 1).float() ** 2 * top.float() / 256
        plain[:, perm[begin : begin + size]] = (codes - 2 ** (bits - 1)) * scale[:, None]
        words = packed_bits(_padded(codes.int(), padded), bits)  # (padded, words)
        rows.append(words.T)
        scales.append(packed_bits(_padded(nibble[:, None], padded).T.contiguous(), 4))
        largest.append(top)
        begin, row = begin + part.shape[1], row + words.shape[1]
    return {
        "q_weight": torch.cat(rows),
        "q_scale": torch.cat(scales),
        "q_scale_max": torch.stack(largest),
        "q_groups": torch.tensor(groups, dtype=torch.int16),
        "q_invperm": perm.argsort().int(),
    }, plain


def _group(part: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (out, in), scales' 4 bits (out,), and the largest scale."""
    half = 2 ** (bits - 1)
    wanted = part.abs().amax(1) / (half - 0.5)
    top = wanted.max().half()
    nibble = ((wanted / top.float() * 256).sqrt().ceil() - 1).clamp(0, 15).int()
    scale = (nibble + 1).float() ** 2 * top.float() / 256
    return (part / scale[:, None]).round().add(half).clamp(0, 2 * half - 1), nibble, top


def _padded(values: torch.Tensor, outputs: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, 0, 0, outputs - len(values)))


def _mixed(layer: str, weight: torch.Tensor) -> Packed:
    if layer == "lm_head":  # 330 outputs, padded, of 128 inputs
        return exl2(layer, weight, [(6, 128)])
    if weight.shape[1] == 224:  # 7 times 32, of which the last group has but one
        return exl2(layer, weight, [(8, 32), (5, 32), (5, 32), (3, 64), (3, 64)])
    if weight.shape[1] == 256:
        return exl2(layer, weight, [(8, 32), (6, 96), (2, 64), (2, 64)])
    kinds = [[(8, 32), (6, 32), (4, 32), (2, 32)], [(5, 32), (4, 64), (3, 32)]]
    return exl2(layer, weight, kinds[len(layer) % 2])


RECIPES = {
    "exl2": Recipe(
        settings={
            **{"quant_method": "exl2", "version": "0.2.4", "bits": 4.5, "head_bits": 6},
            "calibration": {"rows": 115, "length": 2048, "dataset": "(default)"},
        },
        pack=_mixed,
        takes=lambda layer: "embed" not in layer,
        split=True,
    ),
}
