"""How compressed-tensors names the layers that a setting is for: by name, pattern or type.

Source: the package compressed-tensors, ``utils/match.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from exkv.checkpoint.files import quoted

from .expert_groups import expert_of


def check_pattern(where: str, name: str) -> None:
    """ValueError for a pattern that is none."""
    if not name.startswith("re:"):
        return
    try:
        re.compile(name[3:])
    except re.error as error:
        raise ValueError(
            f"{where}: {quoted(name)} is no regular expression ({error}): take another version of "
            "the model"
        ) from None


def names_layer(name: str, layer: str) -> bool:
    """Whether a target, or a name to ignore, is the layer's, a pattern of it, or its type."""
    if name.startswith("re:"):
        return re.match(name[3:], layer) is not None
    return name in (layer, type_of(layer))


def type_of(layer: str) -> str:
    """The module that transformers makes of it."""
    return "Embedding" if layer.endswith("embed_tokens") else "Linear"


def patterns_of(layers: list[str], others: Iterable[str] = ()) -> list[str]:
    """Patterns of exactly these names, one for all that differ in the layer's number and the
    expert's only.

    Args:
        others: names that are of no such layer: the experts among them are told apart by number.
    """
    elsewhere = {_numbered(layer)[:3] for layer in others}
    experts: dict[tuple[str, str, str], list[str]] = {}
    for layer in layers:
        *name, expert = _numbered(layer)
        experts.setdefault((name[0], name[1], name[2]), []).append(expert)
    numbers: dict[tuple[str, str], list[str]] = {}
    for (before, number, behind), several in experts.items():
        which = f"({'|'.join(several)})" if (before, number, behind) in elsewhere else r"\d+"
        behind = re.escape(behind).replace(re.escape(_ANY), which)
        numbers.setdefault((re.escape(before), behind), []).append(number)
    return [
        rf"re:{before}\.({'|'.join(known)})\.{behind}$" if behind else f"re:{before}$"
        for (before, behind), known in numbers.items()
    ]


#: In the place of an expert's number.
_ANY = "*"


def _numbered(layer: str) -> tuple[str, str, str, str]:
    """A layer's name before its decoder layer's number, that number, what is behind it, and the
    number of the expert in there; empty where there is none."""
    before, *rest = re.split(r"\.(\d+)\.", layer, maxsplit=1)
    if not rest:
        return layer, "", "", ""
    number, behind = rest
    expert = expert_of(behind)
    if expert is None:
        return before, number, behind, ""
    return before, number, behind.replace(f"experts.{expert}.", f"experts.{_ANY}."), str(expert)
