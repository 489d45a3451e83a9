"""JSON for people and for diffs: what fits in a line is one, and a long list of numbers or names
fills its lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

WIDTH = 100


def folded(value: Any, indent: str = "") -> str:
    """The value as JSON; lines behind the first are indented by ``indent``."""
    line = json.dumps(value)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, list | dict) or not value:
        return line
    deeper = f"{indent} "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {folded(each, deeper)}" for key, each in value.items()]
        return _between("{}", items, indent)
    items = [folded(each, deeper) for each in value]
    plain = not any(isinstance(each, list | dict) for each in value)
    return _between("[]", _filled(items, WIDTH - len(deeper) - 1) if plain else items, indent)


def _between(brackets: str, lines: Iterable[str], indent: str) -> str:
    begin, end = brackets
    return f"{begin}\n{indent} " + f",\n{indent} ".join(lines) + f"\n{indent}{end}"


def _filled(items: list[str], width: int) -> list[str]:
    lines = items[:1]
    for item in items[1:]:
        if len(lines[-1]) + len(item) + 2 > width:
            lines.append(item)
        else:
            lines[-1] += f", {item}"
    return lines
