"""Open a model's weights, whichever kind of file has them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from .gguf.contents import find_gguf
from .gguf.tensors import GGUFCheckpoint
from .open_file import CheckpointError
from .safetensors import Checkpoint

#: Path -> opener, for checkpoints that are mounted in place of a folder.
_MOUNTED: dict[Path, Callable[[], Checkpoint]] = {}


def mount(path: Path, opened: Callable[[], Checkpoint]) -> None:
    """Have :func:`open_checkpoint` return ``opened()`` for this path, whatever is there."""
    _MOUNTED[path] = opened


def unmount(path: Path) -> None:
    """Undo :func:`mount`."""
    _MOUNTED.pop(path, None)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the weights of a model folder, or of a GGUF file or a folder with one, or what is
    mounted there.

    Raises FileNotFoundError and CheckpointError as :class:`Checkpoint` does.
    """
    if (opened := _MOUNTED.get(Path(path))) is not None:
        return opened()
    gguf = find_gguf(path)
    return Checkpoint(path) if gguf is None else GGUFCheckpoint(gguf)


def open_if_sound(path: Path | None) -> Checkpoint | None:
    """:func:`open_checkpoint`; None for no path, or if the weights are missing or damaged, which
    loading them reports."""
    if path is None:
        return None
    try:
        return open_checkpoint(path)
    except (OSError, CheckpointError):
        return None
