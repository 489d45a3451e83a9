"""Checks of single values from a config.json: each error has the key, the value, and what it must
be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeVar

#: More than any model has, and few enough to be built one by one.
MOST_LAYERS = 2048


T = TypeVar("T", bound=type)


def refuses_assignment(cls: T) -> T:
    """Decorate a frozen dataclass with slots, so that assignments raise FrozenInstanceError with a
    remedy. (For unknown names, dataclasses up to Python 3.13 raise a TypeError from super.)"""

    def refuse(self: Any, name: str, value: Any = None) -> NoReturn:
        kind = type(self).__name__
        known = name in {field.name for field in dataclasses.fields(self)}
        hint = f"make one with dataclasses.replace({kind.lower()}, {name}=...)"
        hint = hint if known else f"it has no setting {name!r}"
        raise dataclasses.FrozenInstanceError(f"a {kind} can't be changed: {hint}")

    for method in ("__setattr__", "__delattr__"):
        setattr(cls, method, refuse)
    return cls


def is_int(value: Any) -> bool:
    """An integer, and not one of Python's booleans."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A finite number, but not an integer too large for a float."""
    if isinstance(value, float):
        return math.isfinite(value)
    return is_int(value) and abs(value) < 2**63


def check_size(key: str, value: Any) -> None:
    """ValueError unless the value is a positive size."""
    if not is_int(value) or not 0 < value < 2**31:
        raise ValueError(f"{key} must be a positive integer below 2**31, not {value!r}")


def check_count(key: str, value: Any) -> None:
    """ValueError unless the value is an integer of at least 0."""
    if not is_int(value) or value < 0:
        raise ValueError(f"{key} must be an integer of at least 0, not {value!r}")


def check_convolution(key: str, tokens: int) -> None:
    """ValueError unless a convolution is over at least 2 tokens."""
    if tokens < 2:
        raise ValueError(f"{key} {tokens}: a convolution is over at least 2 tokens")


def check_layers(value: Any) -> None:
    """ValueError unless the value is a supported number of layers."""
    check_size("num_hidden_layers", value)
    check_at_most("num_hidden_layers", value, MOST_LAYERS)


def check_at_most(key: str, value: int, most: int) -> None:
    """ValueError if the size exceeds what exkv supports."""
    if value > most:
        raise ValueError(f"{key} {value} is more than the {most} that exkv takes")


def check_bool(key: str, value: Any) -> None:
    """ValueError unless the value is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, not {value!r}")


def set_floats(obj: Any, keys: Iterable[str], *, null: bool = False) -> None:
    """Check positive finite numbers, and convert them to float: JSON writes 500000 for 500000.0."""
    for key in keys:
        value = getattr(obj, key)
        if null and value is None:
            continue
        if not is_number(value) or value <= 0:
            raise ValueError(f"{key} must be a positive number, not {value!r}")
        object.__setattr__(obj, key, float(value))


def stated_once(found: Mapping[str, Any]) -> Any:
    """The value of a setting that may be stated under several names, which must agree.

    Args:
        found: name for messages -> value, None if not stated.

    Returns:
        The value, or None if none is stated.
    """
    stated = {name: value for name, value in found.items() if value is not None}
    distinct: list[Any] = []
    for value in stated.values():
        if value not in distinct:
            distinct.append(value)
    if len(distinct) > 1:
        raise ValueError(
            " contradicts ".join(f"{name} {value!r}" for name, value in stated.items())
        )
    return distinct[0] if distinct else None
