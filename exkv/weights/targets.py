"""Targets of compressed-tensors' settings: layers by name, pattern or type.

Source: the package compressed-tensors, ``utils/match.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from exkv.checkpoint.files import quoted

from .expert_groups import expert_of
from .settings import is_table


def check_pattern(where: str, name: str) -> None:
    """ValueError for an invalid pattern."""
    if not name.startswith("re:"):
        return
    try:
        re.compile(name[3:])
    except re.error as error:
        raise ValueError(
            f"{where}: {quoted(name)} is not a regular expression ({error}): take another version "
            "of the model"
        ) from None


def names_layer(name: str, layer: str) -> bool:
    """Whether a target, or a name to ignore, is the layer's name, a matching pattern, or its
    type."""
    if name.startswith("re:"):
        return re.match(name[3:], layer) is not None
    return name in (layer, type_of(layer))


def type_of(layer: str) -> str:
    """Type of the layer's module in transformers."""
    return "Embedding" if layer.endswith("embed_tokens") or is_table(layer) else "Linear"


def patterns_of(layers: list[str], others: Iterable[str] = ()) -> list[str]:
    """Patterns that match exactly these names: one for all that differ only in the numbers of
    layers and experts.

    Args:
        others: names that must not match; if they have experts, patterns list experts' numbers.
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


#: Placeholder for an expert's number.
_ANY = "*"


def _numbered(layer: str) -> tuple[str, str, str, str]:
    """Split a layer's name into the part before the decoder layer's number, that number, the part
    after it, and the number of an expert in there; empty if missing."""
    before, *rest = re.split(r"\.(\d+)\.", layer, maxsplit=1)
    if not rest:
        return layer, "", "", ""
    number, behind = rest
    expert = expert_of(behind)
    if expert is None:
        return before, number, behind, ""
    return before, number, behind.replace(f"experts.{expert}.", f"experts.{_ANY}."), str(expert)
