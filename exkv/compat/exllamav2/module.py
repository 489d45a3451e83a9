"""Hooks around a module, which are torch's own in exkv."""

from .gone import gone, missing_from

Intervention = gone("Intervention", __name__)

__getattr__ = missing_from(__name__)
