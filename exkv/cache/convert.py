"""Storing in another way what a cache holds already: fewer bits, or in host memory.

Everything goes through the host, so that no device ever holds the old and the new at once: a
conversion is what is left to do when a device is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from exkv import devices

if TYPE_CHECKING:
    from .layer import LayerSpec

#: Tokens that are floats at once.
_STEP = 1024


def to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(devices.CPU) for name, tensor in tensors.items()}


def restored(
    held: Mapping[str, torch.Tensor],
    old: LayerSpec,
    new: LayerSpec,
    room: int,
    device: torch.device,
) -> dict[str, torch.Tensor] | None:
    """Tensors with room for so many tokens that hold, as the new spec stores it, what those in host
    memory do by the old one; None where the device has no room.

    No error is raised for that: its traceback would hold what was allocated.
    """
    try:
        return _restore(held, old, new, room, device)
    except torch.OutOfMemoryError:
        return None


def _restore(
    held: Mapping[str, torch.Tensor],
    old: LayerSpec,
    new: LayerSpec,
    room: int,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    rows, tokens = next(iter(held.values())).shape[:2]
    home = new.residence.home(device)
    tensors = {
        name: devices.zeros((rows, *shape[1:]), dtype, home, near=device)
        for name, (shape, dtype) in new.layout(room).items()
    }
    tokens = min(tokens, room)
    for start in range(0, tokens, _STEP):
        part = slice(start, min(start + _STEP, tokens))
        stored = {name: tensor[:, part] for name, tensor in held.items()}
        if new.storage != old.storage:
            k, v = old.storage.decode(stored, old.dtype, old.head_dim)
            stored = new.storage.encode(k, v, new.dtype)
        for name, tensor in stored.items():
            tensors[name][:, part] = tensor.to(home)
    return tensors
