"""The loss of each matrix of a layer when it is rounded for the inputs of a text, by which
``exkv quantize --bits`` and ``--fit`` choose.

The method is that of ``exkv.loading.losses``, but matrices are rounded as they will be written
(``exkv.loading.calibration``), for all rows of the text but the last, on which outputs are
compared. Rounding everything in every option would take several times as long as writing a folder.
So each matrix is rounded whole in one option only, ``FOLLOWED``, which shows how it changes the
layer's output, and the layer the probabilities. In the other options only a sample of its rows is
rounded (feedback rounds rows independently), and the ratio of their output errors, weighted by the
inputs' moments, scales that loss. Embedding and head stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from exkv.batch import Batch, Lengths
from exkv.cache import NoCacheLayer
from exkv.checkpoint import Checkpoint, ModelConfig
from exkv.devices import CPU
from exkv.models import Unit
from exkv.weights import GroupFormat
from exkv.weights.choice import Losses
from exkv.weights.feedback import rounded_with_factor
from exkv.weights.hadamard import HADAMARD, NONE, block_of
from exkv.weights.on_load import AS_STORED, BITS, INTEGERS, shift_of
from exkv.weights.rounding import Rounded

from .calibration import Found, Rounding, integers_of, put_weight, values_of
from .losses import Errors, TextLosses, kept, relative
from .measured_file import digest

#: The option in which everything is rounded: fine enough that the loss still grows as the error's
#: square, and coarse enough to stand out from float32's rounding.
FOLLOWED = "int5"
#: Sampled rows of a matrix, rounded in the other options.
_ROWS = 48


def calibrated_losses_of(
    config: ModelConfig,
    checkpoint: Checkpoint,
    rows: torch.Tensor,
    transform: str = NONE,
    integers: Sequence[str] = tuple(BITS),
) -> Losses:
    """The losses in each option for a folder of integers; measured once, and stored in the file of
    ``exkv.loading.losses``.

    Args:
        rows: the text, int64 (B, T), as of ``calibration_rows``.
        transform: of the matrices' inputs, "hadamard" or "none".
        integers: options beside weights as stored, of ``on_load.INTEGERS``.
    """
    losses = CalibratedLosses(config, checkpoint, rows, transform, integers)
    key = f"rounded {digest(rows.tolist())}{'' if transform == NONE else f' {transform}'}"
    return kept(losses.model, checkpoint.fingerprint, key, losses.measured, integers)


class CalibratedLosses(TextLosses):
    """Runs a text through the units, rounding them for it.

    Args:
        rows: the text, int64 (B, T).
        transform: of the matrices' inputs, "hadamard" or "none".
    """

    followed = FOLLOWED

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        rows: torch.Tensor,
        transform: str = NONE,
        integers: Sequence[str] = tuple(BITS),
    ) -> None:
        super().__init__(config, checkpoint, rows[-1].tolist(), integers)
        self._transform = transform
        self._hidden = rows[:-1] if len(rows) > 1 else rows
        lengths = Lengths.uniform(len(self._hidden), 0, rows.shape[1])
        self._rows = Batch.on(CPU, lengths, self.model.rotary, torch.float32)

    def of_unit(
        self, unit: Unit, module: nn.Module, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[Errors, torch.Tensor | None]:
        made = Unit(unit.index, self.model.specs_kept(FOLLOWED)[unit.index])
        formats = {} if unit.spec.layer is None else integers_of(made)
        if not formats:
            if unit is not self.model.units[-1]:
                self._hidden = module(self._hidden, self._rows, NoCacheLayer())
            return Errors(unit={AS_STORED: 0.0}), None
        floats = {path: module.get_submodule(path).get_parameter("weight") for path in formats}
        if self._transform == HADAMARD:
            formats = {
                path: replace(format, hadamard=block_of(floats[path].shape[1]))
                for path, format in formats.items()
            }
        made.module = module
        sampled = _Sampled(made, formats, self.integers)
        with sampled:
            sampled.records = True
            passed = module(self._hidden, self._rows, NoCacheLayer())
            sampled.records = False
            module(self._hidden, self._rows, NoCacheLayer())
        self._hidden = passed
        followed = self.run(module, x)
        whole, alone = relative(followed, y), dict[str, float]()
        rounded = _values(sampled.found, formats)
        _put(module, floats)
        for name, paths in made.spec.classes.items():
            _put(module, {path: rounded[path] for path in paths})
            alone[name] = relative(self.run(module, x), y)
            _put(module, {path: floats[path] for path in paths})
        share = whole / (sum(alone.values()) or 1.0)
        errors = Errors(unit={AS_STORED: 0.0})
        for name, paths in made.spec.classes.items():
            lost = {o: sum(sampled.errors[path][o] for path in paths) for o in self.integers}
            scale = share * alone[name] / (lost[FOLLOWED] or 1.0)
            errors.matrices[name] = {AS_STORED: 0.0, **{o: scale * lost[o] for o in lost}}
        for option in self.integers:
            errors.unit[option] = sum(each[option] for each in errors.matrices.values())
        return errors, followed


def _values(found: Found, formats: Mapping[str, GroupFormat]) -> dict[str, torch.Tensor]:
    return {path: values_of(made, formats[path]) for path, made in found.items()}


def _put(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    for path, weight in weights.items():
        put_weight(module.get_submodule(path), weight)


class _Sampled(Rounding):
    """Rounding that also measures what other options lose on sampled rows of each matrix.

    Args:
        integers: these options.

    Attributes:
        errors: path -> option -> squared error of the whole matrix's outputs, per token.
    """

    def __init__(
        self, unit: Unit, formats: Mapping[str, GroupFormat], integers: Sequence[str]
    ) -> None:
        super().__init__(unit, formats)
        self.integers = integers
        self.errors: dict[str, dict[str, float]] = {}

    def round(self, path: str, root: torch.Tensor, weight: torch.Tensor) -> Rounded:
        some = weight[:: max(len(weight) // _ROWS, 1)]
        format = self.formats[path]
        self.errors[path] = {}
        for option in self.integers:
            bits, zeros = INTEGERS[option], shift_of(option) == "zero"
            made = rounded_with_factor(root, some, bits, format.group, format.scale, zeros)
            lost = ((some - made.values(bits)) @ root).square().sum()
            self.errors[path][option] = float(lost) * len(weight) / len(some)
        return super().round(path, root, weight)
