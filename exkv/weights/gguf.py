"""ggml's packed blocks, as GGUF files have them: ``Q4_0``, ``Q4_K`` and their kin.

A row is a series of blocks of 32 or 256 weights, each with a scale or two in 16-bit floats and
codes of 2 to 8 bits; the K types have scales of groups within a block too. The values that blocks
stand for are those of ggml's ``dequantize_row_*`` (ggml-quants.c) in float32, to the bit. Types
with one scale a block become groups (``groups.py``); the others stay on a device as they are in
the file, where the CPU's kernels read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig
from exkv.checkpoint.files import quoted
from exkv.checkpoint.gguf.header import TENSOR_TYPES, TensorType
from exkv.ops.registry import define_op
from exkv.ops.weight_groups import BLOCK

from .floats import FLOATS
from .format import Layout, Size, Tensors, WeightFormat
from .groups import GroupFormat
from .methods import FormatOf, register
from .mxfp4 import MXFP4Format
from .tiles import Packing, TiledFormat, packed_layout

#: Blocks (n, bytes) uint8 -> weights (n, block) float32.
Unpack = Callable[[torch.Tensor], torch.Tensor]
#: The same -> their codes (n, block) uint8, which count from 0.
Codes = Callable[[torch.Tensor], torch.Tensor]
#: Weights that are put into another layout at once, while a model is read.
_TILE = 1 << 22


def _row_bytes(type: TensorType, size: Size) -> int:
    """Of a row; ValueError where it is no whole number of blocks."""
    if size[1] % type.block:
        raise ValueError(
            f"rows of {size[1]} numbers are no blocks of {type.block}, as {type.name} has them"
        )
    return size[1] // type.block * type.nbytes


def _stored(type: TensorType, size: Size) -> dict[str, ExpectedTensor]:
    shape = (size[0], _row_bytes(type, size))
    return {"weight": ExpectedTensor(shape=shape, dtypes=(torch.uint8,))}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat(TiledFormat):
    """One of ggml's types, in the file's own layout on a device too.

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

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        (weight,) = _stored(self.type, size).values()
        each = _HALVES[self.type.name]
        return {"weight": replace(weight, block=self.type.nbytes, halves=each)}

    def layout(self, size: Size) -> Layout:
        return {"weight": ((size[0], _row_bytes(self.type, size)), torch.uint8)}

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"weight": stored["weight"]}

    def native(self, size: Size) -> tuple[int, ...] | None:
        return packed_layout(Packing.GGML, _NUMBERS[self.type.name])

    def part(self, tensors: Tensors, begin: int, end: int) -> dict[str, torch.Tensor] | None:
        return {"weight": tensors["weight"][begin:end]}

    def outputs(self, tensors: Tensors) -> int:
        return len(tensors["weight"])

    def rows(self, tensors: Tensors, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        packed = tensors["weight"][ids]
        blocks = packed.view(-1, self.type.nbytes)
        return self.unpack(blocks).view(len(packed), -1).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFormat(GroupFormat):
    """A type whose blocks are codes and a scale, or an offset too: they lie apart on a device, as
    kernels read them, at the file's number of bytes.

    Attributes:
        type: its name and sizes.
        codes: those of its blocks.
    """

    type: TensorType
    codes: Codes = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        return f"gguf {self.type.name}"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        return _stored(self.type, size)

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = torch.ops.exkv.split_blocks(stored["weight"], _NUMBERS[self.type.name])
        return dict(zip(self.names, made, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Float4Format(MXFP4Format):
    """ggml's MXFP4: a block is the scale's byte and the codes of 32 inputs, those of the first half
    in the low bits. On a device it is MXFP4 as other files have it."""

    type: TensorType

    @property
    def name(self) -> str:
        return f"gguf {self.type.name}"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        return _stored(self.type, size)

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        blocks = stored["weight"].reshape(-1, self.type.nbytes)
        codes = _fields(blocks[:, 1:], 4, 16)
        made = {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "scale": blocks[:, 0]}
        outputs = len(stored["weight"])
        rows = {name: each.reshape(outputs, -1).contiguous() for name, each in made.items()}
        return MXFP4Format.convert(self, rows)


def _split_fake(rows: torch.Tensor, type: int) -> list[torch.Tensor]:
    format = _split_format(rows, type)
    size = (len(rows), rows.shape[1] // format.type.nbytes * format.type.block)
    layout = format.layout(size).values()
    return [rows.new_empty(shape, dtype=dtype) for shape, dtype in layout]


@define_op("split_blocks(Tensor rows, int type) -> Tensor[]", fake=_split_fake)
def split_blocks(rows: torch.Tensor, type: int) -> list[torch.Tensor]:
    """Rows of blocks, uint8 (out, bytes) -> the tensors of a :class:`SplitFormat`, in its order.

    Args:
        type: ggml's number.

    Raises:
        ValueError: the type has other blocks, or the rows are none of it.
    """
    format = _split_format(rows, type)
    weights = rows.shape[1] // format.type.nbytes * format.type.block
    step = max(_TILE // max(weights, 1) // BLOCK * BLOCK, BLOCK)
    tiles = [_split(format, tile) for tile in rows.split(step)]
    return [torch.cat(parts) for parts in zip(*tiles, strict=True)]


def _split(format: SplitFormat, rows: torch.Tensor) -> list[torch.Tensor]:
    blocks = rows.reshape(-1, format.type.nbytes)
    codes = format.codes(blocks).view(len(rows), -1)
    halves = blocks[:, :4].contiguous().view(torch.float16).view(len(rows), -1, 2)
    return list(format.pack(codes, halves[..., 0], halves[..., 1]).values())


def _split_format(rows: torch.Tensor, type: int) -> SplitFormat:
    format = next((each for name, each in FORMATS.items() if _NUMBERS[name] == type), None)
    if not isinstance(format, SplitFormat):
        raise ValueError(f"split_blocks: ggml's type {type} has no codes with one scale")
    each = format.type.nbytes
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] % each:
        raise ValueError(
            f"split_blocks: rows must be uint8 (out, bytes), whole blocks of {each} bytes; they "
            f"are {rows.dtype} {tuple(rows.shape)}"
        )
    return format


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer: ``types`` of the settings names those that aren't floats, as
    ``exkv.checkpoint.gguf.metadata`` finds them in a file's header."""
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
            format.stored(size)
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
    runs = packed.reshape(len(packed), -1, run)
    fields = [runs >> below & (1 << bits) - 1 for below in range(0, 8, bits)]
    return torch.stack(fields, 2).view(len(packed), -1)


def _signed(codes: torch.Tensor, zero: int) -> torch.Tensor:
    """Codes less their zero point, as floats."""
    return codes.view(torch.int8).sub(zero).float()


def _codes4(blocks: torch.Tensor) -> torch.Tensor:
    """Q4_0, Q4_1: behind the floats."""
    return _fields(blocks[:, -16:], 4, 16)


def _codes5(blocks: torch.Tensor) -> torch.Tensor:
    """Q5_0, Q5_1: the fifth bits lie before the others."""
    return _codes4(blocks) | (_fields(blocks[:, -20:-16], 1, 1) << 4)


def _codes8(blocks: torch.Tensor) -> torch.Tensor:
    """Q8_0: signed in the file."""
    return blocks[:, 2:] ^ 128


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


#: Where blocks have 16-bit floats, in bytes.
_HALVES: dict[str, tuple[int, ...]] = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
_UNPACK: dict[str, Unpack] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
#: Bits of a code, what there is beside the scale, and where the codes are.
_SPLIT: dict[str, tuple[int, str, Codes]] = {
    "Q4_0": (4, "symmetric", _codes4),
    "Q4_1": (4, "offset", _codes4),
    "Q5_0": (5, "symmetric", _codes5),
    "Q5_1": (5, "offset", _codes5),
    "Q8_0": (8, "symmetric", _codes8),
}


def _format(type: TensorType) -> BlockFormat | SplitFormat | Float4Format:
    if type.name == "MXFP4":
        return Float4Format(weight="weight", scale="scale", type=type)
    if type.name in _UNPACK:
        return BlockFormat(type=type, unpack=_UNPACK[type.name])
    bits, shift, codes = _SPLIT[type.name]
    scale = torch.float16
    return SplitFormat(
        bits=bits, group=type.block, scale=scale, shift=shift, type=type, codes=codes
    )


#: ggml's name of a type -> its number.
_NUMBERS = {type.name: number for number, type in TENSOR_TYPES.items()}
#: ggml's name of a type -> its format.
FORMATS = {type.name: _format(type) for type in TENSOR_TYPES.values() if type.dtype is None}
for _each in FORMATS.values():
    register(_each)
