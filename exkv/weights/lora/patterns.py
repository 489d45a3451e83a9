"""Match modules by the names and regular expressions of an adapter_config.json, as PEFT does.

An untrusted file may have an expression that takes forever. So expressions may have only a few
unbounded repetitions, and none of a group.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

#: Upper bounds on unbounded repetitions, and on characters of an expression.
_MOST_REPEATS, _MOST_CHARACTERS = 5, 4096
#: An unbounded repetition, outside of a character class; and one of a group.
_REPEAT = re.compile(r"(?<!\\)(\*|\+|\{\d*,\d*\})")
_GROUP_REPEAT = re.compile(r"(?<!\\)\)\s*(\*|\+|\{)")
_PLAIN = re.compile(r"[\w.\-]*")


@functools.lru_cache(256)
def compiled(expression: str) -> re.Pattern[str]:
    """Compile an expression.

    Raises:
        ValueError: it is invalid, or might take forever.
    """
    if not _PLAIN.fullmatch(expression):
        repeats = len(_REPEAT.findall(expression))
        many = repeats > _MOST_REPEATS or len(expression) > _MOST_CHARACTERS
        if many or _GROUP_REPEAT.search(expression):
            raise ValueError(
                f"the regular expression {expression!r:.80} has {repeats} repetitions; at most "
                f"{_MOST_REPEATS} are allowed, none of a group: list the modules' names instead"
            )
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{expression!r:.80} is not a regular expression: {error}") from None


def means(names: str | Iterable[str], module: str) -> bool:
    """Whether a list has the module's name or the end of it, or an expression matches it whole."""
    if isinstance(names, str):
        return compiled(names).fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def key_of(patterns: Iterable[str], module: str) -> str | None:
    """The first key of a ``rank_pattern`` or ``alpha_pattern`` that matches the module."""
    for key in patterns:
        compiled(key)
        if re.match(rf"(.*\.)?({key})$", module):
            return key
    return None
