"""Float weights that become integers when they are loaded: ``Model(folder, weights="int4")``.

A config for it is that of the float checkpoint with a quantization of its own, which no file has to
state: ``{"quant_method": "on_load", "weights": "int4"}``; see :func:`with_weights`.

Matrices of the layers become integers of 8 to 3 bits in groups of 64, by ``rounding``. The
projection to logits, which every token reads whole and whose errors nothing evens out, has 8 bits;
so has a table of tokens that is tied to it. A table of its own, or of the layers' own embeddings,
stays: one of its rows is read a token. Norms and biases stay, and so do the routers of experts,
which are small and choose.

``weights`` may also say it unit by unit, ``{"model.layers.0": "int8", ...}``, embedding and head
included: what a plan for ``weights="best"`` chooses, see ``exkv.planning.best``. A unit may be a
mix, ``"mlp.down_proj int5, self_attn.q_proj int4, ..."``, which names all classes of its matrices:
those of one projection, of all of a layer's experts together (:func:`class_of`) or by groups of
them (``expert_groups``).

``"transform": "hadamard"`` beside ``weights`` has the integers be of matrices whose inputs go
through the Hadamard transform (``hadamard.py``), in the largest blocks that fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig
from exkv.checkpoint.facts import Facts, facts_of
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
#: What ``weights`` may be -> bits of the layers' matrices.
BITS = {"int8": 8, "int6": 6, "int5": 5, "int4": 4, "int3": 3}
#: What a unit's weights are where they are not turned into integers.
AS_STORED = "as stored"
#: All that a unit's weights may be kept as, the least lossy first.
OPTIONS = (AS_STORED, *BITS)
#: The ``weights`` for which a plan chooses the units' bits.
BEST = "best"
_OF_HEAD = "int8"
_FLOATS = (OF_LAYERS, *ROUTERS)
_GROUP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OnLoad(GroupFormat):
    """The layout of groups, made of a matrix of floats."""

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
        made = rounded(weight, self.bits, self.group, self.scale)
        return self.pack(made.codes, made.scale)


def with_weights(
    config: ModelConfig, weights: str | Mapping[str, str] | None, transform: str | None = None
) -> ModelConfig:
    """The config with its float weights kept as ``weights`` says.

    Args:
        weights: one of ``BITS``; or one of ``OPTIONS``, or a mix, for every unit, by the units'
            names; or None for as they are, and ``BEST`` for as they are until a plan has chosen.
        transform: "hadamard" for integers of transformed matrices; None or "none" for others.

    Raises:
        ValueError: there is no such way, or the checkpoint is quantized.
    """
    if transform not in (None, NONE, HADAMARD):
        raise ValueError(f"transform is {transform!r}; it must be {HADAMARD}, {NONE}, or None")
    if transform == HADAMARD and weights in (None, BEST):
        raise ValueError(
            f"transform is {HADAMARD!r}, which is of integers, and weights is {weights!r}: take "
            f"one of {', '.join(BITS)}, or write the model by exkv quantize --transform {HADAMARD}"
        )
    if weights is None:
        return config
    if isinstance(weights, str) and weights not in (*BITS, BEST):
        raise ValueError(
            f"weights is {weights!r}; it must be one of {', '.join(BITS)}, {BEST}, or None"
        )
    if config.quantization is not None:
        method = config.quantization.get("quant_method")
        raise ValueError(
            f"{config.path or 'the config'} is quantized already ({method}), and weights is "
            f"{weights!r}; leave weights out, or take the model's unquantized version"
        )
    if weights == BEST:
        return config
    settings = {"quant_method": METHOD, "weights": weights}
    if transform not in (None, NONE):
        settings["transform"] = transform
    return replace(config, quantization=settings)


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer."""
    assert config.quantization is not None
    facts = facts_of(config)
    kept_as = _kept_as(config, facts)
    transforms = config.quantization.get("transform") == HADAMARD

    def format_of(layer: str, size: Size) -> WeightFormat:
        kept = AS_STORED if stays_float(layer, _FLOATS) else kept_as(layer)
        if kept == AS_STORED:
            return FLOATS[dtype]
        is_table = layer in (facts.table, facts.head)
        return _format(BITS[kept], size, dtype, transforms and not is_table)

    return format_of


