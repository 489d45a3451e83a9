"""Filters, which are grammars in exkv: see ``exkv.generation.grammar``."""

from exkv.compat.exllamav2.gone import gone, missing_from

ExLlamaV2Filter = gone("ExLlamaV2Filter", __name__)
ExLlamaV2SelectFilter = gone("ExLlamaV2SelectFilter", __name__)
ExLlamaV2PrefixFilter = gone("ExLlamaV2PrefixFilter", __name__)

__getattr__ = missing_from(__name__)
