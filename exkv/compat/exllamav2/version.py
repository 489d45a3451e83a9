"""The version of ExLlamaV2 whose interface this is."""

__version__ = "0.3.2"
