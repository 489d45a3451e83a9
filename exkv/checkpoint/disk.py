"""Weights that stay on disk until they are used: read ahead of a call, and how fast that is."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

#: Bytes that Linux reads ahead in one go at least, by default; it drops the rest of a longer hint.
_AHEAD = 128 << 10
#: Bytes read at once where the rate is measured, how many in all at most, and for how long.
_PIECE, _MOST, _SECONDS = 2 << 20, 256 << 20, 0.3


def read_ahead(tensors: Iterable[torch.Tensor]) -> None:
    """Have the system read these tensors' pages, of those that lie in mapped files and are not in
    memory: many at once, which one page fault after the other is not."""
    if sys.platform != "linux":
        return
    madvise = _madvise()
    for tensor in tensors:
        begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        end = tensor.data_ptr() + tensor.nbytes
        for first in range(begin, end, _AHEAD):
            madvise(first, min(_AHEAD, end - first), mmap.MADV_WILLNEED)  # where it fails, so be it


@functools.cache
def _madvise() -> ctypes._NamedFuncPointer:
    found = ctypes.CDLL(None).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


def measured_rate(file: Path) -> float | None:
    """Bytes a second at which pieces of a file come from its disk, past the system's cache; None
    where the file system can't do that, or there is too little to read."""
    flag = getattr(os, "O_DIRECT", None)
    pieces = min(_MOST, file.stat().st_size) // _PIECE
    if flag is None or pieces < 2:
        return None
    step = file.stat().st_size // pieces // mmap.PAGESIZE * mmap.PAGESIZE
    done, seconds = 0, 0.0
    with contextlib.suppress(OSError), contextlib.closing(mmap.mmap(-1, _PIECE)) as memory:
        fd = os.open(file, os.O_RDONLY | flag)
        try:
            started = time.perf_counter()
            while done < pieces and seconds < _SECONDS:
                if os.preadv(fd, [memory], done * step) < _PIECE:
                    return None
                done, seconds = done + 1, time.perf_counter() - started
        finally:
            os.close(fd)
    return done * _PIECE / seconds if done else None
