"""Swapped-out rows: copies in host memory of pages of a pool, and of states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exkv.devices import CPU


@dataclass(frozen=True, eq=False)
class SwappedPages:
    """Copied pages of each layer in this process, by tensor name, and what the row keeps outside of
    pages."""

    layers: tuple[dict[str, Tensor], ...]
    states: tuple[dict[str, Tensor], ...]

    @classmethod
    def of(
        cls,
        layers: Sequence[Mapping[str, Tensor]],
        pages: Sequence[int],
        states: Sequence[Mapping[str, Tensor]],
    ) -> SwappedPages:
        """Copy these pages of the layers' pools, and states, to host memory."""
        return cls(
            tuple({name: _copied(x, pages) for name, x in each.items()} for each in layers),
            tuple({name: x.to(CPU, copy=True) for name, x in each.items()} for each in states),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        copied = (*self.layers, *self.states)
        return sum(tensor.nbytes for layer in copied for tensor in layer.values())

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
