"""How ``generate`` decodes: its config, and the processors that a config asks for.

The loop that uses them is ``exkv.decode``; what they do to scores is written in ``exkv.sampling``.
"""

from .config import GenerationConfig

__all__ = ["GenerationConfig"]
