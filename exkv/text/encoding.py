"""The result of calling a tokenizer, as in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Encoding(dict[str, Any]):
    """``input_ids`` and ``attention_mask`` as keys and attributes: lists, or int64 tensors (texts,
    tokens). ``model.generate(**encoding)`` takes it."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"this Encoding has {', '.join(self)}, but no {name!r}")
        return self[name]

    def to(self, device: str | torch.device) -> Encoding:
        """An Encoding whose tensors are on this device."""
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.items()}
        return Encoding(moved)


def padded(row: list[int], width: int, fill: int, side: str) -> list[int]:
    """Pad a row to ``width`` on the left or on the right."""
    gap = [fill] * (width - len(row))
    return gap + row if side == "left" else row + gap


def as_tensor(rows: Sequence[list[int]]) -> torch.Tensor:
    """Stack rows to int64 (rows, tokens); ValueError if their lengths differ."""
    widths = sorted(set(map(len, rows)))
    if len(widths) > 1:
        raise ValueError(f"texts of {widths} tokens make no tensor: pass padding=True")
    return torch.tensor(rows, dtype=torch.int64)
