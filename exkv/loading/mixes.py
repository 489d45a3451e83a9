"""The bits in which ``exkv quantize`` writes each matrix of a layer: the same for all, the mix with
the least loss at a number of bits a weight, or the one with the least loss that fits a plan.

Bits are counted over all matrices of layers that may become integers, with their scales, as stored
in the file. Embedding, head, routers, norms and biases stay as they are, and don't count.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from exkv.checkpoint import ModelConfig, facts_of
from exkv.models import Transformer, Unit, unit_specs
from exkv.models.mtp import with_mtp
from exkv.models.units import UnitSpec
from exkv.planning import Scenario
from exkv.planning.best import item_of, planned
from exkv.planning.search.knapsack import Relaxed, least_lossy
from exkv.weights import GroupFormat, compressed_tensors
from exkv.weights.choice import Choice, Losses
from exkv.weights.expert_groups import expert_of, name_among
from exkv.weights.format import Size
from exkv.weights.hadamard import HADAMARD, NONE, block_of
from exkv.weights.on_load import (
    AS_STORED,
    INTEGERS,
    class_of,
    mixed,
    option_of,
    options_of,
    shift_of,
)
from exkv.weights.settings import stays_float

#: Inputs that share a scale; the second where the first doesn't divide all matrices' inputs.
GROUPS = (64, 32)
#: Bits between two points of a curve.
_STEP = 0.25

#: Unit's name -> one of ``on_load.ALL_OPTIONS``, or a mix.
Kept = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix that may become integers.

    Attributes:
        unit: the name of the unit that has it.
        size: outputs, inputs.
        group: inputs that share a scale.
        hadamard: block size of the transform, in inputs; 0 for none.
        dtype: of the stored matrix and of its scales.
    """

    unit: str
    size: Size
    group: int
    hadamard: int
    dtype: torch.dtype

    def format(self, option: str) -> GroupFormat | None:
        """The format in an option; None to keep the matrix as stored."""
        if option == AS_STORED:
            return None
        return GroupFormat(
            bits=INTEGERS[option],
            group=self.group,
            scale=self.dtype,
            shift=shift_of(option),
            hadamard=self.hadamard,
        )

    def nbytes(self, option: str) -> int:
        """Bytes in the file."""
        if (format := self.format(option)) is None:
            return self.size[0] * self.size[1] * self.dtype.itemsize
        return compressed_tensors.packed_nbytes(format, self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The matrices of a model's layers.

    Attributes:
        specs: the model's units.
        matrices: those that may become integers, by name in the checkpoint.
        floats: names of all others.
    """

    config: ModelConfig
    specs: list[UnitSpec]
    matrices: Mapping[str, Matrix]
    floats: list[str]

    @classmethod
    def of(
        cls, config: ModelConfig, dtypes: Mapping[str, torch.dtype], transform: str = NONE
    ) -> Layers:
        """The layers of a config of float weights.

        Args:
            dtypes: of the scales, by matrix name.
            transform: of the matrices' inputs, "hadamard" or "none".
        """
        specs = unit_specs(config, config.dtype or torch.float32)
        found, floats = dict[str, tuple[str, Size]](), {"lm_head"}  # a tied head's name, too
        for spec in specs:
            stored = {n: t.shape for source in spec.sources for n, t in source.stored.items()}
            for name, shape in stored.items():
                layer = name.removesuffix(".weight")
                may = spec.layer is not None and not stays_float(layer)
                if len(shape) == 2 and may and shape[1] % GROUPS[-1] == 0:
                    found[layer] = spec.name, (shape[0], shape[1])
                elif len(shape) == 2:
                    floats.add(layer)
        fits = (all(size[1] % group == 0 for _, size in found.values()) for group in GROUPS)
        group = next(itertools.compress(GROUPS, fits))
        matrices = {
            layer: Matrix(
                unit=unit,
                size=size,
                group=group,
                hadamard=block_of(size[1]) if transform == HADAMARD else 0,
                dtype=dtypes.get(layer, torch.float32),
            )
            for layer, (unit, size) in found.items()
        }
        return cls(config=config, specs=specs, matrices=matrices, floats=sorted(floats))

    def alike(self, option: str) -> dict[str, str]:
        return {spec.name: option for spec in self.specs if spec.layer is not None}

    def formats(self, kept: Kept) -> dict[str, GroupFormat]:
        """The formats of the matrices that become integers, by name."""
        options = {unit: options_of(each) for unit, each in kept.items()}
        name_of = {unit: name_among(each) for unit, each in options.items()}
        found = {}
        for layer, matrix in self.matrices.items():
            option = options[matrix.unit]
            if not isinstance(option, str):
                name = name_of[matrix.unit](class_of(layer), layer)
                option = AS_STORED if name is None else option[name]
            if (format := matrix.format(option)) is not None:
                found[layer] = format
        return found

    def settings(self, kept: Kept) -> dict[str, Any] | None:
        """The quantization_config of a folder written in these options; None if nothing becomes
        integers."""
        formats = self.formats(kept)
        stay = self.matrices.keys() - formats.keys()
        return compressed_tensors.settings_of_packed(formats, sorted({*self.floats, *stay}))

    def units(self, kept: Kept, dtype: torch.dtype, mtp: bool = False) -> tuple[Unit, ...]:
        """The folder's units, with a float MTP head if it is used; ValueError if exkv could not
        load the folder."""
        config = replace(self.config, path=None, mtp=mtp)
        named = _names_without_files(self.config)
        written = self.formats(kept)
        formats = {named(name): format for name, format in written.items()}
        floats = {named(name) for name in (*self.floats, *self.matrices.keys() - written.keys())}
        for spec in unit_specs(config, dtype):  # experts may be stacked, and then are floats
            names = spec.matrices.values()
            floats.update(n for n in names if spec.is_mtp or expert_of(n) is not None)
        settings = compressed_tensors.settings_of_packed(formats, sorted(floats - formats.keys()))
        found = unit_specs(replace(config, quantization=settings), dtype)
        return tuple(Unit(index, spec) for index, spec in enumerate(found))

    def class_sizes(self, losses: Losses) -> dict[tuple[str, str], dict[str, int]]:
        """(unit, class of matrices) with known losses -> option -> bytes."""
        found: dict[tuple[str, str], dict[str, int]] = {}
        name_of = {unit: name_among(names) for unit, names in losses.matrices.items()}
        for layer, matrix in self.matrices.items():
            name = name_of[matrix.unit](class_of(layer), layer)
            assert name is not None, "all matrices have losses"
            sizes = found.setdefault((matrix.unit, name), dict.fromkeys(losses.options, 0))
            for option in sizes:
                sizes[option] += matrix.nbytes(option)
        return found

    def bits(self, kept: Kept) -> float:
        """Bits a weight, on average."""
        formats = self.formats(kept)
        nbytes = sum(
            each.nbytes(option_of(formats[layer]) if layer in formats else AS_STORED)
            for layer, each in self.matrices.items()
        )
        return 8 * nbytes / self.count

    @property
    def count(self) -> int:
        """Number of weights in all matrices."""
        return sum(each.size[0] * each.size[1] for each in self.matrices.values())


def _names_without_files(config: ModelConfig) -> Callable[[str], str]:
    """Maps a matrix's name in the checkpoint to its name by the config alone, where a text model
    within one with images may be named otherwise."""
    files, alone = facts_of(config), facts_of(replace(config, path=None))
    ends = {files.head: alone.head, files.table: alone.table}

    def named(name: str) -> str:
        rest = name.removeprefix(f"{files.layers}.")
        return ends.get(name, name) if rest == name else f"{alone.layers}.{rest}"

    return named


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixes:
    """The choice of mixes: the layers, their matrices' losses, and how often experts are chosen (as
    of :meth:`Transformer.usage`)."""

    layers: Layers
    losses: Losses
    usage: Mapping[str, tuple[float, ...]] | None = None

    def at(self, bits: float) -> dict[str, str]:
        """The mix with the least loss of at most ``bits`` a weight.

        Raises:
            ValueError: no mix has so few, or none so many.
        """
        sizes = self.layers.class_sizes(self.losses)
        options = self.losses.options
        ends = [8 * sum(s[o] for s in sizes.values()) / self.layers.count for o in options]
        if not min(ends) <= bits < ends[0]:
            raise ValueError(
                f"--bits {bits:g}: with scales the layers' weights take from {min(ends):g} bits "
                f"({options[-1]}) to under {ends[0]:g}, as stored; give a number between these"
            )
        chosen = least_lossy(self._items(), int(bits * self.layers.count / 8))
        assert chosen is not None, "the least fit"
        kept: dict[str, dict[str, str]] = {}
        for (unit, name), option in zip(sizes, chosen, strict=True):
            kept.setdefault(unit, {})[name] = options[option]
        return self.layers.alike(AS_STORED) | {unit: mixed(each) for unit, each in kept.items()}

    def fitting(self, scenario: Scenario) -> dict[str, str]:
        """The mix with the least loss that fits; PlacementError if none does.

        Args:
            scenario: of one model, a :class:`WrittenModel`.
        """
        found, _, _ = planned(scenario)
        choice = found.workloads[0].model.choice
        assert choice is not None
        names = self.layers.alike(AS_STORED)
        return {unit: kept for unit, kept in choice.kept.items() if unit in names}

    def curve(self) -> list[tuple[float, float]]:
        """Points (bits a weight, least loss); between mixes the loss is interpolated linearly."""
        sizes, count = self.layers.class_sizes(self.losses), self.layers.count
        relaxed = Relaxed(self._items())
        options = self.losses.options[-1], "int8"
        ends = [8 * sum(each[o] for each in sizes.values()) / count for o in options]
        points = np.arange(ends[0], ends[1] + _STEP / 2, _STEP)
        # One byte more, so that rounding of the product never excludes the smallest mix.
        rooms = points * count / 8 + 1
        losses = relaxed.least(0, rooms)
        return [(float(b), float(loss)) for b, loss in zip(points, losses, strict=True)]

    def loss(self, kept: Kept) -> float:
        return sum(self.losses.of(unit, each) for unit, each in kept.items())

    def _items(self) -> list[Any]:
        return [
            item_of(sizes, self.losses.matrices[unit][name])
            for (unit, name), sizes in self.layers.class_sizes(self.losses).items()
        ]


class WrittenModel(Transformer):
    """The model as it will be read from the folder to be written, for plans to choose its mix.

    Args:
        mtp: whether its MTP head is used, too, whose weights stay as they are.
    """

    def __init__(self, mixes: Mixes, mtp: bool = False) -> None:
        config = mixes.layers.config
        super().__init__(with_mtp(config) if mtp else config)
        self.mixes = mixes

    def losses(self) -> Losses:
        found = self.mixes.losses
        stays = {u.name: {AS_STORED: 0.0} for u in self.units if u.name not in found.units}
        return replace(found, units={**found.units, **stays})

    def usage(self) -> Mapping[str, tuple[float, ...]] | None:
        return self.mixes.usage

    def units_kept(self, choice: Choice | None) -> tuple[Unit, ...]:
        layers = self.mixes.layers
        kept = choice.kept if choice else layers.alike(AS_STORED)
        return layers.units(kept, self.dtype, mtp=self.config.mtp)
