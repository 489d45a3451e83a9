"""Adapters, which have not landed in exkv."""

from .gone import gone

ExLlamaV2Lora = gone("ExLlamaV2Lora", __name__)
