"""Quantize float weights when they are loaded: ``Model(folder, weights="int4")``.

The config is that of the float checkpoint with a quantization of its own, which no file needs to
state: ``{"quant_method": "on_load", "weights": "int4"}``; see :func:`with_weights`.

The layers' matrices become integers of 8 to 2 bits in groups of 64, by ``rounding``; under names
that end in ``-asym``, each group has a zero point. The projection
to logits, which every token reads whole and whose errors reach the output directly, has 8 bits, and
so does an embedding table that is tied to it. An untied table, and one of per-layer embeddings,
stays: each token reads only one of its rows. Norms, biases and the routers of experts, which are
small, stay too.

``weights`` may also be a mapping by unit, ``{"model.layers.0": "int8", ...}``, embedding and head
included: what a plan chooses for ``weights="best"``, see ``exkv.planning.best``. A unit may be a
mix, ``"mlp.down_proj int5, self_attn.q_proj int4, ..."``, which names all classes of its matrices:
those of one projection, for experts of all in the layer (:func:`class_of`) or of groups of them
(``expert_groups``).

With ``"transform": "hadamard"`` beside ``weights``, also while ``"weights": "best"`` leaves them as
they are stored until a plan has chosen, matrices and their inputs go through the
Hadamard transform (``hadamard.py``), in the largest blocks that fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig
from exkv.checkpoint.facts import Facts, facts_of
from exkv.checkpoint.families import FAMILIES
from exkv.checkpoint.files import quoted
from exkv.ops.weight_groups import CHUNK

from .expert_groups import name_among
from .finite import check_finite
from .floats import FLOATS
from .format import Size, WeightFormat
from .groups import GroupFormat
from .hadamard import HADAMARD, NONE, block_of, transformed
from .methods import FormatOf, register
from .rounding import rounded
from .settings import EMBEDDING, HEAD, OF_LAYERS, ROUTERS, stays_float

METHOD = "on_load"
#: Values of ``weights`` without zero points -> bits of the layers' matrices.
BITS = {"int8": 8, "int6": 6, "int5": 5, "int4": 4, "int3": 3, "int2": 2}
#: Suffix of those with a zero point for each group.
_ASYMMETRIC = "-asym"
#: All of them, the least lossy first.
INTEGERS = {o: bits for name, bits in BITS.items() for o in (f"{name}{_ASYMMETRIC}", name)}
#: The option that leaves a unit's weights unquantized.
AS_STORED = "as stored"
#: All options for a unit's weights, the least lossy first; and those without zero points, between
#: which plans choose unless they are told otherwise.
ALL_OPTIONS, OPTIONS = (AS_STORED, *INTEGERS), (AS_STORED, *BITS)
#: The value of ``weights`` with which a plan chooses the units' bits.
BEST = "best"
_OF_HEAD = "int8"
_FLOATS = (OF_LAYERS, *ROUTERS)
_GROUP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OnLoad(GroupFormat):
    """The layout of groups, rounded from a matrix of floats."""

    @property
    def name(self) -> str:
        return f"{self.layout_name} on load"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        self.layout(size)  # raises for inputs that it cannot have
        return {"weight": ExpectedTensor.of_floats(size, torch.float32)}

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weight = stored["weight"]
        check_finite("weights", weight)
        weight = transformed(weight.float(), self.hadamard) if self.hadamard else weight
        made = rounded(weight, self.bits, self.group, self.scale, self.zeros)
        return self.pack(made.codes, made.scale, made.zero)


def with_weights(
    config: ModelConfig, weights: str | Mapping[str, str] | None, transform: str | None = None
) -> ModelConfig:
    """The config with its float weights quantized on load.

    Args:
        weights: one of ``INTEGERS``; or a mapping from every unit to one of ``ALL_OPTIONS`` or a
            mix; None to leave them as stored; ``BEST`` to leave them so until a plan has chosen.
        transform: "hadamard" to transform quantized matrices; None or "none" not to.

    Raises:
        ValueError: an unknown value, or the checkpoint is quantized already.
    """
    if transform not in (None, NONE, HADAMARD):
        raise ValueError(f"transform is {transform!r}; it must be {HADAMARD}, {NONE}, or None")
    if transform == HADAMARD and weights is None:
        raise ValueError(
            f"transform is {HADAMARD!r}, which needs integers, and weights is None: take one of "
            f"{', '.join(BITS)}, {BEST}, or write the model by exkv quantize --transform {HADAMARD}"
        )
    if weights is None:
        return config
    if isinstance(weights, str) and weights not in (*INTEGERS, BEST):
        raise ValueError(
            f"weights is {weights!r}; it must be one of {', '.join(BITS)}, these with "
            f"{_ASYMMETRIC} behind them, {BEST}, or None"
        )
    if leaves_open(config):
        assert config.quantization is not None
        transform = config.quantization["transform"]
    elif config.quantization is not None:
        method = config.quantization.get("quant_method")
        raise ValueError(
            f"{config.path or 'the config'} is quantized already ({method}), and weights is "
            f"{weights!r}; leave weights out, or take the model's unquantized version"
        )
    if transform in (None, NONE):
        settings = None if weights == BEST else {"quant_method": METHOD, "weights": weights}
    else:
        settings = {"quant_method": METHOD, "weights": weights, "transform": transform}
    return replace(config, quantization=settings)


def leaves_open(config: ModelConfig) -> bool:
    """Whether the config only has a transform, for bits that a plan chooses."""
    settings = config.quantization or {}
    return settings.get("quant_method") == METHOD and settings.get("weights") == BEST


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer."""
    assert config.quantization is not None
    if leaves_open(config):
        return lambda layer, size: FLOATS[dtype]
    facts = facts_of(config)
    kept_as = _kept_as(config, facts)
    transforms = config.quantization.get("transform") == HADAMARD

    def format_of(layer: str, size: Size) -> WeightFormat:
        has_groups = size[1] % CHUNK == 0 and not stays_float(layer, _FLOATS)
        if not has_groups or (kept := kept_as(layer)) == AS_STORED:
            return FLOATS[dtype]
        is_table = layer in (facts.table, facts.head)
        return _format(kept, size, transforms and not is_table)

    return format_of


