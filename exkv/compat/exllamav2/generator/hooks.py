"""Hooks after sampling, which exkv doesn't have."""

from exkv.compat.exllamav2.missing import missing_from, placeholder

ExLlamaV2PostSamplingHook = placeholder("ExLlamaV2PostSamplingHook", __name__)
ExLlamaV2PostSamplingResult = placeholder("ExLlamaV2PostSamplingResult", __name__)

__getattr__ = missing_from(__name__)
