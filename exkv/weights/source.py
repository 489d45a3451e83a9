"""Sources of a unit's parameters: tensors of a checkpoint, and their conversion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from exkv.checkpoint import ExpectedTensor

from .format import Size, WeightFormat
from .methods import register

#: Selects some rows of a tensor.
Rows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """A matrix in a checkpoint, by itself or part of a larger one.

    Attributes:
        layer: name of its module in the unit.
        name: name of the module in the checkpoint.
        rows: selects this matrix's rows from a tensor with the stored matrix's rows; None for all.
    """

    layer: str
    name: str
    rows: Rows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Parameters that are converted together.

    Attributes:
        stored: the checkpoint's tensors that they need, by name.
        parameters: names of the parameters.
        convert: converts the tensors to the parameters, both by name, on the host.
        matrices: the matrices among the parameters.
    """

    stored: Mapping[str, ExpectedTensor]
    parameters: tuple[str, ...]
    convert: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
    matrices: tuple[StoredMatrix, ...] = ()


def tensor_source(parameter: str, name: str, like: torch.Tensor) -> Source:
    """Source of a parameter that is one tensor of the checkpoint: a norm's weight or a bias."""
    return Source(
        stored={name: ExpectedTensor.of_floats(tuple(like.shape), like.dtype)},
        parameters=(parameter,),
        convert=lambda stored: {parameter: stored[name]},
    )


def format_source(layer: str, name: str, format: WeightFormat, size: Size) -> Source:
    """Source of a layer's matrix; the layer is ``layer`` in the unit and ``name`` in the
    checkpoint."""
    expected = format.stored(size)

    def convert(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = _converted(name, format, {each: stored[f"{name}.{each}"] for each in expected})
        return {f"{layer}.{each}": tensor for each, tensor in made.items()}

    return Source(
        stored={f"{name}.{each}": tensor for each, tensor in expected.items()},
        parameters=tuple(f"{layer}.{each}" for each in format.names),
        convert=convert,
        matrices=(StoredMatrix(layer=layer, name=name),),
    )


def _converted(
    name: str, format: WeightFormat, stored: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    try:
        return format.convert(stored)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def with_precomputed(source: Source, made: Mapping[str, torch.Tensor]) -> Source:
    """The source with its parameters taken from ``made``, if all of them are there."""
    if not made.keys() >= set(source.parameters):
        return source
    return replace(source, convert=lambda _: {name: made[name] for name in source.parameters})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A matrix of a checkpoint, quantized or not, whose rows are those of several matrices of a
    unit.

    Attributes:
        name: name of its module in the checkpoint.
        parts: module of a matrix in the unit -> selects its rows from a tensor with all rows.
    """

    name: str
    parts: Mapping[str, Rows]

    def size(self, sizes: Mapping[str, Size]) -> Size:
        """Of the whole, from those of the parts."""
        each = [sizes[part] for part in self.parts]
        return sum(outputs for outputs, _ in each), each[0][1]

    def formats(self, whole: WeightFormat, size: Size) -> dict[str, WeightFormat]:
        """The formats of the parts of a matrix that the checkpoint has in this one.

        Raises:
            ValueError: rows of that format can't be taken.
        """
        if _is_of_floats(whole, size):
            return dict.fromkeys(self.parts, whole)
        every = torch.arange(size[0])
        found = dict[str, WeightFormat]()
        for part, rows in self.parts.items():
            if (format := whole.of_rows(size, rows(every))) is None:
                raise _inseparable(self.name, whole)
            found[part] = register(format)
        return found

    def source(self, whole: WeightFormat, sizes: Mapping[str, Size]) -> Source:
        """Source of the parts; arguments as of :meth:`formats` and :meth:`size`."""
        size = self.size(sizes)
        if _is_of_floats(whole, size):
            slices = [
                Slice(name=part, of=rows, format=whole, size=sizes[part])
                for part, rows in self.parts.items()
            ]
            dtype = whole.stored(size)["weight"].dtypes[0]
            return sliced_source(f"{self.name}.weight", size, dtype, slices)
        every, expected = torch.arange(size[0]), whole.stored(size)

        def convert(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            made = _converted(self.name, whole, {n: stored[f"{self.name}.{n}"] for n in expected})
            return {
                f"{part}.{tensor}": value
                for part, rows in self.parts.items()
                for tensor, value in whole.take(made, rows(every)).items()
            }

        return Source(
            stored={f"{self.name}.{each}": tensor for each, tensor in expected.items()},
            parameters=tuple(
                f"{part}.{tensor}"
                for part, format in self.formats(whole, size).items()
                for tensor in format.names
            ),
            convert=convert,
            matrices=tuple(
                StoredMatrix(layer=part, name=self.name, rows=rows)
                for part, rows in self.parts.items()
            ),
        )

    def bias_source(self, shapes: Mapping[str, torch.Tensor], size: Size) -> list[Source]:
        """Source of the parts' biases, if they have any among these parameters."""
        biases = {f"{part}.bias": rows for part, rows in self.parts.items()}
        if not biases.keys() <= shapes.keys():
            return []
        slices = [Slice(name=name, of=rows) for name, rows in biases.items()]
        dtype = shapes[slices[0].name].dtype
        return [sliced_source(f"{self.name}.bias", size[:1], dtype, slices)]


def _is_of_floats(format: WeightFormat, size: Size) -> bool:
    """Whether a checkpoint has such matrices as floats."""
    return set(format.stored(size)) == {"weight"}


def _inseparable(name: str, format: WeightFormat) -> ValueError:
    return ValueError(
        f"{name}: {format.name} is not supported for matrices stored together in one tensor; "
        "take the model's unquantized version"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A parameter that is part of a stored tensor: a matrix, or e.g. a bias.

    Attributes:
        name: name of the matrix's module, or of the parameter.
        of: selects the part of the stored tensor: (outputs, inputs) for a matrix.
        format: format of a matrix of ``size``; None for other parameters.
    """

    name: str
    of: Callable[[torch.Tensor], torch.Tensor]
    format: WeightFormat | None = None
    size: Size = (0, 0)


def sliced_source(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, slices: Sequence[Slice]
) -> Source:
    """Source of parameters that are stored together in the tensor ``name`` of floats.

    Raises:
        ValueError: a matrix's format can't be made of floats.
    """
    for each in slices:
        if each.format is not None and not _is_of_floats(each.format, each.size):
            raise _inseparable(name, each.format)

    def convert(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        for each in slices:
            part = each.of(stored[name])  # copied once, to its final place
            if each.format is None:
                made[each.name] = part
                continue
            kept = each.format.names == ("weight",)
            tensors = each.format.convert({"weight": part if kept else part.contiguous()})
            made |= {f"{each.name}.{tensor}": value for tensor, value in tensors.items()}
        return made

    return Source(
        stored={name: ExpectedTensor.of_floats(shape, dtype)},
        parameters=tuple(each for one in slices for each in _parameters(one)),
        convert=convert,
        matrices=tuple(
            StoredMatrix(layer=each.name, name=name.removesuffix(".weight"), rows=each.of)
            for each in slices
            if each.format is not None
        ),
    )


def _parameters(part: Slice) -> list[str]:
    if part.format is None:
        return [part.name]
    return [f"{part.name}.{tensor}" for tensor in part.format.names]
