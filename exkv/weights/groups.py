"""Weights as small integers with a scale for each group of inputs: the layout that kernels read.

Other formats of this kind are converted to this layout when loaded: they derive from
:class:`GroupFormat`, define their name and how a checkpoint stores them (``name``, ``stored``), and
end their ``convert`` with :meth:`GroupFormat.pack`, which takes the codes as unsigned integers
(out, in) with rows and columns in the model's order::

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Q4_0(GroupFormat):  # registered as Q4_0(bits=4, group=32, scale=torch.float16)
        name: ClassVar[str] = "q4_0"
        def stored(self, size): ...
        def convert(self, stored):
            ...
            return self.pack(codes, d)  # w = d * (code - 8)

These fit without loss, in no more bytes: Q8_0 (8 bits, groups of 32, codes + 128), Q4_0, Q4_1 (4
bits, groups of 32, with ``offset``), Q5_0 and Q5_1; GPTQ and AWQ with zero points (``zero``), or
without if all of them are in the middle; compressed-tensors' signed integers + 2^(bits - 1); and
inputs sorted by activation order: pass as ``order`` the permutation that made groups contiguous.
The packed order is documented in ``exkv.ops.weight_groups``.

Any of them may store a matrix times a Hadamard transform, for inputs that are transformed likewise:
see ``hadamard.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from exkv.checkpoint import ExpectedTensor
from exkv.ops import weight_groups
from exkv.ops.bound_run import TRANSFORMED
from exkv.ops.weight_groups import BLOCK, CHUNK, OFFSET, PLANES, SYMMETRIC, ZERO, Groups

from .floats import NAMES
from .format import Layout, Size, Tensors, WeightFormat, in_blocks, picked
from .hadamard import LEAST, transformed

_SHIFTS = {"symmetric": SYMMETRIC, "offset": OFFSET, "zero": ZERO}
_SCALES = (torch.float16, torch.bfloat16, torch.float32)
#: Tensors with a row for each of the matrix.
_BY_ROW = ("scale", *_SHIFTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFormat(WeightFormat):
    """w = scale * (code - 2^(bits - 1)), or scale * code + offset, or scale * (code - zero).

    Attributes:
        bits: bits of a code: 8, 6, 5, 4, 3 or 2.
        group: inputs that share a scale, a multiple of 32; 0 for a whole row.
        scale: dtype of scales and offsets: float16, bfloat16 or float32.
        shift: "symmetric", "offset" (a float a group) or "zero" (an integer a group).
        ordered: whether inputs are sorted by a permutation, stored in another tensor.
        hadamard: block size of the transform of inputs, a power of two; 0 for none.
    """

    bits: int
    group: int
    scale: torch.dtype
    shift: str = "symmetric"
    ordered: bool = False
    hadamard: int = 0

    def __post_init__(self) -> None:
        if self.bits not in PLANES:
            raise ValueError(f"groups of {self.bits} bits; bits must be one of {sorted(PLANES)}")
        if self.group < 0 or self.group % CHUNK:
            raise ValueError(
                f"groups of {self.group} inputs; it must be a multiple of {CHUNK}, or 0 for a "
                "whole row"
            )
        if self.shift not in _SHIFTS:
            raise ValueError(f"shift is {self.shift!r}; it must be one of {', '.join(_SHIFTS)}")
        if self.scale not in _SCALES:
            raise ValueError(f"scales are {self.scale}; they must be one of {_SCALES}")
        if self.hadamard and (self.hadamard < LEAST or self.hadamard & self.hadamard - 1):
            raise ValueError(
                f"transformed blocks of {self.hadamard} inputs; it must be a power of two from "
                f"{LEAST} on, or 0 for none"
            )

    @property
    def zeros(self) -> bool:
        """Whether groups have zero points."""
        return self.shift == "zero"

    @property
    def groups(self) -> Groups:
        """The layout as the ops take it."""
        return Groups(self.bits, self.group, _SHIFTS[self.shift], int(self.ordered))

    @property
    def name(self) -> str:
        """The layout's name; formats that are stored differently override it."""
        return self.layout_name

    @property
    def layout_name(self) -> str:
        """Name of the layout, such as ``int4-64-fp16-offset``."""
        more = "-ordered" if self.ordered else ""
        more += f"-hadamard{self.hadamard}" if self.hadamard else ""
        return f"int{self.bits}-{self.group or 'row'}-{NAMES[self.scale]}-{self.shift}{more}"

    @property
    def names(self) -> tuple[str, ...]:
        shift = () if self.shift == "symmetric" else (self.shift,)
        return ("codes", "scale", *shift, *(["order"] if self.ordered else []))

    @property
    def transform(self) -> int:
        return self.hadamard

    def native(self, size: Size) -> tuple[int, ...] | None:
        mark = (TRANSFORMED, self.hadamard) if self.hadamard else ()
        return (*mark, *self.groups)

    def choice_layout(self, size: Size) -> list[int] | None:
        return list(self.groups)

    def layout(self, size: Size) -> Layout:
        outputs, inputs = size
        if inputs % CHUNK:
            raise ValueError(
                f"a matrix of {outputs} x {inputs} can't be in {self.name}: its inputs must be a "
                f"multiple of {CHUNK}"
            )
        if self.hadamard and inputs % self.hadamard:
            raise ValueError(
                f"a matrix of {outputs} x {inputs} can't be in {self.name}: its inputs must be a "
                f"multiple of the {self.hadamard} of a transformed block"
            )
        groups = self.groups.count(inputs)
        zeros = -(-groups * self.groups.zero_bits() // 8)
        shape = (-(-outputs // BLOCK), inputs // CHUNK, CHUNK * self.bits)
        beside = {
            "offset": ((outputs, groups), self.scale),
            "zero": ((outputs, zeros), torch.uint8),
            "order": ((inputs,), torch.int32),
        }
        made: Layout = {"codes": (shape, torch.uint8), "scale": ((outputs, groups), self.scale)}
        return {**made, **{name: beside[name] for name in self.names[2:]}}

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        """The layout itself; derived formats override it."""
        return {
            name: ExpectedTensor.of_floats(shape, dtype)
            if dtype.is_floating_point
            else ExpectedTensor(shape=shape, dtypes=(dtype,))
            for name, (shape, dtype) in self.layout(size).items()
        }

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.ordered:
            _check_order(stored["order"])
        return dict(stored)

    def pack(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Pack codes and scales into the layout's tensors.

        Args:
            codes: integers (out, in) from 0 to 2^bits - 1.
            scale: (out, groups); rounded to the format's dtype.
            shift: offsets or integer zero points (out, groups), if the format has them.
            order: column i of ``codes`` belongs to input ``order[i]``.

        Raises:
            ValueError: ``order`` is not a permutation, or a zero point doesn't fit its bits.
        """
        return self.beside(weight_groups.pack_codes(codes, self.bits), scale, shift, order)

    def beside(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """:meth:`pack` with codes that are packed already."""
        made = {"codes": packed, "scale": scale.to(self.scale).contiguous()}
        if self.shift == "offset":
            assert shift is not None
            made["offset"] = shift.to(self.scale).contiguous()
        if self.shift == "zero":
            assert shift is not None
            made["zero"] = weight_groups.pack_zeros(self._checked(shift), self.bits)
        if self.ordered:
            assert order is not None
            made["order"] = order.to(torch.int32)
            _check_order(made["order"])
        return made

    def _checked(self, zeros: torch.Tensor) -> torch.Tensor:
        most = 2 ** self.groups.zero_bits() - 1
        if zeros.numel() and not 0 <= int(zeros.min()) <= int(zeros.max()) <= most:
            raise ValueError(
                f"zero points range from {int(zeros.min())} to {int(zeros.max())}; with "
                f"{self.bits} bits they must be from 0 to {most}"
            )
        return zeros

    def _parts(self, tensors: Tensors) -> list[torch.Tensor]:
        return [tensors[name] for name in self.names]

    def part(self, tensors: Tensors, begin: int, end: int) -> dict[str, torch.Tensor] | None:
        if begin % BLOCK or end % BLOCK:
            return None
        made = {name: tensors[name][begin:end] for name in self.names}
        made["codes"] = tensors["codes"][begin // BLOCK : end // BLOCK]
        return {**made, "order": tensors["order"]} if self.ordered else made

    def of_rows(self, size: Size, rows: torch.Tensor) -> WeightFormat:
        return self

    def take(self, tensors: Tensors, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        made = {each: picked(tensors[each], rows) for each in self.names if each in _BY_ROW}
        codes = tensors["codes"]
        if len(rows) % BLOCK == 0 and in_blocks(rows, BLOCK):
            codes = picked(codes, rows[::BLOCK] // BLOCK)
        else:
            codes = weight_groups.pack_codes(
                weight_groups.unpack_codes(codes, self.bits)[rows], self.bits
            )
        return {"codes": codes, **made, **({"order": tensors["order"]} if self.ordered else {})}

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        if not self.hadamard:
            return weight_groups.dequantized(self._parts(tensors), self.groups, dtype)
        made = weight_groups.dequantized(self._parts(tensors), self.groups, torch.float32)
        return transformed(made.double(), self.hadamard).to(dtype)

    def linear(self, x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        return self.times(transformed(x, self.hadamard), tensors, bias)

    def times(self, x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        return weight_groups.multiply(x, self._parts(tensors), self.groups, bias)

    def linears(
        self, x: torch.Tensor, each: Sequence[Tensors], biases: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        added = [bias for bias in biases if bias is not None]
        mixed = added and len(added) < len(biases)  # the op takes all of them or none
        x = transformed(x, self.hadamard)
        rounded = weight_groups.rounded_bits(x, self.groups)
        if mixed or rounded or not weight_groups.is_by_codes(x):
            pairs = zip(each, biases, strict=True)
            return [self.times(x, tensors, bias) for tensors, bias in pairs]
        parts = [part for tensors in each for part in self._parts(tensors)]
        layout = list(self.groups)
        return torch.ops.exkv.linears_groups(x, parts, layout, added)

    def embed(self, ids: torch.Tensor, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        if not self.hadamard:
            return weight_groups.rows_dequantized(ids, self._parts(tensors), self.groups, dtype)
        rows = weight_groups.rows_dequantized(ids, self._parts(tensors), self.groups, torch.float32)
        return transformed(rows.double(), self.hadamard).to(dtype)


def _check_order(order: torch.Tensor) -> None:
    """ValueError unless it is a permutation."""
    expected = torch.arange(len(order), dtype=order.dtype)
    if not torch.equal(order.sort().values, expected):
        raise ValueError(f"order must be a permutation of the {len(order)} inputs, and is not")
