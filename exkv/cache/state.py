"""Layers with a state in place of keys and values: convolutions, recurrent (linear) attention.

A state is of one size, however long its row is. It is what is behind the row's last token, so that
no earlier token can be returned to: like a ring that has overwritten what it would need, a cropped
row is stale, and the model runs it again at its next use (``Rows.stale``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from exkv.batch import Batch
from exkv.checkpoint import StateTensor

from .layer import CacheLayer
from .views import Tensors


class StateLayer(CacheLayer):
    """The states of one decoder layer: on its device, and never in pages or shared."""

    def states(
        self, batch: Batch, tensors: Sequence[StateTensor], dtype: torch.dtype
    ) -> Mapping[str, Tensor]:
        """The states of the call's rows by name, (B, ...), to be changed in place; zeros for rows
        without tokens."""
        for row, past in enumerate(batch.lengths.past):
            if past == 0:
                for tensor in self.tensors.values():
                    tensor[row].zero_()
        rows = len(batch.lengths.past)
        return {name: tensor[:rows, 0] for name, tensor in self.tensors.items()}

    @property
    def keys(self) -> NoReturn:
        raise ValueError("this layer has a state, and neither keys nor values: see its tensors")

    values = keys

    @property
    def pooled(self) -> dict[str, Tensor]:
        return {}

    def borrow(self, lender: CacheLayer) -> None:
        """Nothing is shared."""

    def state(self, row: int) -> dict[str, Tensor]:
        return {name: tensor[row] for name, tensor in self.tensors.items()}

    def set_state(self, row: int, state: Tensors) -> None:
        for name, tensor in self.tensors.items():
            tensor[row].copy_(state[name])
