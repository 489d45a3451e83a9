"""Stopping criteria of ``generate``: time and stop texts, as in transformers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from exkv.text import Tokenizer


class MaxTime:
    """Ends all sequences after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __call__(self, ids: Tensor, scores: Tensor | None) -> bool:
        return time.monotonic() > self._end


class StopStrings:
    """Ends a sequence whose newest token completes one of the texts, which may begin in the prompt,
    as in transformers."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        self._stops = [text.encode() for text in texts]
        self._tokenizer = tokenizer
        # Each token of a stop text has at least one of its bytes.
        self._longest = max(map(len, self._stops))

    def __call__(self, ids: Tensor, scores: Tensor | None) -> Tensor:
        """ids (N, tokens) -> bool (N,)."""
        return torch.tensor([self._is_complete(row) for row in ids[:, -self._longest :].tolist()])

    def _is_complete(self, ids: list[int]) -> bool:
        *before, newest = map(self._tokenizer.bytes_of, ids)
        text = b"".join(before)
        return any(
            (text + newest).find(stop, max(0, len(text) - len(stop) + 1)) >= 0
            for stop in self._stops
        )
