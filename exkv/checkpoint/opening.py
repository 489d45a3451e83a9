"""Opens a model's weights, whatever kind of file has them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from .gguf.contents import find_gguf
from .gguf.tensors import GGUFCheckpoint
from .safetensors import Checkpoint

#: What opens a checkpoint that lies in no folder here, by the path that stands for it.
_MOUNTED: dict[Path, Callable[[], Checkpoint]] = {}


def mount(path: Path, opened: Callable[[], Checkpoint]) -> None:
    """From now on this path stands for what ``opened`` makes, whatever lies there."""
    _MOUNTED[path] = opened


def unmount(path: Path) -> None:
    """The path stands for itself again."""
    _MOUNTED.pop(path, None)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The weights of a model folder, or of a GGUF file or a folder that holds one, or what was
    mounted there.

    Raises FileNotFoundError and CheckpointError as :class:`Checkpoint` does.
    """
    if (opened := _MOUNTED.get(Path(path))) is not None:
        return opened()
    gguf = find_gguf(path)
    return Checkpoint(path) if gguf is None else GGUFCheckpoint(gguf)
