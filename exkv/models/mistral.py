"""Mistral (Jiang et al., 2023): a Llama whose layers see a window of tokens.

Version 0.1 has one of 4,096 tokens, later ones have none; the config says so layer by layer, and
attention asks it.
"""

from .llama import units

__all__ = ["units"]
