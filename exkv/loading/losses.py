"""The loss of each unit in each weight format: measured once, and stored in a file.

With a text the loss of a unit is the KL divergence of the model's next-token probabilities when
this unit alone is in the format, in nats a token; of an MTP head that of its own probabilities, so
that its proposals count as much as the model's tokens. Every unit runs on the host, on the hidden
states of the units before it, and its output in each format is compared with that of its original
weights. How far such an error moves the logits is measured once a unit: its output in one format
also passes through all following units. A layer's matrices are compared in the same way, class by
class with the others unchanged, and divide the whole layer's loss in proportion. Without a text a
sample of each matrix's rows is rounded, and the loss is the weights' own error. Units are read one
by one; nothing is loaded. A config without weights gets the loss of normally distributed ones.

The figures are stored in ``exkv-losses.json``: see ``exkv.loading.measured_file``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar, cast

import torch
from torch import nn

from exkv.batch import Batch, Lengths
from exkv.cache import NoCacheLayer
from exkv.checkpoint import Checkpoint, ModelConfig, open_checkpoint
from exkv.devices import CPU
from exkv.layers.attention import Attend
from exkv.models import Transformer, Unit
from exkv.models.decoder import Head
from exkv.models.mtp import MTPHead, guesses
from exkv.models.units import UnitSpec
from exkv.text import Tokenizer
from exkv.weights import formats_of
from exkv.weights.choice import Losses
from exkv.weights.format import Size
from exkv.weights.hadamard import HADAMARD, transformed
from exkv.weights.on_load import (
    AS_STORED,
    BITS,
    OPTIONS,
    OnLoad,
    class_of,
    leaves_open,
    with_weights,
)
from exkv.weights.rounding import squared_error
from exkv.weights.settings import EMBEDDING, HEAD

from .measured_file import MeasuredFile, digest

logger = logging.getLogger(__name__)
T = TypeVar("T")

FILE = "exkv-losses.json"
#: Version of the file and of the method of measuring; figures of another one are measured anew.
_VERSION = 5
#: Tokens of a text that are used: their hidden states are in memory once for each unit.
MOST_TOKENS = 512
_FEWEST_TOKENS = 32
#: Sampled rows of a matrix, rounded to measure its loss.
_ROWS = 64
#: The option whose output passes through all following units: with more bits its error would come
#: near float32's, and with fewer the divergence would no longer grow as the error's square.
_FOLLOWED = "int6"


def losses_of(model: Transformer, text: str | None = None) -> Losses:
    """The losses of a model of float weights in each option.

    Args:
        text: in the model's language, a few hundred words; the first 512 tokens count.

    Raises:
        ValueError: the text is too short.
        CheckpointError: the files are damaged, or contradict the config.
    """
    checkpoint = opened(model)
    if checkpoint is None:
        return of_weights(model, None)
    with checkpoint:
        ids = None if text is None else ids_of(model.config, text)
        key = "weights" if ids is None else f"text {digest(ids)}"
        if leaves_open(model.config):
            key += f" {HADAMARD}"

        def measured() -> Losses:
            begin(model, checkpoint)
            return (
                of_weights(model, checkpoint) if ids is None else _of_text(model, checkpoint, ids)
            )

        return kept(model, checkpoint.fingerprint, key, measured)


def opened(model: Transformer) -> Checkpoint | None:
    """The model's checkpoint; None for a config alone."""
    try:
        return None if model.config.path is None else open_checkpoint(model.config.path)
    except FileNotFoundError:
        return None


def begin(model: Transformer, checkpoint: Checkpoint) -> None:
    """Prepare to read units one by one; errors as of :func:`losses_of`."""
    logger.info("%s: measuring what fewer bits cost", model.config.path)
    checkpoint.expect(model.stored_tensors(), model.unused_modules())


def ids_of(config: ModelConfig, text: str) -> list[int]:
    assert config.path is not None
    ids = Tokenizer(config.path).encode(text)[:MOST_TOKENS]
    if len(ids) < _FEWEST_TOKENS:
        raise ValueError(
            f"the calibration text has {len(ids)} tokens; give a few hundred words, at least "
            f"{_FEWEST_TOKENS} tokens"
        )
    return ids


