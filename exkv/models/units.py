"""Units: the parts of a model that are placed whole, each on one device.

An architecture is a list of ``UnitSpec``: the embedding, every decoder layer, and the head. A spec
has shapes and checkpoint names, and allocates nothing; a ``Unit`` is a spec within a model:
unplaced, placed or loaded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from exkv import devices
from exkv.checkpoint import Checkpoint, ModelConfig
from exkv.checkpoint.families import FAMILIES
from exkv.checkpoint.safetensors import headers_read_once
from exkv.devices import rounded
from exkv.epochs import advance
from exkv.layers.descriptions import LowRank
from exkv.layers.linear import Matrix
from exkv.layers.mlp import lay_on_host, mixtures
from exkv.layers.split_experts import ExpertStaging, staging_bytes_of
from exkv.weights import (
    FormatOf,
    Fused,
    Source,
    WeightFormat,
    format_source,
    formats_of,
    tensor_source,
)
from exkv.weights.expert_groups import expert_of, name_among
from exkv.weights.format import Size
from exkv.weights.on_load import class_of
from exkv.weights.read_parameters import read_parameters
from exkv.weights.source import with_precomputed

#: Marks parameters that all tokens use, beside the routed experts.
_SHARED = re.compile(r"(?:^|\.)shared_expert(?:_gate)?\.")


@dataclass(frozen=True)
class InFormats:
    """What units with equal modules and formats have in common.

    Attributes:
        module: one of these modules on ``meta``; not to be changed.
        shapes: its parameters.
    """

    module: nn.Module
    shapes: Mapping[str, torch.Tensor]

    @cached_property
    def nbytes(self) -> Mapping[str, int]:
        """Parameter -> its bytes on a device."""
        return {name: rounded(tensor.nbytes) for name, tensor in self.shapes.items()}

    @cached_property
    def expert_bytes(self) -> tuple[int, ...]:
        """Bytes of each routed expert; empty if there are none."""
        totals: dict[int, int] = {}
        for name, nbytes in self.nbytes.items():
            if (expert := expert_of(name)) is not None:
                totals[expert] = totals.get(expert, 0) + nbytes
        return tuple(totals[expert] for expert in range(len(totals)))

    @cached_property
    def shared_expert_bytes(self) -> int:
        """Bytes used by all tokens beside routed experts, which a card computes while a host runs
        its experts."""
        return sum(size for name, size in self.nbytes.items() if _SHARED.search(name))

    @cached_property
    def layout(self) -> int:
        """A number shared by units whose parameters have the same names and shapes."""
        shapes = tuple((name, tensor.shape) for name, tensor in self.shapes.items())
        return _layouts.setdefault(shapes, len(_layouts))


#: Names and shapes of parameters -> :attr:`InFormats.layout`.
_layouts: dict[tuple[tuple[str, torch.Size], ...], int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """One placeable piece.

    Attributes:
        name: as the checkpoint names it, e.g. ``"model.layers.3"``.
        layer: the decoder layer's index, or None for embedding and head.
        build: makes the module on the default device, uninitialised; its ``forward`` takes
            ``(x, batch, cache_layer)``.
        like: what it has in common with equal units.
        in_formats: returns the spec with its matrices in other formats, which it requests by their
            names and sizes.
        find_sources: returns :attr:`sources`.
        tied: parameter -> ``(unit index, parameter)`` whose tensor it shares on one device.
        matrices: matrix's module -> its name in the checkpoint, which determines its format.
        unused: modules that a checkpoint may also have and that the model doesn't use.
        kind: what affects the memory of its forward call beside the shapes, e.g. a window; layers
            that agree in both are planned as one.
        is_mtp: whether it is an MTP head (``exkv.models.mtp``), which takes embeddings beside
            hidden states, and whose output is partly kept between calls.
    """

    name: str
    layer: int | None
    build: Callable[[], nn.Module]
    like: InFormats
    in_formats: Callable[[FormatOf], UnitSpec]
    find_sources: Callable[[], tuple[Source, ...]]
    tied: dict[str, tuple[int, str]]
    matrices: Mapping[str, str]
    unused: tuple[str, ...] = ()
    kind: Hashable = None
    is_mtp: bool = False

    @property
    def shapes(self) -> Mapping[str, torch.Tensor]:
        """The module's parameters -> shape and dtype, on ``meta``."""
        return self.like.shapes

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where the parameters come from, one source for each. A load needs them, a plan doesn't,
        so they are made on first use."""
        return self.find_sources()

    @property
    def classes(self) -> dict[str, list[str]]:
        """Modules of a layer's integer matrices in groups, by the classes of a mix; see
        ``exkv.weights.on_load.class_of``."""
        return self.classes_named(filter(None, map(class_of, self.matrices.values())))

    def classes_named(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Likewise by these names of a mix, which may cover only some experts."""
        found, name_of = dict[str, list[str]](), name_among(names)
        for path, layer in self.matrices.items() if self.layer is not None else ():
            name = name_of(class_of(layer), layer) if f"{path}.codes" in self.shapes else None
            if name is not None:
                found.setdefault(name, []).append(path)
        return found


