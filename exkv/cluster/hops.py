"""The hops of a forward call: where it leaves this process, and where it comes back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exkv.batch import Lengths
from exkv.models.bound_run import Logits

from .wire import EMBEDDED, Expected, Wire


class Hops:
    """The transport of a model whose units are in several processes; rank 0 gets the logits.

    Args:
        owners: each unit's rank.
        width, vocabulary: elements of a hidden state, and of a token's logits.
        dtype: of both.

    Attributes:
        defers: whether calls return before their logits have arrived.
        due: the logits of the last call that asked for some; :meth:`Wire.take` waits for them.
    """

    def __init__(
        self, wire: Wire, owners: Sequence[int], width: int, vocabulary: int, dtype: torch.dtype
    ) -> None:
        self._wire, self._owners = wire, list(owners)
        self._width, self._vocabulary, self._dtype = width, vocabulary, dtype
        self.defers = False
        self.due: Expected | None = None

    def pass_on(self, x: Tensor, done: int, end: int, lengths: Lengths) -> tuple[Tensor, int]:
        wire, owners = self._wire, self._owners
        if done and owners[done - 1] == wire.rank:
            wire.send(x, owners[done])
        after = next((i for i in range(done, end) if owners[i] == wire.rank), end)
        if after < end:
            shape = len(lengths.new), lengths.chunk, self._width
            x = wire.receive(shape, self._dtype, owners[after - 1])
        return x, after

    def hand(self, x: Tensor | None, source: int, target: int, lengths: Lengths) -> Tensor | None:
        wire, start, end = self._wire, self._owners[source], self._owners[target]
        if start == end:
            return x
        if start == wire.rank:
            assert x is not None
            wire.send(x, end)
        if end != wire.rank:
            return None
        shape = len(lengths.new), lengths.chunk, self._width
        return wire.receive(shape, self._dtype, start)

    def give_embedded(self, x: Tensor, target: int) -> None:
        self._wire.send(x, self._owners[target], tag=EMBEDDED)

    def embedded(self, rows: int, tokens: int) -> Tensor:
        x = torch.empty((rows, tokens, self._width), dtype=self._dtype)
        self._wire.receive_into(x, self._owners[0], tag=EMBEDDED)
        return x

    def logits(self, x: Tensor, lengths: Lengths, wanted: Logits) -> Tensor | None:
        wire, owner = self._wire, self._owners[-1]
        if owner == wire.rank:
            if wire.rank:
                wire.send_logits(x)
            return None if wire.rank else x
        if wire.rank:
            return None
        rows, tokens = len(lengths.new), lengths.chunk
        if wanted is Logits.LAST:
            tokens = 1
        elif wanted is Logits.EACH:
            rows, tokens = sum(lengths.new), 1
        shape = rows, tokens, self._vocabulary
        self.due = wire.expect(shape, self._dtype, owner)
        return None if self.defers else wire.take(self.due)
