"""Hooks after the choice of a token, which exkv has not."""

from exkv.compat.exllamav2.gone import gone

ExLlamaV2PostSamplingHook = gone("ExLlamaV2PostSamplingHook", __name__)
ExLlamaV2PostSamplingResult = gone("ExLlamaV2PostSamplingResult", __name__)
