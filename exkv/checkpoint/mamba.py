"""Settings of Mamba layers, which have a state in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .families import Specific, StateTensor, check_state_sizes
from .value_checks import check_convolution, check_size, is_number

#: Infinity in JSON, as transformers 5 writes it.
_INFINITY = {"__float__": "Infinity"}


@dataclass(frozen=True, kw_only=True)  # no slots: classes inherit it beside ExpertsConfig
class Mamba2Config(Specific):
    """Layers of Mamba 2: ``mamba_n_heads`` heads of ``mamba_d_head`` features, in
    ``mamba_n_groups`` groups, with ``mamba_d_state`` state values a feature, after a convolution
    over ``mamba_d_conv`` tokens. Steps are clamped to ``time_step_limit``."""

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
        check_state_sizes(self, self.SIZES)
        check_convolution("mamba_d_conv", self.mamba_d_conv)
        if self.mamba_n_heads % self.mamba_n_groups:
            raise ValueError(
                f"mamba_n_heads {self.mamba_n_heads} is not a multiple of mamba_n_groups "
                f"{self.mamba_n_groups}"
            )

    @property
    def step_limits(self) -> tuple[float, float]:
        """Least and greatest size of a step."""
        return self.time_step_limit

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.mamba_n_heads * self.mamba_d_head

    @property
    def shared(self) -> int:
        """Features, over all groups, by which a token writes to the states or reads from them."""
        return self.mamba_n_groups * self.mamba_d_state

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The convolution's last inputs, and the state of each head."""
        inputs = self.inner + 2 * self.shared
        heads = self.mamba_n_heads, self.mamba_d_state, self.mamba_d_head
        return (
            StateTensor("conv", (self.mamba_d_conv - 1, inputs)),
            StateTensor("recurrent", heads, torch.float32),
        )


@dataclass(frozen=True, kw_only=True)
class ExpandedMamba2Config(Mamba2Config):
    """Mamba 2 whose heads have ``mamba_expand`` times ``hidden_size`` features in all, from which
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
                f"mamba_n_heads {heads} times mamba_d_head {self.mamba_d_head} is not {name} {size}"
            )

    def wanted(self) -> tuple[str, int]:
        """Name and value of the number of features that all heads must have."""
        return "mamba_expand * hidden_size", self.mamba_expand * self.hidden_size


@dataclass(frozen=True, kw_only=True)
class MambaConfig(Specific):
    """Layers of Mamba: ``mamba_expand`` times ``hidden_size`` channels with ``mamba_d_state`` state
    values each, after a convolution over ``mamba_d_conv`` tokens. Steps are projected from
    ``mamba_dt_rank`` features, a sixteenth of the hidden size for None or "auto"."""

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
        check_state_sizes(self, ("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank"))
        check_convolution("mamba_d_conv", self.mamba_d_conv)

    @property
    def inner(self) -> int:
        """Number of channels."""
        return self.mamba_expand * self.hidden_size

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The convolution's last inputs, and the state of each channel."""
        return (
            StateTensor("conv", (self.mamba_d_conv - 1, self.inner)),
            StateTensor("recurrent", (self.mamba_d_state, self.inner), torch.float32),
        )


def _limits(limits: Any) -> tuple[float, float]:
    """Read two numbers, the second perhaps infinite, from JSON."""
    if isinstance(limits, list | tuple) and len(limits) == 2:
        low, high = (float("inf") if each == _INFINITY else each for each in limits)
        if is_number(low) and (is_number(high) or high == float("inf")) and 0 <= low <= high:
            return float(low), float(high)
    raise ValueError(f"time_step_limit must be two numbers, 0 <= low <= high, not {limits!r}")
