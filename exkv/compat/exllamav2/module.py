"""Hooks around a module, for which exkv has torch's own."""

from .missing import missing_from, placeholder

Intervention = placeholder("Intervention", __name__)

__getattr__ = missing_from(__name__)
