"""Adapters over hosts: the driver sends an adapter's files, and every host stores them in a
temporary folder while the adapter is loaded, and reads its own units' part from there."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exkv.models import Transformer
from exkv.models.adapters import Adapter
from exkv.weights.lora import CONFIG_NAME, TENSORS_NAME

from .wire import PIECE, WEIGHTS, Wire

if TYPE_CHECKING:
    from .cluster import Cluster

_FILES = (CONFIG_NAME, TENSORS_NAME)


def give(
    cluster: Cluster,
    names: Collection[str],
    adapter: Adapter,
    sending: AbstractContextManager[None],
) -> None:
    """Load an adapter of the driver's on these hosts.

    Args:
        sending: context in which hosts are sent the model's tensors that they request.

    Raises:
        PlacementError, ClusterError: a host can't load it; all have answered.
        WireError: a host is gone.
    """
    sizes = [(adapter.folder / file).stat().st_size for file in _FILES]
    command: dict[str, Any] = {"name": adapter.name, "key": adapter.key, "sizes": sizes}
    command["strength"] = adapter.strength
    cluster.send_each(
        "load_adapter", [command if name in names else None for name in cluster.names[1:]]
    )
    ranks = [rank for rank in cluster.others if cluster.names[rank] in names]
    for file, size in zip(_FILES, sizes, strict=True):
        for piece in _pieces(adapter.folder / file, size):
            for rank in ranks:
                cluster.wire.send(piece, rank, tag=WEIGHTS)
    with sending:
        cluster.answers()


def _pieces(file: Path, size: int) -> Iterator[torch.Tensor]:
    """The first ``size`` bytes of a file, in pieces, padded with zeros if it has become shorter
    (the adapter's key then differs)."""
    with file.open("rb") as stream:
        for first in range(0, size, PIECE):
            count = min(PIECE, size - first)
            read = stream.read(count)
            yield torch.frombuffer(bytearray(read.ljust(count, b"\0")), dtype=torch.uint8)


def _received(wire: Wire, size: int) -> Iterator[torch.Tensor]:
    """Receive ``size`` bytes from the driver, in pieces."""
    for first in range(0, size, PIECE):
        piece = torch.empty(min(PIECE, size - first), dtype=torch.uint8)
        wire.receive_into(piece, 0, tag=WEIGHTS)
        yield piece


class AdapterFiles:
    """Adapter files that a host received, by adapter name."""

    def __init__(self) -> None:
        self._folders: dict[str, tempfile.TemporaryDirectory[str]] = {}

    def receive(self, wire: Wire, name: str, sizes: tuple[int, int]) -> Path:
        """Receive an adapter's files -> their folder."""
        incoming = [_received(wire, size) for size in sizes]
        try:
            folder = tempfile.TemporaryDirectory(prefix="exkv-adapter-")
            for file, pieces in zip(_FILES, incoming, strict=True):
                with (Path(folder.name) / file).open("wb") as stream:
                    for piece in pieces:
                        stream.write(piece.numpy().data)
        finally:  # drain the wire, even if the disk is full
            for pieces in incoming:
                deque(pieces, maxlen=0)
        self.drop(name)
        self._folders[name] = folder
        return Path(folder.name)

    def drop(self, name: str) -> None:
        """Delete an adapter's files, if there are any."""
        if (folder := self._folders.pop(name, None)) is not None:
            folder.cleanup()

    def clear(self) -> None:
        """Delete all files."""
        for name in list(self._folders):
            self.drop(name)


def chosen_again(model: Transformer, made_with: list[str | None]) -> list[str | None]:
    """Adapter names with which to recompute rows, from the keys of those they were computed with;
    None for a row of several adapters, or of one that is no longer loaded."""
    names = {adapter.key: name for name, adapter in model.adapters.items()}
    return [None if key is None else names.get(key) for key in made_with]