class Pattern:
    """What units with equal modules have in common, so that it is made once.

    Args:
        build: makes one of these modules with its matrices as floats.

    Attributes:
        sizes: matrix's module -> size.
        in_formats: names of the matrices' formats, in this order -> the module with them.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        with torch.device("meta"):
            self.sizes = {each: matrix.size for each, matrix in _matrices(build())}
        self.in_formats: dict[tuple[str, ...], InFormats] = {}


def unit_spec(
    name: str,
    build: Callable[[], nn.Module],
    rename: Callable[[str], str],
    *,
    formats: FormatOf,
    layer: int | None = None,
    tied: Mapping[str, tuple[int, str]] = MappingProxyType({}),
    kind: Hashable = None,
    made: Callable[[nn.Module], list[Source]] | None = None,
    pattern: Pattern | None = None,
    unused: tuple[str, ...] = (),
    is_mtp: bool = False,
    names: Mapping[str, str] | None = None,
    fused: Sequence[Fused] = (),
) -> UnitSpec:
    """A spec whose checkpoint names follow from the module's own.

    Args:
        build: makes the module with its matrices as floats; ``formats`` decides what they become.
        rename: from a matrix's module, or any other parameter, to its name in the checkpoint.
        tied: matrix's module -> ``(unit index, module)`` whose tensors it shares on one device.
        made: from the module, on ``meta``, to its own sources, which take precedence.
        pattern: of units with modules equal to this one; None if there are no others.
        unused: as the checkpoint names them.
        names: of the matrices' modules in the checkpoint; None to use ``rename``.
        fused: matrices that the checkpoint has as one, under names that take precedence.
    """
    pattern = pattern or Pattern(build)
    if names is None:
        names = {each: rename(each) for each in pattern.sizes}
        names |= {part: each.name for each in fused for part in each.parts}
    whole = [(each, formats(each.name, each.size(pattern.sizes))) for each in fused]
    parts = dict[str, WeightFormat]()
    for one, format in whole:
        parts |= one.formats(format, one.size(pattern.sizes))
    chosen = {
        each: parts.get(each) or formats(names[each], size) for each, size in pattern.sizes.items()
    }

    def in_formats() -> nn.Module:
        module = build()
        for each, matrix in _matrices(module):
            try:
                matrix.use_format(chosen[each])
            except ValueError as error:
                raise ValueError(f"{rename(each)}: {error}") from None
        return module

    combination = _format_names(chosen.values())
    first = combination not in pattern.in_formats
    if first:
        with torch.device("meta"):
            module = in_formats()
        pattern.in_formats[combination] = InFormats(module, dict(module.named_parameters()))
    alike = pattern.in_formats[combination]

    def in_other_formats(formats: FormatOf) -> UnitSpec:
        return unit_spec(
            name,
            build,
            rename,
            formats=formats,
            layer=layer,
            tied=tied,
            kind=kind,
            made=made,
            pattern=pattern,
            unused=unused,
            is_mtp=is_mtp,
            names=names,
            fused=fused,
        )

    spec = UnitSpec(
        name=name,
        layer=layer,
        build=in_formats,
        like=alike,
        in_formats=in_other_formats,
        find_sources=cache(partial(_sources, alike, rename, made, whole, pattern.sizes)),
        tied={
            f"{each}.{tensor}": (index, f"{other}.{tensor}")
            for each, (index, other) in tied.items()
            for tensor in chosen[each].names
        },
        matrices=names,
        unused=unused,
        kind=(kind, *combination),
        is_mtp=is_mtp,
    )
    if first:
        _ = spec.sources  # raises where the checkpoint can't have such matrices
    return spec


def _format_names(formats: Collection[WeightFormat]) -> tuple[str, ...]:
    """Names of the formats; memoized."""
    names = {id(format): format.name for format in {id(each): each for each in formats}.values()}
    return tuple(names[id(format)] for format in formats)


def _sources(
    alike: InFormats,
    rename: Callable[[str], str],
    made: Callable[[nn.Module], list[Source]] | None,
    fused: Sequence[tuple[Fused, WeightFormat]],
    sizes: Mapping[str, Size],
) -> tuple[Source, ...]:
    sources = [] if made is None else made(alike.module)
    for whole, format in fused:
        sources.append(whole.source(format, sizes))
        sources += whole.bias_source(alike.shapes, whole.size(sizes))
    known = {parameter for source in sources for parameter in source.parameters}
    sources += [
        format_source(each, rename(each), matrix.format, matrix.size)
        for each, matrix in _matrices(alike.module)
        if f"{each}.{matrix.format.names[0]}" not in known
    ]
    known = {parameter for source in sources for parameter in source.parameters}
    others = (each for each in alike.shapes.items() if each[0] not in known)
    return (*sources, *(tensor_source(p, rename(p), like) for p, like in others))


def _matrices(module: nn.Module) -> Iterator[tuple[str, Matrix]]:
    return ((name, part) for name, part in module.named_modules() if isinstance(part, Matrix))


def unit_specs(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the config's architecture, in the order in which a token passes through them.

    Raises:
        ValueError: an unknown architecture, or a matrix that can't have its format.
    """
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise ValueError(
            f"{config.path or 'the config'}: architecture {config.architecture!r} is not "
            f"supported; known are: {', '.join(sorted(FAMILIES))}"
        )
    with _naming(config), headers_read_once():
        return family.units(config, dtype)


