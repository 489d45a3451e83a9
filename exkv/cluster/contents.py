"""A cache's contents on other hosts, for saving and restoring it: each tensor is sent between its
host and the driver, which reads and writes the file as it does on one machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from exkv.cache import KVCache
from exkv.cache.file import Part

from .replica import rows_of
from .wire import WEIGHTS, pieces

if TYPE_CHECKING:
    from .cluster import Cluster


class Away:
    """The parts of one cache on other hosts; errors as of ``Cluster.ask``.

    Args:
        number: the cache's number on the hosts.
    """

    def __init__(self, cluster: Cluster, number: int) -> None:
        self._cluster, self._number = cluster, number

    def parts(self, cache: KVCache, lens: Sequence[int]) -> dict[str, Part]:
        names, answers = self._cluster.names[1:], self._ask(cache, "describe_rows", lens)
        return {
            f"layers.{layer}.{name}": RemotePart(
                cluster=self._cluster,
                host=host,
                which={"number": self._number, "layer": layer, "name": name, "lens": lens},
                dtype=dtype,
                shape=tuple(shape),
            )
            for host, answer in zip(names, answers, strict=False)
            for layer, name, dtype, shape in answer
        }

    def make_room(self, cache: KVCache, lens: Sequence[int]) -> None:
        self._ask(cache, "make_room", lens)

    def become(self, cache: KVCache) -> None:
        self._cluster.ask("set_rows", number=self._number, state=rows_of(cache))

    def _ask(self, cache: KVCache, do: str, lens: Sequence[int]) -> list[Any]:
        """Every host's answer; [] if the cache's model is not loaded."""
        if self._cluster.model is not cache.model:
            return []
        pages = None if cache.pages is None else cache.pages.rows
        return self._cluster.ask(do, number=self._number, lens=lens, pages=pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePart:
    """A tensor of a cache layer on another host.

    Attributes:
        which: cache, layer and tensor, as arguments of the hosts' commands.
    """

    cluster: Cluster
    host: str
    which: Mapping[str, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def values(self) -> torch.Tensor:
        rank = self._send_command("send_rows")
        found = torch.empty(self.shape, dtype=self.dtype)
        for piece in pieces(found):
            self.cluster.wire.receive_into(piece, rank, tag=WEIGHTS)
        self.cluster.answers()
        return found

    def become(self, values: torch.Tensor) -> None:
        rank = self._send_command("take_rows")
        for piece in pieces(values.contiguous()):
            self.cluster.wire.send(piece, rank, tag=WEIGHTS)
        self.cluster.answers()

    def _send_command(self, do: str) -> int:
        """Send a command to the host -> its rank."""
        names = self.cluster.names
        args = [dict(self.which) if name == self.host else None for name in names[1:]]
        self.cluster.send_each(do, args)
        return names.index(self.host)
