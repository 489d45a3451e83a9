"""A stand-in for ``torch.cuda``, for scripts that count devices on a machine without CUDA."""

from __future__ import annotations

import torch

_AMPERE = (8, 0)  # a capability for which scripts enable everything


def stand_in_for_cuda() -> None:
    """Without CUDA, let ``torch.cuda`` report the devices of ``torch.accelerator``, or one, the
    host. Making a CUDA tensor still fails."""
    if torch.cuda.is_available():
        return
    here = torch.accelerator.is_available()
    count = torch.accelerator.device_count() if here else 1
    answers = {
        "device_count": lambda: count,
        "get_device_capability": lambda device=None: _AMPERE,
        "synchronize": lambda device=None: torch.accelerator.synchronize() if here else None,
        "_lazy_init": lambda: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
