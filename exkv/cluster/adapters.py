"""Adapters over hosts: the driver reads an adapter's files and sends them, and every host keeps
them in a folder of its own for as long as it has the adapter, to read its units' part of them."""

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
    """Have hosts of these names load an adapter of the driver's.

    Args:
        sending: within it hosts are sent tensors of the model that they ask for.

    Raises:
        PlacementError, ClusterError: one can't; all have answered.
        WireError: one is gone.
    """
    sizes = [(adapter.folder / file).stat().st_size for file in _FILES]
    about: dict[str, Any] = {"name": adapter.name, "key": adapter.key, "sizes": sizes}
    about["strength"] = adapter.strength
    cluster.send_each(
        "load_adapter", [about if name in names else None for name in cluster.names[1:]]
    )
    ranks = [rank for rank in cluster.others if cluster.names[rank] in names]
    for file, size in zip(_FILES, sizes, strict=True):
        for piece in _pieces(adapter.folder / file, size):
            for rank in ranks:
                cluster.wire.send(piece, rank, tag=WEIGHTS)
    with sending:
        cluster.answers()


def _pieces(file: Path, size: int) -> Iterator[torch.Tensor]:
    """So many bytes of a file; zeros where it has become shorter, which the adapter's key tells."""
    with file.open("rb") as stream:
        for first in range(0, size, PIECE):
            count = min(PIECE, size - first)
            read = stream.read(count)
            yield torch.frombuffer(bytearray(read.ljust(count, b"\0")), dtype=torch.uint8)


def _received(wire: Wire, size: int) -> Iterator[torch.Tensor]:
    """So many bytes from the driver."""
    for first in range(0, size, PIECE):
        piece = torch.empty(min(PIECE, size - first), dtype=torch.uint8)
        wire.receive_into(piece, 0, tag=WEIGHTS)
        yield piece


class AdapterFiles:
    """What a host was sent of adapters, by their names."""

    def __init__(self) -> None:
        self._folders: dict[str, tempfile.TemporaryDirectory[str]] = {}

    def receive(self, wire: Wire, name: str, sizes: tuple[int, int]) -> Path:
        """The folder of an adapter whose files have come."""
        coming = [_received(wire, size) for size in sizes]
        try:
            kept = tempfile.TemporaryDirectory(prefix="exkv-adapter-")
            for file, pieces in zip(_FILES, coming, strict=True):
                with (Path(kept.name) / file).open("wb") as stream:
                    for piece in pieces:
                        stream.write(piece.numpy().data)
        finally:  # what is sent is to be received, also where the disk is full
            for pieces in coming:
                deque(pieces, maxlen=0)
        self.drop(name)
        self._folders[name] = kept
        return Path(kept.name)

    def drop(self, name: str) -> None:
        """Remove its files, if there are any."""
        if (folder := self._folders.pop(name, None)) is not None:
            folder.cleanup()

    def clear(self) -> None:
        """Remove all."""
        for name in list(self._folders):
            self.drop(name)


def chosen_again(model: Transformer, made_with: list[str | None]) -> list[str | None]:
    """The names of the adapters by which rows are computed again that were made with these keys;
    None for rows of several adapters, and of one that is no more."""
    names = {adapter.key: name for name, adapter in model.adapters.items()}
    return [None if key is None else names.get(key) for key in made_with]


__all__ = ["AdapterFiles", "chosen_again", "give"]