def _kept_as(config: ModelConfig, facts: Facts) -> Callable[[str], str]:
    """What the matrix of a layer, by its name in the checkpoint, is kept as."""
    assert config.quantization is not None
    weights = config.quantization.get("weights")
    if isinstance(weights, Mapping):
        layers = (f"model.layers.{index}" for index in range(config.num_hidden_layers))
        check_kept(weights, (EMBEDDING, HEAD, *layers))
        ends = {facts.table: weights[EMBEDDING], facts.head: weights[HEAD]}
        known = {unit: options_of(kept) for unit, kept in weights.items()}
        name_of = {unit: name_among(kept) for unit, kept in known.items()}

        def of_layer(layer: str) -> str:
            unit = _unit_of(layer, facts)
            kept = ends.get(layer) or known[unit]
            if isinstance(kept, str):
                return kept
            if not (name := class_of(layer)):
                return AS_STORED
            if (found := name_of[unit](name, layer)) is None:
                raise ValueError(
                    f"weights of {unit} say nothing of {name}; they name {', '.join(kept)}"
                )
            return kept[found]

        return of_layer
    if weights not in BITS:
        raise ValueError(
            f"{config.path or 'the config'}: weights of quantization_config is {weights!r}; it "
            f"must be one of {', '.join(BITS)}"
        )
    ends = {facts.table: AS_STORED, facts.head: _OF_HEAD}
    return lambda layer: ends.get(layer, weights)


def _unit_of(layer: str, facts: Facts) -> str:
    """The unit of a matrix of the layers; some lie beside these in the checkpoint, of which the
    first layer has what comes before all others, and the head what comes behind."""
    rest = layer.removeprefix(f"{facts.layers}.")
    if rest != layer:
        return f"model.layers.{rest.partition('.')[0]}"
    return HEAD if "unembed" in layer else "model.layers.0"


def class_of(layer: str) -> str:
    """What the matrix of a layer, by its name in the checkpoint, is kept together with in a mix, as
    in ``self_attn.q_proj`` and ``mlp.experts.up_proj``: the name without the unit's, and without
    numbers of experts. Empty for one that lies beside the layers, and stays in a mix."""
    _, *behind = re.split(r"\.\d+\.", layer, maxsplit=1)
    return ".".join(part for part in "".join(behind).split(".") if not part.isdigit())


def mixed(kept: Mapping[str, str]) -> str:
    """The name of a mix: by classes of matrices, one of ``OPTIONS``, alone if they are all one."""
    options = set(kept.values())
    if len(options) == 1:
        return options.pop()
    return ", ".join(f"{name} {kept[name]}" for name in sorted(kept))


def options_of(kept: str) -> str | dict[str, str]:
    """What :func:`mixed` made the name of; ValueError for what names neither."""
    if kept in OPTIONS:
        return kept
    parts = [part.partition(" ") for part in kept.split(", ")]
    found = {name: option for name, _, option in parts}
    if len(found) < len(parts) or not set(OPTIONS).issuperset(found.values()):
        raise ValueError(
            f"{quoted(kept)}; known are {', '.join(OPTIONS)}, and of a mix one for each projection"
        )
    return found


def check_kept(kept: Mapping[str, str], units: Iterable[str]) -> None:
    """ValueError unless each of the units, and nothing else, has one of the options, or a mix."""
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
def _format(bits: int, size: Size, dtype: torch.dtype, transforms: bool) -> WeightFormat:
    """In the largest groups that the inputs have; floats where there are none."""
    inputs = size[1]
    if inputs % CHUNK:
        return FLOATS[dtype]
    group = CHUNK if inputs % _GROUP else _GROUP
    block = block_of(inputs) if transforms else 0
    return register(OnLoad(bits=bits, group=group, scale=torch.float16, hadamard=block))
