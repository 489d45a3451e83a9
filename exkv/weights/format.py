"""The interface of weight formats.

A :class:`WeightFormat` is a frozen value that knows the tensors of one linear layer: their names,
shapes and dtypes in a checkpoint and on a device, how to convert them, which matrix they encode,
and how to multiply by it. Layers, checks of checkpoints, plans and the bound run use only this
interface. An embedding table is a matrix too, (vocabulary, hidden).

A new format implements ``name``, ``names``, ``stored``, ``layout``, ``convert`` and
``dequantize``. The other methods multiply by the dequantized matrix unless it has something better.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from exkv.checkpoint import ExpectedTensor
from exkv.devices import rounded
from exkv.ops.activations import is_native
from exkv.ops.experts import Routing
from exkv.ops.weight_groups import is_decode_sized

from .hadamard import transformed

if TYPE_CHECKING:
    from .source import Slice, Source

#: Size of a linear layer's matrix: outputs, inputs.
Size = tuple[int, int]
#: Tensor name -> shape and dtype.
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
#: The tensors of one matrix on a device, by the names of the layout, possibly among others.
Tensors = Mapping[str, torch.Tensor]


class WeightFormat(ABC):
    """How one matrix is stored. Equal values store alike, and have the same name."""

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the format with its parameters, for :func:`exkv.weights.format_named`."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the tensors on a device, in the layout's order."""

    def native(self, size: Size) -> tuple[int, ...] | None:
        """Numbers that describe the layout to a bound run's native code, as ``add_layer`` takes
        them; None if layers in this format take the readable route."""
        return None

    @property
    def transform(self) -> int:
        """Block size of the Hadamard transform to apply to x first; 0 for none."""
        return 0

    @property
    def arithmetic(self) -> torch.dtype | None:
        """The only dtype in which layers of this format compute; None for any."""
        return None

    @abstractmethod
    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        """The tensors in a checkpoint; names follow the layer's, as in ``q_proj.weight``.

        Raises:
            ValueError: the format has no matrices of this size.
        """

    @abstractmethod
    def layout(self, size: Size) -> Layout:
        """The tensors on a device."""

    @abstractmethod
    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert the tensors of :meth:`stored` to those of :meth:`layout`, on the host. A float
        tensor may have another float dtype than the layout's: it is cast on the way to the device.

        Raises:
            ValueError: the tensors have invalid contents.
        """

    @abstractmethod
    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The matrix (out, in) in plain PyTorch: the reference of the other methods."""

    def part(self, tensors: Tensors, begin: int, end: int) -> dict[str, torch.Tensor] | None:
        """Tensors of the matrix's rows [begin, end) that share memory with these; None if the
        layout can't be split there."""
        return None

    def of_rows(self, size: Size, rows: torch.Tensor) -> WeightFormat | None:
        """Format of the matrix that :meth:`take` makes of some rows of one of this size; None if
        these rows can't be a matrix of their own.

        Args:
            rows: indices of the rows in their new order, int64.
        """
        return None

    def take(self, tensors: Tensors, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tensors of the matrix of these rows alone, with the same weights, in the format that
        :meth:`of_rows` returns for them."""
        raise NotImplementedError(f"{self.name} has no rows to take")

    def splits_at(self, rows: int) -> bool:
        """Whether matrices of so many rows, one below the other in one matrix, can be multiplied by
        one by one: by :meth:`heads`, and by their :meth:`part`."""
        return False

    def choice_layout(self, size: Size) -> list[int] | None:
        """Numbers by which kernels that choose among matrices of this format on the device know
        its layout; None if there are none."""
        return None

    def chooses(self, size: Size, dtype: torch.dtype) -> bool:
        """Whether such kernels (:meth:`chosen`) take x of this dtype."""
        short = dtype in (torch.bfloat16, torch.float16)
        return short and self.arithmetic in (None, dtype) and self.choice_layout(size) is not None

    def chosen(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        size: Size,
        each: Sequence[Tensors],
        biases: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """x (N, in), or (N, K, in) with one for each choice, times chosen matrices of one size ->
        (N, K, out), without synchronization.

        Args:
            chosen: int64 (N, K).
            each: the tensors of every matrix.
            biases: one of each, or none at all.
        """
        tensors = [held[name] for held in each for name in self.names]
        layout = self.choice_layout(size)
        assert layout is not None, "the caller asked `chooses`"
        x = transformed(x, self.transform)
        given = (tensors, self.name, layout, size[0], biases)
        return torch.ops.exkv.chosen_products(x, chosen, *given)

    def heads(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """x (H, N, in), each by its own of H matrices that lie one below the other -> (H, N,
        out)."""
        whole = self.dequantize(tensors, x.dtype)
        return torch.ops.exkv.linear_heads(x, whole.unflatten(0, (len(x), -1)))

    def together(
        self, name: str, size: tuple[int, int, int], slices: Sequence[Slice]
    ) -> Source | None:
        """Source of ``count`` matrices of this format that a checkpoint has together under
        ``name``; None if the format has no such tensors.

        Args:
            size: count, outputs, inputs.
        """
        return None

    def nbytes(self, size: Size) -> int:
        """Bytes that a matrix takes from a device."""
        return sum(
            rounded(torch.Size(shape).numel() * dtype.itemsize)
            for shape, dtype in self.layout(size).values()
        )

    def linear(self, x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        """x (..., in) -> x weight^T + bias (..., out)."""
        return F.linear(x, self.dequantize(tensors, x.dtype), bias)

    def times(self, x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        """:meth:`linear` of an x to which :attr:`transform` was applied already."""
        raise NotImplementedError(f"{self.name} transforms no inputs")

    def linears(
        self,
        x: torch.Tensor,
        each: Sequence[Tensors],
        biases: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        """:meth:`linear` of one x by several matrices."""
        pairs = zip(each, biases, strict=True)
        return [self.linear(x, tensors, bias) for tensors, bias in pairs]

    def embed(self, ids: torch.Tensor, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """Rows of these ids (...) -> (..., in), dequantized alone if the format can."""
        return torch.embedding(self.dequantize(tensors, dtype), ids)

    def experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        matrices: Sequence[Sequence[Tensors]],
        inner: int,
        act: str,
    ) -> torch.Tensor:
        """The op ``experts``; arguments as documented there.

        Args:
            matrices: gate, up and down of each expert.
            inner: outputs of a gate.
        """
        flat = [tensors for expert in matrices for tensors in expert]
        return mixed_experts(x, routing, [(self, tensors) for tensors in flat], inner, act)


def picked(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor, in its memory if they are adjacent."""
    if torch.equal(rows, torch.arange(len(rows)) + rows[0]):
        return tensor[int(rows[0]) : int(rows[0]) + len(rows)]
    if tensor.is_floating_point() and tensor.itemsize == 1:
        return tensor.view(torch.uint8)[rows].view(tensor.dtype)
    return tensor[rows]


def in_blocks(rows: torch.Tensor, size: int) -> bool:
    """Whether rows are whole blocks of ``size`` adjacent ones; the last may lack its end."""
    first = rows[::size]
    each = torch.arange(len(rows)) % size
    return not (first % size).any() and torch.equal(
        rows, first.repeat_interleave(size)[: len(rows)] + each
    )


def products(
    x: torch.Tensor,
    matrices: Sequence[tuple[WeightFormat, Tensors]],
    biases: Sequence[torch.Tensor | None],
) -> list[torch.Tensor]:
    """Multiply x by several matrices: in one call if they share a format, and with a single
    transform of x if they share that."""
    format = matrices[0][0]
    if all(each is format for each, _ in matrices):
        return format.linears(x, [tensors for _, tensors in matrices], biases)
    pairs = list(zip(matrices, biases, strict=True))
    block = format.transform
    if block and all(each.transform == block for each, _ in matrices):
        x = transformed(x, block)
        return [each.times(x, tensors, bias) for (each, tensors), bias in pairs]
    return [each.linear(x, tensors, bias) for (each, tensors), bias in pairs]


def mixed_experts(
    x: torch.Tensor,
    routing: Routing,
    matrices: Sequence[tuple[WeightFormat, Tensors]],
    inner: int,
    act: str,
    among: Sequence[WeightFormat] | None = None,
) -> torch.Tensor:
    """The op ``experts`` for matrices of any formats: gate, up and down of the first expert, then
    of the second, and so on; gates have ``inner`` outputs.

    Args:
        among: formats that native kernels must know too in order to be used.
    """
    names = [format.name for format, _ in matrices]
    tensors = [held[name] for format, held in matrices for name in format.names]
    routed = (routing.chosen, routing.weights)
    layouts = None
    if is_decode_sized(x) and is_native(act) and _all_native(among or (), x, inner):
        layouts = _layouts([format for format, _ in matrices], x, inner)
    if layouts is None:
        return torch.ops.exkv.experts_of_formats(x, *routed, tensors, names, act)
    return torch.ops.exkv.chosen_experts(x, *routed, tensors, layouts, "\n".join(names), act)


def _all_native(formats: Sequence[WeightFormat], x: torch.Tensor, inner: int) -> bool:
    """Whether native code knows gates, ups and downs in each of these."""
    return all(_layouts([format] * 3, x, inner) is not None for format in formats)


def _layouts(formats: Sequence[WeightFormat], x: torch.Tensor, inner: int) -> list[int] | None:
    """The ``native`` numbers of these matrices; None if native code doesn't know all of them."""
    hidden = x.shape[-1]
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    numbers: list[int] = []
    for place, format in enumerate(formats):
        layout = format.native(sizes[place % 3])
        if layout is None or format.arithmetic not in (None, x.dtype):
            return None
        numbers += layout
    return numbers