def kept(
    model: Transformer,
    fingerprint: str,
    key: str,
    measured: Callable[[], Losses],
    integers: Sequence[str] = tuple(BITS),
) -> Losses:
    """Read losses by key from the checkpoint's file; if it has none, measure and store them."""
    units, options = [unit.name for unit in model.units], (AS_STORED, *integers)
    if options != OPTIONS:
        key += f" {' '.join(integers)}"

    def checked(values: Mapping[str, Any]) -> Losses:
        return _checked(values, units, options)

    return kept_as(model, fingerprint, key, measured, checked, asdict)


def kept_as(
    model: Transformer,
    fingerprint: str,
    key: str,
    measured: Callable[[], T],
    checked: Callable[[Any], T],
    written: Callable[[T], Any],
) -> T:
    """:func:`kept` for figures of any kind.

    Args:
        checked: parses them from JSON values, as for :class:`MeasuredFile`.
        written: turns them into JSON values.
    """
    assert model.config.path is not None
    file = MeasuredFile(model.config.path, FILE, fingerprint, _VERSION)
    key += " with mtp" * model.config.mtp
    found = file.read(key, checked)
    if found is None:
        found = measured()
        file.write(key, written(found))
    return found


# By the weights' own error ----------------------------------------------------------------------


def of_weights(model: Transformer, checkpoint: Checkpoint | None) -> Losses:
    """Losses by the error of a checkpoint's weights; None for normally distributed ones."""
    units: dict[str, dict[str, float]] = {}
    alike: dict[Hashable, dict[str, float]] = {}
    for spec in model.specs_kept(AS_STORED):
        # Without a checkpoint, layers of one kind have the same loss.
        key = spec.name if checkpoint or spec.layer is None else (spec.kind, spec.like.layout)
        if key not in alike:
            alike[key] = _unit_loss(model, spec, checkpoint)
        units[spec.name] = alike[key]
    return Losses(units=units)


def _unit_loss(
    model: Transformer, spec: UnitSpec, checkpoint: Checkpoint | None
) -> dict[str, float]:
    errors, squares = dict.fromkeys(OPTIONS, 0.0), 0.0
    for layer, size in _matrices(spec):
        share = 1.0
        if checkpoint is not None:
            rows = _sample(checkpoint.tensor(f"{layer}.weight"))
            share = size[0] / len(rows)
            squares += share * rows.square().sum().item()
        else:
            squares += math.prod(size)
        for option, format in _made_of(model, layer, size).items():
            group = format.group, format.scale
            if checkpoint is not None:
                stored = transformed(rows, format.hadamard)
                errors[option] += share * squared_error(stored, format.bits, *group)
            else:
                errors[option] += math.prod(size) * _normal_loss(format.bits, *group)
    if checkpoint is not None:
        checkpoint.unmap()
    return {option: error / (squares or 1.0) for option, error in errors.items()}


def _matrices(spec: UnitSpec) -> Iterator[tuple[str, Size]]:
    """Names of the unit's matrices in the checkpoint, and their sizes."""
    for source in spec.sources:
        for name, tensor in source.stored.items():
            if len(tensor.shape) == 2:
                yield name.removesuffix(".weight"), tensor.shape


def _made_of(model: Transformer, layer: str, size: Size) -> dict[str, OnLoad]:
    """Option -> format, for the options that turn this matrix into integers."""
    made = {option: _formats(model.config, model.dtype, option)(layer, size) for option in BITS}
    return {option: format for option, format in made.items() if isinstance(format, OnLoad)}


