"""adapter_model.safetensors: the adapter's matrices, each with two factors A and B."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from exkv.checkpoint import Checkpoint, TensorInfo
from exkv.checkpoint.files import quoted
from exkv.checkpoint.value_checks import is_number

from ..finite import first_not_finite
from .adapter_config import AdapterConfig, AdapterError

TENSORS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
#: Ending of a tensor's name -> whether it belongs to an embedding, and whether it is B.
_ENDS = {
    ".lora_A.weight": (False, False),
    ".lora_B.weight": (False, True),
    ".lora_embedding_A": (True, False),
    ".lora_embedding_B": (True, True),
}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class _Tensors(Checkpoint):
    """The one file of an adapter."""

    def _open(self) -> dict[str, TensorInfo]:
        file = self.folder / TENSORS_NAME
        if not file.is_file():
            pickled = (self.folder / "adapter_model.bin").exists()
            hint = "adapter_model.bin is a pickle, which may run code: save it again as safetensors"
            raise FileNotFoundError(
                f"{file} is missing: {hint if pickled else 'name the folder that PEFT saved to'}"
            )
        return self._read_file(file)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankShape:
    """The factors of a matrix's change, by their names in the file: A (rank, in), B (out, rank).

    Attributes:
        module: the module in the trained model.
        embedding: whether it changes an embedding table (vocabulary, hidden), which is looked up
            and not multiplied: A is (rank, vocabulary), B (hidden, rank).
        scale: factor of B A.
    """

    module: str
    a: str
    b: str
    rank: int
    inputs: int
    outputs: int
    scale: float
    embedding: bool


class AdapterFolder:
    """An adapter's files, open and checked against each other.

    Args:
        strength: multiplies the config's scale.

    Attributes:
        folder: the adapter's folder.
        strength: as given.
        config: the contents of adapter_config.json.
        matrices: module -> its factors.
        whole: module -> tensor with its whole matrix, which PEFT adds for adapted embeddings.

    Raises:
        ValueError: the strength is not a number.
        FileNotFoundError: a file is missing.
        AdapterError: a file is damaged, or files contradict each other.
    """

    def __init__(self, folder: str | os.PathLike[str], strength: float = 1.0) -> None:
        if not is_number(strength):
            raise ValueError(f"strength is {strength!r:.60}: give a finite number, 1.0 as trained")
        self.folder = Path(folder)
        self.strength = float(strength)
        self.config = AdapterConfig.from_folder(self.folder)
        self._tensors = _Tensors(self.folder)
        self.file = self.folder / TENSORS_NAME
        self.whole: dict[str, str] = {}
        halves: dict[tuple[str, bool], dict[bool, TensorInfo]] = {}
        for name in self._tensors.names():
            self._sort(name, halves)
        if not halves:
            raise AdapterError(f"{self.file} has no tensor of an adapter: save it again")
        self.matrices = {key[0]: self._matrix(*key, both) for key, both in halves.items()}

    @property
    def fingerprint(self) -> str:
        """Identifies the adapter: hash of its tensors, and their scales."""
        scales = sorted({matrix.scale for matrix in self.matrices.values()})
        return f"{self._tensors.fingerprint}:{','.join(map(repr, scales))}"

    def close(self) -> None:
        """Close the file."""
        self._tensors.close()

    def halves(self, matrix: LowRankShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A and scale * B on the host, copied and rounded once to ``dtype``.

        Raises:
            CheckpointError: the file has changed since it was opened.
            AdapterError: a number is NaN or infinite, or too large for ``dtype``.
        """
        a, b = self._tensors.tensor(matrix.a), self._tensors.tensor(matrix.b)
        for name, half in ((matrix.a, a), (matrix.b, b)):
            if (found := first_not_finite(half, dtype)) is not None:
                raise AdapterError(
                    f"{self.file}: {quoted(name)}: number {found} is NaN, infinite or too large "
                    f"for {dtype}: save or download the adapter again"
                )
        scaled = b.to(torch.float64) * matrix.scale
        return a.to(dtype, copy=True), scaled.to(dtype)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the file as stored."""
        return self._tensors.tensor(name)

    def _sort(self, name: str, halves: dict[tuple[str, bool], dict[bool, TensorInfo]]) -> None:
        """Add a tensor to ``halves`` or to ``whole``."""
        info, module = self._tensors.info(name), name.removeprefix(_PREFIX)
        for end, (embedding, second) in _ENDS.items():
            if module.endswith(end):
                halves.setdefault((module.removesuffix(end), embedding), {})[second] = info
                return
        for end in (".base_layer.weight", ".weight"):
            if module.endswith(end) and ".lora_" not in module:
                self.whole[module.removesuffix(end)] = name
                return
        what = "belongs to DoRA" if "magnitude" in name else "is not a part of LoRA that exkv knows"
        raise AdapterError(
            f"{self.file}: tensor {quoted(name)} {what}: merge the adapter into the model with "
            "PEFT (merge_and_unload), and load that"
        )

    def _matrix(
        self, module: str, embedding: bool, both: Mapping[bool, TensorInfo]
    ) -> LowRankShape:
        """The factors of a module; AdapterError if one is missing, or they don't fit each other or
        the config."""
        if len(both) < 2:
            (there,) = both.values()
            lacking = "B" if False in both else "A"
            raise AdapterError(
                f"{self.file}: {quoted(there.name)} has no matching {lacking}: the file is "
                "incomplete, save or download it again"
            )
        a, b = both[False], both[True]
        rank = self.config.rank_of(module)
        fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] == rank
        if not fits or 0 in (*a.shape, *b.shape):
            raise AdapterError(
                f"{self.file}: {quoted(a.name)} is {list(a.shape)} and its B {list(b.shape)}; for "
                f"the rank {rank} of {self.config.file.name} they must be [{rank}, in] and "
                f"[out, {rank}]: config and tensors are not of one adapter"
            )
        for half in (a, b):
            if half.dtype not in _FLOATS:
                raise AdapterError(
                    f"{self.file}: {quoted(half.name)} holds {half.dtype}, and must hold floats of "
                    "16, 32 or 64 bits: save the adapter again in one of them"
                )
        return LowRankShape(
            module=module,
            a=a.name,
            b=b.name,
            rank=rank,
            inputs=a.shape[1],
            outputs=b.shape[0],
            scale=self.config.scale_of(module) * self.strength,
            embedding=embedding,
        )
