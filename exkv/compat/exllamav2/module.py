"""Hooks around a module, which are torch's own in exkv."""

from .gone import gone

Intervention = gone("Intervention", __name__)
