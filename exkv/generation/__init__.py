"""The settings of ``generate`` under transformers' names: config, checks, and names that exkv's
config doesn't have. ``exkv.decode`` follows them; their effect on scores is in ``exkv.sampling``.
"""

from .config import GenerationConfig

__all__ = ["GenerationConfig"]
