"""Rotary frequencies and their scaling: linear, llama3, yarn, longrope.

Frequencies are on the host, and factors are computed there once per forward call, so that every
device gets the same bits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from exkv.batch import Factors, Lengths
from exkv.checkpoint import ModelConfig, QueryScaling, RopeParameters, RopeScaling

#: Rotary tables: of most layers, of sliding layers with their own, of layers without positions.
MAIN, LOCAL, NONE = "main", "local", "none"
#: A further table: factors that queries are multiplied by.
QUERIES = "queries"
#: Longest call, in tokens, whose factors are reused by the following calls.
NEAR = 64


def rotary_name(config: ModelConfig, layer: int) -> str:
    """Name of the layer's rotary table."""
    if not config.rotates(layer):
        return NONE
    return LOCAL if config.local_rope is not None and config.slides(layer) else MAIN


class RotaryTables:
    """cos and sin for the positions of one forward call, one pair for each kind of layer.

    Factors of short calls are computed in blocks that cover the next steps too, since computing
    them takes twenty small ops.
    """

    def __init__(self, config: ModelConfig) -> None:
        width = (
            config.rotary_dim
            if config.local_rope is None
            else config.rotary_dim_where(slides=False)
        )
        self.tables = {MAIN: RotaryTable(config.rope, width)}
        if config.local_rope is not None:
            width = config.rotary_dim_where(slides=True)
            self.tables[LOCAL] = RotaryTable(config.local_rope, width)
        if not all(config.rotated):
            self.tables[NONE] = Unrotated()
        if config.query_scaling is not None:
            self.tables[QUERIES] = QueryFactors(config.query_scaling)
        #: Whether frequencies depend on the text's length.
        self.varies = self.variant(0) != self.variant(sys.maxsize)
        #: Length up to which frequencies are constant (dynamic NTK).
        self.fixed_until = min(table.dynamic_from for table in self.tables.values())
        self._near: tuple[tuple[int, torch.dtype], dict[str, Factors]] | None = None

    def __call__(self, lengths: Lengths, dtype: torch.dtype) -> dict[str, Factors]:
        """Factors for a call's new tokens: name -> cos, sin (B, T, R), on the host."""
        grown = max(lengths.final, default=0) > self.fixed_until
        many = lengths.ragged or lengths.chunk > NEAR
        # Don't reuse tensors made under a dispatch mode: they may be of its own kind.
        if many or self.varies or grown or _get_current_dispatch_mode() is not None:
            past = torch.tensor(lengths.past, dtype=torch.int32)
            ahead = torch.arange(lengths.chunk, dtype=torch.int32)
            return self._at(past.unsqueeze(-1) + ahead, lengths.final, dtype)
        begin = lengths.past[0] // NEAR * NEAR
        if self._near is None or self._near[0] != (begin, dtype):
            positions = torch.arange(begin, begin + 2 * NEAR, dtype=torch.int32).unsqueeze(0)
            self._near = (begin, dtype), self._at(positions, lengths.final, dtype)
        rows, first = len(lengths.past), lengths.past[0] - begin
        here = {
            name: (cos.narrow(1, first, lengths.chunk), sin.narrow(1, first, lengths.chunk))
            for name, (cos, sin) in self._near[1].items()
        }
        if rows == 1:
            return here
        each = (rows, -1, -1)
        return {name: (cos.expand(each), sin.expand(each)) for name, (cos, sin) in here.items()}

    def _at(
        self, positions: Tensor, final: Sequence[int], dtype: torch.dtype
    ) -> dict[str, Factors]:
        """Integer positions (B, T) -> name: cos, sin (B, T, R)."""
        made = {name: table(positions, final) for name, table in self.tables.items()}
        return {name: (cos.to(dtype), sin.to(dtype)) for name, (cos, sin) in made.items()}

    def shift(self, name: str, by: Tensor, lengths: Lengths) -> Factors:
        """Factors that rotate already rotated heads by ``by`` (B, T) more positions; without the
        table's magnitude, which the heads already have."""
        table = self.tables[name]
        cos, sin = table(by, lengths.final)
        return cos / table.magnitude, sin / table.magnitude

    def variant(self, length: int) -> tuple[bool, ...]:
        """Which of longrope's frequencies apply to a text of this length, for each table."""
        return tuple(table.is_long(length) for table in self.tables.values())


