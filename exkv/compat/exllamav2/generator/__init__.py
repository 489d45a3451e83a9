"""ExLlamaV2's generators, their settings, and the names of those that exkv doesn't have."""

from exkv.compat.exllamav2.missing import missing_from
from exkv.compat.exllamav2.version import __version__

from . import filters
from .base import ExLlamaV2BaseGenerator
from .dynamic import ExLlamaV2DynamicGenerator, ExLlamaV2MMEmbedding
from .dynamic_async import ExLlamaV2DynamicGeneratorAsync, ExLlamaV2DynamicJobAsync
from .hooks import ExLlamaV2PostSamplingHook, ExLlamaV2PostSamplingResult
from .jobs import ExLlamaV2DynamicJob
from .sampler import ExLlamaV2Sampler
from .streaming import ExLlamaV2StreamingGenerator

__all__ = [
    "ExLlamaV2BaseGenerator",
    "ExLlamaV2DynamicGenerator",
    "ExLlamaV2DynamicGeneratorAsync",
    "ExLlamaV2DynamicJob",
    "ExLlamaV2DynamicJobAsync",
    "ExLlamaV2MMEmbedding",
    "ExLlamaV2PostSamplingHook",
    "ExLlamaV2PostSamplingResult",
    "ExLlamaV2Sampler",
    "ExLlamaV2StreamingGenerator",
    "__version__",
    "filters",
]

__getattr__ = missing_from(__name__)
