"""Which entries of a tensor's second dimension hold some tokens of a row: a slice where they lie in
order, or their indices where they don't, e.g. in pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

#: int64 (N,) on the host where these are indices; of any order.
Slots: TypeAlias = slice | torch.Tensor


def count(slots: Slots) -> int:
    """How many entries these are."""
    if isinstance(slots, slice):
        return max(slots.stop - slots.start, 0)
    return len(slots)


def extent(slots: Slots) -> int:
    """Entries up to the last of these."""
    if isinstance(slots, slice):
        return slots.stop
    return int(slots.max()) + 1 if len(slots) else 0


def pieces(slots: Slots, step: int) -> Iterator[Slots]:
    """The same, no more than so many entries at once."""
    if isinstance(slots, slice):
        for start in range(slots.start, slots.stop, step):
            yield slice(start, min(start + step, slots.stop))
    else:
        yield from slots.split(step)


def index(rows: Any, slots: Slots) -> tuple[Any, Any]:
    """What picks these entries of each of several rows (a list, or int64 (R,)) from a tensor."""
    if isinstance(slots, slice):
        return rows, slots
    return torch.as_tensor(rows).unsqueeze(-1), slots


def views(row: torch.Tensor, slots: Slots) -> Iterator[torch.Tensor]:
    """These entries of a row (S, ...) as views: to copy from or to them takes no memory."""
    if isinstance(slots, slice):
        yield row[slots]
    else:
        yield from (row[slot] for slot in slots.tolist())


def put(tensor: torch.Tensor, slots: Slots, values: torch.Tensor) -> None:
    """Write values (R, N, ...), from the host or the tensor's device, to these entries of the first
    R rows."""
    if isinstance(slots, slice):
        tensor[: len(values), slots] = values
    else:
        tensor[: len(values), slots] = values.to(tensor.device)
