"""A file of weights that stays open: what was checked is what is read.

The file is opened once, and its header, its size and all its data come from that opening. What a
file system knows of it is compared again whenever data is read, so that a file which somebody
replaces or writes to in the meantime never gives half of one model and half of another.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import weakref
from pathlib import Path

# Python names this flag from 3.13 on; its value is the processor's affair.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0) or (
    0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0
)

#: madvise(2), Linux 5.14: read pages in now, and say what goes wrong. Python doesn't name it.
_MADV_POPULATE_READ = 22


class CheckpointError(ValueError):
    """A checkpoint's files are damaged, incomplete, or not what they are said to be."""


class OpenFile:
    """A file that is open for reading, until :meth:`close` or the end of its last user.

    Attributes:
        path: where it was opened.
        size: bytes, as they were then.
        identity: what the file system tells it by from another, and from itself once written to.

    Raises:
        OSError: it can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self.close = weakref.finalize(self, os.close, self._fd)
        found = os.fstat(self._fd)
        self.size = found.st_size
        self.identity = _identity(found)
        self._mapping: mmap.mmap | None = None

    def read(self, nbytes: int, offset: int) -> bytes:
        """So many bytes from the offset on, or fewer where the file ends."""
        return os.pread(self._fd, nbytes, offset)

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill memory (bytes) with what lies at the offset. Other threads run meanwhile.

        Raises:
            CheckpointError: the file ends before.
        """
        done = 0
        while done < len(memory):
            count = os.preadv(self._fd, [memory[done:]], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: the file ends at byte {offset + done}, where {self.size} bytes "
                    f"were when it was opened: open the checkpoint again"
                )
            done += count

    def mapped(self) -> mmap.mmap:
        """The whole file, mapped when it is first asked for."""
        if self._mapping is None:
            self._mapping = _map_privately(self._fd, self.size)
        return self._mapping

    def fetch(self, offset: int, nbytes: int) -> None:
        """Have bytes of the mapping in memory, so that a disk which fails is told here and not by a
        signal when they are used. Other threads run meanwhile.

        Raises:
            CheckpointError: they can't be read.
        """
        if sys.platform != "linux" or nbytes == 0:
            return
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        first = ctypes.c_char.from_buffer(self.mapped(), begin)
        size = ctypes.c_size_t(offset + nbytes - begin)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.madvise(ctypes.byref(first), size, _MADV_POPULATE_READ)
        if failed and (number := ctypes.get_errno()) != errno.EINVAL:  # a Linux before 5.14
            raise CheckpointError(
                f"{self.path}: bytes {offset} to {offset + nbytes} can't be read "
                f"({os.strerror(number)}): the file was truncated, or its disk fails"
            )

    def unmap(self) -> None:
        """Let go of the mapping; it ends with its last tensor."""
        self._mapping = None

    def check(self, purpose: str) -> None:
        """See that it is still what was opened.

        Args:
            purpose: what it is needed for, for the message.

        Raises:
            CheckpointError: it was written to, or another file is in its place. One that was
                deleted can be read on.
        """
        now = os.fstat(self._fd)
        if now.st_size != self.size:
            raise CheckpointError(
                f"{self.path}: the file has changed since it was opened, from {self.size} bytes to "
                f"{now.st_size}; {purpose}: open the checkpoint again"
            )
        if _identity(now) != self.identity or self._is_replaced():
            raise CheckpointError(
                f"{self.path}: the file was replaced or written to since it was opened; {purpose}: "
                f"open the checkpoint again"
            )

    def _is_replaced(self) -> bool:
        try:
            return _identity(os.stat(self.path)) != self.identity
        except FileNotFoundError:
            return False


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """What tells a file from another, and from itself once it was written to."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _map_privately(fd: int, size: int) -> mmap.mmap:
    """The whole file, copied on write: torch wants a buffer that it may write to.

    Linux would count a private mapping against the machine's memory, and refuse a file larger
    than that; MAP_NORESERVE says that nothing will be written.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    return mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
