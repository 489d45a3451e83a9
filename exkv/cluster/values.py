"""Serialization of commands between hosts, as JSON.

Only numbers, strings, lists and the frozen dataclasses listed here are sent, and nothing that is
received is executed.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch

from exkv.cache import (
    CACHES,
    Dynamic,
    KeepAll,
    LayerSpec,
    OnDevice,
    OnHost,
    Sinks,
    Static,
    Storage,
    Window,
)
from exkv.cache.paging.growth import HostTier, Paged
from exkv.cache.spec import Prefix
from exkv.checkpoint import (
    LatentHeads,
    ModelConfig,
    Multipliers,
    QueryScaling,
    RopeParameters,
    RopeScaling,
    StateTensor,
)
from exkv.checkpoint.families import FAMILIES
from exkv.checkpoint.safetensors import DTYPES
from exkv.planning import Budget, Ledger, Link, Plan
from exkv.planning.plan import PlacedUnit, Role
from exkv.weights.choice import Choice


@dataclasses.dataclass(frozen=True, slots=True)
class Numbered:
    """A reference by number to an object that the driver and every host have a part of."""

    number: int


_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Dynamic, HostTier, KeepAll, LayerSpec, OnDevice, OnHost, Paged, Prefix, Sinks, Static),
        *(Storage, Window),
        *(Budget, Choice, Ledger, Link, Numbered, PlacedUnit, Plan, Role),
        *(LatentHeads, ModelConfig, Multipliers, QueryScaling, RopeParameters, RopeScaling),
        StateTensor,
        *(family.specific for family in FAMILIES.values() if family.specific is not None),
    )
}
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}
#: Cache classes that can be built on another host, by name.
CACHE_KINDS = {kind.__name__: kind for kind in CACHES.values()}


def dumps(value: Any) -> bytes:
    """Serialize a value to JSON; TypeError names a value of an unsupported type."""
    return json.dumps(_plain(value)).encode()


def loads(text: bytes) -> Any:
    """Deserialize a value; lists come back as tuples.

    Raises:
        ValueError: malformed text.
    """
    try:
        return _value(json.loads(text))
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"malformed message: {error!r}") from None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, torch.dtype):
        return {"!": "dtype", "name": str(value)}
    if isinstance(value, torch.device):
        return {"!": "device", "name": str(value)}
    if _KINDS.get(type(value).__name__) is not type(value):
        raise TypeError(f"{value!r:.80} can't be sent to other hosts")
    fields = (field.name for field in dataclasses.fields(value) if field.init)
    return {"!": type(value).__name__, **{name: _plain(getattr(value, name)) for name in fields}}


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(map(_value, plain))
    if not isinstance(plain, dict):
        return plain
    fields = {name: _value(each) for name, each in plain.items() if name != "!"}
    if "!" not in plain:
        return fields
    if plain["!"] == "dtype":
        return _DTYPES[fields["name"]]
    if plain["!"] == "device":
        return torch.device(fields["name"])
    return _KINDS[plain["!"]](**fields)
