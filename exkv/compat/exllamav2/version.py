"""The version of ExLlamaV2 whose names are here."""

__version__ = "0.3.2"
