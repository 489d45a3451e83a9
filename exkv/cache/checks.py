"""Argument checks of caches, made before any memory is allocated."""

from __future__ import annotations

import operator
from typing import SupportsIndex

#: Most tokens a row: kernels take lengths as int32.
MOST_TOKENS = 2**31 - 1
#: Most rows: common prefixes are recorded for each pair of rows.
MOST_ROWS = 16_384


def whole(name: str, value: SupportsIndex, *, least: int = 1, most: int = MOST_TOKENS) -> int:
    """Check an integer argument and return it.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of range.
    """
    number = whole_type(name, value)
    if not least <= number <= most:
        shown = number if abs(number) < 10**18 else f"{'-' * (number < 0)}10**18 or more"
        raise ValueError(f"{name} is {shown}: it must be at least {least}, and {most:,} at most")
    return number


def whole_type(name: str, value: SupportsIndex) -> int:
    """Check that an argument is an integer, of any range, and return it.

    Raises:
        TypeError: it is not.
    """
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise TypeError(f"{name} is {shown}: it must be a whole number")
    return operator.index(value)
