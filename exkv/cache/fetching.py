"""What a layer keeps in host memory, on its way to the layer's device."""

from __future__ import annotations

import torch

from exkv import devices
from exkv.batch import Lengths

from .arrangement import Arrangement
from .retention import Tensors


class Coming:
    """A copy of what a layer holds, on its way from the host to the layer's device.

    Args:
        lengths: of the call that it is for.
    """

    def __init__(self, lengths: Lengths, here: Tensors, copies: devices.SideStream) -> None:
        self.lengths = lengths
        self._here = here
        self._copies = copies

    @classmethod
    def start(
        cls, tensors: Tensors, arrangement: Arrangement, device: torch.device, lengths: Lengths
    ) -> Coming:
        """Begin to copy the rows' tokens to a place with room for those that the call brings."""
        rows, slots = len(lengths.past), arrangement.slots
        here = {
            name: torch.empty(
                (rows, slots(name, 0, lengths.kv_len).stop, *tensor.shape[2:]),
                dtype=tensor.dtype,
                device=device,
            )
            for name, tensor in tensors.items()
        }
        copies = devices.SideStream(device)
        with copies:
            for name, tensor in tensors.items():
                held = slots(name, 0, max(lengths.past)).stop
                copies.uses(here[name])
                here[name][:, :held].copy_(tensor[:rows, :held], non_blocking=True)
                here[name][:, held:].zero_()  # padding is read, though nothing sees it
        return cls(lengths, here, copies)

    def arrive(self) -> Tensors:
        """The copy, once all of it is there for whatever the current stream does next."""
        self._copies.wait()
        return self._here
