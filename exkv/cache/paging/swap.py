"""Pages that were put away: copies in host memory of what some of a pool's pages hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SwappedPages:
    """Of each layer that is in this process the copied pages, by the storage's names."""

    layers: tuple[dict[str, Tensor], ...]

    @classmethod
    def of(cls, layers: Sequence[Mapping[str, Tensor]], pages: Sequence[int]) -> SwappedPages:
        """Copies of these pages of the layers' pools."""
        return cls(tuple({name: _copied(x, pages) for name, x in each.items()} for each in layers))

    @property
    def nbytes(self) -> int:
        """That it takes."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.values())

    def copy_to(
        self, layers: Sequence[Mapping[str, Tensor]], pages: Sequence[int], first: int
    ) -> None:
        """Fill pages of the layers' pools with the copies from ``first`` on."""
        for layer, stored in zip(layers, self.layers, strict=True):
            for name, tensor in layer.items():
                for page, content in zip(pages, stored[name][first:], strict=True):
                    tensor[page].copy_(content)


def _copied(tensor: Tensor, pages: Sequence[int]) -> Tensor:
    """These pages in host memory; one after the other, since a device that is full has no room for
    all of them beside each other."""
    found = torch.empty((len(pages), *tensor.shape[1:]), dtype=tensor.dtype)
    for content, page in zip(found, pages, strict=True):
        content.copy_(tensor[page])
    return found
