"""Caches: ``base`` says what one is, then one file a kind."""

from .base import CacheLayer, KVCache, LayerSpec, common_prefix
from .full import Cache
from .hybrid import HybridCache
from .int8 import Cache8bit
from .none import NoCacheLayer

#: The kinds by the names that commands take, the least lossy ones first. The contract tests run
#: over this table.
CACHES: dict[str, type[KVCache]] = {"fp16": Cache, "hybrid": HybridCache, "8bit": Cache8bit}

__all__ = [
    "CACHES",
    "Cache",
    "Cache8bit",
    "CacheLayer",
    "HybridCache",
    "KVCache",
    "LayerSpec",
    "NoCacheLayer",
    "common_prefix",
]
