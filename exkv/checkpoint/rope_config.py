"""Rotary positions in config.json, in the spellings of transformers 4 and 5.

Version 4 writes ``rope_theta`` and ``rope_scaling`` side by side, and for Gemma 3 also
``rope_local_base_freq``; version 5 writes ``rope_parameters`` with all of it, for Gemma 3 once for
each type of layer. ``exkv.checkpoint.model_config`` reads them by this module; the frequencies are
computed in ``exkv/layers/rope.py``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .families import Family
from .value_checks import check_bool, check_size, is_int, is_number, set_floats, stated_once
from .windows import FULL_ATTENTION, SLIDING_ATTENTION

ROPE_TYPES = (
    "default",
    "linear",
    "llama3",
    "yarn",
    "longrope",
    "dynamic",
    "ntk_alpha",
    "factors",
    "proportional",
)

logger = logging.getLogger(__name__)

_TRAINED = "original_max_position_embeddings"
#: rope_type -> the fields that it requires.
_NEEDED = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor", _TRAINED),
    "yarn": (_TRAINED,),
    "longrope": ("short_factor", "long_factor", _TRAINED),
    "dynamic": (_TRAINED,),
    "ntk_alpha": ("alpha",),
    "factors": ("factors",),
    "proportional": ("partial_rotary_factor",),
}
#: Fields with a number for each pair of rotated features.
_LISTS = ("short_factor", "long_factor", "factors")
#: rope_type -> two fields in ascending order.
_ORDERED = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_slow", "beta_fast"),
}
#: Types in which the two may be equal: Kimi K2 and Llama 4 Scout have nothing between the bands.
_MAY_BE_EQUAL = ("yarn", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary positions are stretched beyond the trained length; lengths are in tokens.

    rope_type "linear" (positions divided by `factor`) needs only `factor`; "llama3" (Llama 3.1's
    frequency bands) also needs the trained length `original_max_position_embeddings` and the band
    edges `low_freq_factor` and `high_freq_factor`; "yarn" (arXiv 2309.00071) takes the trained
    length, `beta_fast`, `beta_slow` (rotations), and the attention temperature, either as
    `attention_factor` or derived from `factor`, `mscale` and `mscale_all_dim`. `truncate` rounds
    YaRN's band edges to whole dimensions. "longrope" (arXiv 2402.13753) divides each frequency by
    its own number: `short_factor` for texts within the trained length, `long_factor` for longer
    ones; its temperature is `attention_factor` or follows from `factor`. "dynamic" raises the base
    of the frequencies with the length of texts longer than `original_max_position_embeddings`,
    which is the model's max_position_embeddings here. "ntk_alpha" multiplies the base by `alpha`
    to the power D / (D - 2), for D rotated features. "factors" divides each frequency by its own of
    `factors`, for any text, as GGUF files store Llama 3.1's bands. "proportional" uses the
    frequencies of a whole head, divided by `factor`, for the first `partial_rotary_factor` of its
    pairs, and doesn't rotate the others (Gemma 4).

    Raises ValueError for a number that is missing, of a wrong type, or out of range.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    factors: tuple[float, ...] | None = None
    alpha: float | None = None
    partial_rotary_factor: float | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES[1:]:
            raise ValueError(
                f"rope_type {self.rope_type!r} is unknown; exkv knows {', '.join(ROPE_TYPES)}"
            )
        set_floats(self, ("factor", "beta_fast", "beta_slow"))
        set_floats(self, ("low_freq_factor", "high_freq_factor", "attention_factor"), null=True)
        set_floats(self, ("mscale", "mscale_all_dim", "alpha", "partial_rotary_factor"), null=True)
        if self.factor < 1:
            raise ValueError(
                f"factor {self.factor} of rope_type {self.rope_type!r} would shrink the context; "
                f"it must be at least 1"
            )
        if self.original_max_position_embeddings is not None:
            check_size(_TRAINED, self.original_max_position_embeddings)
        check_bool("truncate", self.truncate)
        for key in _LISTS:
            object.__setattr__(self, key, _factors(key, getattr(self, key)))
        self._check_needed()
        if self.partial_rotary_factor is not None:
            _check_part("partial_rotary_factor", self.partial_rotary_factor)

    def _check_needed(self) -> None:
        """Check the keys that this rope_type requires, and their order."""
        missing = [key for key in _NEEDED[self.rope_type] if getattr(self, key) is None]
        if missing:
            raise ValueError(f"rope_type {self.rope_type!r} needs {', '.join(missing)}")
        if self.rope_type in _ORDERED:
            low, high = _ORDERED[self.rope_type]
            first, second = getattr(self, low), getattr(self, high)
            equal = first == second and self.rope_type in _MAY_BE_EQUAL
            if first >= second and not equal:
                raise ValueError(f"{low} {first} must be below {high} {second}")

    @property
    def trained_length(self) -> int:
        """`original_max_position_embeddings`, for a rope_type that requires it."""
        assert self.original_max_position_embeddings is not None
        return self.original_max_position_embeddings

    @property
    def bands(self) -> tuple[float, float]:
        """llama3's band edges, the low one and the high one."""
        assert self.low_freq_factor is not None and self.high_freq_factor is not None
        return self.low_freq_factor, self.high_freq_factor

    def temperature(self, weight: float = 1.0) -> float:
        """YaRN's attention temperature (equation 22), from a weighted logarithm of the factor."""
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

    def check_width(self, rotary_dim: int) -> None:
        """ValueError unless there is one factor for each pair of the rotated features."""
        for key in _LISTS:
            factors = getattr(self, key)
            if key in _NEEDED[self.rope_type] and len(factors) != rotary_dim // 2:
                raise ValueError(
                    f"{key} has {len(factors)} numbers, and {rotary_dim} features of a head are "
                    f"rotated, which takes {rotary_dim // 2}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """One kind of rotary positions: the base of its frequencies, their scaling, and the rotated
    part of a head, None for the model's."""

    rope_theta: float
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float | None = None

    def __post_init__(self) -> None:
        set_floats(self, ("rope_theta",))
        set_floats(self, ("partial_rotary_factor",), null=True)
        if self.rope_theta <= 1:
            raise ValueError(f"rope_theta {self.rope_theta} must be above 1, it is a base")
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise ValueError(f"rope_scaling must be a RopeScaling, not {self.rope_scaling!r}")


def read_rope(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """ModelConfig's fields about rotary positions, from the contents of a config.json.

    Raises ValueError for a contradiction between two places, and for unsupported values.
    """
    blocks = {
        key: values[key]
        for key in ("rope_parameters", "rope_scaling")
        if values.get(key) is not None
    }
    if not blocks and family.rope_parameters:
        blocks = {"rope_parameters": dict(family.rope_parameters)}
    for key, block in blocks.items():
        if not isinstance(block, dict):
            raise ValueError(f"{key} must be an object or null, not {block!r}")
    local = None
    if family.rope_local_base_freq is not None:
        blocks, local = _split_by_layer(blocks, values, family)
    elif by_layer := [k for k, b in blocks.items() if any(isinstance(v, dict) for v in b.values())]:
        raise ValueError(
            f"{by_layer[0]} differs from layer to layer, which {family.model_type} does not support"
        )
    found = _read_blocks(blocks, values, family)
    fields: dict[str, Any] = {"local_rope": local, "rope_scaling": found.rope_scaling}
    fields["rope_theta"] = found.rope_theta
    fields["partial_rotary_factor"] = _partial_rotary_factor(values, blocks, family)
    return fields


def _split_by_layer(
    blocks: dict[str, Any], values: Mapping[str, Any], family: Family
) -> tuple[dict[str, Any], RopeParameters]:
    """Gemma 3: the blocks of full layers, and the parameters of sliding layers.

    ``rope_scaling`` is the old spelling, and applies to full layers only.
    """
    stated = blocks.pop("rope_parameters", {})
    nested = {key: stated[key] for key in (FULL_ATTENTION, SLIDING_ATTENTION) if key in stated}
    if ignored := [key for key in stated if key not in nested]:  # as transformers does
        logger.warning(
            "rope_parameters: %s ignored, since a %s has an object for each type of layers",
            ", ".join(map(repr, ignored)),
            family.model_type,
        )
    for key, block in nested.items():
        if not isinstance(block, dict | None):
            raise ValueError(f"rope_parameters.{key} must be an object or null, not {block!r}")
    split = {key: {f"rope_parameters.{key}": block} for key, block in nested.items() if block}
    local = _read_blocks(
        split.get(SLIDING_ATTENTION, {}),
        {"rope_local_base_freq": values.get("rope_local_base_freq")},
        family,
        theta_key="rope_local_base_freq",
    )
    if family.partial_rotary_factor is not None:
        own = _partial_rotary_factor({}, split.get(SLIDING_ATTENTION, {}), family)
        local = dataclasses.replace(local, partial_rotary_factor=own)
    return split.get(FULL_ATTENTION, {}) | blocks, local


def _read_blocks(
    blocks: Mapping[str, Mapping[str, Any]],
    values: Mapping[str, Any],
    family: Family,
    theta_key: str = "rope_theta",
) -> RopeParameters:
    """The parameters stated by the blocks and the keys beside them, which must agree."""
    theta = stated_once({theta_key: values.get(theta_key)} | _each("rope_theta", blocks))
    trained = stated_once({_TRAINED: values.get(_TRAINED)} | _each(_TRAINED, blocks))
    longest = values.get("max_position_embeddings", family.defaults["max_position_embeddings"])
    found = {
        key: _read_scaling(key, block, trained, longest, family) for key, block in blocks.items()
    }
    if len(set(found.values())) > 1:
        raise ValueError(" contradicts ".join(f"{key} {blocks[key]!r}" for key in found))
    return RopeParameters(
        rope_theta=getattr(family, theta_key) if theta is None else theta,
        rope_scaling=next(iter(found.values()), None),
    )


def _each(key: str, blocks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{name}.{key}": block.get(key) for name, block in blocks.items()}


def _partial_rotary_factor(
    values: Mapping[str, Any], blocks: Mapping[str, Any], family: Family
) -> float:
    """The part of a head that is rotated."""
    key = "partial_rotary_factor"
    # That of "proportional" belongs to the scaling: the whole head counts as rotated.
    proportional = {name for name, block in blocks.items() if _is_proportional(block)}
    blocks = {name: block for name, block in blocks.items() if name not in proportional}
    factor = stated_once({key: values.get(key)} | _each(key, blocks))
    if factor is None and family.rotary_dim is not None:
        factor = _part_of_head(values, family.rotary_dim, family)
    if factor is None:
        return family.partial_rotary_factor or 1.0
    _check_part(key, factor)
    if factor != 1 and family.partial_rotary_factor is None:
        raise ValueError(
            f"{key} {factor!r}: the positions of a {family.model_type} rotate all of a head, so it "
            f"must be 1"
        )
    return float(factor)


def _is_proportional(block: Mapping[str, Any]) -> bool:
    return "proportional" in (block.get("rope_type"), block.get("type"))


def _check_part(key: str, value: Any) -> None:
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{key} {value!r} must be above 0 and at most 1")


def _part_of_head(values: Mapping[str, Any], key: str, family: Family) -> float | None:
    """The rotated part of a head, from the number of features under ``key``."""
    stated, head = values.get(key), values.get("head_dim", family.defaults.get("head_dim"))
    if stated is None:
        return None
    if head is None:  # it follows from these
        hidden: Any = values.get("hidden_size")
        heads: Any = values.get("num_attention_heads")
        if not is_int(hidden) or not is_int(heads) or hidden < heads or heads < 1:
            return None  # whoever reads them says what is wrong
        head = hidden // heads
    for name, value in ((key, stated), ("head_dim", head)):
        check_size(name, value)
    return float(stated / head)


def _rope_type(key: str, block: Mapping[str, Any], family: Family) -> str:
    kind = stated_once({f"{key}: rope_type": block.get("rope_type"), "type": block.get("type")})
    if kind is None and "factor" in block:
        raise ValueError(f"{key} has a factor but no rope_type; exkv knows {', '.join(ROPE_TYPES)}")
    if isinstance(kind, str):
        kind = family.rope_aliases.get(kind, kind)
    if kind is not None and kind not in ROPE_TYPES:
        raise ValueError(
            f"{key}: rope_type {kind!r} is unknown; exkv knows {', '.join(ROPE_TYPES)}"
        )
    return kind or "default"


def _read_scaling(
    key: str, block: Mapping[str, Any], trained: Any, longest: Any, family: Family
) -> RopeScaling | None:
    """Read one rope_scaling or rope_parameters object; None if unscaled.

    `trained` is its original_max_position_embeddings, `longest` the max_position_embeddings.
    """
    block = {name: value for name, value in block.items() if value is not None}
    for ours in set(family.rope_keys.values()):
        names = [own for own, meant in family.rope_keys.items() if meant == ours and own in block]
        if names:
            block[ours] = stated_once({f"{key}.{own}": block[own] for own in names})
    kind = _rope_type(key, block, family)
    if kind == "default":
        return None
    known = {field.name for field in dataclasses.fields(RopeScaling)}
    numbers = {name: block[name] for name in block if name in known and name != "rope_type"}
    # Zero means "not given" for these, and a derived value takes its place.
    for name in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
        if is_number(numbers.get(name)) and numbers[name] == 0:
            del numbers[name]
    if kind in ("yarn", "longrope", "dynamic"):
        check_size("max_position_embeddings", longest)
    if kind == "dynamic":
        trained = longest
    if kind == "ntk_alpha":
        numbers["factor"] = 1.0
    if kind == "proportional":
        numbers = {"factor": 1.0, "partial_rotary_factor": 1.0, **numbers}
    if trained is None and kind == "yarn":
        trained = longest
    if trained is None and kind == "longrope":
        trained = family.original_max_position_embeddings
    if kind == "longrope" and "factor" not in numbers and trained is not None:
        check_size(_TRAINED, trained)
        numbers["factor"] = longest / trained
    if "factor" not in numbers:
        raise ValueError(f"{key}: rope_type {kind!r} needs factor")
    numbers[_TRAINED] = trained
    try:
        return RopeScaling(rope_type=kind, **numbers)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _factors(key: str, value: Any) -> tuple[float, ...] | None:
    """A list for each pair of features, as a tuple of floats."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{key} must be a list of positive numbers, not {value!r}")
    for index, number in enumerate(value):
        if not is_number(number) or number <= 0:
            raise ValueError(f"{key}[{index}] must be a positive number, not {number!r}")
    return tuple(float(number) for number in value)
