"""Calibrated rounding: run a text through the model, unit by unit, and round each matrix for the
inputs that it gets.

Each unit runs in float32, on the host or on a device, on the whole text at once, and twice: first
with float weights, on the hidden states of the float model; then on those of the rounded model. In
the second pass a matrix is rounded as soon as its inputs arrive, and the pass continues with the
rounded values. So the second moments by which ``exkv.weights.feedback`` rounds are those of inputs
that have passed through everything rounded before, in the same layer too, and the target of a
matrix is its output in the float pass. One unit of floats is in memory at a time, beside the text's
hidden states and its inputs in this unit.

An expert is rounded for the tokens routed to it. Where these are few, others are added.

A matrix whose format has a Hadamard transform is rounded as it will be stored, W H for inputs x H,
whose moments are H E[x x^T] H. The unit's own matrix becomes the dequantized values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from exkv.batch import Batch, Lengths
from exkv.cache import NoCacheLayer
from exkv.checkpoint import Checkpoint, ModelConfig
from exkv.devices import CPU
from exkv.layers.linear import Linear
from exkv.layers.mlp import Experts
from exkv.models import Transformer, Unit
from exkv.models.expert_usage import ExpertUsage, UsageCounter
from exkv.ops.experts import Routing
from exkv.text import Tokenizer
from exkv.weights import GroupFormat
from exkv.weights.feedback import cholesky_factor, compensated, rounded_with_factor
from exkv.weights.hadamard import transformed
from exkv.weights.on_load import OnLoad
from exkv.weights.rounding import Rounded

#: Rows of a text that are used if no other number is given, and tokens of a row. On other text
#: SmolLM2 in int4 diverges a fifth less by 48 rows than by 16; with less than one row the demo
#: model comes out worse than without a text.
ROWS, TOKENS = 48, 512
#: Fewest tokens that an expert is rounded for, where the text has as many.
_OF_EXPERT = 256


#: Gives the formats that a unit's matrices are rounded to, by module path.
FormatsByPath = Callable[[Unit], Mapping[str, GroupFormat]]
#: A unit's matrices in integers, by module path.
Found = dict[str, Rounded]


def calibration_rows(config: ModelConfig, text: str, rows: int | None = None) -> torch.Tensor:
    """The text's first tokens, in rows (B, 512).

    Args:
        rows: number of rows; None for 48, or as many as the text fills.

    Raises:
        ValueError: the text is too short.
    """
    count = ROWS if rows is None else rows
    if config.path is None:
        raise ValueError("a text needs the model's tokenizer, and the config came from no folder")
    ids = Tokenizer(config.path).encode(text)[: count * TOKENS]
    if len(ids) < TOKENS:
        raise ValueError(
            f"the calibration text has {len(ids)} tokens; give a few thousand words, at least "
            f"{TOKENS} tokens (the first {count * TOKENS:,} are used)"
        )
    if rows is not None and len(ids) < count * TOKENS:
        raise ValueError(
            f"the calibration text has {len(ids):,} tokens, and {rows} rows of {TOKENS} take "
            f"{count * TOKENS:,}: give a longer text, or at most {len(ids) // TOKENS} rows"
        )
    return torch.tensor(ids[: len(ids) // TOKENS * TOKENS]).view(-1, TOKENS)


def rounded_units(
    config: ModelConfig,
    checkpoint: Checkpoint,
    ids: torch.Tensor,
    formats: FormatsByPath,
    device: torch.device = CPU,
    known: Callable[[Unit], Found] = lambda _: {},
    usage: dict[str, ExpertUsage] | None = None,
    rounding_of: Callable[..., Any] | None = None,
) -> Iterator[Found]:
    """Round unit after unit, in the order of the model.

    Args:
        config: of the float weights.
        ids: int64 (B, T).
        device: where the units run.
        known: a unit's matrices that were rounded before, for the same text.
        usage: filled with how often each expert is chosen, by unit name.
        rounding_of: makes another kind of :class:`Rounding`, whose ``found`` is yielded.

    Raises:
        ValueError: the text's hidden states are not finite; names the matrix.
    """
    model = Transformer(replace(config, quantization=None), dtype=torch.float32)
    batch = Batch.on(
        device, Lengths.uniform(len(ids), 0, ids.shape[1]), model.rotary, torch.float32
    )
    floats = x = ids.to(device)
    for unit in model.units[:-1]:
        if unit.spec.is_mtp:
            yield {}  # the text's hidden states continue after it
            continue
        unit.read(checkpoint, device, {})
        checkpoint.unmap()
        rounding = (rounding_of or Rounding)(unit, formats(unit), known(unit))
        with torch.no_grad(), rounding:
            rounding.records = True
            with UsageCounter({unit.name: rounding.module}) as counter:
                floats = rounding.module(floats, batch, NoCacheLayer())
                if usage is not None:
                    usage |= counter.take()
            rounding.records = False
            rounding.put_known()
            x = rounding.module(x, batch, NoCacheLayer()) if rounding.formats else floats
        unit.release()
        yield rounding.found
    yield {}


class CalibratedUnits:
    """The integers of a model that quantizes on load. Units are read in order; reading an earlier
    one runs the text from the start.

    Args:
        model: its units determine which matrices become integers.
        ids: the text, int64 (B, T).
    """

    def __init__(self, model: Transformer, ids: torch.Tensor) -> None:
        self.model, self.ids = model, ids
        self.formats = [integers_of(unit) for unit in model.units]
        self._checkpoint: Checkpoint | None = None
        self._under_way: Iterator[tuple[int, Found]] = iter(())
        self._index, self._found = 0, Found()

    def parameters(self, unit: Unit, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        """A unit's parameters that hold integers, on the host."""
        if unit.spec.layer is None:
            return {}
        if checkpoint is not self._checkpoint or unit.index < self._index:
            found = rounded_units(self.model.config, checkpoint, self.ids, self._formats_of)
            self._checkpoint, self._under_way = checkpoint, enumerate(found)
            self._index = -1
        while self._index < unit.index:
            self._index, self._found = next(self._under_way)
        formats = self.formats[unit.index]
        return {
            f"{path}.{name}": tensor
            for path, made in self._found.items()
            for name, tensor in formats[path].pack(made.codes, made.scale, made.zero).items()
        }

    def done(self) -> None:
        """Free the hidden states and the last unit's integers."""
        self._checkpoint, self._under_way = None, iter(())
        self._found = {}

    def _formats_of(self, unit: Unit) -> Mapping[str, GroupFormat]:
        return self.formats[unit.index]


