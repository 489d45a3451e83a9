"""The ggml type that ``exkv quantize`` gives each tensor of a GGUF file, and its blocks.

Types are chosen as in ``exkv.loading.mixes``, tensor by tensor: of the types whose block size
divides a tensor's rows, the combination with the least total loss within a number of bits a weight,
or of bytes that a plan has room for.
The loss of a projection's matrices is measured with integers (``exkv.loading.calibrated_losses``)
and scaled for each type by the output error of a sample of rows, weighted by the inputs' moments.
Rounding is that of ``exkv.loading.calibration``, to blocks (``exkv.weights.gguf_rounding``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from exkv.checkpoint import Checkpoint, ModelConfig
from exkv.errors import PlacementError
from exkv.layers.linear import Linear
from exkv.models import Unit
from exkv.planning.search.knapsack import Item, least_lossy
from exkv.weights.feedback import rounded_with_factor
from exkv.weights.gguf_rounding import TYPES, blocks_with_factor, values_of
from exkv.weights.on_load import BITS, class_of

from .calibrated_losses import FOLLOWED, calibrated_losses_of
from .calibration import Rounding, put_weight, rounded_units
from .mixes import Layers

#: Sampled rows of a matrix, rounded to every type.
_ROWS = 48
#: Into how many steps of bytes the choice by a plan is narrowed down.
_STEPS = 4096

#: Matrix's name in the checkpoint -> type or ``FOLLOWED`` -> squared error of its outputs.
Errors = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTensor:
    """A tensor of the file that is stored in blocks.

    Attributes:
        matrices: names of the checkpoint's matrices in it.
        count: number of weights.
        inputs: row length.
    """

    matrices: Sequence[str]
    count: int
    inputs: int

    @property
    def types(self) -> list[str]:
        return [name for name, type in TYPES.items() if self.inputs % type.block == 0]

    def nbytes(self, name: str) -> int:
        return self.count // TYPES[name].block * TYPES[name].nbytes


#: Name of a tensor -> its type, and the predicted loss of all, nats a token.
Chosen = tuple[dict[str, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeMixes:
    """The choice of types: the tensors, and their matrices' losses in each type."""

    tensors: Mapping[str, BlockTensor]
    losses: Errors

    @classmethod
    def measured(
        cls,
        layers: Layers,
        checkpoint: Checkpoint,
        rows: torch.Tensor,
        tensors: Mapping[str, BlockTensor],
    ) -> TypeMixes:
        """With losses on a text.

        Args:
            rows: the text, int64 (B, T).
        """
        return cls(tensors=tensors, losses=_losses(layers, checkpoint, rows))

    def at(self, bits: float) -> Chosen:
        """The types that lose least with at most ``bits`` a weight on average; ValueError if the
        smallest types take more."""
        if (found := self._within(int(bits * self.count / 8))) is None:
            raise ValueError(
                f"--bits {bits:g} is too few: the smallest types that fit the layers' rows take "
                f"{8 * self._ends[0] / self.count:.4g} bits a weight; give at least that"
            )
        return found

    def fitting(self, missing: Callable[[Mapping[str, str]], PlacementError | None]) -> Chosen:
        """The types that lose least and fit, within 1/4096 of the bytes between the smallest and
        the largest types.

        Args:
            missing: what is missing for these types, by tensor, to fit.

        Raises:
            PlacementError: not even the smallest fit.
        """
        low, high = self._ends
        if (largest := self._within(high)) and not missing(largest[0]):
            return largest
        best, step = self._within(low), max((high - low) // _STEPS, 1)
        assert best is not None
        if (error := missing(best[0])) is not None:
            raise error
        while high - low > step:
            middle = (low + high) // 2
            found = self._within(middle)
            assert found is not None
            if missing(found[0]):
                high = middle
            else:
                low, best = middle, found
        return best

    @property
    def count(self) -> int:
        """Number of weights."""
        return sum(tensor.count for tensor in self.tensors.values())

    @property
    def _ends(self) -> tuple[int, int]:
        """Bytes of the smallest types, and of the largest."""
        sizes = [[tensor.nbytes(name) for name in tensor.types] for tensor in self.tensors.values()]
        return sum(map(min, sizes)), sum(map(max, sizes))

    def _within(self, room: int) -> Chosen | None:
        """The types that lose least within ``room`` bytes; None if none do."""
        items = []
        for tensor in self.tensors.values():
            matrices, types = tensor.matrices, tensor.types
            lost = [sum(self.losses[matrix][name] for matrix in matrices) for name in types]
            items.append(Item(np.array([tensor.nbytes(name) for name in types]), np.array(lost)))
        if room < self._ends[0]:
            return None
        found = least_lossy(items, room)
        assert found is not None, "the least fit"
        loss = sum(float(item.losses[option]) for item, option in zip(items, found, strict=True))
        pairs = zip(self.tensors.items(), found, strict=True)
        return {name: tensor.types[option] for (name, tensor), option in pairs}, loss


def blocks_of(
    config: ModelConfig, checkpoint: Checkpoint, rows: torch.Tensor, types: Mapping[str, str]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the blocks of each unit's matrices by name, uint8 (out, bytes).

    Args:
        types: matrix name -> type.
    """
    yield from _by_name(config, checkpoint, rows, types, _Blocks)


def _losses(layers: Layers, checkpoint: Checkpoint, rows: torch.Tensor) -> Errors:
    """The loss of each matrix in each type that it may have, nats a token."""
    losses = calibrated_losses_of(layers.config, checkpoint, rows)
    names = dict.fromkeys(layers.matrices, FOLLOWED)
    errors: Errors = {}
    for each in _by_name(layers.config, checkpoint, rows, names, _Sampled):
        errors |= each
    whole: dict[tuple[str, str], float] = {}
    for name, matrix in layers.matrices.items():
        key = matrix.unit, class_of(name)
        whole[key] = whole.get(key, 0.0) + errors[name][FOLLOWED]
    found: Errors = {}
    for name, matrix in layers.matrices.items():
        unit, kind = matrix.unit, class_of(name)
        scale = losses.matrices[unit][kind][FOLLOWED] / (whole[unit, kind] or 1.0)
        found[name] = {type: scale * error for type, error in errors[name].items()}
    return found


def _by_name(
    config: ModelConfig,
    checkpoint: Checkpoint,
    rows: torch.Tensor,
    types: Mapping[str, str],
    kind: type[_ByFactor],
) -> Iterator[dict[str, Any]]:
    units: list[Unit] = []

    def of_unit(unit: Unit) -> dict[str, Any]:
        units.append(unit)
        return {path: types[name] for path, name in unit.spec.matrices.items() if name in types}

    for found in rounded_units(config, checkpoint, rows, of_unit, rounding_of=kind):
        yield {units[-1].spec.matrices[path]: each for path, each in found.items()}


class _ByFactor(Rounding):
    """A pass through a unit that processes each matrix with the root of its inputs' moments.

    ``formats`` are the matrices' types, ``found`` the results.
    """

    formats: Any
    found: Any

    def block_of(self, path: str) -> int:
        return 0


class _Blocks(_ByFactor):
    """Rounds to blocks, and continues with the dequantized values."""

    def made(self, path: str, linear: Linear, root: torch.Tensor, weight: torch.Tensor) -> Any:
        blocks = blocks_with_factor(root, weight, self.formats[path])
        put_weight(linear, values_of(blocks, self.formats[path]))
        return blocks


class _Sampled(_ByFactor):
    """Measures what every type loses on sampled rows; leaves the weights unchanged."""

    def made(self, path: str, linear: Linear, root: torch.Tensor, weight: torch.Tensor) -> Any:
        some = weight[:: max(len(weight) // _ROWS, 1)]
        share = len(weight) / len(some)
        inputs = some.shape[1]
        group = 64 if inputs % 64 == 0 else 32
        bits = BITS[FOLLOWED]
        values = {
            FOLLOWED: rounded_with_factor(root, some, bits, group, torch.float16).values(bits)
        }
        for name, type in TYPES.items():
            if inputs % type.block == 0:
                values[name] = values_of(blocks_with_factor(root, some, name), name)
        return {
            name: share * float(((some - each) @ root).square().sum())
            for name, each in values.items()
        }
