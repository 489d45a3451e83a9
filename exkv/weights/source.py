"""Where a unit's parameters come from: tensors of a checkpoint, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from exkv.checkpoint import ExpectedTensor

from .format import Size, WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """A matrix that a checkpoint has, by itself or in a larger one.

    Attributes:
        layer: what the unit calls its module.
        name: what the checkpoint calls the module.
        rows: from anything with a row for each row of the stored matrix to this one's rows; None
            where it is the whole.
    """

    layer: str
    name: str
    rows: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Parameters that are made together.

    Attributes:
        stored: the checkpoint's tensors by their names, as they must be.
        parameters: the names of what is made of them.
        convert: from those tensors to the parameters, on the host; both by their names.
        matrices: that are among them.
    """

    stored: Mapping[str, ExpectedTensor]
    parameters: tuple[str, ...]
    convert: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
    matrices: tuple[StoredMatrix, ...] = ()


def tensor_source(parameter: str, name: str, like: torch.Tensor) -> Source:
    """A parameter that is a tensor of the checkpoint, a norm's weight or a bias."""
    return Source(
        stored={name: ExpectedTensor.of_floats(tuple(like.shape), like.dtype)},
        parameters=(parameter,),
        convert=lambda stored: {parameter: stored[name]},
    )


def format_source(layer: str, name: str, format: WeightFormat, size: Size) -> Source:
    """The matrix of a layer, which the unit calls ``layer`` and the checkpoint ``name``."""
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
    """A parameter that is part of a stored tensor: a matrix, or what else there is, e.g. a bias.

    Attributes:
        name: of the matrix's module, or of the parameter.
        of: from the stored tensor to the part: (outputs, inputs) of a matrix.
        format: a matrix's, for ``size``; None for another parameter.
    """

    name: str
    of: Callable[[torch.Tensor], torch.Tensor]
    format: WeightFormat | None = None
    size: Size = (0, 0)


def sliced_source(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, slices: Sequence[Slice]
) -> Source:
    """Parameters that lie together in one tensor of floats, which the checkpoint calls ``name``.

    Raises:
        ValueError: a matrix is in a format that is not made of floats.
    """
    for each in slices:
        if each.format is not None and set(each.format.stored(each.size)) != {"weight"}:
            raise ValueError(
                f"{name}: {each.format.name} is not known for matrices that lie together in one "
                "tensor; take the model's unquantized version"
            )

    def convert(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        for each in slices:
            part = each.of(stored[name])  # copied once, to where it is to be
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
