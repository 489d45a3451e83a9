"""Tensors on their way to one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class Sends:
    """Those that were handed to a process group, and are kept until their receiver has them.

    Together they take no more bytes than ``room``, or than the largest one so far. So the small
    states of a decode step go out behind the large one of a prompt's chunk, which its receiver asks
    for only once it is through with the last: whoever sends goes on meanwhile.

    Args:
        wait: until one of the group's calls is through.
    """

    def __init__(self, wait: Callable[[Any], None], room: int = 0) -> None:
        self._wait, self._room = wait, room
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()
        self._nbytes = 0

    def make_room(self, nbytes: int) -> None:
        """Wait until so many bytes more may be on their way; errors are those of ``wait``."""
        self._room = max(self._room, nbytes)
        while self._nbytes + nbytes > self._room:
            self._wait(self._under_way[0][0])
            _, data = self._under_way.popleft()
            self._nbytes -= data.nbytes

    def add(self, work: Any, data: torch.Tensor) -> None:
        """This one is on its way, by a call of the group's."""
        self._under_way.append((work, data))
        self._nbytes += data.nbytes
