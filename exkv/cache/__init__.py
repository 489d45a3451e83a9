"""KV caches: ``base`` has the cache itself, ``layer`` combines its four properties, ``presets`` has
the named kinds."""

from .base import KVCache, check_kind, make_layers
from .growth import Dynamic, Static
from .layer import CacheLayer
from .none import NoCacheLayer
from .paging.growth import HostTier, Paged
from .paging.pool import OutOfPagesError
from .presets import (
    BY_LOSS,
    CACHES,
    Cache,
    Cache2bit,
    Cache4bit,
    Cache8bit,
    DynamicCache,
    HybridCache,
    KiviCache,
    OffloadedCache,
    OffloadedStaticCache,
    PagedCache,
    QuantizedCache,
    SinkCache,
    SlidingWindowCache,
    StaticCache,
    cache_kind,
    make_cache,
)
from .residence import OnDevice, OnHost
from .retention import KeepAll, Sinks, Window
from .rows import common_prefix
from .shared import Shared
from .spec import LayerSpec
from .storage import Storage

__all__ = [
    "BY_LOSS",
    "CACHES",
    "Cache",
    "Cache2bit",
    "Cache4bit",
    "Cache8bit",
    "CacheLayer",
    "Dynamic",
    "DynamicCache",
    "HybridCache",
    "KVCache",
    "KeepAll",
    "KiviCache",
    "LayerSpec",
    "NoCacheLayer",
    "OffloadedCache",
    "OffloadedStaticCache",
    "OnDevice",
    "OnHost",
    "OutOfPagesError",
    "HostTier",
    "Paged",
    "PagedCache",
    "QuantizedCache",
    "SinkCache",
    "Shared",
    "Sinks",
    "SlidingWindowCache",
    "Static",
    "StaticCache",
    "Storage",
    "Window",
    "cache_kind",
    "check_kind",
    "common_prefix",
    "make_cache",
    "make_layers",
]