def _kept_as(config: ModelConfig, facts: Facts) -> Callable[[str], str]:
    """Lookup from a layer's name in the checkpoint to the option for its matrix."""
    assert config.quantization is not None
    weights = config.quantization.get("weights")
    if isinstance(weights, Mapping):
        layers = (f"model.layers.{index}" for index in range(config.cache_layers))
        check_kept(weights, (EMBEDDING, HEAD, *layers))
        ends = {facts.table: weights[EMBEDDING], facts.head: weights[HEAD]}
        known = {unit: options_of(kept) for unit, kept in weights.items()}
        name_of = {unit: name_among(kept) for unit, kept in known.items()}
        mtp_head = f"model.layers.{config.num_hidden_layers}"
        parts = _parts_of_mtp(config, facts)

        def of_layer(layer: str) -> str:
            unit = mtp_head if layer.startswith(parts) else _unit_of(layer, facts)
            kept = ends.get(layer) or known[unit]
            if isinstance(kept, str):
                return kept
            if not (name := class_of(layer)):
                return AS_STORED
            if (found := name_of[unit](name, layer)) is None:
                raise ValueError(
                    f"weights of {unit} have no entry for {name}; they name {', '.join(kept)}"
                )
            return kept[found]

        return of_layer
    if weights not in INTEGERS:
        raise ValueError(
            f"{config.path or 'the config'}: weights of quantization_config is {weights!r}; it "
            f"must be one of {', '.join(INTEGERS)}"
        )
    ends = {facts.table: AS_STORED, facts.head: _OF_HEAD}
    return lambda layer: ends.get(layer, weights)


def _parts_of_mtp(config: ModelConfig, facts: Facts) -> tuple[str, ...]:
    """What matrices of the MTP head are called, or begin with, where it is used."""
    names = FAMILIES[config.architecture].mtp if config.mtp else None
    if names is None:
        return ()
    parts = names.of(f"{facts.layers}.{config.num_hidden_layers}")
    return f"{parts['layer']}.", parts["projection"]


def _unit_of(layer: str, facts: Facts) -> str:
    """The unit of a layer's matrix. Of matrices beside the layers in the checkpoint, those used
    before all layers belong to the first one, and those used after them to the head."""
    rest = layer.removeprefix(f"{facts.layers}.")
    if rest != layer:
        return f"model.layers.{rest.partition('.')[0]}"
    return HEAD if "unembed" in layer else "model.layers.0"


def class_of(layer: str) -> str:
    """The class of a layer's matrix in a mix, from its name in the checkpoint: the name without the
    unit's and without experts' numbers, such as ``self_attn.q_proj`` or ``mlp.experts.up_proj``.
    Empty for a matrix beside the layers, which a mix leaves as stored."""
    _, *behind = re.split(r"\.\d+\.", layer, maxsplit=1)
    return ".".join(part for part in "".join(behind).split(".") if not part.isdigit())


def mixed(kept: Mapping[str, str]) -> str:
    """Name of a mix from classes of matrices to options; just the option if all are equal."""
    options = set(kept.values())
    if len(options) == 1:
        return options.pop()
    return ", ".join(f"{name} {kept[name]}" for name in sorted(kept))


def options_of(kept: str) -> str | dict[str, str]:
    """Inverse of :func:`mixed`; ValueError for any other name."""
    if kept in ALL_OPTIONS:
        return kept
    parts = [part.partition(" ") for part in kept.split(", ")]
    found = {name: option for name, _, option in parts}
    if len(found) < len(parts) or not set(ALL_OPTIONS).issuperset(found.values()):
        raise ValueError(
            f"{quoted(kept)}; known are {', '.join(OPTIONS)}, integers with {_ASYMMETRIC} behind "
            "them, or a mix with one of these for each projection"
        )
    return found


def check_kept(kept: Mapping[str, str], units: Iterable[str]) -> None:
    """ValueError unless exactly these units have one of the options, or a mix."""
    names = set(units)
    if odd := sorted(names ^ kept.keys()):
        raise ValueError(
            f"weights name {len(kept)} units, and the model has {len(names)}; not in both: "
            f"{quoted(odd[0])}"
        )
    for unit, option in kept.items():
        try:
            options_of(option)
        except ValueError as error:
            raise ValueError(f"weights of {unit} are {error}") from None


@lru_cache
def _format(option: str, size: Size, transforms: bool) -> WeightFormat:
    """The format with the largest group that fits the inputs."""
    inputs = size[1]
    group = CHUNK if inputs % _GROUP else _GROUP
    block = block_of(inputs) if transforms else 0
    return register(
        OnLoad(
            bits=INTEGERS[option],
            group=group,
            scale=torch.float16,
            shift=shift_of(option),
            hadamard=block,
        )
    )


def shift_of(option: str) -> str:
    """``GroupFormat.shift`` of integers."""
    return "zero" if option.endswith(_ASYMMETRIC) else "symmetric"


def option_of(format: GroupFormat) -> str:
    """The name of integers like these."""
    return f"int{format.bits}{_ASYMMETRIC if format.zeros else ''}"
