"""ggml's packed blocks, as GGUF files have them: ``Q4_0``, ``Q4_K`` and their kin.

A row is a series of blocks of 32 or 256 weights, each with a scale or two in 16-bit floats and
codes of 2 to 8 bits; the K types have scales of groups within a block too. Here are the values
that blocks stand for, in float32 to the bit as ggml's ``dequantize_row_*`` has them
(ggml-quants.c), in plain PyTorch. The layout on a device is the file's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig
from exkv.checkpoint.files import quoted
from exkv.checkpoint.gguf_header import TENSOR_TYPES, TensorType

from .floats import FLOATS
from .format import Layout, Size, Tensors, WeightFormat
from .registry import FormatOf, register
from .tiles import TiledFormat

#: Blocks (n, bytes) uint8 -> weights (n, block) float32.
Unpack = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFormat(TiledFormat):
    """One of ggml's types.

    Attributes:
        type: its name and sizes.
        unpack: what its blocks stand for.
    """

    type: TensorType
    unpack: Unpack = field(compare=False, repr=False)
    names: ClassVar[tuple[str, ...]] = ("weight",)

    @property
    def name(self) -> str:
        return f"gguf {self.type.name}"

    def row_bytes(self, size: Size) -> int:
        """Of a row; ValueError where it is no whole number of blocks."""
        if size[1] % self.type.block:
            raise ValueError(
                f"rows of {size[1]} numbers are no blocks of {self.type.block}, as "
                f"{self.type.name} has them"
            )
        return size[1] // self.type.block * self.type.nbytes

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        shape = (size[0], self.row_bytes(size))
        return {"weight": ExpectedTensor(shape=shape, dtypes=(torch.uint8,))}

    def layout(self, size: Size) -> Layout:
        return {"weight": ((size[0], self.row_bytes(size)), torch.uint8)}

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"weight": stored["weight"]}

    def outputs(self, tensors: Tensors) -> int:
        return len(tensors["weight"])

    def rows(self, tensors: Tensors, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        packed = tensors["weight"][ids]
        blocks = packed.view(-1, self.type.nbytes)
        return self.unpack(blocks).view(len(packed), -1).to(dtype)


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer: ``types`` of the settings names those that aren't floats, as
    ``exkv.checkpoint.gguf_config`` finds them in a file's header."""
    where = f"{config.path or 'the config'}: quantization_config"
    types = (config.quantization or {}).get("types")
    if not isinstance(types, Mapping) or not set(types.values()) <= FORMATS.keys():
        raise ValueError(
            f"{where}: types {quoted(types)} must name the type of each packed layer, one of "
            f"{', '.join(FORMATS)}: load the GGUF file itself"
        )

    def format_of(layer: str, size: Size) -> WeightFormat:
        format = FORMATS.get(types.get(layer, ""))
        if format is None:
            return FLOATS[dtype]
        try:
            format.row_bytes(size)
        except ValueError as error:
            raise ValueError(f"{config.path or 'the config'}: {layer}: {error}") from None
        return format

    return format_of


# What blocks stand for --------------------------------------------------------------------------
# Sums and products are rounded one by one, in ggml's order.


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """A 16-bit float of each block (n, 1)."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(packed: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Codes of so many bits (n, 8 / bits * bytes): of every ``run`` bytes first all lowest fields,
    then those above."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    fields = packed.reshape(len(packed), -1, 1, run) >> shifts.view(-1, 1)
    return (fields & ((1 << bits) - 1)).view(len(packed), -1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """All bits of some bytes, in order (n, 8 * bytes)."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).view(len(packed), -1)


def _signed(codes: torch.Tensor, zero: int) -> torch.Tensor:
    """Codes less their zero point, as floats."""
    return codes.view(torch.int8).sub(zero).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _signed(_fields(blocks[:, 2:], 4, 16), 8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _fields(blocks[:, 4:], 4, 16).float()
    return codes.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _fields(blocks[:, 6:], 4, 16) | (_bits(blocks[:, 2:6]) << 4)
    return _signed(codes, 16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _fields(blocks[:, 8:], 4, 16) | (_bits(blocks[:, 4:8]) << 4)
    return codes.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _signed(blocks[:, 2:], 0).mul_(_half(blocks, 0))


def _grouped(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Floats (n, 256) by groups, each times its scale (n, groups)."""
    groups = codes.view(*scales.shape, -1)
    return groups.mul_(scales.unsqueeze(-1))


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, low = blocks[:, :16] & 15, blocks[:, :16] >> 4
    codes = _fields(blocks[:, 16:80], 2, 32).float()
    made = _grouped(codes, _half(blocks, 80) * scales.float())
    return made.sub_((_half(blocks, 82) * low.float()).unsqueeze(-1)).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = _fields(blocks[:, 96:104], 4, 8) | (_fields(blocks[:, 104:108], 2, 4) << 4)
    # A bit that is not set takes 4 away.
    high = _fields(blocks[:, :32], 1, 32) << 2
    codes = _signed(_fields(blocks[:, 32:96], 2, 32) | high, 4)
    return _grouped(codes, _half(blocks, 108) * _signed(scales, 32)).flatten(1)


def _scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight of 6 bits each (n, 8), of 12 bytes: the first four lie whole in the low bits of bytes 0
    to 3 and 4 to 7; of the others those have the upper bits, and bytes 8 to 11 the lower."""
    scales, minima, rest = packed.view(len(packed), 3, 4).unbind(1)
    return (
        torch.cat((scales & 63, (rest & 15) | ((scales >> 2) & 48)), 1),
        torch.cat((minima & 63, (rest >> 4) | ((minima >> 2) & 48)), 1),
    )


def _with_minima(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Q4_K's and Q5_K's eight groups, each with a scale and what is taken away."""
    scales, minima = _scales_and_minima(blocks[:, 4:16].contiguous())
    made = _grouped(codes.float(), _half(blocks, 0) * scales.float())
    return made.sub_((_half(blocks, 2) * minima.float()).unsqueeze(-1)).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _with_minima(blocks, _fields(blocks[:, 16:], 4, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    high = _fields(blocks[:, 16:48], 1, 32) << 4
    return _with_minima(blocks, _fields(blocks[:, 48:], 4, 32) | high)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    high = _fields(blocks[:, 128:192], 2, 32) << 4
    codes = _signed(_fields(blocks[:, :128], 4, 64) | high, 32)
    scales = _half(blocks, 208) * _signed(blocks[:, 192:208], 0)
    return _grouped(codes, scales).flatten(1)


_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _level(codes: torch.Tensor) -> torch.Tensor:
    """IQ4's sixteen levels by their codes."""
    return torch.tensor(_LEVELS, dtype=torch.float32, device=codes.device)[codes.int()]


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _level(_fields(blocks[:, 2:], 4, 16)).mul_(_half(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    low = _fields(blocks[:, 4:8], 4, 1)
    high = _fields(blocks[:, 2:4], 2, 1) << 4
    codes = _level(_fields(blocks[:, 8:], 4, 16))
    return _grouped(codes, _half(blocks, 0) * _signed(low | high, 32)).flatten(1)


_UNPACK: dict[str, Unpack] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
#: ggml's name of a type -> its format.
FORMATS = {
    type.name: GGUFFormat(type=type, unpack=_UNPACK[type.name])
    for type in TENSOR_TYPES.values()
    if type.dtype is None
}
for _format in FORMATS.values():
    register(_format)
