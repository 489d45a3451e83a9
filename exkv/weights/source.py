"""Where a unit's parameters come from: tensors of a checkpoint, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from exkv.checkpoint import ExpectedTensor

from .format import Size, WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Parameters that are made together.

    Attributes:
        stored: the checkpoint's tensors by their names, as they must be.
        parameters: the names of what is made of them.
        convert: from those tensors to the parameters, on the host; both by their names.
    """

    stored: Mapping[str, ExpectedTensor]
    parameters: tuple[str, ...]
    convert: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]


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
    )
