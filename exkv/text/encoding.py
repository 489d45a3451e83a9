"""What calling a tokenizer returns, in transformers' words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Encoding(dict[str, Any]):
    """``input_ids`` and ``attention_mask``, as keys and as attributes: lists, or int64 tensors
    (texts, tokens), so that ``model.generate(**encoding)`` takes it."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"an Encoding has {', '.join(self)}, and no {name!r}")
        return self[name]

    def to(self, device: str | torch.device) -> Encoding:
        """The same with its tensors on the device."""
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.items()}
        return Encoding(moved)


def padded(rows: Sequence[list[int]], width: int, pad_id: int, side: str) -> Encoding:
    """Ids of several texts as rows of ``width`` tokens; masks are 0 at what was filled."""
    ids, masks = [], []
    for row in rows:
        missing = width - len(row)
        fill, gap, ones = [pad_id] * missing, [0] * missing, [1] * len(row)
        ids.append(fill + row if side == "left" else row + fill)
        masks.append(gap + ones if side == "left" else ones + gap)
    return Encoding(input_ids=ids, attention_mask=masks)
