"""exkv: a language model over your devices, layer by layer, each layer's cache beside it."""

import gc
import os
import sys

# OpenMP's threads wait for each other by spinning, some milliseconds by default: where others want
# the processors too, what they wait for is each other. A fraction of one covers what is between two
# operations. (libgomp reads this once, when torch is imported.)
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

# Importing torch makes a million objects that stay, and no garbage: don't look for any meanwhile,
# nor among them later, which would take a tenth of a second of somebody's load.
_collects = gc.isenabled()
gc.disable()
try:
    from exkv import sim
    from exkv.cache import (
        CACHES,
        Cache,
        Cache4bit,
        Cache8bit,
        DynamicCache,
        HybridCache,
        KiviCache,
        KVCache,
        OffloadedCache,
        OffloadedStaticCache,
        Paged,
        PagedCache,
        QuantizedCache,
        SinkCache,
        SlidingWindowCache,
        StaticCache,
        make_cache,
    )
    from exkv.checkpoint import Checkpoint, CheckpointError, ModelConfig, RopeScaling
    from exkv.decode import (
        MTP,
        Draft,
        Engine,
        EngineStats,
        Event,
        Fallback,
        GenerateOutput,
        Generator,
        Handle,
        Hooks,
        Job,
        NGrams,
        OnOom,
    )
    from exkv.errors import CacheUseError, OutOfMemoryError, PlacementError
    from exkv.generation import GenerationConfig
    from exkv.model import Model
    from exkv.planning import Plan
    from exkv.planning.place import place
    from exkv.sampling import Grammar, SamplingParams
    from exkv.text import Tokenizer
    from exkv.version import __version__

    gc.freeze()
finally:
    if _collects:
        gc.enable()

try:
    sim.enable_from_env()
except ValueError as error:  # of a variable: one sentence, for whatever program this is
    raise SystemExit(str(error)) from None

__all__ = [
    "CACHES",
    "Cache",
    "Cache4bit",
    "Cache8bit",
    "CacheUseError",
    "Checkpoint",
    "CheckpointError",
    "Draft",
    "DynamicCache",
    "Engine",
    "EngineStats",
    "Event",
    "Fallback",
    "GenerateOutput",
    "GenerationConfig",
    "Generator",
    "Grammar",
    "Handle",
    "Hooks",
    "HybridCache",
    "Job",
    "KVCache",
    "MTP",
    "KiviCache",
    "Model",
    "ModelConfig",
    "NGrams",
    "OffloadedCache",
    "OffloadedStaticCache",
    "OnOom",
    "OutOfMemoryError",
    "Paged",
    "PagedCache",
    "PlacementError",
    "Plan",
    "QuantizedCache",
    "RopeScaling",
    "SamplingParams",
    "SinkCache",
    "SlidingWindowCache",
    "StaticCache",
    "Tokenizer",
    "__version__",
    "make_cache",
    "place",
    "sim",
]
