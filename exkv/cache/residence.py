"""Residence: whether a layer's storage is next to the layer's weights, or in host memory.

One of the four properties of a cache. On the host, a layer's tokens are copied to its device while
it attends to them (``fetching.py``), the next layer's are prefetched meanwhile, and only new tokens
are written back; all in the stored format, so quantized values travel packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from exkv import devices


class Residence(Protocol):
    """A value: layers with equal residences are placed alike."""

    def storage_device(self, device: torch.device) -> torch.device:
        """Device of the storage of a layer on ``device``."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """On the device of the layer's weights."""

    def storage_device(self, device: torch.device) -> torch.device:
        return device


@dataclass(frozen=True, slots=True)
class OnHost:
    """In host memory, pinned if the accelerator makes use of that."""

    def storage_device(self, device: torch.device) -> torch.device:
        return devices.CPU