def quantized_anew(
    specs: Iterable[UnitSpec], config: ModelConfig, dtype: torch.dtype
) -> list[UnitSpec]:
    """The units of a config, from those of one that differs only in ``quantization``; errors as in
    :func:`unit_specs`."""
    with _naming(config):
        formats = formats_of(config, dtype)
        return [spec.in_formats(formats) for spec in specs]


@contextlib.contextmanager
def _naming(config: ModelConfig) -> Iterator[None]:
    """Within the block, errors name the config."""
    try:
        yield
    except ValueError as error:
        if config.path is None or str(config.path) in str(error):
            raise
        raise ValueError(f"{config.path}: {error}") from None


class PlacedUnit(Protocol):
    """A unit in a forward call: a :class:`Unit`, or one with adapters."""

    @property
    def index(self) -> int: ...

    @property
    def spec(self) -> UnitSpec: ...

    @property
    def device(self) -> torch.device | None: ...

    @property
    def module(self) -> nn.Module | None: ...

    @property
    def host_experts(self) -> frozenset[int]: ...


class Unit:
    """A spec in one model: unplaced, placed, or loaded. A change advances the epoch.

    Attributes:
        shapes: parameter -> the shape and dtype of its weights, on ``meta``.
        nbytes: parameter -> bytes of its weights on a device.
        device: where the unit is placed, or None while it is unplaced.
        module: its weights on that device, or None until they are read.
        host_experts: routed experts whose weights lie in host memory while the rest is on
            ``device``.
        low_rank: its adapters: name -> path of a layer -> matrices.
    """

    def __init__(self, index: int, spec: UnitSpec) -> None:
        self.index = index
        self.spec = spec
        self.device: torch.device | None = None
        self.module: nn.Module | None = None
        self.host_experts: frozenset[int] = frozenset()
        self.low_rank: Mapping[str, Mapping[str, LowRank]] = {}
        self.shapes = spec.shapes
        self.nbytes = spec.like.nbytes

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        advance()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def expert_bytes(self) -> tuple[int, ...]:
        """Bytes of each routed expert; empty for a unit without any."""
        return self.spec.like.expert_bytes

    @property
    def shared_expert_bytes(self) -> int:
        """As in :class:`InFormats`."""
        return self.spec.like.shared_expert_bytes

    @property
    def layout(self) -> int:
        """As in :class:`InFormats`."""
        return self.spec.like.layout

    @property
    def host_weights(self) -> int:
        """Bytes of the experts that lie in host memory while the rest is on a card."""
        experts = self.expert_bytes if self.host_experts else ()
        return sum(experts[expert] for expert in self.host_experts)

    def class_bytes(self, classes: Mapping[str, Sequence[str]]) -> dict[str, int]:
        """Bytes of the matrices of each class, by their modules."""
        of_module: dict[str, int] = {}
        for name, nbytes in self.nbytes.items():
            path, _, tensor = name.rpartition(".")
            if tensor != "bias":
                of_module[path] = of_module.get(path, 0) + nbytes
        return {name: sum(of_module[path] for path in paths) for name, paths in classes.items()}

    def read(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        shared: Mapping[str, torch.Tensor],
        made: Mapping[str, torch.Tensor] = MappingProxyType({}),
        staging: ExpertStaging | None = None,
        resident: float = 1.0,
    ) -> None:
        """Read the weights to the device, all of them or none; those of :attr:`host_experts` to
        host memory.

        Args:
            shared: parameters whose tensor is on the device already, for tied weights.
            made: precomputed parameters on the host, used in place of conversion by formats.
            staging: buffers through which experts come to the device from host memory.
            resident: the share of mapped experts that host memory has room for; below 1, calls
                read experts ahead.

        Raises:
            torch.OutOfMemoryError: the device is full; the unit is as before.
        """
        there = (s for s in self.spec.sources if not shared.keys() >= set(s.parameters))
        sources = [with_precomputed(source, made) for source in there]
        on_host = {name for name in self.shapes if expert_of(name) in self.host_experts}
        read = read_parameters(checkpoint, sources, self.shapes, device, on_host, resident)
        with torch.device("meta"):
            module = self.spec.build()
        module.load_state_dict({**shared, **read}, assign=True)
        if device.type != "cpu":
            lay_on_host(module, self.host_experts, staging)
        for mixture in mixtures(module):
            mixture.from_disk = resident < 1
        self.device, self.module = device, module

    def put_on_host(self, experts: Collection[int]) -> None:
        """Set :attr:`host_experts`, and, if the unit is read, have its module find their weights
        there. To be called when experts are moved.

        Raises:
            ValueError: as in :meth:`check_experts`.
        """
        self.check_experts(experts)
        self.host_experts = frozenset(experts)
        if self.module is not None and self.device != devices.CPU:
            lay_on_host(self.module, self.host_experts)

    def check_experts(self, experts: Collection[int]) -> None:
        """Raise ValueError unless these are routed experts of the unit."""
        count = len(self.expert_bytes) if experts else 0
        if wrong := sorted(each for each in experts if not 0 <= each < count):
            has = f"experts 0 to {count - 1}" if count else "no routed experts"
            raise ValueError(f"{self.name} has {has}: {wrong[0]} can't be in host memory")

    def release(self) -> None:
        """Unplace it, and free the weights."""
        self.device = self.module = None
        self.low_rank = {}


def largest_host_expert(units: Iterable[Unit]) -> int:
    """Bytes of the largest expert in units that have experts in host memory; 0 for none."""
    return max((max(unit.expert_bytes) for unit in units if unit.host_experts), default=0)


def staging_bytes(units: Iterable[Unit], device_type: str) -> int:
    """Bytes of the buffers through which experts come to a card from host memory; each card with
    units that have experts there holds them while it holds such a unit.

    Args:
        units: all of the model's.
    """
    largest = largest_host_expert(units)
    return staging_bytes_of(largest, device_type) if largest else 0
