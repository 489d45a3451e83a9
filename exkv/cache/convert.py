"""Conversion of a cache's storage: to fewer bits, or to host memory.

Everything goes through the host, so that no device ever holds the old and the new at once:
conversion is the fallback when a device is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exkv import devices
from exkv.errors import Attempt

from .spans import token_spans
from .spec import LayerSpec
from .views import Tensors

#: Tokens decoded to floats at a time; a multiple of the group size.
_STEP = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """A layer's tensors copied to host memory.

    Attributes:
        lens: tokens in each row.
    """

    tensors: Tensors
    lens: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Tensors, lens: Sequence[int]) -> HostCopy:
        there = {name: tensor.to(devices.CPU) for name, tensor in tensors.items()}
        return cls(tensors=there, lens=tuple(lens))


def restored(
    copy: HostCopy, old: LayerSpec, new: LayerSpec, room: int, device: torch.device
) -> dict[str, torch.Tensor] | None:
    """The copy's contents, stored by the ``old`` spec, in tensors of the ``new`` spec with room for
    ``room`` tokens a row; None if the device has no room."""
    with Attempt():
        return _restore(copy, old, new, room, device)
    return None


def _restore(
    copy: HostCopy, old: LayerSpec, new: LayerSpec, room: int, device: torch.device
) -> dict[str, torch.Tensor]:
    rows = len(next(iter(copy.tensors.values())))
    storage_device = new.residence.storage_device(device)
    layout = {
        name: ((rows, *shape[1:]), dtype) for name, (shape, dtype) in new.layout(room).items()
    }
    tensors = devices.zeros(layout, storage_device, near=device)
    if new.arrangement == old.arrangement:
        for name, tensor in copy.tensors.items():
            entries = min(tensor.shape[1], tensors[name].shape[1])
            for start in range(0, entries, _STEP):
                part = slice(start, min(start + _STEP, entries))
                tensors[name][:, part] = tensor[:, part].to(storage_device)
        return tensors
    kept = old.kept
    for span in token_spans(sinks=kept.sinks, window=kept.size, lens=copy.lens, step=_STEP):
        k, v = old.kv.read(copy.tensors, span, old.dtype, old.head_dim)
        new.kv.put(tensors, span, k, v, new.dtype)
    return tensors
