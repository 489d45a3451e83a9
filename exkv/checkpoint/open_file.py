"""A file of weights that stays open, so that the data read is the data that was checked.

The file is opened once; its header, its size and all its data are read from that descriptor. Its
identity is compared again whenever data is read, so that a file which is replaced or written to in
the meantime never yields half of one model and half of another.
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

# Python has this flag from 3.13 on; its value depends on the processor.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0) or (
    0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0
)

#: madvise(2), Linux 5.14: read pages in now, and report errors. Python doesn't name it.
_MADV_POPULATE_READ = 22


class CheckpointError(ValueError):
    """A checkpoint's files are damaged, incomplete, or contradict each other."""


class OpenFile:
    """A file that is open for reading, until :meth:`close` or garbage collection.

    Attributes:
        path: where it was opened.
        size: size in bytes when it was opened.
        identity: distinguishes the file from others, and from itself once written to.

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
        """Read ``nbytes`` bytes from the offset on, or fewer if the file ends before."""
        return os.pread(self._fd, nbytes, offset)

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill memory (bytes) from the offset on. Other threads run meanwhile.

        Raises:
            CheckpointError: the file ends before.
        """
        done = 0
        while done < len(memory):
            count = os.preadv(self._fd, [memory[done:]], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: the file ends at byte {offset + done}, but had {self.size} "
                    f"bytes when it was opened: open the checkpoint again"
                )
            done += count

    def mapped(self) -> mmap.mmap:
        """The whole file, mapped on first use."""
        if self._mapping is None:
            self._mapping = _map_privately(self._fd, self.size)
        return self._mapping

    def fetch(self, offset: int, nbytes: int) -> None:
        """Read bytes of the mapping into memory, so that a failing disk raises here and not by a
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
        """Release the mapping; it ends with its last tensor."""
        self._mapping = None

    def check(self, purpose: str) -> None:
        """Check that it is still the file that was opened.

        Args:
            purpose: what fails otherwise, for the message.

        Raises:
            CheckpointError: it was written to or replaced. A deleted file can still be read.
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


def refuse_lfs_pointer(path: Path, start: bytes) -> None:
    """CheckpointError if a file that begins with these 8 bytes is a Git LFS pointer."""
    if start == b"version ":
        raise CheckpointError(
            f"{path}: this is a Git LFS pointer and not the weights themselves: fetch them with "
            "`git lfs pull`"
        )


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """What distinguishes a file from others, and from itself once it was written to."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _map_privately(fd: int, size: int) -> mmap.mmap:
    """Map the whole file copy-on-write, since torch wants a writable buffer.

    Linux would count a private mapping against the machine's memory, and refuse a file larger than
    that; MAP_NORESERVE promises that nothing will be written.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    return mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
