"""Convert a ``loras`` argument to the one adapter that exkv's calls take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .missing import Adapter


class OfModel(Adapter):
    """A model's adapter, with its name in ``model.exkv.adapters``; see :class:`ExLlamaV2Lora`."""

    model: Any
    name: str


def adapter_of(model: Any, loras: Any) -> str | None:
    """The adapter's name in a ``loras`` argument; None for no adapter.

    Raises:
        ValueError: several adapters, or one of another model.
        TypeError: an entry is not an adapter.
    """
    each = list(loras) if isinstance(loras, Sequence) else [loras] if loras is not None else []
    for lora in each:
        if not isinstance(lora, OfModel):
            raise TypeError(f"loras has a {type(lora).__name__}; it must be an ExLlamaV2Lora")
        if lora.model is not model:
            raise ValueError(f"adapter {lora.name!r} was loaded for another model")
    if len(each) > 1:
        raise ValueError(
            f"loras has {len(each)} adapters, but exkv runs a row through one: merge them with "
            "PEFT (add_weighted_adapter)"
        )
    return each[0].name if each else None
