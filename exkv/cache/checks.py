"""What users give to caches, checked before memory is asked for."""

from __future__ import annotations

import operator
from typing import SupportsIndex

#: The most tokens of a row: lengths are int32 to the kernels.
MOST_TOKENS = 2**31 - 1
#: The most rows: which of them begin alike is kept for each two.
MOST_ROWS = 16_384


def whole(name: str, value: SupportsIndex, *, least: int = 1, most: int = MOST_TOKENS) -> int:
    """The number, which an argument of this name was given.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is out of range.
    """
    number = whole_type(name, value)
    if not least <= number <= most:
        shown = number if abs(number) < 10**18 else f"{'-' * (number < 0)}10**18 or more"
        raise ValueError(f"{name} is {shown}: it must be at least {least}, and {most:,} at most")
    return number


def whole_type(name: str, value: SupportsIndex) -> int:
    """The same for any number."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise TypeError(f"{name} is {shown}: it must be a whole number")
    return operator.index(value)
