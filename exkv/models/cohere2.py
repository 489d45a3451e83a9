"""Command R7B and Command A (Cohere, 2024): a Command R with a window on three of four layers, of
which the fourth has no positions; the config says so layer by layer."""

from .cohere import units

__all__ = ["units"]
