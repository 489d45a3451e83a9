"""Tensors in flight to one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class Sends:
    """Asynchronous sends, whose tensors are kept alive until they are received.

    Their bytes in flight are bounded by ``room``, or by ``most`` times the largest tensor so far.
    So the sender can queue the small hidden states of decode steps behind the large one of a
    prefill chunk, which the receiver takes only after the chunk before, and continue.

    Args:
        wait: waits for one of the group's sends.
    """

    def __init__(self, wait: Callable[[Any], None], room: int = 0, most: int = 1) -> None:
        self._wait, self._room, self._most = wait, room, most
        self._in_flight: deque[tuple[Any, torch.Tensor]] = deque()
        self._nbytes = 0

    def make_room(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more may be in flight; errors as of ``wait``."""
        self._room = max(self._room, self._most * nbytes)
        while self._nbytes + nbytes > self._room:
            self._wait(self._in_flight[0][0])
            _, data = self._in_flight.popleft()
            self._nbytes -= data.nbytes

    def add(self, work: Any, data: torch.Tensor) -> None:
        """Add a tensor in flight, with the send's work handle."""
        self._in_flight.append((work, data))
        self._nbytes += data.nbytes
