"""Low-rank adapters (LoRA): the layers that each one changes, their bytes, and the units of a call.

A call names an adapter for each row (:data:`Chosen`). Its units are copies that share everything
with the model's own except the layers that an adapter changes (``exkv.layers.low_rank``): bound
runs, captured graphs and plans see different modules, and know nothing else about adapters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Protocol, TypeAlias
from weakref import WeakSet

import torch
from torch import nn

from exkv import devices, epochs
from exkv.batch import Chosen
from exkv.checkpoint import ModelConfig, open_checkpoint
from exkv.devices import rounded
from exkv.layers import Experts
from exkv.layers.descriptions import LowRank, RowsLowRank
from exkv.layers.linear import Matrix
from exkv.layers.low_rank import with_low_rank
from exkv.weights.lora import AdapterError, AdapterFolder, LowRankShape

from .units import Unit, UnitSpec

#: Changes of a unit: adapter's name -> path of a layer -> its matrices.
Changes: TypeAlias = Mapping[str, Mapping[str, LowRank]]
#: Prefixes of the text model in models of text and images.
_TEXT_MODELS = ("model.language_model.", "language_model.model.", "model.text_model.")
#: Number of combinations of adapters whose units are memoized.
_MOST_KEPT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A layer that can have an adapter.

    Attributes:
        unit: the unit's index.
        path: of the module in the unit.
        size: (out, in).
        rows: selects the layer's rows of a stored matrix; None for all.
    """

    unit: int
    path: str
    size: tuple[int, int]
    embedding: bool
    rows: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """One layer's matrices in the adapter's file, and their target."""

    target: Target
    matrix: LowRankShape

    def shapes(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B on ``meta``."""
        (outputs, inputs), rank = self.target.size, self.matrix.rank
        sizes = [(rank, inputs), (outputs, rank)]
        if self.target.embedding:
            sizes = [(outputs, rank), (inputs, rank)]
        a, b = (torch.empty(size, dtype=dtype, device="meta") for size in sizes)
        return a, b

    def read(self, folder: AdapterFolder, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B on the host."""
        a, b = folder.halves(self.matrix, dtype)
        if self.target.embedding:
            return a.T.contiguous(), b
        if self.target.rows is not None:
            b = self.target.rows(b)
        return a.contiguous(), b.contiguous()


class User(Protocol):
    """A user of an adapter, until it is done."""

    @property
    def done(self) -> bool: ...


class Adapter:
    """An adapter of a model, with open files; made by :meth:`Transformer.load_adapter`.

    Attributes:
        name: by which calls choose it.
        folder: of its files.
        strength: factor of the change: 1 as it was trained.
        config: of adapter_config.json.
        key: identifies its keys and values: its name, and a hash of its contents.
        users: jobs that use it, held weakly.
    """

    def __init__(
        self, folder: AdapterFolder, name: str, changes: Sequence[LayerChange], dtype: torch.dtype
    ) -> None:
        self.name = name
        self.config = folder.config
        self.folder: Path = folder.folder
        self.strength = folder.strength
        self.key = f"{name}:{folder.fingerprint}"
        self.users: WeakSet[User] = WeakSet()
        self._files = folder
        self._dtype = dtype
        self._changes: dict[int, list[LayerChange]] = {}
        for change in changes:
            self._changes.setdefault(change.target.unit, []).append(change)

    def __repr__(self) -> str:
        return f"Adapter({self.name!r}, {str(self.folder)!r}, ranks up to {self.rank})"

    @property
    def rank(self) -> int:
        """The largest rank of its matrices."""
        return max(change.matrix.rank for each in self._changes.values() for change in each)

    @cached_property
    def nbytes(self) -> dict[int, int]:
        """Unit -> bytes on the unit's device."""
        return {
            unit: sum(rounded(half.nbytes) for each in all_of for half in each.shapes(self._dtype))
            for unit, all_of in self._changes.items()
        }

    def shapes(self, unit: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Path of a layer in the unit -> A and B on ``meta``."""
        changes = self._changes.get(unit, ())
        return {change.target.path: change.shapes(self._dtype) for change in changes}

    def read(self, unit: int, device: torch.device, *, hollow: bool = False) -> dict[str, LowRank]:
        """Read its part of a unit to a device.

        Args:
            hollow: make zeros instead of reading.

        Raises:
            CheckpointError: the file has changed since it was opened.
            torch.OutOfMemoryError: the device is full.
        """
        made = {}
        for change in self._changes.get(unit, ()):
            if hollow:
                shapes = dict(zip("ab", change.shapes(self._dtype), strict=True))
                halves = devices.zeros_on(device, shapes)
                made[change.target.path] = LowRank(a=halves["a"], b=halves["b"])
            else:
                a, b = change.read(self._files, self._dtype)
                made[change.target.path] = LowRank(a=a.to(device), b=b.to(device))
        return made

    def close(self) -> None:
        """Close the files."""
        self._files.close()


# What can be changed ----------------------------------------------------------------------------


def open_adapter(
    folder: AdapterFolder, name: str, units: Sequence[Unit], config: ModelConfig, dtype: torch.dtype
) -> Adapter:
    """Make an adapter, checked against the model.

    Raises:
        AdapterError: it is for another model, or for layers that don't support adapters.
    """
    targets = Targets(units)
    changes: list[LayerChange] = []
    for module, matrix in folder.matrices.items():
        found = targets.find(module)
        if found is None:
            raise AdapterError(f"{folder.file}: {module!r:.120} {targets.why_not(module)}")
        _check_size(folder, matrix, found)
        if not folder.config.is_for(module):
            raise AdapterError(
                f"{folder.file}: there are tensors for {module!r:.120}, which target_modules and "
                f"layers_to_transform in {folder.config.file.name} leave out: they are not of one "
                "adapter"
            )
        changes += [LayerChange(target=target, matrix=matrix) for target in found]
    _check_complete(folder, targets)
    _check_whole(folder, targets, config)
    return Adapter(folder, name, changes, dtype)


class Targets:
    """The layers of a model that adapters can change, by their names in trained models."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._by_name: dict[str, list[Target]] = {}
        self._refused: set[str] = set()
        stored: dict[str, list[Target]] = {}
        known: dict[tuple, dict[str, Matrix | None]] = {}
        for unit in units:
            kind = (unit.spec.kind, tuple(unit.shapes))
            if kind not in known:
                known[kind] = dict(_layers_of(unit.spec))
            for name, own, target in _targets_of(unit, known[kind]):
                if target is None:
                    self._refused |= {name, own}
                    continue
                if target.rows is None:
                    self._by_name[own] = [target]
                stored.setdefault(name, []).append(target)
        for name, targets in stored.items():
            if self._by_name.get(name) is None and len({t.unit for t in targets}) == 1:
                self._by_name[name] = targets
        #: Names in the trained model, one for each stored matrix.
        self.names = {name for name in stored if name in self._by_name}

    def find(self, module: str) -> list[Target] | None:
        """The layers that a module of this name stands for, or None."""
        return self._by_name.get(_known_as(module))

    def why_not(self, module: str) -> str:
        """The reason why :meth:`find` finds none."""
        if _known_as(module) in self._refused or ".experts" in module:
            return (
                "is an expert or its router, which can't have adapters here: train one for the "
                "attention alone, or merge it into the model with PEFT (merge_and_unload)"
            )
        return "is not a linear layer or embedding of this model: the adapter is for another model"


def _known_as(module: str) -> str:
    for prefix in _TEXT_MODELS:
        if module.startswith(prefix):
            return f"model.{module.removeprefix(prefix)}"
    return module


def _layers_of(spec: UnitSpec) -> Iterator[tuple[str, Matrix | None]]:
    """Paths of a unit's matrices, with None for those that don't support adapters."""
    with torch.device("meta"):
        module = spec.build()
    experts = [path for path, part in module.named_modules() if isinstance(part, Experts)]
    for path, part in module.named_modules():
        if not isinstance(part, Matrix):
            continue
        inside = any(path.startswith(f"{each}.") for each in experts)
        shared = ".shared_expert." in path
        yield path, part if shared or not inside else None


def _targets_of(
    unit: Unit, layers: Mapping[str, Matrix | None]
) -> Iterator[tuple[str, str, Target | None]]:
    """A unit's matrices: name in the checkpoint, name here, target."""
    for source in unit.spec.sources:
        for stored in source.matrices:
            layer, embedding = layers[stored.layer], stored.layer == "embed_tokens"
            own = f"{unit.name}.{stored.layer}" if unit.spec.layer is not None else unit.name
            if layer is None:
                yield stored.name, own, None
                continue
            yield (
                stored.name,
                own,
                Target(
                    unit=unit.index,
                    path=stored.layer,
                    size=layer.size,
                    embedding=embedding,
                    rows=stored.rows,
                ),
            )


def _check_size(folder: AdapterFolder, matrix: LowRankShape, targets: Sequence[Target]) -> None:
    """Raise AdapterError for matrices that don't fit the layer's size."""
    inputs = targets[0].size[1]
    outputs = sum(target.size[0] for target in targets)
    if targets[0].embedding:
        inputs, outputs = outputs, inputs
    what = "an embedding" if matrix.embedding else "a linear layer"
    if matrix.embedding != targets[0].embedding:
        raise AdapterError(
            f"{folder.file}: {matrix.module!r:.120} is changed as {what}, but is not one in this "
            "model: the adapter is for another model"
        )
    if (matrix.outputs, matrix.inputs) != (outputs, inputs):
        raise AdapterError(
            f"{folder.file}: {matrix.module!r:.120} is changed by B A of [{matrix.outputs}, "
            f"{matrix.rank}] and [{matrix.rank}, {matrix.inputs}], but has [{outputs}, {inputs}] "
            "in this model: the adapter is for another model"
        )


def _check_complete(folder: AdapterFolder, targets: Targets) -> None:
    """Raise AdapterError if the file lacks a layer that the config names."""
    config = folder.config
    if isinstance(config.targets, str):
        return  # a regular expression, or PEFT's word for all
    there = {_known_as(module) for module in folder.matrices}
    found = {(t.unit, t.path) for module in there for t in targets.find(module) or ()}
    for name in sorted(targets.names):
        lacks = [t for t in targets.find(name) or () if (t.unit, t.path) not in found]
        if not lacks or not config.is_for(name):
            continue
        raise AdapterError(
            f"{folder.file}: there are no tensors for {name!r}, which target_modules in "
            f"{config.file.name} names: the file is incomplete, save or download it again"
        )


def _check_whole(folder: AdapterFolder, targets: Targets, config: ModelConfig) -> None:
    """Raise AdapterError for a whole matrix that differs from the model's."""
    for module, tensor in folder.whole.items():
        found = targets.find(module)
        if found is not None and config.path is not None:
            with open_checkpoint(config.path) as checkpoint:
                name = f"{module}.weight"
                if name in checkpoint and torch.equal(
                    checkpoint.tensor(name), folder.tensor(tensor)
                ):
                    continue
        raise AdapterError(
            f"{folder.file}: tensor {tensor!r:.120} is a whole matrix that differs from the "
            "model's own (modules_to_save, or a resized vocabulary): merge the adapter into the "
            "model with PEFT (merge_and_unload), and load that"
        )


# Units of a call --------------------------------------------------------------------------------


class AdaptedUnit:
    """A unit in calls with certain adapters."""

    def __init__(self, unit: Unit, chosen: Chosen) -> None:
        self._unit = unit
        self._chosen = chosen
        self._of: nn.Module | None = None
        self._module: nn.Module | None = None

    @property
    def index(self) -> int:
        return self._unit.index

    @property
    def spec(self) -> UnitSpec:
        return self._unit.spec

    @property
    def device(self) -> torch.device | None:
        return self._unit.device

    @property
    def host_experts(self) -> frozenset[int]:
        return self._unit.host_experts

    @property
    def module(self) -> nn.Module | None:
        """The changed module; None until the weights are read."""
        if self._of is not self._unit.module:
            self._of = self._unit.module
            self._module = self._of and adapted(self._of, self._unit.low_rank, self._chosen)
        return self._module


def adapted(module: nn.Module, changes: Changes, chosen: Chosen) -> nn.Module:
    """The module with the changes of the chosen adapters."""
    found: dict[str, list[RowsLowRank]] = {}
    for name, first, last in _spans(chosen):
        for path, low_rank in changes.get(name, {}).items():
            found.setdefault(path, []).append(
                RowsLowRank(low_rank=low_rank, first=first, last=last)
            )
    return with_low_rank(module, found) if found else module


def _spans(chosen: Chosen) -> Iterator[tuple[str, int, int | None]]:
    """Adapters with the first and last of adjacent rows that use them."""
    if isinstance(chosen, str):
        yield chosen, 0, None
        return
    first = 0
    for name, group in groupby(chosen or ()):
        last = first + len(list(group))
        if name is not None:
            yield name, first, last
        first = last


class AdaptedUnits:
    """The units of calls with adapters; memoizes the last used combinations for one epoch."""

    def __init__(self) -> None:
        self._epoch = -1
        self._kept: OrderedDict[Chosen, tuple[AdaptedUnit, ...]] = OrderedDict()

    def find(self, units: Sequence[Unit], chosen: Chosen) -> tuple[AdaptedUnit, ...]:
        """The units of a call with these adapters."""
        epoch = epochs.current()
        if self._epoch != epoch:
            self.release()
            self._epoch = epoch
            epochs.bind(self, epoch)  # so that unloaded units aren't held
        found = self._kept.pop(chosen, None)
        if found is None:
            found = tuple(AdaptedUnit(unit, chosen) for unit in units)
        self._kept[chosen] = found  # the last used one last
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return found

    def release(self) -> None:
        """Drop all units."""
        self._kept.clear()
