"""Products with a matrix whose rows stay packed as in the checkpoint.

Decode-sized inputs are multiplied by kernels that unpack in registers, if the format has one.
Larger inputs, and other formats and devices, are multiplied by a tile of dequantized rows at a
time: a whole dequantized matrix beside the packed one would be the largest tensor of a forward
call. The result is the same, since every output depends on one row.

The layout of a matrix is described to kernels by four or more numbers. The first is a
:class:`Packing`, on which the meaning of the others depends:

- ``GGML``: ggml's number of the type;
- ``FLOAT8``: outputs and inputs that share a scale, 0 for all;
- ``TABLE``: weights that share an absmax, and 1 if absmax are quantized;
- ``FLOAT4``: none;
- ``TRELLIS``: words of a tile, and the codebook's number;
- ``SECTIONS``: outputs, sections and 0, then bits, inputs of a group and inputs of each section.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.nn.functional as F

from exkv.ops import prompt_bits
from exkv.ops.registry import HOST, computes_on, define_op
from exkv.ops.weight_groups import is_by_codes, is_decode_sized, tile_dtype

from .format import Size, Tensors, WeightFormat
from .methods import formats

#: Weights dequantized at a time, on the CPU and on a GPU, where small tiles mean many launches;
#: a format without kernels takes 9 to 16 temporary bytes a weight.
TILE, GPU_TILE = 1 << 20, 1 << 22
#: Kernels read rows whose inputs are a multiple of this.
CHUNK = 32
#: Rows of 16-bit floats up to which kernels are faster than tiles of float32, if there are no other
#: products for them; kernels with a table lookup are faster only for decode-sized x.
MOST_SHORT = 32


class Packing(IntEnum):
    """The first number of a layout of packed rows."""

    GGML = -1
    FLOAT8 = -2
    TABLE = -3
    SECTIONS = -4
    FLOAT4 = -5
    TRELLIS = -6


#: Layouts whose weights are integers times scales.
INTEGERS = (Packing.GGML, Packing.FLOAT4)


def packed_layout(packing: Packing, first: int = 0, second: int = 0) -> tuple[int, ...]:
    """The four numbers of a layout."""
    return (packing.value, first, second, 0)


class TiledFormat(WeightFormat):
    """A format whose rows can be dequantized alone."""

    __slots__ = ()

    @abstractmethod
    def outputs(self, tensors: Tensors) -> int:
        """Rows of the matrix."""

    @abstractmethod
    def rows(self, tensors: Tensors, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize the rows (n, in) of these ids (n,), int64 on the tensors' device."""

    def choice_layout(self, size: Size) -> list[int] | None:
        layout = self.native(size)
        if layout is None or layout[0] not in (Packing.FLOAT8, Packing.FLOAT4):
            return None
        odd = layout[2] & (layout[2] - 1)  # inputs that share a scale: no power of two
        return None if odd else list(layout)

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        device = tensors[self.names[0]].device
        return self.rows(tensors, torch.arange(self.outputs(tensors), device=device), dtype)

    def linear(self, x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        parts, outputs = [tensors[name] for name in self.names], self.outputs(tensors)
        layout = self.native((outputs, x.shape[-1]))
        if layout is not None and (bits := _rounded_bits(x, layout, parts[0])):
            given = (x, parts, self.name, list(layout), outputs, bias, bits)
            return torch.ops.exkv.linear_packed_prompt(*given)
        if layout is None or not is_by_codes(x, 0 if layout[0] == Packing.TABLE else MOST_SHORT):
            return torch.ops.exkv.linear_tiles(x, parts, self.name, outputs, bias)
        return torch.ops.exkv.linear_packed(x, parts, self.name, list(layout), outputs, bias)

    def embed(self, ids: torch.Tensor, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return self.rows(tensors, ids.flatten(), dtype).view(*ids.shape, -1)


def _rounded_bits(x: torch.Tensor, layout: Sequence[int], rows: torch.Tensor) -> int:
    """Bits to which x (..., in) is to be rounded for packed rows, uint8 (out, bytes); 0 if another
    op is faster."""
    if layout[0] not in INTEGERS or is_decode_sized(x):
        return 0
    return prompt_bits.bits_of(x, 8 * rows.shape[1] / x.shape[-1])


def tile_of(inputs: int, device_type: str) -> int:
    """Rows of ``inputs`` inputs dequantized at a time."""
    return max((TILE if device_type in HOST else GPU_TILE) // inputs, 1)


def _fake(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    *_, outputs, _bias = rest
    return x.new_empty((*x.shape[:-1], outputs))


@define_op(
    "linear_tiles(Tensor x, Tensor[] tensors, str format, int outputs, Tensor? bias) -> Tensor",
    fake=_fake,
)
def linear_tiles(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    format: str,
    outputs: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x (..., in) -> x weight^T + bias (..., out), tile by tile.

    Args:
        tensors: in the order of the format's layout.
        format: name of a registered :class:`TiledFormat`.
        outputs: rows of the matrix, from the first on.
    """
    tiled = _tiled(format)
    layout = None if x.dtype == torch.float64 else tiled.native((outputs, x.shape[-1]))
    out, step = x.new_empty((*x.shape[:-1], outputs)), tile_of(x.shape[-1], computes_on(x))
    x = x.to(tile_dtype(x))
    bias = None if bias is None else bias.to(x.dtype)
    for first in range(0, outputs, step):
        rows = (first, min(first + step, outputs))
        if layout is None:
            tile = _rows(tiled, tensors, rows, x.dtype)
        else:
            given = (tensors, format, list(layout), x.shape[-1], *rows, x.dtype)
            tile = torch.ops.exkv.dequantize_packed(*given)
        out[..., slice(*rows)] = torch.ops.exkv.linear(x, tile, _part(bias, *rows))
    return out


def _tiled(name: str) -> TiledFormat:
    tiled = formats().get(name)
    if not isinstance(tiled, TiledFormat):
        raise ValueError(f"no registered format {name!r} has rows that can be dequantized alone")
    return tiled


def _checked(op: str, tensors: Sequence[torch.Tensor], name: str, size: Size) -> TiledFormat:
    """The format of this name; ValueError if there is none, or if the tensors aren't those of a
    matrix of this size or of more rows."""
    tiled = _tiled(name)
    named = dict(zip(tiled.names, tensors, strict=False))
    outputs = -1
    if len(tensors) == len(tiled.names) and tensors[0].dim() > 0:
        outputs = tiled.outputs(named)
    if outputs < size[0]:
        raise ValueError(f"{op}: the tensors have {max(outputs, 0)} rows, fewer than {size[0]}")
    layout = tiled.layout((outputs, size[1]))
    if [(tuple(each.shape), each.dtype) for each in tensors] != list(layout.values()):
        raise ValueError(f"{op}: a matrix of {size[1]} inputs in {name} must be {layout}")
    return tiled


def _rows(
    tiled: TiledFormat, tensors: Sequence[torch.Tensor], rows: Size, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize rows from the first of two numbers up to the second."""
    held = dict(zip(tiled.names, tensors, strict=True))
    return tiled.rows(held, torch.arange(*rows, device=tensors[0].device), dtype)


def _part(bias: torch.Tensor | None, first: int, end: int) -> torch.Tensor | None:
    return None if bias is None else bias[first:end]


# Ops with kernels -----------------------------------------------------------------------------


@define_op(
    "linear_packed(Tensor x, Tensor[] tensors, str format, int[] layout, int outputs, "
    "Tensor? bias) -> Tensor",
    fake=_fake,
    kernels_fall_back=True,
    reference_names=formats(),
)
def linear_packed(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    format: str,
    layout: Sequence[int],
    outputs: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`linear_tiles` for at most :data:`exkv.ops.weight_groups.MOST_ROWS` rows, or
    :data:`MOST_SHORT` where that is faster, by kernels that read the packed rows. Integers are
    multiplied as in ``linear_groups``, 8-bit floats as float32. A row's result doesn't depend on
    other rows.

    Args:
        layout: the format's ``native`` numbers.
    """
    tiled = _checked("linear_packed", tensors, format, (outputs, x.shape[-1]))
    step = tile_of(x.shape[-1], computes_on(x))
    out = x.new_empty((*x.shape[:-1], outputs))
    for first in range(0, outputs, step):
        rows = (first, min(first + step, outputs))
        tile = _rows(tiled, tensors, rows, x.dtype)
        out[..., slice(*rows)] = F.linear(x, tile, _part(bias, *rows))
    return out


@define_op(
    "linear_packed_prompt(Tensor x, Tensor[] tensors, str format, int[] layout, int outputs, "
    "Tensor? bias, int bits) -> Tensor",
    fake=lambda x, tensors, format, layout, outputs, bias, bits: _fake(x, outputs, bias),
    kernels_fall_back=True,
    reference_names=formats(),
)
def linear_packed_prompt(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    format: str,
    layout: Sequence[int],
    outputs: int,
    bias: torch.Tensor | None,
    bits: int,
) -> torch.Tensor:
    """:func:`linear_packed` for many rows, of x in 8 or 16 bits (``prompt_bits.rounded``). By
    kernels a row's result doesn't depend on other rows."""
    _checked("linear_packed_prompt", tensors, format, (outputs, x.shape[-1]))
    wide = None if bias is None else bias.float()
    made = prompt_bits.rounded(x, bits)
    return linear_packed(made, tensors, format, layout, outputs, wide).to(x.dtype)


@define_op(
    "dequantize_packed(Tensor[] tensors, str format, int[] layout, int inputs, int begin, int end, "
    "ScalarType dtype) -> Tensor",
    fake=lambda tensors, format, layout, inputs, begin, end, dtype: tensors[0].new_empty(
        (end - begin, inputs), dtype=dtype
    ),
    kernels_fall_back=True,
    reference_names=formats(),
)
def dequantize_packed(
    tensors: Sequence[torch.Tensor],
    format: str,
    layout: Sequence[int],
    inputs: int,
    begin: int,
    end: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Dequantize rows [begin, end) of the matrix: (end - begin, inputs); bit-identical in float32.

    Args:
        tensors, format, layout: as for :func:`linear_packed`.
    """
    tiled = _checked("dequantize_packed", tensors, format, (end, inputs))
    if not 0 <= begin <= end:
        raise ValueError(f"dequantize_packed: rows {begin} to {end}")
    return _rows(tiled, tensors, (begin, end), dtype)
