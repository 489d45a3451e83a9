"""Bounds of settings. A :class:`Bounds` checks a value, describes the allowed values, and knows
which of them switch the setting's step off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from exkv.checkpoint.value_checks import is_int, is_number

#: A model's largest logits are around 10**4; divided by this they stay finite in float32.
SMALLEST = 1e-30
LARGEST = 1e30
#: The largest number below 1.
BELOW_1 = math.nextafter(1.0, 0.0)
MOST_TOKENS = 2**31 - 1
LARGEST_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """The allowed values of a setting.

    Attributes:
        words: the allowed values, for messages and documentation.
        check: (name, value) -> the value to store; raises TypeError or ValueError.
        kind: the type of a number or a switch; None for anything else.
        switches: whether this setting alone switches its step on or off.
        off: the numbers that switch off, the usual one first.
    """

    words: str
    check: Callable[[str, Any], Any]
    kind: type[int] | type[float] | None = None
    switches: bool = True
    off: tuple[float, ...] = ()

    def is_on(self, value: Any) -> bool:
        """Whether this value switches the step on."""
        on = bool(value) if self.kind in (None, bool) else value is not None
        return self.switches and on and value not in self.off


def number(
    low: float,
    high: float,
    *,
    kind: type[int] | type[float] = float,
    off: tuple[float, ...] = (),
    above: bool = False,
    zero: str = "",
    note: str = "",
) -> Bounds:
    """Bounds of a number from low to high; with ``off``, it switches its step.

    Args:
        above: exclude ``low``.
        zero: meaning of 0, if it is allowed beside the range.
        note: remark for the description, in place of the values that switch off.
    """
    words = f"{'an int from' if kind is int else 'from'} {_plain(low)} to {_plain(high)}"
    if low == 0 and high in (1, BELOW_1):
        words = f"in {'(' if above else '['}0, 1{']' if high == 1 else ')'}"
    elif above:
        words = f"above {low:g}, to {_plain(high)}"
    if off and not note:
        note = f"{' or '.join(f'{value:g}' for value in off)} switches it off"
    words = f"{words}; {note}" if note else f"0, which {zero}, or {words}" if zero else words

    def check(name: str, value: Any) -> Any:
        value = plain_number(value)
        if not is_int(value) and not (kind is float and isinstance(value, float)):
            raise TypeError(f"{name} is {value!r}; it must be {words}")
        inside = low < value if above else low <= value
        if not (is_number(value) and (inside and value <= high or zero and value == 0)):
            raise ValueError(f"{name} is {value!r}; it must be {words}")
        return value

    return Bounds(words, check, kind=kind, switches=bool(off), off=off)


count = partial(number, kind=int)


def switch(*, switches: bool = True) -> Bounds:
    """True or False."""

    def check(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it must be True or False")
        return value

    return Bounds("True or False", check, kind=bool, switches=switches)


def check_fields(
    config: Any, bounds: Mapping[str, Bounds], prefix: str = "", *, none_is_off: bool = False
) -> None:
    """Check fields of a frozen dataclass, and store the values that ``check`` returns. None is
    allowed if it is the default.

    Args:
        none_is_off: whether None, where it isn't the default, stands for the number that switches
            off, or else for the default.

    Raises:
        TypeError, ValueError: naming the prefixed field, its value and what is allowed.
    """
    known = type(config).__dataclass_fields__
    for name, each in bounds.items():
        value, default = getattr(config, name), known[name].default
        if value is None and none_is_off:
            value = each.off[0] if each.off and default is not None else default
        if value is not None or default is not None:
            value = each.check(prefix + name, value)
        object.__setattr__(config, name, value)


def check_count(name: str, value: Any, low: int, high: int, words: str) -> None:
    """TypeError or ValueError unless it is an int from low to high."""
    if not is_int(value):
        raise TypeError(f"{name} is {value!r}; it must be {words}")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be {words}")


def plain_number(value: Any) -> Any:
    """Python's number for a tensor or numpy value with a single element; others pass through."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    return value.item() if isinstance(value, np.generic) else value


def token_ids(
    name: str, ids: Any, words: str = "a token id, or several, or None"
) -> tuple[int, ...]:
    """One id or several, in any container, as a tuple."""
    if isinstance(ids, torch.Tensor | np.ndarray | np.generic):
        ids = ids.tolist()
    several: Any = [ids] if is_int(ids) else ids
    if isinstance(several, str | bytes) or not isinstance(several, Iterable):
        raise TypeError(f"{name} is {ids!r}; it must be {words}")
    found = tuple(map(plain_number, several))
    for token in found:
        check_count(name, token, 0, LARGEST_ID, words)
    return found


def token_sequences(name: str, words: Any) -> tuple[tuple[int, ...], ...]:
    """Lists of token ids, none of them empty, as tuples."""
    allowed = "a list of lists of token ids"
    if not isinstance(words, list | tuple) or not all(isinstance(w, list | tuple) for w in words):
        raise TypeError(f"{name} is {words!r}; it must be {allowed}")
    if not all(words):
        raise ValueError(f"{name} is {words!r}, with an empty word: leave it out")
    return tuple(token_ids(name, word, allowed) for word in words)


def token_set(name: str, tokens: Any) -> frozenset[int]:
    """A set of token ids, which may be empty."""
    if isinstance(tokens, str | Mapping) or not isinstance(tokens, Iterable):
        raise TypeError(f"{name} is {tokens!r:.60}; it must be a set of token ids")
    found = frozenset(tokens)
    for token in found:
        if not is_int(token) or token < 0:
            raise ValueError(f"{name} holds {token!r:.60}; it must hold token ids")
    return found


def token_bias(name: str, bias: Any) -> dict[int, float]:
    """A copy of {token id: number}."""
    if not isinstance(bias, Mapping):
        raise TypeError(f"{name} is {bias!r}; it must be a dict: {{id: number}}")
    for token, value in bias.items():
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ValueError(f"{name} has the key {token!r}; keys are token ids")
        if value != -math.inf:
            _BIAS.check(f"{name}[{token}]", value)
    return dict(bias)


def sequence_bias(name: str, biases: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    """{ids: number} or pairs of them, as pairs of tuples and numbers."""
    words = "{(ids,): number} or a list of [[ids], number], numbers finite or -inf"
    pairs = list(biases.items() if isinstance(biases, Mapping) else biases)
    if not pairs or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError(f"{name} is {biases!r}; it must be {words}")
    sequences = token_sequences(name, [ids for ids, _ in pairs])
    for _, bias in pairs:
        if bias != -math.inf:
            _BIAS.check(name, bias)
    given = {ids: float(bias) for ids, (_, bias) in zip(sequences, pairs, strict=True)}
    return tuple(given.items())


def length_decay(name: str, decay: Any) -> tuple[int, float]:
    """A number of tokens and a factor."""
    if not isinstance(decay, list | tuple) or len(decay) != 2:
        raise TypeError(f"{name} is {decay!r}; it must be (tokens, factor)")
    start = count(0, MOST_TOKENS).check(name, decay[0])
    return start, float(number(SMALLEST, LARGEST).check(name, decay[1]))


def _plain(value: float) -> str:
    for power in (31, 63):
        if value == 2**power - 1:
            return f"2**{power} - 1"
    return f"{value:g}".replace("e+", "e")


_BIAS = number(-LARGEST, LARGEST, note="or -inf")
