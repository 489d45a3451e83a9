"""Where a layer's storage lies: beside the layer's weights, or in host memory.

One of four properties of a cache. On the host a layer's tokens come to its device for the moment
in which it attends to them, the next layer's are on their way meanwhile, and only new tokens are
written back; all of it as it is stored, so quantized values travel packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from exkv import devices
from exkv.batch import Lengths

from .retention import Tensors

if TYPE_CHECKING:
    from .layer import CacheLayer


class Residence(Protocol):
    """A value: two layers with equal ones lie alike."""

    def home(self, device: torch.device) -> torch.device:
        """Where the storage of a layer on this device lies."""

    def fetch(self, layer: CacheLayer, lengths: Lengths) -> Tensors:
        """The layer's tensors on its device, with room for the new tokens."""

    def write_back(self, layer: CacheLayer, new: Tensors, lengths: Lengths) -> None:
        """Keep new values (B, T, ...) where the layer's storage is, once they were stored in what
        :meth:`fetch` gave."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Beside the layer's weights."""

    def home(self, device: torch.device) -> torch.device:
        return device

    def fetch(self, layer: CacheLayer, lengths: Lengths) -> Tensors:
        return layer.tensors

    def write_back(self, layer: CacheLayer, new: Tensors, lengths: Lengths) -> None:
        pass


@dataclass(frozen=True, slots=True)
class OnHost:
    """In host memory, pinned where the accelerator can make use of that."""

    def home(self, device: torch.device) -> torch.device:
        return devices.CPU

    def fetch(self, layer: CacheLayer, lengths: Lengths) -> Tensors:
        if not layer.away:
            return layer.tensors
        coming, layer.coming = layer.coming, None
        if coming is None or coming.lengths != lengths:
            coming = Coming.start(layer, lengths)
        here = coming.arrive()
        if layer.after is not None and layer.after.tensors:
            layer.after.coming = Coming.start(layer.after, lengths)
        return here

    def write_back(self, layer: CacheLayer, new: Tensors, lengths: Lengths) -> None:
        if not layer.away:
            return
        home = {name: value.to(devices.CPU) for name, value in new.items()}
        layer.spec.arrangement.write(layer.tensors, home, lengths)


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
    def start(cls, layer: CacheLayer, lengths: Lengths) -> Coming:
        """Begin to copy the rows' tokens to a place with room for those that the call brings."""
        rows, slots = len(lengths.past), layer.spec.arrangement.slots
        here = {
            name: torch.empty(
                (rows, slots(name, 0, lengths.kv_len).stop, *tensor.shape[2:]),
                dtype=tensor.dtype,
                device=layer.device,
            )
            for name, tensor in layer.tensors.items()
        }
        copies = devices.SideStream(layer.device)
        with copies:
            for name, tensor in layer.tensors.items():
                held = slots(name, 0, max(lengths.past)).stop
                copies.uses(here[name])
                here[name][:, :held].copy_(tensor[:rows, :held], non_blocking=True)
                here[name][:, held:].zero_()  # padding is read, though nothing sees it
        return cls(lengths, here, copies)

    def arrive(self) -> Tensors:
        """The copy, once all of it is there for whatever the current stream does next."""
        self._copies.wait()
        return self._here