def integers_of(unit: Unit) -> dict[str, GroupFormat]:
    """The formats of a decoder layer's matrices that loading turns into integers."""
    if unit.spec.layer is None:
        return {}
    with torch.device("meta"):
        module = unit.spec.build()
    linears = ((path, part) for path, part in module.named_modules() if isinstance(part, Linear))
    return {path: part.format for path, part in linears if isinstance(part.format, OnLoad)}


@dataclass(slots=True)
class _Inputs:
    """Memo of the last inputs, which adjacent projections share."""

    x: torch.Tensor | None = None
    block: int = 0
    root: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class Rounding(contextlib.ExitStack):
    """Context in which a unit's matrices are rounded as soon as their inputs arrive.

    Args:
        known: matrices rounded before.

    Attributes:
        records: whether this is the float pass, whose inputs are kept for the second one.
        found: rounded matrices so far.
    """

    def __init__(
        self,
        unit: Unit,
        formats: Mapping[str, GroupFormat],
        known: Mapping[str, Rounded] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        assert unit.module is not None
        self.unit, self.module, self.formats = unit, unit.module, formats
        self.records, self.found = False, Found(known)
        self._floats: dict[str, torch.Tensor] = {}
        self._last = _Inputs()

    def __enter__(self) -> Rounding:
        for path, module in self.module.named_modules():
            hook: Callable[..., None] | None = None
            if path in self.formats:
                hook = partial(self._round, path)
            elif isinstance(module, Experts):
                hook = partial(self._round_experts, path)
            if hook is not None:
                self.callback(module.register_forward_pre_hook(hook).remove)
        return self

    def _round(self, path: str, linear: Linear, inputs: tuple[Any, ...]) -> None:
        x = linear.aligned(*inputs)
        if self.records:
            self._floats[path] = x
        if self.records or path in self.found:
            return
        block, weight = self.block_of(path), linear.get_parameter("weight").detach()
        try:
            root = self._root(x, block)
        except ValueError as error:
            raise ValueError(f"{self.unit.name}.{path}: {error}") from None
        floats = self._floats.pop(path).flatten(0, -2)
        rows, floats, weight = (
            transformed(each, block) for each in (x.flatten(0, -2), floats, weight)
        )
        self.found[path] = self.made(path, linear, root, compensated(root, weight, rows, floats))

    def block_of(self, path: str) -> int:
        """Block size of the matrix's Hadamard transform, in inputs; 0 for none."""
        return self.formats[path].hadamard

    def made(self, path: str, linear: Linear, root: torch.Tensor, weight: torch.Tensor) -> Rounded:
        """Round a matrix; its layer continues with the dequantized values."""
        found = self.round(path, root, weight)
        put_weight(linear, values_of(found, self.formats[path]))
        return found.map(torch.Tensor.cpu)

    def put_known(self) -> None:
        """Set matrices that were rounded before to their dequantized values."""
        for path, made in self.found.items():
            linear = self.module.get_submodule(path)
            device = linear.get_parameter("weight").device
            put_weight(linear, values_of(made, self.formats[path]).to(device))

    def round(self, path: str, root: torch.Tensor, weight: torch.Tensor) -> Rounded:
        """Round a matrix with the root of its inputs' moments."""
        kept = self.formats[path]
        return rounded_with_factor(root, weight, kept.bits, kept.group, kept.scale, kept.zeros)

    def _root(self, x: torch.Tensor, block: int) -> torch.Tensor:
        """Root of the moments of inputs x, transformed in blocks of ``block``."""
        if self._last.x is not x or self._last.block != block:
            rows = transformed(x.flatten(0, -2), block)
            self._last = _Inputs(x, block, cholesky_factor(rows.T @ rows / len(rows)))
        return self._last.root

    def _round_experts(self, path: str, mlp: Experts, inputs: tuple[Any, ...]) -> None:
        """Run each expert on its own tokens, and on others if these are few."""
        x = inputs[0].flatten(0, 1)
        if self.records:
            self._floats[path] = x
            return
        if all(each in self.found for each in self.formats if each.startswith(f"{path}.")):
            return
        floats, chosen = self._floats.pop(path), mlp.route(x).chosen
        for expert in range(len(mlp.experts)):
            rows = _with_others((chosen == expert).any(-1))
            one = Routing(
                chosen=torch.full((len(rows), 1), expert, device=x.device),
                weights=torch.ones(len(rows), 1, device=x.device),
            )
            self.records = True
            mlp.run(floats[rows], one)
            self.records = False
            mlp.run(x[rows], one)


def values_of(made: Rounded, format: GroupFormat) -> torch.Tensor:
    """Dequantize rounded integers to fp32, for untransformed inputs."""
    return transformed(made.values(format.bits), format.hadamard)


def put_weight(linear: nn.Module, values: torch.Tensor) -> None:
    linear.register_parameter("weight", nn.Parameter(values, requires_grad=False))


def _with_others(own: torch.Tensor) -> torch.Tensor:
    """Indices of an expert's tokens; where these are few, with others at even distances.

    Args:
        own: bool (N,), whether a token is the expert's.
    """
    missing = _OF_EXPERT - int(own.sum())
    if missing <= 0:
        return own.nonzero().flatten()
    others = own.logical_not().nonzero().flatten()
    step = max(len(others) // missing, 1)
    return torch.cat([own.nonzero().flatten(), others[::step][:missing]])
