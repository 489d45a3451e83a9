"""Bound runs: stretches of units on one device that a decode step runs in one call.

A model runs by one of two routes. The readable one calls module after module, on any device, over
any cache, and every hook fires. A :class:`BoundRun` is a maximal stretch of units on one device,
embedding and head included, bound once to weights and a cache's tensors, and called with ids or
hidden states, lengths, and rotary factors. A module is bound if its exact type describes it
(``exkv.layers.descriptions``); all others take the readable route, with the same results.

On the CPU a run is native code (``native_run.py``), on a GPU a captured graph (``graph_run.py``).
``runs.py`` chooses the units, and for how long they are bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Protocol

import torch

from exkv.batch import Factors, Lengths, RotaryTables, real_tokens

#: Tokens of a call, in all rows, up to which the overhead of module calls matters.
MOST_TOKENS = 16


class Logits(IntEnum):
    """Which tokens' logits a call returns: none, each row's last, all, or every real token's, row
    after row, with the bits of single-token calls."""

    NONE = 0
    LAST = 1
    ALL = 2
    EACH = 3


class TokensAsRows:
    """The real tokens of a call as rows of one token each, in row order. A cache layer stores all
    of them before any attends to those before it.

    Attributes:
        lengths: of these rows.
        row: int64 (N,), the row of the call that each belongs to.
    """

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self.row, self._token, position = real_tokens(lengths)
        self.lengths = Lengths(
            past=tuple(position.tolist()),
            new=(1,) * len(self.row),
            pages=None if lengths.pages is None else lengths.pages[self.row],
            adapters=lengths.adapters,
        )

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, ...) -> (N, 1, ...)."""
        return x[self.row.to(x.device), self._token.to(x.device)].unsqueeze(1)

    def factors(self, factors: Mapping[str, Factors]) -> dict[str, Factors]:
        """Rotary factors (B or 1, T, R) of the call -> (N, 1, R)."""

        def split(factor: torch.Tensor) -> torch.Tensor:
            rows = self.row if len(factor) > 1 else torch.zeros_like(self.row)
            return factor[rows, self._token].unsqueeze(1)

        return {name: (split(cos), split(sin)) for name, (cos, sin) in factors.items()}

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """x (N, 1, hidden) -> (B, T, hidden), zeros for padding."""
        whole = x.new_zeros((len(self._lengths.new), self._lengths.chunk, x.shape[-1]))
        whole[self.row.to(x.device), self._token.to(x.device)] = x[:, 0]
        return whole


class BoundRun(Protocol):
    """``count`` units that one call runs."""

    count: int

    def takes(self, lengths: Lengths, logits: Logits) -> bool:
        """Whether it can run rows of these lengths."""

    def __call__(
        self, x: torch.Tensor, lengths: Lengths, rotary: RotaryTables, logits: Logits
    ) -> torch.Tensor | None:
        """Token ids int64 (B, T), or (B, T, hidden) for a run without the embedding, on any device
        -> logits (B, 1 or T, vocabulary), or (N, 1, vocabulary) of N real tokens, or (B, T, hidden)
        without the head or without logits. None, with no effect, if it was released meanwhile."""

    def release(self) -> None:
        """Drop all tensors; it is not called again."""
