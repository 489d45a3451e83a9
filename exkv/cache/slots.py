"""Slots: the entries of a tensor's second dimension that hold some tokens of a row. A slice if they
are contiguous, indices if not, e.g. in pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: A slice, or indices: int64 (N,) on the host, in any order.
Slots: TypeAlias = slice | Tensor


def count(slots: Slots) -> int:
    """Number of entries."""
    if isinstance(slots, slice):
        return max(slots.stop - slots.start, 0)
    return len(slots)


def extent(slots: Slots) -> int:
    """End of the last entry."""
    if isinstance(slots, slice):
        return slots.stop
    return int(slots.max()) + 1 if len(slots) else 0


def pieces(slots: Slots, step: int) -> Iterator[Slots]:
    """Split into pieces of at most ``step`` entries."""
    if isinstance(slots, slice):
        for start in range(slots.start, slots.stop, step):
            yield slice(start, min(start + step, slots.stop))
    else:
        yield from slots.split(step)


def index(rows: Any, slots: Slots) -> tuple[Any, Any]:
    """Index of these entries in each of several rows (a list, or int64 (R,))."""
    if isinstance(slots, slice):
        return rows, slots
    return torch.as_tensor(rows).unsqueeze(-1), slots


def views(row: Tensor, slots: Slots) -> Iterator[Tensor]:
    """Views of these entries of a row (S, ...): copying through them allocates nothing."""
    if isinstance(slots, slice):
        yield row[slots]
    else:
        yield from (row[slot] for slot in slots.tolist())


def put(tensor: Tensor, slots: Slots, values: Tensor) -> None:
    """Write values (R, N, ...), from the host or the tensor's device, to these entries of the first
    R rows."""
    if isinstance(slots, slice):
        tensor[: len(values), slots] = values
    else:
        tensor[: len(values), slots] = values.to(tensor.device)
