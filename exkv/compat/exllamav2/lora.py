"""Adapters, which have not landed in exkv."""

from .gone import gone, missing_from

ExLlamaV2Lora = gone("ExLlamaV2Lora", __name__)

__getattr__ = missing_from(__name__)
