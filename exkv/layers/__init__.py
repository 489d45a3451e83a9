"""The layers that architectures are built from."""

from .attention import Attention
from .linear import Embedding, Linear
from .mlp import GatedMLP
from .norm import RMSNorm
from .rope import RotaryTable

__all__ = ["Attention", "Embedding", "GatedMLP", "Linear", "RMSNorm", "RotaryTable"]
