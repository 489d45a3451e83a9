"""EXL3: random trellis codes, read as ExLlamaV3's reconstruct kernel reads them: a lane of a warp
shifts its eight weights out of words of 32 bits, and the lanes' places are those of a tensor core's
fragment (exl3_dq.cuh, reconstruct.cu, codebook.cuh)."""

from __future__ import annotations

import numpy as np
import torch

from . import Packed, Recipe

MCG, MUL1 = 0xCBAC1FED, 0x83DCD12D


def decode(states: np.ndarray, codebook: str) -> np.ndarray:
    """Any integers, of which 16 bits count -> float16, rounded once."""
    x = states.astype(np.uint64) & np.uint64(0xFFFF)
    factor = {"3inst": 89226354, "mcg": MCG, "mul1": MUL1}[codebook]
    x = (x * np.uint64(factor) + np.uint64(64248484 if codebook == "3inst" else 0)).astype(
        np.uint32
    )
    if codebook == "mul1":  # vabsdiff4 with a sum, then hfma
        total = (0x6400 + x.view(np.uint8).reshape(*x.shape, 4).sum(-1)).astype(np.uint16)
        step, bias = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
        return (total.view(np.float16).astype(np.float64) * step + bias).astype(np.float16)
    halves = ((x & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view(np.float16)
    halves = halves.reshape(*x.shape, 2).astype(np.float64)  # lop3 of a & b ^ c, then hadd
    return halves.sum(-1).astype(np.float16)


def tile_values(words: np.ndarray, codebook: str) -> np.ndarray:
    """Tiles uint16 (n, words) -> (n, 16 inputs, 16 outputs) float16."""
    bits = words.shape[1] / 16
    ring = words.copy().view(np.uint32).astype(np.uint64)
    total = ring.shape[1]
    out = np.empty((len(words), 16, 16), np.float16)
    for lane in range(32):
        for each in range(8):
            end = 0
            for place in range(8 * lane + each + 1):  # those of a half: more in odd places
                end += int(bits) + (place % 2 if bits % 1 else 0)
            first = end - 16 + 32 * total
            i0, i1 = first // 32, (first + 15) // 32
            shift = np.uint64((i1 + 1) * 32 - (first + 16))
            both = ring[:, i0 % total] << np.uint64(32) | ring[:, i1 % total]
            row = lane % 4 * 2 + each % 2 + (8 if each & 2 else 0)
            column = lane // 4 + (8 if each & 4 else 0)
            out[:, row, column] = decode(both >> shift & np.uint64(0xFFFF), codebook)
    return out


def exl3(
    layer: str, weight: torch.Tensor, bits: float, codebook: str, signs: bool = False
) -> Packed:
    """Codes of chance; ends whose product has the matrix's scale."""
    generator = torch.Generator().manual_seed(len(layer) + weight.numel())
    outputs, inputs = (-(-each // 128) * 128 for each in weight.shape)
    shape = (inputs // 16, outputs // 16, int(16 * bits))
    trellis = torch.randint(-(2**15), 2**15, shape, generator=generator).short()
    tiles = tile_values(trellis.flatten(0, 1).numpy().view(np.uint16), codebook)
    inner = torch.from_numpy(tiles).view(*shape[:2], 16, 16).transpose(1, 2).reshape(inputs, -1)
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(7):
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
    full = torch.block_diag(*[h] * (inputs // 128)) @ inner.double()
    full = full @ torch.block_diag(*[h] * (outputs // 128)) / 128

    made = {"trellis": trellis}
    for name, count in (("su", inputs), ("sv", outputs)):
        bits_of = torch.randint(2, (count,), generator=generator)
        ends = (1 - 2 * bits_of).half()
        if signs:
            powers = 1 << torch.arange(16)
            made[name] = (bits_of.view(-1, 16) * powers).sum(1).to(torch.int16)
        else:
            size = weight.std().item() ** 0.5
            ends = ends * (size * (0.5 + torch.rand(count, generator=generator))).half()
            made[f"{name}h"] = ends
        full = full.T * ends.double()
    if codebook != "3inst":
        factor = torch.tensor(MCG if codebook == "mcg" else MUL1)
        made[codebook] = factor.to(torch.uint32).view(torch.int32)
    return made, full.T[: weight.shape[0], : weight.shape[1]].float().contiguous()


def _mixed(layer: str, weight: torch.Tensor) -> Packed:
    kinds = ((3, "3inst"), (4, "mcg"), (2.5, "mul1"), (5, "mul1"))
    bits, codebook = (6, "mcg") if layer == "lm_head" else kinds[len(layer) % 4]
    return exl3(layer, weight, bits, codebook)


def _recipe(pack, split: bool = False) -> Recipe:
    settings = {
        **{"quant_method": "exl3", "version": "0.0.20", "bits": 4.0, "head_bits": 6},
        **{"calibration": {"rows": 250, "cols": 2048}, "out_scales": "auto", "codebook": "mcg"},
    }
    return Recipe(settings=settings, pack=pack, takes=lambda name: "embed" not in name, split=split)


RECIPES = {
    "exl3": _recipe(_mixed, split=True),
    "exl3 signs": _recipe(lambda layer, weight: exl3(layer, weight, 1, "3inst", signs=True)),
}
