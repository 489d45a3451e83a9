"""Settings of Mamba's layers, which have a state in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .families import WIDEST_STATE, Specific, StateTensor
from .value_checks import check_at_most, check_size, is_number

#: How JSON that has no infinity writes it (transformers 5).
_INFINITY = {"__float__": "Infinity"}


@dataclass(frozen=True, kw_only=True)  # no slots: classes inherit it beside ExpertsConfig
class Mamba2Config(Specific):
    """Layers of Mamba 2: ``mamba_n_heads`` heads with ``mamba_d_head`` features, in
    ``mamba_n_groups`` groups, and a state of ``mamba_d_state`` for each feature, behind a
    convolution over ``mamba_d_conv`` tokens. Steps are between the two numbers of
    ``time_step_limit``."""

    mamba_n_heads: int = 128
    mamba_d_head: int = 64
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    #: Sizes among the settings.
    SIZES: ClassVar[tuple[str, ...]] = (
        *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    )

    def __post_init__(self) -> None:
        Specific.__post_init__(self)
        object.__setattr__(self, "time_step_limit", _limits(self.time_step_limit))
        for key in self.SIZES:
            check_size(key, getattr(self, key))
            check_at_most(key, getattr(self, key), WIDEST_STATE)
        if self.mamba_d_conv < 2:
            raise ValueError("mamba_d_conv 1: a convolution is over at least 2 tokens")
        if self.mamba_n_heads % self.mamba_n_groups:
            raise ValueError(
                f"mamba_n_heads {self.mamba_n_heads} is not a multiple of mamba_n_groups "
                f"{self.mamba_n_groups}"
            )

    @property
    def step_limits(self) -> tuple[float, float]:
        """The sizes that steps have at least, and at most."""
        return self.time_step_limit

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.mamba_n_heads * self.mamba_d_head

    @property
    def shared(self) -> int:
        """Values that a token writes to the states, or reads from them, of all groups."""
        return self.mamba_n_groups * self.mamba_d_state

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution, and the state of each head."""
        inputs = self.inner + 2 * self.shared
        heads = self.mamba_n_heads, self.mamba_d_state, self.mamba_d_head
        return (
            StateTensor("conv", (self.mamba_d_conv - 1, inputs)),
            StateTensor("recurrent", heads, torch.float32),
        )


@dataclass(frozen=True, kw_only=True)
class ExpandedMamba2Config(Mamba2Config):
    """Whose heads have together ``mamba_expand`` times the ``hidden_size`` of the model, from which
    ``mamba_d_head`` follows if it is None or "auto"."""

    hidden_size: int
    mamba_expand: int = 2
    mamba_d_head: int = None  # type: ignore[assignment]  # filled in by __post_init__

    def __post_init__(self) -> None:
        for key in ("hidden_size", "mamba_expand", "mamba_n_heads"):
            check_size(key, getattr(self, key))
        (name, size), heads = self.wanted(), self.mamba_n_heads
        stated: Any = self.mamba_d_head
        if stated in (None, "auto"):
            object.__setattr__(self, "mamba_d_head", size // heads)
        Mamba2Config.__post_init__(self)
        if self.inner != size:
            raise ValueError(
                f"mamba_n_heads {heads} of mamba_d_head {self.mamba_d_head} features must be "
                f"{name} {size}"
            )

    def wanted(self) -> tuple[str, int]:
        """Features of all heads, and where that number is from."""
        return "mamba_expand * hidden_size", self.mamba_expand * self.hidden_size


@dataclass(frozen=True, kw_only=True)
class MambaConfig(Specific):
    """Layers of Mamba, of ``mamba_expand`` times the ``hidden_size`` of the model in channels with
    a state of ``mamba_d_state`` each, behind a convolution over ``mamba_d_conv`` tokens. Steps are
    made of ``mamba_dt_rank`` features, a sixteenth of the hidden size if that is None or "auto"."""

    hidden_size: int
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int = None  # type: ignore[assignment]  # filled in by __post_init__
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    def __post_init__(self) -> None:
        Specific.__post_init__(self)
        check_size("hidden_size", self.hidden_size)
        stated: Any = self.mamba_dt_rank
        if stated in (None, "auto"):
            object.__setattr__(self, "mamba_dt_rank", -(-self.hidden_size // 16))
        for key in ("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank"):
            check_size(key, getattr(self, key))
            check_at_most(key, getattr(self, key), WIDEST_STATE)
        if self.mamba_d_conv < 2:
            raise ValueError("mamba_d_conv 1: a convolution is over at least 2 tokens")

    @property
    def inner(self) -> int:
        """Channels."""
        return self.mamba_expand * self.hidden_size

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution, and the state of each channel."""
        return (
            StateTensor("conv", (self.mamba_d_conv - 1, self.inner)),
            StateTensor("recurrent", (self.mamba_d_state, self.inner), torch.float32),
        )


def _limits(limits: Any) -> tuple[float, float]:
    """Two numbers, the second perhaps infinite, as JSON has them."""
    if isinstance(limits, list | tuple) and len(limits) == 2:
        low, high = (float("inf") if each == _INFINITY else each for each in limits)
        if is_number(low) and (is_number(high) or high == float("inf")) and 0 <= low <= high:
            return float(low), float(high)
    raise ValueError(f"time_step_limit must be two numbers, 0 <= low <= high, not {limits!r}")
