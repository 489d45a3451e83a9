"""The settings of ``generate`` in transformers' words: config, checks, and names beyond exkv's own.

``exkv.decode`` runs by them; what they do to scores is written in ``exkv.sampling``.
"""

from .config import GenerationConfig

__all__ = ["GenerationConfig"]
