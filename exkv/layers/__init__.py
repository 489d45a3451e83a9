"""The layers that architectures are built from."""

from .attention import Attention, FusedAttention
from .linear import Embedding, Linear, PlainModule
from .mlp import Experts, FusedGatedMLP, GatedMLP, Network, are_few
from .norm import RMSNorm
from .rope import RotaryTables

__all__ = [
    "Attention",
    "Embedding",
    "Experts",
    "FusedAttention",
    "FusedGatedMLP",
    "GatedMLP",
    "Linear",
    "Network",
    "PlainModule",
    "RMSNorm",
    "RotaryTables",
    "are_few",
]
