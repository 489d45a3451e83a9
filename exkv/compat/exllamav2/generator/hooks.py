"""Hooks after the choice of a token, which exkv has not."""

from exkv.compat.exllamav2.gone import gone, missing_from

ExLlamaV2PostSamplingHook = gone("ExLlamaV2PostSamplingHook", __name__)
ExLlamaV2PostSamplingResult = gone("ExLlamaV2PostSamplingResult", __name__)

__getattr__ = missing_from(__name__)