class RotaryTable:
    """One rotary table. R features of a head are rotated; longrope has separate frequencies for
    short and long texts."""

    def __init__(self, rope: RopeParameters, rotary_dim: int) -> None:
        self.inverse_frequencies, self.magnitude = rotary_frequencies(rope, rotary_dim)
        self.rope, self.rotary_dim = rope, rotary_dim
        self.switch_length: int | None = None
        self.dynamic_from = sys.maxsize
        scaling = rope.rope_scaling
        if scaling is not None and scaling.rope_type == "longrope":
            self.switch_length = scaling.trained_length
        if scaling is not None and scaling.rope_type == "dynamic":
            self.dynamic_from = scaling.trained_length

    def is_long(self, length: int) -> bool:
        """Whether longrope's long frequencies apply to a text of this length."""
        return self.switch_length is not None and length > self.switch_length

    def __call__(self, positions: Tensor, final: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Positions (B, T) of rows that will be ``final`` tokens long -> cos, sin (B, T, R)."""
        frequencies = self.inverse_frequencies
        if self.switch_length is not None:
            kinds = [int(self.is_long(length)) for length in final]
            frequencies = frequencies[kinds].unsqueeze(1)  # (B, 1, R / 2)
        elif max(final, default=0) > self.dynamic_from:
            grown = [dynamic_frequencies(self.rope, self.rotary_dim, length) for length in final]
            frequencies = torch.stack(grown).unsqueeze(1)  # (B, 1, R / 2)
        angles = positions.unsqueeze(-1).float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude


class Unrotated(RotaryTable):
    """The table of layers without positions: it rotates one pair of features by angle 0, which
    changes no bit, so that callers need no special case."""

    def __init__(self) -> None:
        self.inverse_frequencies, self.magnitude = torch.zeros(1), 1.0
        self.switch_length: int | None = None
        self.dynamic_from = sys.maxsize


class QueryFactors(Unrotated):
    """Factors of queries by position (B, T, 1), in place of both cos and sin."""

    def __init__(self, scaling: QueryScaling) -> None:
        super().__init__()
        self.scaling = scaling

    def __call__(self, positions: Tensor, final: Sequence[int]) -> tuple[Tensor, Tensor]:
        scaling = self.scaling
        steps = torch.floor((positions + scaling.offset) / scaling.length)
        factors = (1 + scaling.growth * torch.log(1 + steps)).unsqueeze(-1)
        return factors, factors


def rotary_frequencies(rope: RopeParameters, rotary_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies float32 (R / 2,) in radians per token, and the factors' magnitude; for
    longrope (2, R / 2), short and long."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    base = 1.0 / (rope.rope_theta**exponents)
    scaling = rope.rope_scaling
    if scaling is None or scaling.rope_type == "dynamic":  # dynamic: for short texts
        return base, 1.0
    if scaling.rope_type == "linear":
        return base / scaling.factor, 1.0
    if scaling.rope_type == "ntk_alpha":
        assert scaling.alpha is not None
        stretched = rope.rope_theta * scaling.alpha ** (rotary_dim / (rotary_dim - 2))
        return 1.0 / (stretched**exponents), 1.0
    if scaling.rope_type == "proportional":
        assert scaling.partial_rotary_factor is not None
        rotated = int(scaling.partial_rotary_factor * rotary_dim // 2)
        base[rotated:] = 0
        return base / scaling.factor, 1.0
    if scaling.rope_type == "factors":
        return base / torch.tensor(scaling.factors), 1.0
    if scaling.rope_type == "llama3":
        return _llama3(base, scaling), 1.0
    if scaling.rope_type == "yarn":
        return _yarn(base, scaling, rope.rope_theta), _yarn_magnitude(scaling)
    if scaling.rope_type == "longrope":
        stretched = torch.tensor((scaling.short_factor, scaling.long_factor))
        return 1.0 / (stretched * rope.rope_theta**exponents), _longrope_magnitude(scaling)
    raise ValueError(f"unsupported rope_type {scaling.rope_type!r}")


def dynamic_frequencies(rope: RopeParameters, rotary_dim: int, length: int) -> Tensor:
    """Inverse frequencies (R / 2,) for a text of this length; the base grows with it ("dynamic
    NTK"). Keys keep the frequencies of the length at which they were computed, as in
    transformers."""
    scaling = rope.rope_scaling
    assert scaling is not None
    trained = scaling.trained_length
    growth = scaling.factor * max(length, trained) / trained - (scaling.factor - 1)
    theta = rope.rope_theta * growth ** (rotary_dim / (rotary_dim - 2))
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    return 1.0 / (theta**exponents)


def _llama3(base: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: long waves are slowed by the factor, short ones unchanged, and those
    between interpolated by their number of rotations within the original context. Llama 4 Scout has
    none between."""
    rotations = scaling.trained_length * base / (2 * math.pi)
    low, high = scaling.bands
    between = (high - low) or torch.finfo(torch.float32).tiny
    keep = ((rotations - low) / between).clamp(0, 1)
    return (1 - keep) * base / scaling.factor + keep * base


def _yarn(base: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """YaRN (Peng et al., 2023), section 3.2: interpolate by dimension between its two bounds."""
    rotary_dim = 2 * len(base)

    def dimension(rotations: float) -> float:
        """The (fractional) dimension whose wave rotates this often in the original context."""
        context = scaling.trained_length
        wave = math.log(context / (rotations * 2 * math.pi))
        return rotary_dim * wave / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = (high - low) or 0.001  # a step instead of a ramp
    ramp = ((torch.arange(len(base), dtype=torch.float32) - low) / width).clamp(0, 1)
    return base / scaling.factor * ramp + base * (1 - ramp)


def _yarn_magnitude(scaling: RopeScaling) -> float:
    """YaRN's attention temperature, applied to the rotary factors (equation 22)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return scaling.temperature(scaling.mscale) / scaling.temperature(scaling.mscale_all_dim)
    return scaling.temperature()


def _longrope_magnitude(scaling: RopeScaling) -> float:
    """LongRoPE's attention temperature as in Phi-3 (Abdin et al., 2024; Ding et al., 2024)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    trained = scaling.trained_length
    return math.sqrt(1 + math.log(scaling.factor) / math.log(trained))
