"""Storing in another way what a cache holds already: fewer bits, or in host memory.

Everything goes through the host, so that no device ever holds the old and the new at once: a
conversion is what is left to do when a device is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from exkv import devices

from .kept import blocks
from .spec import LayerSpec

#: Tokens that are floats at once: whole groups.
_STEP = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A layer's tensors in host memory, with room for so many tokens a row, of which each row has
    ``lens``."""

    tensors: Mapping[str, torch.Tensor]
    room: int
    lens: tuple[int, ...]


def to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(devices.CPU) for name, tensor in tensors.items()}


def restored(
    held: Held, old: LayerSpec, new: LayerSpec, room: int, device: torch.device
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
    held: Held, old: LayerSpec, new: LayerSpec, room: int, device: torch.device
) -> dict[str, torch.Tensor]:
    rows = len(next(iter(held.tensors.values())))
    device_of_storage = new.residence.storage_device(device)
    tensors = {
        name: devices.zeros((rows, *shape[1:]), dtype, device_of_storage, near=device)
        for name, (shape, dtype) in new.layout(room).items()
    }
    if new.arrangement == old.arrangement:
        for name, tensor in held.tensors.items():
            kept = min(tensor.shape[1], tensors[name].shape[1])
            for start in range(0, kept, _STEP):
                part = slice(start, min(start + _STEP, kept))
                tensors[name][:, part] = tensor[:, part].to(device_of_storage)
        return tensors
    kept = old.retention
    for block in blocks(sinks=kept.sinks, window=kept.size, lens=held.lens, step=_STEP):
        k, v = old.arrangement.read(held.tensors, block, old.dtype, old.head_dim)
        new.arrangement.put(tensors, block, k, v, new.dtype)
    return tensors
