"""``torch.cuda`` for scripts on a machine without CUDA: they ask it how many devices there are."""

from __future__ import annotations

import torch

_AMPERE = (8, 0)  # what scripts take for able to do everything


def stand_in_for_cuda() -> None:
    """Answer for ``torch.cuda`` where there is no CUDA: its devices are those of
    ``torch.accelerator``, or one, which is the host. What asks for a CUDA tensor still fails."""
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
