"""Layers with a state in place of keys and values: convolutions, recurrent (linear) attention.

A state has a fixed size, however long its row is. It summarizes the row up to its last token, so
that a row can't return to an earlier one: a cropped row is stale, like one whose ring has
overwritten tokens, and the model reruns it at next use (``Rows.stale``), from its first token or
from a snapshot. A cache with room for snapshots has one of each row, which a call takes amid the
row's new tokens, after those that are known to stay (``Lengths.snapshot_at``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from exkv.batch import Batch, Lengths
from exkv.checkpoint import StateTensor

from .layer import CacheLayer
from .views import Tensors

#: Suffix of the names of a snapshot's tensors, after those of the state.
_SNAPSHOT = "_snapshot"


def with_snapshots(state: Sequence[StateTensor]) -> tuple[StateTensor, ...]:
    """The tensors of a layer with room for a snapshot of each row beside its state."""
    return (*state, *(replace(each, name=each.name + _SNAPSHOT) for each in state))


def is_snapshot(name: str) -> bool:
    """Whether a state's tensor of this name is its snapshot."""
    return name.endswith(_SNAPSHOT)


@dataclass(frozen=True, slots=True)
class States:
    """The states of a call's rows.

    Attributes:
        tensors: by name, (B, ...); with their snapshots where the call takes some.
    """

    tensors: Mapping[str, Tensor]
    batch: Batch

    def advance(self, name: str, op: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run an op over the new tokens.

        Args:
            op: (inputs, state, new_lens int32 (B,) or None for all) -> (B, T, ...), undefined at
                padding; changes the state in place.
            inputs: (B, T, ...) each.
        """
        state, batch = self.tensors[name], self.batch
        if batch.snapshot_at is None or batch.new_lens is None:
            return op(*inputs, state, batch.new_lens)
        # In two parts; each row has its own border between them.
        counts, tokens = batch.lengths.snapshot_at, inputs[0].shape[1]
        first = op(*(x[:, : max(counts)].contiguous() for x in inputs), state, batch.snapshot_at)
        rows = [row for row, count in enumerate(counts) if count]
        self.tensors[name + _SNAPSHOT][rows] = state[rows]
        rest = tokens - min(counts)
        if not rest:
            return first
        at, border = torch.arange(tokens, device=state.device), batch.snapshot_at.unsqueeze(-1)
        row = torch.arange(len(counts), device=state.device).unsqueeze(-1)
        behind = (at[:rest] + border).clamp_(max=tokens - 1)
        last = op(*(x[row, behind] for x in inputs), state, batch.new_lens - batch.snapshot_at)
        out = last[row, (at - border).clamp_(min=0, max=rest - 1)]
        early = (at < border).nonzero(as_tuple=True)
        out[early] = first[early]
        return out


class StateLayer(CacheLayer):
    """The states of one decoder layer: on its device, and never in pages or shared."""

    def states(self, batch: Batch, tensors: Sequence[StateTensor], dtype: torch.dtype) -> States:
        """The states of the call's rows; zeros for rows without tokens."""
        self.begin(batch.lengths)
        rows = len(batch.lengths.past)
        return States({name: tensor[:rows] for name, tensor in self.in_rows().items()}, batch)

    def begin(self, lengths: Lengths) -> None:
        """Clear the states of a call's rows that have no tokens yet."""
        for row, past in enumerate(lengths.past):
            if past == 0:
                for tensor in self.tensors.values():
                    tensor[row].zero_()

    def in_rows(self) -> dict[str, Tensor]:
        """All rows' states, (rows, ...) each, in their places."""
        return {name: tensor[:, 0] for name, tensor in self.tensors.items()}

    @property
    def has_snapshot(self) -> bool:
        return any(is_snapshot(each.name) for each in self.spec.state or ())

    def restore(self, row: int) -> None:
        """Return a row to its snapshot."""
        for name, tensor in self.tensors.items():
            if not is_snapshot(name):
                tensor[row].copy_(self.tensors[name + _SNAPSHOT][row])

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
