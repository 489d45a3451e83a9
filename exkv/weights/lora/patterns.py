"""Which modules a name or a regular expression of an adapter_config.json means, as PEFT has it.

A file from anywhere may hold an expression that takes for ever. So one that isn't a plain name may
repeat things without end a few times only, and no group of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

#: Repetitions without end that an expression may have, and its characters.
_MOST_REPEATS, _MOST_CHARACTERS = 5, 4096
#: A repetition without end, outside of a class of characters, and one of a group.
_REPEAT = re.compile(r"(?<!\\)(\*|\+|\{\d*,\d*\})")
_GROUP_REPEAT = re.compile(r"(?<!\\)\)\s*(\*|\+|\{)")
_PLAIN = re.compile(r"[\w.\-]*")


@functools.lru_cache(256)
def compiled(expression: str) -> re.Pattern[str]:
    """The expression.

    Raises:
        ValueError: it is none, or one that might take for ever.
    """
    if not _PLAIN.fullmatch(expression):
        repeats = len(_REPEAT.findall(expression))
        many = repeats > _MOST_REPEATS or len(expression) > _MOST_CHARACTERS
        if many or _GROUP_REPEAT.search(expression):
            raise ValueError(
                f"the regular expression {expression!r:.80} has {repeats} repetitions, and may "
                f"have {_MOST_REPEATS}, none of a group: list the modules' names instead"
            )
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{expression!r:.80} is no regular expression: {error}") from None


def means(names: str | Iterable[str], module: str) -> bool:
    """Whether a list has the module's name or its end, or an expression all of it."""
    if isinstance(names, str):
        return compiled(names).fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def key_of(patterns: Iterable[str], module: str) -> str | None:
    """The first key of a ``rank_pattern`` or ``alpha_pattern`` that is meant for the module."""
    for key in patterns:
        compiled(key)
        if re.match(rf"(.*\.)?({key})$", module):
            return key
    return None
