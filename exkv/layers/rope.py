"""Rotary frequencies and their scaling: linear, llama3, yarn.

Frequencies live on the host and factors are computed there once a forward call, so that every
device gets the same bits.
"""

from __future__ import annotations

import math

import torch

from exkv.config import ModelConfig, RopeScaling


class RotaryTable:
    """cos and sin for positions; factors are scaled where the scaling asks for it (yarn)."""

    def __init__(self, config: ModelConfig) -> None:
        self.inverse_frequencies, self.magnitude = rotary_frequencies(config)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Integer positions (B, T) -> cos, sin (B, T, D), float32, on the host."""
        angles = positions.unsqueeze(-1).float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude


def rotary_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies float32 (D / 2,) in radians a token, and the factors' magnitude."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    base = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return base, 1.0
    if scaling.rope_type == "linear":
        return base / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(base, scaling), 1.0
    if scaling.rope_type == "yarn":
        return _yarn(base, scaling, config), _yarn_magnitude(scaling)
    raise ValueError(f"rope_type {scaling.rope_type!r} has no frequencies here")


def _llama3(base: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1's rule: long waves are slowed by the factor, short ones kept, those between
    blended by how many turns they make within the original context."""
    turns = scaling.original_max_position_embeddings * base / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * base / scaling.factor + keep * base


def _yarn(base: torch.Tensor, scaling: RopeScaling, config: ModelConfig) -> torch.Tensor:
    """YaRN (Peng et al., 2023), section 3.2: blend by dimension between the two it names."""

    def dimension(turns: float) -> float:
        """The (fractional) dimension whose wave makes so many turns in the original context."""
        context = scaling.original_max_position_embeddings
        wave = math.log(context / (turns * 2 * math.pi))
        return config.head_dim * wave / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    width = (high - low) or 0.001  # a step instead of a ramp
    ramp = ((torch.arange(len(base), dtype=torch.float32) - low) / width).clamp(0, 1)
    return base / scaling.factor * ramp + base * (1 - ramp)


def _yarn_magnitude(scaling: RopeScaling) -> float:
    """YaRN's attention temperature, applied to the rotary factors (equation 22)."""

    def magnitude(weight: float = 1.0) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude()
