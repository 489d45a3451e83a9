"""The layers that architectures are built from."""

from .attention import Attention, FusedAttention
from .linear import Embedding, Linear, PlainModule
from .mlp import MLP, Experts, FusedGatedMLP, GatedMLP
from .norm import RMSNorm
from .rope import RotaryTables

__all__ = [
    "Attention",
    "Embedding",
    "Experts",
    "FusedAttention",
    "FusedGatedMLP",
    "GatedMLP",
    "MLP",
    "Linear",
    "PlainModule",
    "RMSNorm",
    "RotaryTables",
]
