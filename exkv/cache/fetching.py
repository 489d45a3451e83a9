"""Copies between host memory and a layer's device: prefetch before attention, write-back after it.

Rows are copied whole, from and to pinned memory, on a side stream. Only consumers wait: attention
waits for the prefetch by an event on the device, and the host waits for new values when it next
reads or writes the storage, a call later.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from exkv import devices
from exkv.batch import Lengths

from .arrangement import Arrangement
from .slots import Slots, extent
from .views import Tensors


class Prefetch:
    """A copy of a layer's tokens in flight from the host to the layer's device.

    Args:
        lengths: of the call that it serves.
    """

    def __init__(self, lengths: Lengths, here: Tensors, copies: devices.SideStream) -> None:
        self.lengths = lengths
        self._here = here
        self._copies = copies

    @classmethod
    def start(
        cls, tensors: Tensors, arrangement: Arrangement, device: torch.device, lengths: Lengths
    ) -> Prefetch:
        """Start to copy the rows' tokens to tensors with room for the call's new ones."""
        if lengths.pages is not None:
            return cls._start_pages(tensors, device, lengths)
        rows, slots = len(lengths.past), arrangement.slots
        here = {
            name: torch.empty(
                (rows, extent(slots(name, 0, lengths.kv_len)), *tensor.shape[2:]),
                dtype=tensor.dtype,
                device=device,
            )
            for name, tensor in tensors.items()
        }
        copies = devices.SideStream(device)
        with copies:
            for name, tensor in tensors.items():
                copies.uses(here[name])
                stored = [slots(name, 0, past) for past in lengths.past]
                here[name][:, _shared_end(stored) :].zero_()  # padding is read, though masked
                for row, each in enumerate(stored):
                    _copy(here[name][row], tensor[row], each)
        return cls(lengths, here, copies)

    @classmethod
    def _start_pages(cls, tensors: Tensors, device: torch.device, lengths: Lengths) -> Prefetch:
        """Start to copy paged rows: their pages are laid out one after another, row by row."""
        assert lengths.pages is not None
        index = lengths.pages.flatten().long()
        copies = devices.SideStream(device)
        with copies:
            here = {name: tensor[index].to(device) for name, tensor in tensors.items()}
            for tensor in here.values():
                copies.uses(tensor)
        return cls(lengths, here, copies)

    def arrive(self) -> Tensors:
        """The copy; the current stream waits for its end."""
        self._copies.wait()
        return self._here


def _shared_end(stored: list[Slots]) -> int:
    """Entries up to which every row holds tokens without a gap."""
    return min(slots.stop if isinstance(slots, slice) else 0 for slots in stored)


def _copy(to: torch.Tensor, row: torch.Tensor, slots: Slots) -> None:
    """Copy these entries of a row on the host to the same place on the device."""
    if isinstance(slots, slice):
        to[slots].copy_(row[slots], non_blocking=True)
    else:
        to[slots] = row[slots].to(to.device)


class WriteBack:
    """A call's new values in flight from a layer's device to the host.

    Args:
        new: (B, T, ...) each.
        lengths: of the call.
    """

    def __init__(self, new: Tensors, lengths: Lengths, device: torch.device) -> None:
        # The block table may change before these values are written.
        pages = None if lengths.pages is None else lengths.pages.clone()
        self.lengths = replace(lengths, pages=pages)
        new = {name: value.contiguous() for name, value in new.items()}
        self._copies = devices.SideStream(device)
        with self._copies:
            for value in new.values():
                self._copies.uses(value)
            # torch allocates pinned memory for the target of a non-blocking copy to the host.
            self._here = {
                name: value.to(devices.CPU, non_blocking=True) for name, value in new.items()
            }

    def arrive(self) -> Tensors:
        """The values; waits for the copy to end."""
        self._copies.synchronize()
        return self._here
