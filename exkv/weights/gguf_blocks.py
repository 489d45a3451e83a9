"""Dequantization of ggml's packed blocks in plain PyTorch: the reference of ``gguf.py``'s formats.

Each function takes blocks (n, bytes) uint8 and returns weights (n, block) float32, bit-identical to
ggml's ``dequantize_row_*`` (ggml-quants.c): sums and products are rounded one by one, in its order.
``UNPACK`` has them by ggml's names; ``SPLIT`` has the types that are codes with one scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import gguf_grids as grids

#: Blocks (n, bytes) uint8 -> weights (n, block) float32.
Unpack = Callable[[torch.Tensor], torch.Tensor]
#: Blocks -> their unsigned codes (n, block) uint8.
Codes = Callable[[torch.Tensor], torch.Tensor]


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """A 16-bit float of each block (n, 1)."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def fields(packed: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Codes of ``bits`` bits (n, 8 / bits * bytes): for every ``run`` bytes first all lowest
    fields, then the next ones."""
    runs = packed.reshape(len(packed), -1, run)
    fields = [runs >> below & (1 << bits) - 1 for below in range(0, 8, bits)]
    return torch.stack(fields, 2).view(len(packed), -1)


def _signed(codes: torch.Tensor, zero: int) -> torch.Tensor:
    """Codes minus their zero point, as floats."""
    return codes.view(torch.int8).sub(zero).float()


def _codes4(blocks: torch.Tensor) -> torch.Tensor:
    """Q4_0, Q4_1: after the floats."""
    return fields(blocks[:, -16:], 4, 16)


def _codes5(blocks: torch.Tensor) -> torch.Tensor:
    """Q5_0, Q5_1: the fifth bits come before the others."""
    return _codes4(blocks) | (fields(blocks[:, -20:-16], 1, 1) << 4)


def _codes8(blocks: torch.Tensor) -> torch.Tensor:
    """Q8_0: signed in the file."""
    return blocks[:, 2:] ^ 128


def _grouped(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Floats (n, 256) by groups, each times its scale (n, groups)."""
    groups = codes.view(*scales.shape, -1)
    return groups.mul_(scales.unsqueeze(-1))


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, low = blocks[:, :16] & 15, blocks[:, :16] >> 4
    codes = fields(blocks[:, 16:80], 2, 32).float()
    made = _grouped(codes, _half(blocks, 80) * scales.float())
    return made.sub_((_half(blocks, 82) * low.float()).unsqueeze(-1)).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = fields(blocks[:, 96:104], 4, 8) | (fields(blocks[:, 104:108], 2, 4) << 4)
    # A bit that is not set subtracts 4.
    high = fields(blocks[:, :32], 1, 32) << 2
    codes = _signed(fields(blocks[:, 32:96], 2, 32) | high, 4)
    return _grouped(codes, _half(blocks, 108) * _signed(scales, 32)).flatten(1)


