"""adapter_model.safetensors: which matrices it has, each of two halves, and what these hold."""

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
#: Ends of tensors' names, and whether they are of an embedding and of the second half.
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
    """The two halves of a matrix's change, by their names in the file: A (rank, in), B (out, rank).

    Attributes:
        module: in the model that was trained.
        embedding: whether it is of an embedding table (vocabulary, hidden), which is looked up and
            not multiplied by: A is (rank, vocabulary), B (hidden, rank).
        scale: the factor of B A.
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
        strength: times the scale that the config says.

    Attributes:
        folder: where they are.
        strength: as it was given.
        config: what adapter_config.json says.
        matrices: by the modules' names.
        whole: the modules of which the file has a whole matrix, and that tensor's name. PEFT adds
            those of embeddings that are adapted.

    Raises:
        ValueError: a strength that is no number.
        FileNotFoundError: a file is missing.
        AdapterError: one is damaged, or they contradict each other.
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
            raise AdapterError(f"{self.file} holds no tensor of an adapter: save it again")
        self.matrices = {key[0]: self._matrix(*key, both) for key, both in halves.items()}

    @property
    def fingerprint(self) -> str:
        """What tells this adapter from others: its tensors, and what they are multiplied by."""
        scales = sorted({matrix.scale for matrix in self.matrices.values()})
        return f"{self._tensors.fingerprint}:{','.join(map(repr, scales))}"

    def close(self) -> None:
        """Let go of the file."""
        self._tensors.close()

    def halves(self, matrix: LowRankShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A and scale * B on the host, copies in ``dtype``; rounded once.

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
        """A tensor of the file as it is stored."""
        return self._tensors.tensor(name)

    def _sort(self, name: str, halves: dict[tuple[str, bool], dict[bool, TensorInfo]]) -> None:
        """Find out what a tensor is."""
        info, module = self._tensors.info(name), name.removeprefix(_PREFIX)
        for end, (embedding, second) in _ENDS.items():
            if module.endswith(end):
                halves.setdefault((module.removesuffix(end), embedding), {})[second] = info
                return
        for end in (".base_layer.weight", ".weight"):
            if module.endswith(end) and ".lora_" not in module:
                self.whole[module.removesuffix(end)] = name
                return
        what = "DoRA" if "magnitude" in name else "no part of a LoRA that exkv knows"
        raise AdapterError(
            f"{self.file}: tensor {quoted(name)} is of {what}: merge the adapter into the model "
            "with PEFT (merge_and_unload), and load that"
        )

    def _matrix(
        self, module: str, embedding: bool, both: Mapping[bool, TensorInfo]
    ) -> LowRankShape:
        """AdapterError where one half is missing, or they don't fit each other or the config."""
        if len(both) < 2:
            (there,) = both.values()
            lacking = "B" if False in both else "A"
            raise AdapterError(
                f"{self.file}: {quoted(there.name)} is there, and the {lacking} that belongs to it "
                "is missing: the file is incomplete, save or download it again"
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
