"""ggml's packed blocks, as GGUF files have them: ``Q4_0``, ``Q4_K`` and their kin.

A row is a series of blocks of 32 or 256 weights, each with one or two scales in 16-bit floats and
codes of 2 to 8 bits; the K types also have scales of groups within a block. Dequantized values are
bit-identical to those of ggml's ``dequantize_row_*`` (ggml-quants.c) in float32. Types with one
scale a block become groups (``groups.py``); the others keep the file's layout on a device. Kernels
read most of them, IQ1 to IQ3 on the CPU only; for the rest, tiles are dequantized
(``gguf_blocks.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig
from exkv.checkpoint.files import quoted
from exkv.checkpoint.gguf.header import TENSOR_TYPES, TensorType
from exkv.ops.registry import HOST, computes_on, define_op
from exkv.ops.weight_groups import BLOCK, is_decode_sized

from .finite import check_finite
from .floats import FLOATS
from .format import Layout, Size, Tensors, WeightFormat
from .gguf_blocks import HALVES, SPLIT, UNPACK, Codes, Unpack, fields, iq1_m_halves
from .groups import GroupFormat
from .methods import FormatOf, register
from .mxfp4 import MXFP4Format
from .tiles import Packing, TiledFormat, packed_layout

#: Weights converted at a time while a model is loaded.
_TILE = 1 << 22


def _row_bytes(type: TensorType, size: Size) -> int:
    """Bytes of a row; ValueError unless it is a whole number of blocks."""
    if size[1] % type.block:
        raise ValueError(
            f"rows of {size[1]} numbers are not a multiple of {type.name}'s blocks of {type.block}"
        )
    return size[1] // type.block * type.nbytes


class _OfType:
    """Name and stored rows of a format of one of ggml's types."""

    __slots__ = ()
    type: TensorType

    @property
    def name(self) -> str:
        return f"gguf {self.type.name}"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        shape = (size[0], _row_bytes(self.type, size))
        return {"weight": ExpectedTensor(shape=shape, dtypes=(torch.uint8,))}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat(_OfType, TiledFormat):
    """One of ggml's types, in the file's layout on a device too.

    Attributes:
        type: its name and sizes.
        unpack: dequantizes its blocks.
    """

    type: TensorType
    unpack: Unpack = field(compare=False, repr=False)
    names: ClassVar[tuple[str, ...]] = ("weight",)

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        (weight,) = _OfType.stored(self, size).values()
        each = HALVES[self.type.name]
        return {"weight": replace(weight, block=self.type.nbytes, halves=each)}

    def layout(self, size: Size) -> Layout:
        return {"weight": ((size[0], _row_bytes(self.type, size)), torch.uint8)}

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.type.name == "IQ1_M":  # its floats are split into pieces
            blocks = stored["weight"].reshape(-1, self.type.nbytes)
            check_finite("scales", iq1_m_halves(blocks))
        return {"weight": stored["weight"]}

    def native(self, size: Size) -> tuple[int, ...] | None:
        if self.type.name in _WITHOUT_KERNELS:
            return None
        return packed_layout(Packing.GGML, _NUMBERS[self.type.name])

    def choice_layout(self, size: Size) -> list[int] | None:
        layout = self.native(size)
        return list(layout) if layout is not None and has_cuda_kernels(layout) else None

    def part(self, tensors: Tensors, begin: int, end: int) -> dict[str, torch.Tensor] | None:
        return {"weight": tensors["weight"][begin:end]}

    def outputs(self, tensors: Tensors) -> int:
        return len(tensors["weight"])

    def rows(self, tensors: Tensors, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        packed = tensors["weight"][ids]
        blocks = packed.view(-1, self.type.nbytes)
        return self.unpack(blocks).view(len(packed), -1).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFormat(_OfType, GroupFormat):
    """A type whose blocks are codes with a scale and perhaps an offset, which are separate tensors
    on a device, as kernels read them, in the file's number of bytes.

    Attributes:
        type: its name and sizes.
        codes: extracts the codes of its blocks.
    """

    type: TensorType
    codes: Codes = field(compare=False, repr=False)

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = torch.ops.exkv.split_blocks(stored["weight"], _NUMBERS[self.type.name])
        return dict(zip(self.names, made, strict=True))

    def splits_at(self, rows: int) -> bool:
        return rows % BLOCK == 0

    def heads(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """Of few rows by the codes on the host, where a call costs less than to dequantize."""
        outputs = len(tensors["scale"])
        if computes_on(x) in HOST and is_decode_sized(x[0]):
            each = outputs // len(x)
            return torch.stack(
                [
                    self.linear(row, self.part(tensors, i * each, (i + 1) * each) or {}, None)
                    for i, row in enumerate(x)
                ]
            )
        whole = torch.ops.exkv.dequantize_weight(
            self._parts(tensors), list(self.groups), 0, outputs, x.dtype
        )
        return torch.ops.exkv.linear_heads(x, whole.unflatten(0, (len(x), -1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Float4Format(_OfType, MXFP4Format):
    """ggml's MXFP4: a block is the scale's byte and the codes of 32 inputs, the first half of them
    in the low bits. On a device it is MXFP4 as from other files."""

    type: TensorType

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        blocks = stored["weight"].reshape(-1, self.type.nbytes)
        codes = fields(blocks[:, 1:], 4, 16)
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
        type: ggml's number of the type.

    Raises:
        ValueError: the type has no :class:`SplitFormat`, or the rows are not its blocks.
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
    """The format of every layer: ``types`` of the settings, which ``exkv.checkpoint.gguf.metadata``
    finds in a file's header, names the types of layers that aren't floats."""
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


def has_cuda_kernels(layout: Sequence[int]) -> bool:
    """Whether CUDA kernels read rows of this layout (the numbers of ``native``)."""
    only_cpu = (_NUMBERS[name] for name in _ONLY_CPU)
    return layout[0] != Packing.GGML or layout[1] not in only_cpu


def _format(type: TensorType) -> BlockFormat | SplitFormat | Float4Format:
    if type.name == "MXFP4":
        return Float4Format(weight="weight", scale="scale", type=type)
    if type.name in UNPACK:
        return BlockFormat(type=type, unpack=UNPACK[type.name])
    bits, shift, codes = SPLIT[type.name]
    scale = torch.float16
    return SplitFormat(
        bits=bits, group=type.block, scale=scale, shift=shift, type=type, codes=codes
    )


#: Types that no kernel reads; and those with codebooks, which only the CPU's kernels read.
_WITHOUT_KERNELS = ("TQ1_0", "TQ2_0", "NVFP4")
_ONLY_CPU = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
#: ggml's name of a type -> its number.
_NUMBERS = {type.name: number for number, type in TENSOR_TYPES.items()}
#: ggml's name of a type -> its format.
FORMATS = {type.name: _format(type) for type in TENSOR_TYPES.values() if type.dtype is None}
for _each in FORMATS.values():
    register(_each)
