"""SmolLM3 (Hugging Face, 2025): a Llama of which every fourth layer has no positions; the config
says so layer by layer, and attention asks it."""

from .llama import units

__all__ = ["units"]
