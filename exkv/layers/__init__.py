"""The layers that architectures are built from."""

from .attention import (
    Attention,
    FusedAttention,
    ScaledQueryAttention,
    SinkAttention,
    WideNormAttention,
)
from .latent import LatentAttention
from .linear import Embedding, Linear, PlainModule
from .mamba import Mamba, Mamba2
from .mlp import (
    MLP,
    ClampedExperts,
    Experts,
    FusedGatedMLP,
    GatedMLP,
    PlainMLP,
    SharedExperts,
    mixture_or_mlp,
    routed_experts,
)
from .norm import LayerNorm, RMSNorm
from .recurrent import FusedGatedDelta, ShortConv, SplitGatedDelta
from .rope import RotaryTables
from .separate_delta import KimiDelta, SeparateGatedDelta

__all__ = [
    "Attention",
    "ClampedExperts",
    "Embedding",
    "Experts",
    "FusedAttention",
    "FusedGatedDelta",
    "FusedGatedMLP",
    "GatedMLP",
    "KimiDelta",
    "LatentAttention",
    "LayerNorm",
    "MLP",
    "Linear",
    "Mamba",
    "Mamba2",
    "PlainMLP",
    "PlainModule",
    "RMSNorm",
    "RotaryTables",
    "ScaledQueryAttention",
    "SeparateGatedDelta",
    "SharedExperts",
    "ShortConv",
    "SinkAttention",
    "SplitGatedDelta",
    "WideNormAttention",
    "mixture_or_mlp",
    "routed_experts",
]
