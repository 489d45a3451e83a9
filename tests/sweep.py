"""Tests that sweep over all there is of a kind: every architecture, instruction set, source file.

One that takes long is marked ``@pytest.mark.sweep(n)``. ``make test`` runs n of its cases, the same
each time, spread over all; ``make sweep`` (``EXKV_SWEEP=1``) runs all. Tests that draw cases by
themselves ask :func:`cases` how many.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from zlib import crc32

import pytest

ALL = os.environ.get("EXKV_SWEEP", "0") not in ("", "0")


def cases(few: int, many: int) -> int:
    return many if ALL else few


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Cases of sweeps that don't run, of those that were selected."""
    if ALL:
        return set()
    swept = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("sweep"):
            swept[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    return {
        item
        for (_, few), each in swept.items()
        for item in sorted(each, key=lambda item: crc32(item.nodeid.encode()))[few:]
    }
