"""Linear layers whose weights are integers with a scale for each group of inputs.

A matrix (out, in) is a list of tensors:

- ``codes``, uint8 (ceil(out / 8), in / 32, 32 * bits): unsigned integers of ``bits`` bits, packed
  as below;
- ``scale``, floats (out, groups);
- ``offset``, floats (out, groups), or ``zero``, uint8 (out, bytes), zero points of 8 bits, or of 4
  bits, low halves first, where codes have 4 bits or fewer; or neither;
- ``order``, int32 (in,), if inputs were sorted: column i is for input ``order[i]``.

A weight is ``scale * code + offset``, or ``scale * (code - zero)``, with a zero of ``2^(bits - 1)``
if there is neither.

Codes are packed as the kernels read them: a chunk holds 32 inputs of 8 outputs. Words of 16 bits
hold one output's inputs of equal parity, in steps of two; 16 words, even and odd inputs of each
output, make a vector of 32 bytes. So a shift and a mask of a vector yield pairs of inputs for each
of 8 outputs, ready to be multiplied and added in pairs. Bits that no word is a multiple of are
packed in planes, the lower bits first: 6 as 4 and 2, 5 as 4 and 1, 3 as 2 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from exkv.errors import is_out_of_memory
from exkv_ext import cpu_isa

from . import prompt_bits
from .registry import HOST, computes_on, define_op

#: Outputs of a block, and inputs of a chunk.
BLOCK, CHUNK = 8, 32

#: Bits of a code -> bits of its planes, the lower ones first.
PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}

#: Values of :attr:`Groups.shift`: the tensor besides the scale.
SYMMETRIC, OFFSET, ZERO = range(3)

#: Most rows of x for which kernels multiply by the codes directly.
MOST_ROWS = 16
#: The same for 16-bit floats on AVX2: 2.6 to 3 times as fast as tiles of floats at 32 rows, 1.0 to
#: 1.2 times at 256, 0.9 to 1.0 times at 512 (two threads).
MOST_BY_CODES = 256

#: CPU instruction sets without products of 16-bit floats; None: not detected.
_WITHOUT_SHORT = (None, "portable", "avx2")

#: Weights that are dequantized at a time if there are too many rows for the kernels.
TILE = 1 << 21
#: The same on a GPU: a product of fewer leaves multiprocessors idle, and Python is slower. Without
#: kernels the reference takes 3 to 6 further bytes a weight, and each launch is long enough to hide
#: the next one's overhead.
GPU_TILE = 1 << 24


class Groups(NamedTuple):
    """Layout of a grouped matrix; the ops take its fields as a list.

    Attributes:
        bits: bits of a code.
        group: inputs that share a scale, a multiple of 32; 0 for all.
        shift: SYMMETRIC, OFFSET or ZERO.
        ordered: 1 if there is an ``order``.
    """

    bits: int
    group: int
    shift: int
    ordered: int

    def count(self, inputs: int) -> int:
        """Number of groups of ``inputs`` inputs."""
        return 1 if self.group == 0 else -(-inputs // self.group)

    def zero_bits(self) -> int:
        return 4 if self.bits <= 4 else 8

    def tensors(self) -> int:
        """Number of tensors of a matrix."""
        return 2 + (self.shift != SYMMETRIC) + self.ordered


# Packing --------------------------------------------------------------------------------------


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack integers (out, in), 0 to 2^bits - 1 -> uint8 (ceil(out / 8), in / 32, 32 * bits)."""
    return torch.ops.exkv.pack_codes(codes.to(torch.uint8), bits)


