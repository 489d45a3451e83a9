"""Copies between host memory and a layer's device: prefetch before attention, write-back after it.

Rows are copied whole, from and to pinned memory, on a side stream. The prefetches of a call
alternate between two buffers: while attention reads one, the next layer's tokens arrive in the
other. Before memory that a copy reads or writes is freed, the current stream waits for the copy's
event, so that nothing needs ``record_stream``, whose memory is reused only once the host has polled
its events.
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
        lengths: lengths of the call that it serves.
        memory: the buffer that the copy arrives in.
        spare: the other buffer, for the layer after this one; None where there is none yet.
    """

    def __init__(
        self,
        lengths: Lengths,
        here: Tensors,
        copies: devices.SideStream,
        memory: torch.Tensor,
        spare: torch.Tensor | None = None,
    ) -> None:
        self.lengths = lengths
        self.memory, self.spare = memory, spare
        self._here: Tensors | None = here
        self._copies = copies

    def __del__(self) -> None:
        if self._here is not None:  # the call failed, and the copy still writes to the buffer
            self._copies.wait()

    @classmethod
    def start(
        cls,
        tensors: Tensors,
        arrangement: Arrangement,
        device: torch.device,
        lengths: Lengths,
        *,
        memory: torch.Tensor | None = None,
        spare: torch.Tensor | None = None,
    ) -> Prefetch:
        """Start to copy the rows' tokens to tensors with room for the call's new ones.

        Args:
            memory: uint8 buffer for the copy; allocated anew if None or too small.
            spare: the other buffer, passed on to the next layer.
        """
        layout = _layout(tensors, arrangement, lengths)
        memory = _enough(memory, devices.layout_bytes(layout), device)
        here = devices.views(memory, layout)
        copies = devices.SideStream(device)
        with copies:  # behind whoever read the buffer before
            for name, tensor in tensors.items():
                if lengths.pages is not None:
                    here[name].copy_(tensor[lengths.pages.flatten().long()])
                    continue
                stored = [arrangement.slots(name, 0, past) for past in lengths.past]
                filled = min(s.stop if isinstance(s, slice) else 0 for s in stored)  # of every row
                here[name][:, filled:].zero_()  # padding is read, though masked
                for row, each in enumerate(stored):
                    _copy(here[name][row], tensor[row], each)
        return cls(lengths, here, copies, memory, spare)

    def arrive(self) -> Tensors:
        """Return the copy, once; the current stream waits for it."""
        assert self._here is not None, "a copy is read once"
        here, self._here = self._here, None
        self._copies.wait()
        return here


def _layout(tensors: Tensors, arrangement: Arrangement, lengths: Lengths) -> devices.Layout:
    """Layout of the copy: rows up to the call's end, or the pages of all rows in order."""
    if lengths.pages is not None:
        count = lengths.pages.numel()
        return {name: ((count, *each.shape[1:]), each.dtype) for name, each in tensors.items()}
    rows, slots = len(lengths.past), arrangement.slots
    return {
        name: ((rows, extent(slots(name, 0, lengths.kv_len)), *each.shape[2:]), each.dtype)
        for name, each in tensors.items()
    }


def _enough(memory: torch.Tensor | None, nbytes: int, device: torch.device) -> torch.Tensor:
    """The buffer, or a new one where it is too small or elsewhere."""
    if memory is not None and memory.device == device and memory.nbytes >= nbytes:
        return memory
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


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
        self._new: Tensors = {name: value.contiguous() for name, value in new.items()}
        self._copies = devices.SideStream(device)
        with self._copies:
            # torch allocates pinned memory for the target of a non-blocking copy to the host.
            self._here = {
                name: value.to(devices.CPU, non_blocking=True) for name, value in self._new.items()
            }

    def free_source(self) -> None:
        """Free the values on the device: whatever is queued there from now on follows the copy."""
        self._copies.wait()
        self._new = {}

    def arrive(self) -> Tensors:
        """Wait for the copy, and return the values."""
        self._copies.synchronize()
        self._new = {}
        return self._here
