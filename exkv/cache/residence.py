"""Where a layer's storage lies: beside the layer's weights, or in host memory.

One of four properties of a cache. On the host a layer's tokens come to its device for the moment
in which it attends to them (``fetching.py``), the next layer's are on their way meanwhile, and only
new tokens are written back; all of it as it is stored, so quantized values travel packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from exkv import devices


class Residence(Protocol):
    """A value: two layers with equal ones lie alike."""

    def storage_device(self, device: torch.device) -> torch.device:
        """Where the storage of a layer on this device lies."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Beside the layer's weights."""

    def storage_device(self, device: torch.device) -> torch.device:
        return device


@dataclass(frozen=True, slots=True)
class OnHost:
    """In host memory, pinned where the accelerator can make use of that."""

    def storage_device(self, device: torch.device) -> torch.device:
        return devices.CPU