def _codes_fake(codes: Tensor, bits: int) -> Tensor:
    outputs, inputs = codes.shape
    return codes.new_empty((-(-outputs // BLOCK), inputs // CHUNK, CHUNK * bits))


@define_op("pack_codes(Tensor codes, int bits) -> Tensor", fake=_codes_fake)
def _packed_codes(codes: Tensor, bits: int) -> Tensor:
    """:func:`pack_codes` of uint8.

    Raises:
        ValueError: an unsupported shape, dtype or number of bits.
    """
    if bits not in PLANES:
        raise ValueError(f"pack_codes: codes of {bits} bits; they must have 2 to 6, or 8")
    if codes.dtype != torch.uint8 or codes.dim() != 2 or codes.shape[1] % CHUNK:
        raise ValueError(
            f"pack_codes: codes must be uint8 (out, in), in a multiple of {CHUNK}; they are "
            f"{codes.dtype} {tuple(codes.shape)}"
        )
    padded = F.pad(codes, (0, 0, 0, -len(codes) % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, CHUNK))  # (n, 8, chunks, 32)
    packed, below = [], 0
    for plane in PLANES[bits]:
        whole = plane == bits
        packed.append(_pack_plane(blocks if whole else blocks >> below & (1 << plane) - 1, plane))
        below += plane
    return packed[0] if len(packed) == 1 else torch.cat(packed, -1)


def _pack_plane(codes: Tensor, bits: int) -> Tensor:
    """uint8 (n, 8, chunks, 32) -> uint8 (n, chunks, 32 * bits)."""
    each = 8 // bits
    # (n, 8, chunks, vectors, bytes of a word, fields of a byte, parity)
    fields = codes.unflatten(3, (bits, 2, each, 2))
    made = fields[..., 0, :]
    for place in range(1, each):
        made = made | fields[..., place, :] << bits * place
    words = made.contiguous().flatten(3).view(torch.int32)  # (n, 8, chunks, vectors)
    # Swap the two bytes in the middle: parity first, then the bytes of a word.
    words = words & ~0xFFFF00 | words >> 8 & 0xFF00 | (words & 0xFF00) << 8
    return words.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Inverse of :func:`pack_codes`, for whole blocks: uint8 (8 * blocks, in)."""
    (_, _, lowest), *others = _planes(packed, bits)
    codes = _unpack_plane(lowest, PLANES[bits][0])
    for plane, below, part in others:
        codes.bitwise_or_(_unpack_plane(part, plane).bitwise_left_shift_(below))
    return codes.flatten(0, 1).flatten(1)


def _planes(packed: Tensor, bits: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield bits of each plane, bits below it, and its bytes."""
    below = 0
    parts = packed.split([CHUNK * plane for plane in PLANES[bits]], -1)
    for plane, part in zip(PLANES[bits], parts, strict=True):
        yield plane, below, part
        below += plane


def _unpack_plane(packed: Tensor, bits: int) -> Tensor:
    """-> uint8 (n, 8, chunks, 32), for the caller to write to."""
    fields = packed.unflatten(2, (bits, BLOCK, 2, 2))  # the low byte of a word, then the high one
    if bits < 8:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        fields = (fields.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1).flatten(5)
    # (n, chunks, vectors, 8, parity, fields)
    return fields.permute(0, 3, 1, 2, 5, 4).flatten(3)


def pack_zeros(zeros: Tensor, bits: int) -> Tensor:
    """Pack zero points (out, groups) for codes of ``bits`` bits -> uint8 (out, bytes)."""
    zeros = zeros.to(torch.uint8).contiguous()
    if bits > 4:
        return zeros
    low, high = F.pad(zeros, (0, zeros.shape[1] % 2)).unflatten(1, (-1, 2)).unbind(-1)
    return low | high << 4


def unpack_zeros(packed: Tensor, bits: int, groups: int) -> Tensor:
    """Inverse of :func:`pack_zeros`, uint8 (out, groups)."""
    if bits > 4:
        return packed
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)[:, :groups]


# Dequantizing ---------------------------------------------------------------------------------


def dequantized(tensors: Sequence[Tensor], groups: Groups, dtype: torch.dtype) -> Tensor:
    """The matrix (out, in), computed in float32."""
    codes, scale = unpack_codes(tensors[0], groups.bits)[: len(tensors[1])], tensors[1]
    return _unsorted(_valued(codes, scale, tensors[2:], groups, dtype), tensors, groups)


def _unsorted(values: Tensor, tensors: Sequence[Tensor], groups: Groups) -> Tensor:
    """Columns (..., in) in the order of the layer's inputs."""
    if not groups.ordered:
        return values
    return torch.empty_like(values).index_copy_(-1, tensors[-1].long(), values)


#: Rows of a lookup at once: the blocks that contain them take eight times their bytes.
_ROWS_AT_ONCE = 128


def rows_dequantized(
    ids: Tensor, tensors: Sequence[Tensor], groups: Groups, dtype: torch.dtype
) -> Tensor:
    """Look up rows (...) of the matrix -> (..., in)."""
    flat = ids.flatten()
    if len(flat) <= _ROWS_AT_ONCE:
        return _rows_dequantized(flat, tensors, groups, dtype).unflatten(0, ids.shape)
    inputs = tensors[0].shape[1] * CHUNK
    out = torch.empty(len(flat), inputs, dtype=dtype, device=flat.device)
    for some, into in zip(flat.split(_ROWS_AT_ONCE), out.split(_ROWS_AT_ONCE), strict=True):
        into.copy_(_rows_dequantized(some, tensors, groups, dtype))
    return out.unflatten(0, ids.shape)


def _rows_dequantized(
    flat: Tensor, tensors: Sequence[Tensor], groups: Groups, dtype: torch.dtype
) -> Tensor:
    """Look up rows (N,) of the matrix -> (N, in), by unpacking the blocks that contain them."""
    block = flat >> BLOCK.bit_length() - 1  # // would have a plan import sympy
    blocks = unpack_codes(tensors[0][block], groups.bits).unflatten(0, (-1, BLOCK))
    codes = blocks[torch.arange(len(flat), device=flat.device), flat % BLOCK]
    parts = [part[flat] for part in tensors[1 : groups.tensors() - groups.ordered]]
    return _unsorted(_valued(codes, parts[0], parts[1:], groups, dtype), tensors, groups)


def _valued(
    codes: Tensor, scale: Tensor, rest: Sequence[Tensor], groups: Groups, dtype: torch.dtype
) -> Tensor:
    """Dequantize codes (out, in) in float32; columns are not reordered.

    On a GPU without kernels each op is a launch over a whole tile, and its temporaries take memory
    that calls need: hence few ops, and no float32 where 8-bit integers are exact in ``dtype``.
    """
    inputs = codes.shape[1]
    if padding := -inputs % (groups.group or inputs):  # the last group is smaller
        codes = F.pad(codes, (0, padding))
    codes, factor = codes.unflatten(1, (scale.shape[1], -1)), scale.unsqueeze(-1)
    if groups.shift == OFFSET:  # the product is not rounded to dtype
        values = codes.float().mul_(factor).add_(rest[0].unsqueeze(-1)).to(dtype)
    else:
        values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        torch.sub(codes, _zero_points(rest, groups, scale), out=values)
        values.mul_(factor)
    return values.flatten(1)[:, :inputs]


def _zero_points(rest: Sequence[Tensor], groups: Groups, scale: Tensor) -> Tensor | float:
    """Zero points in floats of any dtype: all represent 8-bit integers and their differences
    exactly."""
    if groups.shift == SYMMETRIC:
        return float(2 ** (groups.bits - 1))
    zeros = unpack_zeros(rest[0], groups.bits, scale.shape[1])
    return zeros.to(scale.dtype).unsqueeze(-1)


# The ops --------------------------------------------------------------------------------------


def _checked(op: str, tensors: Sequence[Tensor], layout: Sequence[int]) -> Groups:
    """Check tensors and layout of one or more matrices, and return the layout.

    Raises:
        ValueError: an invalid layout, or tensors that don't match it.
    """
    if len(layout) != len(Groups._fields):
        raise ValueError(f"{op}: the layout is {len(layout)} numbers, and must be 4")
    groups = Groups(*layout)
    if groups.bits not in PLANES or groups.group < 0 or groups.group % CHUNK:
        raise ValueError(
            f"{op}: there are no groups of {groups.group} inputs of {groups.bits} bits"
        )
    if groups.shift not in (SYMMETRIC, OFFSET, ZERO) or groups.ordered not in (0, 1):
        raise ValueError(
            f"{op}: shift is {groups.shift} of 0 to 2, ordered {groups.ordered} of 0, 1"
        )
    if not tensors or len(tensors) % groups.tensors():
        raise ValueError(f"{op}: {len(tensors)} tensors; a matrix has {groups.tensors()}")
    for first in range(0, len(tensors), groups.tensors()):
        _check_matrix(op, tensors[first : first + groups.tensors()], groups)
    return groups


def _check_matrix(op: str, tensors: Sequence[Tensor], groups: Groups) -> None:
    codes, scale, *rest = tensors
    if codes.dim() != 3 or scale.dim() != 2 or codes.shape[1] == 0:
        raise ValueError(
            f"{op}: codes {tuple(codes.shape)} must have 3 dimensions, the second of 1 or more, "
            f"and scale {tuple(scale.shape)} 2"
        )
    outputs, inputs = len(scale), codes.shape[1] * CHUNK
    count = groups.count(inputs)
    zeros = -(-count * groups.zero_bits() // 8)
    shapes = [(-(-outputs // BLOCK), inputs // CHUNK, CHUNK * groups.bits), (outputs, count)]
    shapes += {SYMMETRIC: [], OFFSET: [(outputs, count)], ZERO: [(outputs, zeros)]}[groups.shift]
    shapes += [(inputs,)] * groups.ordered
    types = [torch.uint8, scale.dtype, *(part.dtype for part in rest)]
    if groups.shift == ZERO:
        types[2] = torch.uint8
    if groups.ordered:
        types[-1] = torch.int32
    for part, shape, dtype in zip(tensors, shapes, types, strict=True):
        if tuple(part.shape) != shape or part.dtype != dtype:
            raise ValueError(
                f"{op}: a tensor is {part.dtype} {tuple(part.shape)}, and must be {dtype} {shape}"
            )
    if not scale.dtype.is_floating_point:
        raise ValueError(f"{op}: scale is {scale.dtype}, and must be floats")


@define_op(
    "dequantize_weight(Tensor[] tensors, int[] layout, int begin, int end, ScalarType dtype) "
    "-> Tensor",
    fake=lambda tensors, layout, begin, end, dtype: tensors[0].new_empty(
        (end - begin, tensors[0].shape[1] * CHUNK), dtype=dtype
    ),
    kernels_fall_back=True,
)
def dequantize_weight(
    tensors: Sequence[Tensor], layout: Sequence[int], begin: int, end: int, dtype: torch.dtype
) -> Tensor:
    """Dequantize rows [begin, end) of the matrix, (end - begin, in), with columns in the order of
    the codes.

    Args:
        layout: the fields of :class:`Groups`.
        begin: a multiple of 8.
    """
    groups = _checked("dequantize_weight", tensors, layout)._replace(ordered=0)
    if not 0 <= begin <= end <= len(tensors[1]) or begin % BLOCK:
        raise ValueError(
            f"dequantize_weight: rows {begin} to {end} of {len(tensors[1])}; the first must be a "
            f"multiple of {BLOCK}"
        )
    parts = [part[begin:end] for part in tensors[1 : groups.tensors()]]
    codes = tensors[0][begin // BLOCK : -(-end // BLOCK)]
    return dequantized([codes, *parts], groups, dtype)


def _fake(
    x: Tensor, tensors: Sequence[Tensor], layout: Sequence[int], bias: Tensor | None
) -> Tensor:
    return x.new_empty((*x.shape[:-1], tensors[1].shape[0]))


@define_op(
    "linear_groups(Tensor x, Tensor[] tensors, int[] layout, Tensor? bias) -> Tensor",
    fake=_fake,
    kernels_fall_back=True,
)
def linear_groups(
    x: Tensor, tensors: Sequence[Tensor], layout: Sequence[int], bias: Tensor | None
) -> Tensor:
    """x (..., in) -> x weight^T + bias (..., out); for at most :data:`MOST_ROWS` rows, or more if
    :func:`is_by_codes` allows.

    The kernels read packed codes, and multiply integers: a chunk of x is rounded to 16 bits
    (float32 to twice as many) of its largest magnitude, which is finer than bfloat16 and float16.
    A row's result doesn't depend on other rows.

    Args:
        tensors: see the module's docstring.
        layout: the fields of :class:`Groups`.
    """
    _checked("linear_groups", tensors, layout)
    return _by_tiles(x, tensors, layout, bias, F.linear)


@define_op(
    "linear_groups_prompt(Tensor x, Tensor[] tensors, int[] layout, Tensor? bias, int bits) "
    "-> Tensor",
    fake=lambda x, tensors, layout, bias, bits: _fake(x, tensors, layout, bias),
    kernels_fall_back=True,
)
def linear_groups_prompt(
    x: Tensor, tensors: Sequence[Tensor], layout: Sequence[int], bias: Tensor | None, bits: int
) -> Tensor:
    """:func:`linear_groups` for many rows, of x in 8 or 16 bits (``prompt_bits.rounded``). By
    kernels a row's result doesn't depend on other rows."""
    groups = _checked("linear_groups_prompt", tensors, layout)
    if groups.ordered:
        x, tensors, groups = _in_order(x, tensors[-1]), tensors[:-1], groups._replace(ordered=0)
    wide = None if bias is None else bias.float()
    made = _by_tiles(prompt_bits.rounded(x, bits), tensors, list(groups), wide, F.linear)
    return made.to(x.dtype)


def _several_fake(
    x: Tensor, tensors: Sequence[Tensor], layout: Sequence[int], biases: Sequence[Tensor]
) -> list[Tensor]:
    each = Groups(*layout).tensors()
    return [
        _fake(x, tensors[first : first + each], layout, None)
        for first in range(0, len(tensors), each)
    ]


@define_op(
    "linears_groups(Tensor x, Tensor[] tensors, int[] layout, Tensor[] biases) -> Tensor[]",
    fake=_several_fake,
    kernels_fall_back=True,
)
def linears_groups(
    x: Tensor, tensors: Sequence[Tensor], layout: Sequence[int], biases: Sequence[Tensor]
) -> list[Tensor]:
    """:func:`linear_groups` of one x by several matrices of one layout, whose tensors are
    concatenated, with a bias for each or none (``[]``); bit-identical."""
    each = _checked("linears_groups", tensors, layout).tensors()
    count = len(tensors) // each
    if biases and len(biases) != count:
        raise ValueError(f"linears_groups: {len(biases)} biases for {count} matrices")
    added: Sequence[Tensor | None] = biases or [None] * count
    return [
        _by_tiles(x, tensors[each * i : each * (i + 1)], layout, added[i], F.linear)
        for i in range(count)
    ]


def multiply(x: Tensor, tensors: Sequence[Tensor], groups: Groups, bias: Tensor | None) -> Tensor:
    """x weight^T + bias for any number of rows: on the codes, or on dequantized tiles."""
    if bits := rounded_bits(x, groups):
        return torch.ops.exkv.linear_groups_prompt(x, tensors, list(groups), bias, bits)
    if is_by_codes(x):
        return torch.ops.exkv.linear_groups(x, tensors, list(groups), bias)
    return torch.ops.exkv.linear_group_tiles(x, tensors, list(groups), bias)


@define_op(
    "linear_group_tiles(Tensor x, Tensor[] tensors, int[] layout, Tensor? bias) -> Tensor",
    fake=_fake,
)
def linear_group_tiles(
    x: Tensor, tensors: Sequence[Tensor], layout: Sequence[int], bias: Tensor | None
) -> Tensor:
    """:func:`linear_groups` for any number of rows, on dequantized tiles."""
    _checked("linear_group_tiles", tensors, layout)
    return _by_tiles(x, tensors, layout, bias, torch.ops.exkv.linear, tile_dtype(x))


def is_decode_sized(x: Tensor) -> bool:
    """Whether x (..., in) has few enough rows for the kernels, which don't support float64."""
    return x.shape[:-1].numel() <= MOST_ROWS and x.dtype != torch.float64


def rounded_bits(x: Tensor, groups: Groups) -> int:
    """Bits to which ``linear_groups_prompt`` is to round x (..., in); 0 if another op is faster."""
    return 0 if is_decode_sized(x) else prompt_bits.bits_of(x, groups.bits)


def is_by_codes(x: Tensor, most: int = MOST_BY_CODES) -> bool:
    """Whether kernels multiply x (..., in) by the codes directly. On processors whose only 16-bit
    products are of integers, this is also faster for short prompts, 16 rows at a time, than
    products of floats.

    Args:
        most: upper bound on rows of such prompts.
    """
    short = tile_dtype(x) != x.dtype and cpu_isa() == "avx2"
    return is_decode_sized(x) or (short and x.shape[:-1].numel() <= most)


def tile_dtype(x: Tensor) -> torch.dtype:
    """Dtype in which a tile is dequantized and multiplied by x. Processors without products of
    16-bit floats are twice as fast in float32, which is also more exact."""
    short = x.dtype in (torch.bfloat16, torch.float16)
    on_host = computes_on(x) in HOST
    return torch.float32 if short and on_host and cpu_isa() in _WITHOUT_SHORT else x.dtype


def _in_order(x: Tensor, order: Tensor) -> Tensor:
    try:
        return x.index_select(-1, order)
    except (IndexError, RuntimeError) as error:  # which of them depends on x's shape
        if is_out_of_memory(error):
            raise
        raise ValueError(f"order must be a permutation of x's inputs ({error})") from None


def tile_of(inputs: int, device_type: str) -> int:
    """Rows of ``inputs`` inputs that are dequantized at once."""
    weights = TILE if device_type in HOST else GPU_TILE
    return max(1, weights // inputs // BLOCK) * BLOCK


def _by_tiles(
    x: Tensor,
    tensors: Sequence[Tensor],
    layout: Sequence[int],
    bias: Tensor | None,
    times: Callable[..., Tensor],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply with at most one dequantized tile at a time, in x's dtype or ``dtype``."""
    outputs, inputs = len(tensors[1]), tensors[0].shape[1] * CHUNK
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"bias is {tuple(bias.shape)}, and must be ({outputs},)")
    if Groups(*layout).ordered:
        x = _in_order(x, tensors[-1])
    step = tile_of(inputs, computes_on(x))
    if step >= outputs:
        whole = torch.ops.exkv.dequantize_weight(tensors, layout, 0, outputs, x.dtype)
        return times(x, whole, bias)
    out = x.new_empty((*x.shape[:-1], outputs))
    x = x.to(dtype or x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    for begin in range(0, outputs, step):
        end = min(begin + step, outputs)
        rows = (tensors, layout, begin, end, x.dtype)
        # Not assigned to a name, so that it is freed before the next tile is made.
        added = None if bias is None else bias[begin:end]
        out[..., begin:end] = times(x, torch.ops.exkv.dequantize_weight(*rows), added)
    return out