def _sample(matrix: torch.Tensor) -> torch.Tensor:
    """Sample rows at even distances, as float32."""
    step = max(len(matrix) // _ROWS, 1)
    return matrix[::step].float()


@functools.cache
def _normal_loss(bits: int, group: int, scale: torch.dtype) -> float:
    """The share of squares that normally distributed weights lose."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    return squared_error(weight, bits, group, scale) / weight.square().sum().item()


# By the divergence on a text --------------------------------------------------------------------


def _of_text(model: Transformer, checkpoint: Checkpoint, ids: Sequence[int]) -> Losses:
    """Measure in float32, so that only the rounding to integers makes a difference."""
    return TextLosses(model.config, checkpoint, ids).measured()


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of a unit's output in each option, and with each class of its matrices alone."""

    unit: dict[str, float]
    matrices: dict[str, dict[str, float]] = field(default_factory=dict)

    def times(self, scale: float) -> Errors:
        return Errors(
            {option: scale * error for option, error in self.unit.items()},
            {n: {o: scale * e for o, e in each.items()} for n, each in self.matrices.items()},
        )

    def adding_up(self) -> Errors:
        """Scale the matrices' errors so that in every option they add up to the unit's."""
        sums = {o: sum(each[o] for each in self.matrices.values()) for o in self.unit}
        share = {option: error / (sums[option] or 1.0) for option, error in self.unit.items()}
        return Errors(
            self.unit,
            {n: {o: share[o] * e for o, e in each.items()} for n, each in self.matrices.items()},
        )


def has_its_own(spec: UnitSpec) -> bool:
    """Whether a layer's matrices have names of their own, as an MTP head's always do; the two
    halves of a layer share theirs."""
    if spec.is_mtp:
        return True
    names = (name for name in spec.matrices.values() if spec.layer is not None and class_of(name))
    return all(f".{spec.layer}." in name for name in names)


@contextlib.contextmanager
def _replaced(module: nn.Module, other: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Within the context, the module has these submodules of another one like it."""
    before = {path: module.get_submodule(path) for path in paths}
    try:
        for path in paths:
            module.set_submodule(path, other.get_submodule(path))
        yield
    finally:
        for path, part in before.items():
            module.set_submodule(path, part)


class TextLosses:
    """Runs a text through the units, in each option.

    Args:
        integers: the options beside weights as stored.

    Attributes:
        followed: the option whose output passes through all following units.
    """

    followed = _FOLLOWED

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ids: Sequence[int],
        integers: Sequence[str] = tuple(BITS),
    ) -> None:
        self.integers = integers
        self.checkpoint, self.ids = checkpoint, torch.tensor([ids])
        self.model = Transformer(config, dtype=torch.float32)
        self._embedded = torch.empty(0)

    def measured(self) -> Losses:
        """The divergence for every unit in each option, in nats a token."""
        found = self.scaled()
        return Losses(
            units={name: each.unit for name, each in found.items()},
            matrices={name: each.matrices for name, each in found.items() if each.matrices},
        )

    @torch.no_grad()
    def scaled(self) -> dict[str, Errors]:
        """:meth:`measured` by unit name.

        The divergence grows as the square of a small error. So it is measured in one option,
        ``followed``, and scaled for the others by the ratio of their outputs' squared errors.
        """
        errors: dict[str, Errors] = {}
        *units, head = self.model.units
        x, followed = self.ids, dict[str, torch.Tensor]()
        guessed = dict[str, tuple[torch.Tensor, torch.Tensor]]()
        for unit in units:
            module = self.read(unit.index, AS_STORED)
            y = self.run(module, x)
            if not unit.spec.is_mtp:
                for name, state in followed.items():
                    followed[name] = self.run(module, state)
            errors[unit.name], found = self.of_unit(unit, module, x, y)
            del module
            if unit.spec.is_mtp:  # nothing behind it reads its output
                guessed |= {unit.name: (y, found)} if found is not None else {}
                continue
            if found is not None:
                followed[unit.name] = found
            self._embedded = self._embedded if unit.index else y
            x = y
        module = self.read(head.index, AS_STORED)
        logits = self.run(module, x)
        lost = {n: _divergence(logits, self.run(module, s)) for n, s in followed.items()}
        project = cast("Head", module).project
        lost |= {n: _divergence(*map(project, states)) for n, states in guessed.items()}
        errors[head.name], found = self.of_unit(head, module, x, logits)
        if found is not None:
            lost[head.name] = _divergence(logits, found)
        scale = {n: kl / (errors[n].unit[self.followed] or 1.0) for n, kl in lost.items()}
        return {name: each.times(scale.get(name, 0.0)) for name, each in errors.items()}

    def run(self, module: nn.Module, x: torch.Tensor, store: Attend | None = None) -> torch.Tensor:
        store = NoCacheLayer() if store is None else store
        if isinstance(module, MTPHead):
            return guesses(module, self._embedded, x, self.batch, store)
        y: torch.Tensor = module(x, self.batch, store)
        return y

    @property
    def batch(self) -> Batch:
        """The text in one call."""
        lengths = Lengths.uniform(1, 0, self.ids.shape[1])
        return Batch.on(CPU, lengths, self.model.rotary, torch.float32)

    def read(self, index: int, option: str) -> nn.Module:
        """Read a unit with its weights in one option."""
        unit = Unit(index, self.model.specs_kept(option)[index])
        unit.read(self.checkpoint, CPU, {})
        self.checkpoint.unmap()
        assert unit.module is not None
        return unit.module

    def of_unit(
        self, unit: Unit, module: nn.Module, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[Errors, torch.Tensor | None]:
        """The errors of its output y, and the output in ``followed``, if any.

        Args:
            module: the unit with its original weights.
        """
        errors = Errors(unit={AS_STORED: 0.0})
        specs = self.model.specs_kept(self.followed)
        classes = specs[unit.index].classes if all(map(has_its_own, specs)) else {}
        for option in self.integers:
            made = self.read(unit.index, option)
            found = self.run(made, x)
            errors.unit[option] = relative(found, y)
            if option == self.followed:
                followed = found
            for name, paths in classes.items():
                with _replaced(module, made, paths):
                    error = relative(self.run(module, x), y)
                errors.matrices.setdefault(name, {AS_STORED: 0.0})[option] = error
        return errors.adding_up(), followed


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Each token's squared error as a share of its squares, averaged over the tokens."""
    error = (found - expected).square().sum(-1)
    return float((error / expected.square().sum(-1).clamp(min=1e-30)).mean())


def _divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Kullback-Leibler divergence of the probabilities of logits (1, T, V), in nats a token."""
    lost = 0.0
    for p, q in zip(expected[0], found[0], strict=True):  # doubles of one token's
        likely = p.double().log_softmax(-1)
        lost += (likely.exp() * (likely - q.double().log_softmax(-1))).sum().item()
    return max(lost / expected.shape[1], 0.0)


# Kept in a file ---------------------------------------------------------------------------------


def _checked(values: Mapping[str, Any], units: Sequence[str], options: Sequence[str]) -> Losses:
    """Validate figures read from a file; raises ValueError, or Python's own errors for malformed
    ones, unless they are for these units and options."""
    found = Losses(**{each.name: values[each.name] for each in fields(Losses)})
    matrices = [each for unit in found.matrices.values() for each in unit.values()]
    stays = [AS_STORED]
    tables = [(found.units.keys(), units)]
    tables += [(each.keys(), options) for each in matrices]
    tables += [(e.keys(), stays if len(e) == 1 else options) for e in found.units.values()]
    for names, expected in tables:
        if set(names) != set(expected):
            raise ValueError(f"it is for {', '.join(map(str, names))}")
    if not found.matrices.keys() <= set(units):
        raise ValueError(f"it has matrices of {', '.join(map(str, found.matrices))}")
    numbers = [n for each in (*found.units.values(), *matrices) for n in each.values()]
    if not all(isinstance(n, float) and 0 <= n < math.inf for n in numbers):
        raise ValueError("a loss isn't a number of at least 0")
    return found


@functools.lru_cache(maxsize=8)
def _formats(config: ModelConfig, dtype: torch.dtype, option: str) -> Any:
    """The formats of a model whose units all use one option."""
    layers = (f"model.layers.{index}" for index in range(config.cache_layers))
    units = (EMBEDDING, *layers, HEAD)
    return formats_of(with_weights(config, dict.fromkeys(units, option)), dtype)
