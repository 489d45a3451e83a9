"""Swapped-out pages: copies in host memory of pages of a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SwappedPages:
    """Copied pages of each layer in this process, by tensor name."""

    layers: tuple[dict[str, Tensor], ...]

    @classmethod
    def of(cls, layers: Sequence[Mapping[str, Tensor]], pages: Sequence[int]) -> SwappedPages:
        """Copy these pages of the layers' pools to host memory."""
        return cls(tuple({name: _copied(x, pages) for name, x in each.items()} for each in layers))

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.values())

    def copy_to(
        self, layers: Sequence[Mapping[str, Tensor]], pages: Sequence[int], first: int
    ) -> None:
        """Copy the pages from ``first`` on back into ``pages`` of the layers' pools."""
        for layer, stored in zip(layers, self.layers, strict=True):
            for name, tensor in layer.items():
                for page, content in zip(pages, stored[name][first:], strict=True):
                    tensor[page].copy_(content)


def _copied(tensor: Tensor, pages: Sequence[int]) -> Tensor:
    """Copy pages to host memory one by one: gathering them first would need memory on a full
    device."""
    found = torch.empty((len(pages), *tensor.shape[1:]), dtype=tensor.dtype)
    for content, page in zip(found, pages, strict=True):
        content.copy_(tensor[page])
    return found