def _scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minima of 6 bits (n, 8) from 12 bytes: the first four of each are the
    low bits of bytes 0 to 3 and 4 to 7, whose high bits are the upper bits of the others; bytes 8
    to 11 have their lower bits."""
    scales, minima, rest = packed.view(len(packed), 3, 4).unbind(1)
    return (
        torch.cat((scales & 63, (rest & 15) | ((scales >> 2) & 48)), 1),
        torch.cat((minima & 63, (rest >> 4) | ((minima >> 2) & 48)), 1),
    )


def _with_minima(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Q4_K's and Q5_K's eight groups, each with a scale and a minimum."""
    scales, minima = _scales_and_minima(blocks[:, 4:16].contiguous())
    made = _grouped(codes.float(), _half(blocks, 0) * scales.float())
    return made.sub_((_half(blocks, 2) * minima.float()).unsqueeze(-1)).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _with_minima(blocks, fields(blocks[:, 16:], 4, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    high = fields(blocks[:, 16:48], 1, 32) << 4
    return _with_minima(blocks, fields(blocks[:, 48:], 4, 32) | high)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    high = fields(blocks[:, 128:192], 2, 32) << 4
    codes = _signed(fields(blocks[:, :128], 4, 64) | high, 32)
    scales = _half(blocks, 208) * _signed(blocks[:, 192:208], 0)
    return _grouped(codes, scales).flatten(1)


# IQ4 and 4-bit floats: a table of levels ---------------------------------------------------------

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: Twice the values of e2m1, and half the values of unsigned e4m3, where ggml has 0 for NaN.
_FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_FLOAT8 = tuple(
    0.0
    if byte == 127
    else (byte & 7 | (8 if byte & 120 else 0)) * 2.0 ** (max(byte >> 3 & 15, 1) - 11)
    for byte in range(256)
)


def _level(levels: Sequence[float], codes: torch.Tensor) -> torch.Tensor:
    """The level of each code, float32."""
    return torch.tensor(levels, dtype=torch.float32, device=codes.device)[codes.int()]


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _level(_IQ4, fields(blocks[:, 2:], 4, 16)).mul_(_half(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    low = fields(blocks[:, 4:8], 4, 1)
    high = fields(blocks[:, 2:4], 2, 1) << 4
    codes = _level(_IQ4, fields(blocks[:, 8:], 4, 16))
    return _grouped(codes, _half(blocks, 0) * _signed(low | high, 32)).flatten(1)


def _nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    codes = _level(_FLOAT4, fields(blocks[:, 4:], 4, 8))
    return _grouped(codes, _level(_FLOAT8, blocks[:, :4])).flatten(1)


# Ternary digits ---------------------------------------------------------------------------------


def _digits(packed: torch.Tensor, run: int, count: int) -> torch.Tensor:
    """Ternary digits (n, count * bytes) uint8: for every ``run`` bytes first all highest ones. A
    byte is the digits as a fraction, times 256, rounded up."""
    runs = packed.reshape(len(packed), -1, run)
    digits = [(runs * 3**place).to(torch.uint8).int() * 3 >> 8 for place in range(count)]
    return torch.stack(digits, 2).view(len(packed), -1).to(torch.uint8)


def _tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    parts = ((blocks[:, :32], 32, 5), (blocks[:, 32:48], 16, 5), (blocks[:, 48:52], 4, 4))
    codes = torch.cat([_digits(*part) for part in parts], 1)
    return _signed(codes, 1).mul_(_half(blocks, 52))


def _tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    return _signed(fields(blocks[:, :64], 2, 32), 1).mul_(_half(blocks, 64))


# IQ1, IQ2 and IQ3: points of a codebook -----------------------------------------------------------

_IQ2_LEVELS = (8, 25, 43)
_IQ3_XXS_LEVELS = (4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S_LEVELS = (1, 3, 5, 7, 9, 11, 13, 15)
_IQ1_LEVELS = (-1, 0, 1)
#: Added to or subtracted from every weight of a point of IQ1.
_IQ1_DELTA = 0.125


def _words(packed: torch.Tensor, dtype: torch.dtype = torch.int16) -> torch.Tensor:
    """Little-endian words (n, bytes / 2) int32 from 0 to 65535; or int32 as they are."""
    words = packed.contiguous().view(dtype)
    return words if dtype == torch.int32 else words.int() & 0xFFFF


def _bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The lowest ``count`` fields of integers (n, k), side by side (n, count * k) int32."""
    shifts = torch.arange(0, bits * count, bits, dtype=torch.int32, device=packed.device)
    return (packed.int().unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)


def _high(codes: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Codes whose bits from the eighth on are stored elsewhere."""
    return codes.int() | high << 8


def _points(book: grids.Codebook, levels: Sequence[float], codes: torch.Tensor) -> torch.Tensor:
    """Codes (n, k) -> the weights of their points in the codebook (n, k * length) float32."""
    points = torch.tensor(book.points, dtype=torch.int32, device=codes.device)[codes.int()]
    return _level(levels, _bits(points, grids.DIGIT_BITS, book.length))


def _turned(values: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Values (n, 8 * k), negated for each set bit of ``signs`` (n, k)."""
    return values.mul_(1 - 2 * _bits(signs, 1, 8))


def _even(signs: torch.Tensor) -> torch.Tensor:
    """Seven signs and an eighth that makes the number of negative ones even."""
    folded = signs ^ signs >> 4
    folded = folded ^ folded >> 2
    return signs | (folded ^ folded >> 1) << 7 & 128


def _eight(rest: torch.Tensor, d: torch.Tensor, step: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Signs (n, 32) from the low 28 bits of words (n, 8) int32, and scales from the bits above."""
    scales = d * (0.5 + (rest >> 28 & 15).float()) * step
    return _even(_bits(rest, 7, 4)), scales


def _iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    codes, rest = blocks[:, 2:].reshape(-1, 8, 8).split(4, 2)
    signs, scales = _eight(_words(rest, torch.int32).squeeze(2), _half(blocks, 0), 0.25)
    values = _points(grids.IQ2_XXS, _IQ2_LEVELS, codes.flatten(1))
    return _grouped(_turned(values, signs), scales).flatten(1)


def _iq2(blocks: torch.Tensor, values: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """IQ2_XS and IQ2_S: sixteen scales in the last bytes."""
    scales = fields(blocks[:, -8:], 4, 1).float()
    groups = _half(blocks, 0) * (0.5 + scales) * 0.25
    return _grouped(_turned(values, signs), groups).flatten(1)


def _iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    words = _words(blocks[:, 2:66])
    values = _points(grids.IQ2_XS, _IQ2_LEVELS, words & 511)
    return _iq2(blocks, values, _even(words >> 9))


def _iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    codes = _high(blocks[:, 2:34], _bits(blocks[:, 66:74], 2, 4))
    return _iq2(blocks, _points(grids.IQ2_S, _IQ2_LEVELS, codes), blocks[:, 34:66])


def _iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    signs, scales = _eight(_words(blocks[:, 66:], torch.int32), _half(blocks, 0), 0.5)
    values = _points(grids.IQ3_XXS, _IQ3_XXS_LEVELS, blocks[:, 2:66])
    return _grouped(_turned(values, signs), scales).flatten(1)


def _iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    codes = _high(blocks[:, 2:66], _bits(blocks[:, 66:74], 1, 8))
    values = _points(grids.IQ3_S, _IQ3_S_LEVELS, codes)
    scales = _half(blocks, 0) * (1 + 2 * fields(blocks[:, 106:], 4, 1)).float()
    return _grouped(_turned(values, blocks[:, 74:106]), scales).flatten(1)


def _iq1(codes: torch.Tensor, below: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Points (n, 32), minus the delta where ``below`` is 1 and plus it elsewhere, by groups with a
    scale each."""
    delta = _IQ1_DELTA - 2 * _IQ1_DELTA * below.float()
    values = _points(grids.IQ1_S, _IQ1_LEVELS, codes).view(*codes.shape, 8)
    return _grouped(values.add_(delta.unsqueeze(-1)), scales).flatten(1)


def _iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    words = _words(blocks[:, 34:])
    codes = _high(blocks[:, 2:34], _bits(words, 3, 4))
    scales = _half(blocks, 0) * (2 * (words >> 12 & 7) + 1).float()
    return _iq1(codes, (words >> 15).repeat_interleave(4, 1), scales)


def _iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    high = _bits(blocks[:, 32:48], 4, 2)
    scales = iq1_m_halves(blocks).float() * (2 * _bits(_words(blocks[:, 48:]), 3, 4) + 1).float()
    return _iq1(_high(blocks[:, :32], high & 7), high >> 3, scales)


def iq1_m_halves(blocks: torch.Tensor) -> torch.Tensor:
    """IQ1_M's 16-bit floats (n, 1), made of the highest four bits of each of four words."""
    nibbles = blocks[:, 49::2].int() >> 4  # (n, 4)
    bits = nibbles << torch.arange(0, 16, 4, dtype=torch.int32, device=blocks.device)
    return bits.sum(1, dtype=torch.int32).to(torch.int16).view(torch.float16).unsqueeze(1)


#: ggml's name of a type -> its dequantization, for types that keep the file's layout.
UNPACK: dict[str, Unpack] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "NVFP4": _nvfp4,
}
#: Byte offsets of the 16-bit floats in their blocks. Those of IQ1_M are split.
HALVES: dict[str, tuple[int, ...]] = {
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    **{"IQ1_S": (0,), "IQ1_M": (), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,)},
    **{"IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,)},
    **{"TQ1_0": (52,), "TQ2_0": (64,), "NVFP4": ()},
}
#: ggml's name of a type -> bits of a code, the format's ``shift``, and the codes of blocks.
SPLIT: dict[str, tuple[int, str, Codes]] = {
    "Q4_0": (4, "symmetric", _codes4),
    "Q4_1": (4, "offset", _codes4),
    "Q5_0": (5, "symmetric", _codes5),
    "Q5_1": (5, "offset", _codes5),
    "Q8_0": (8, "symmetric", _codes8),
}
