"""ERNIE 4.5 (Baidu, 2025), dense: a Llama whose positions rotate neighbours; the config says so."""

from .llama import units

__all__ = ["units"]
