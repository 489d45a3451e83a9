"""Granite 3 and 4 dense (IBM, 2024): a Llama with multipliers of embeddings, scores, residuals and
logits, which the config gives."""

from .llama import units

__all__ = ["units"]
