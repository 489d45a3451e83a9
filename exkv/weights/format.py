"""What a format of weights is.

A :class:`WeightFormat` is a frozen value that knows the tensors of one linear layer: their names,
shapes and types in a checkpoint, the same on a device, how the one becomes the other, what matrix
they stand for, and how to multiply by it. Layers, checks of checkpoints, plans and the bound run
ask it, and none of them names one. An embedding table is a matrix too, (vocabulary, hidden).

Whoever adds a format writes ``name``, ``names``, ``stored``, ``layout``, ``convert`` and
``dequantize``. The others multiply by the dequantized matrix until a kernel does better.
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

#: A matrix as linear layers have it: outputs, inputs.
Size = tuple[int, int]
#: Tensor name -> shape and dtype.
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
#: The tensors of one matrix on a device, by the names of the layout; there may be others beside.
Tensors = Mapping[str, torch.Tensor]


class WeightFormat(ABC):
    """How one matrix is stored. Equal values store alike, and have one name."""

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """Of this value, its parameters included: what :func:`exkv.weights.format_named` takes."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Of the tensors on a device, in the layout's order."""

    def native(self, size: Size) -> tuple[int, ...] | None:
        """What tells a bound run's native code how the tensors of such a matrix lie, as
        ``add_layer`` takes it; None where layers in this format take the readable route."""
        return None

    @property
    def transform(self) -> int:
        """Inputs of a block of the Hadamard transform that x goes through first; 0 for none."""
        return 0

    @property
    def arithmetic(self) -> torch.dtype | None:
        """The only dtype in which layers in this format compute; None for any."""
        return None

    @abstractmethod
    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        """The tensors in a checkpoint; names come behind the layer's, as in ``q_proj.weight``.

        Raises:
            ValueError: the format has no matrices of this size.
        """

    @abstractmethod
    def layout(self, size: Size) -> Layout:
        """The tensors on a device."""

    @abstractmethod
    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """From those of :meth:`stored` to those of :meth:`layout`, on the host. A float tensor may
        still have another float dtype than the layout's: it is cast on the way to the device.

        Raises:
            ValueError: what the tensors hold cannot be.
        """

    @abstractmethod
    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The matrix (out, in) in plain PyTorch: the reference of the other methods."""

    def part(self, tensors: Tensors, begin: int, end: int) -> dict[str, torch.Tensor] | None:
        """The tensors of the matrix's rows [begin, end), which share memory with these; None where
        there are none such."""
        return None

    def splits_at(self, rows: int) -> bool:
        """Whether matrices of so many rows, one below the other in one matrix, can be multiplied by
        one by one: by :meth:`heads`, and by their :meth:`part`."""
        return False

    def heads(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """x (H, N, in), each by its own of H matrices that lie one below the other -> (H, N,
        out)."""
        whole = self.dequantize(tensors, x.dtype)
        return torch.ops.exkv.linear_heads(x, whole.unflatten(0, (len(x), -1)))

    def together(
        self, name: str, size: tuple[int, int, int], slices: Sequence[Slice]
    ) -> Source | None:
        """Where a checkpoint has many matrices of this format in tensors of its own, under
        ``name``, of size (count, outputs, inputs): what makes them; None where it has none such."""
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
        """:meth:`linear` of an x that went through :attr:`transform`, of a format that has one."""
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
        """The rows of these ids (...) -> (..., in). A format of which a row can be dequantized
        alone does that."""
        return torch.embedding(self.dequantize(tensors, dtype), ids)

    def experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        matrices: Sequence[Sequence[Tensors]],
        inner: int,
        act: str,
    ) -> torch.Tensor:
        """The op ``experts``, which says what the arguments are.

        Args:
            matrices: gate, up and down of each expert.
            inner: outputs of a gate.
        """
        flat = [tensors for expert in matrices for tensors in expert]
        return mixed_experts(x, routing, [(self, tensors) for tensors in flat], inner, act)


def products(
    x: torch.Tensor,
    matrices: Sequence[tuple[WeightFormat, Tensors]],
    biases: Sequence[torch.Tensor | None],
) -> list[torch.Tensor]:
    """x by several matrices: in one call if they share a format, and with one transform of x if
    they share that."""
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
    """The op ``experts`` for matrices of any formats: gate, up and down of the first expert, of
    the second, and so on; gates have ``inner`` outputs.

    Args:
        among: formats that native kernels must all know, too, to be taken.
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
    """What native code is told of these matrices; None where it doesn't know all of them."""
    hidden = x.shape[-1]
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    numbers: list[int] = []
    for place, format in enumerate(formats):
        layout = format.native(sizes[place % 3])
        if layout is None or format.arithmetic not in (None, x.dtype):
            return None
        numbers += layout
    return numbers
