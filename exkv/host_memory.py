"""The host's memory as this process may use it: the system's, within the limits of its control
groups (cgroups), which containers are: past a limit the system ends a process of the group.

What a group uses counts without file pages that the system would drop first (``inactive_file``), as
container runtimes count a container's working set.

Sources: Linux's admin-guide/cgroup-v2 and cgroup-v1/memory; proc(5), cgroups(7).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """Where a version of control groups is mounted, and its files in a group's folder."""

    mount: str
    limit: str
    usage: str
    inactive: str  # a key of memory.stat


_V1 = _Hierarchy(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_V2 = _Hierarchy("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def total_and_free(root: Path = ROOT) -> tuple[int, int]:
    """Bytes that this process and others may use in all, and those that it can still use, by the
    files of Linux under ``root``; all of the machine's where there are none."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = _kibibytes(root / "proc/meminfo", "MemTotal:", whole)
    free = _kibibytes(root / "proc/meminfo", "MemAvailable:", total)
    for limit, used in _limits(root):
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return total, free


def anonymous() -> int:
    """Bytes of this process's memory that are no file's; 0 if the system doesn't say."""
    return _kibibytes(ROOT / "proc/self/status", "RssAnon:", 0)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limits of this process's control groups and of all around them, with what each uses."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        hierarchy = _V1 if controllers else _V2
        inside = PurePosixPath(path).relative_to("/")
        for group in (inside, *inside.parents):
            # In a container the path may be the host's, of which only the mount itself is here.
            folder = root / hierarchy.mount / group
            if (limit := _number(folder / hierarchy.limit)) is not None:
                used = _number(folder / hierarchy.usage) or 0
                stat = dict(line.split() for line in _lines(folder / "memory.stat"))
                yield limit, max(used - int(stat.get(hierarchy.inactive, 0)), 0)


def _number(file: Path) -> int | None:
    """The number in a file; None for the word ``max``, or if it can't be read."""
    text = "".join(_lines(file))
    return int(text) if text.isdecimal() else None


def _kibibytes(file: Path, key: str, default: int) -> int:
    """The bytes that a line of a /proc file has in KiB; the default if there is no such line."""
    for line in _lines(file):
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return default


def _lines(file: Path) -> list[str]:
    """Those of a file; none if it can't be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
