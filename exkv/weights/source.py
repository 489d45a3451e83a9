"""Sources of a unit's parameters: tensors of a checkpoint, and their conversion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from exkv.checkpoint import ExpectedTensor

from .format import Size, WeightFormat


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
    rows: Callable[[torch.Tensor], torch.Tensor] | None = None


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
        try:
            made = format.convert({each: stored[f"{name}.{each}"] for each in expected})
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return {f"{layer}.{each}": tensor for each, tensor in made.items()}

    return Source(
        stored={f"{name}.{each}": tensor for each, tensor in expected.items()},
        parameters=tuple(f"{layer}.{each}" for each in format.names),
        convert=convert,
        matrices=(StoredMatrix(layer=layer, name=name),),
    )


def with_precomputed(source: Source, made: Mapping[str, torch.Tensor]) -> Source:
    """The source with its parameters taken from ``made``, if all of them are there."""
    if not made.keys() >= set(source.parameters):
        return source
    return replace(source, convert=lambda _: {name: made[name] for name in source.parameters})


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
        if each.format is not None and set(each.format.stored(each.size)) != {"weight"}:
            raise ValueError(
                f"{name}: {each.format.name} is not supported for matrices stored together in one "
                "tensor; take the model's unquantized version"
            )

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
