"""The tensors of a GGUF model, under the names that Hugging Face's checkpoints have.

What the converter did to them is undone here, as each architecture's family says: the rows of
Llama's queries and keys are put back in order, packed as they are; Gemma's norms lose the 1 that
was added; a tensor of all experts is one for each.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch

from ..files import quoted
from ..open_file import CheckpointError
from ..safetensors import Checkpoint, TensorInfo
from ..value_checks import is_int
from .contents import SHOWN, GGUFContents, PlacedTensor
from .names import GGUFFamily

#: What stands for rotary frequencies, which a config holds.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

logger = logging.getLogger(__name__)

_MOST_EXPERTS = 4096
_NUMBER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.")


class GGUFCheckpoint(Checkpoint):
    """The tensors of a GGUF model, by the names of Hugging Face's checkpoints.

    Packed ones are uint8 (rows, bytes a row), as they lie in the file.

    Args:
        path: the file, or its first part.

    Raises:
        FileNotFoundError: a part is missing.
        CheckpointError: the file is damaged, or of an architecture that isn't known.
    """

    described_by = "the metadata"
    complete = True
    apart = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        if self.unindexed:
            unused, shown = len(self.unindexed), ", ".join(self.unindexed[:SHOWN])
            logger.warning("%s: %d of its tensors are not used: %s", path, unused, shown)

    def _open(self) -> dict[str, TensorInfo]:
        contents = GGUFContents(self.folder)
        self._files = {file.path: file for file in contents.files}
        self._identities = {file.path: file.identity for file in contents.files}
        _, _, family = contents.family()
        self._orders: dict[str, torch.Tensor] = {}
        self._offsets: dict[str, float] = {}
        found: dict[str, TensorInfo] = {}
        beyond = layers_of(contents)
        for placed in contents.tensors.values():
            infos = None if _layer_of(placed) >= beyond else _infos(placed, family)
            if infos is None:
                self.unindexed.append(placed.tensor.name)
                continue
            _check_new(placed, infos, found)
            found |= {info.name: info for info in infos}
            for info in infos[:1]:
                self._note(contents, family, info)
        return found

    def _note(self, contents: GGUFContents, family: GGUFFamily, info: TensorInfo) -> None:
        """Keep in mind what the converter did to a tensor."""
        if family.norm_offset and info.name.endswith("norm.weight"):
            self._offsets[info.name] = family.norm_offset
        heads = {"q_proj": "head_count", "k_proj": "head_count_kv"}.get(info.name.split(".")[-2])
        if family.interleaved and heads is not None:
            count = contents.own(f"attention.{heads}", contents.own("attention.head_count"))
            self._orders[info.name] = _halves(self.folder, info, count)

    def tensor(self, name: str) -> torch.Tensor:
        """As :meth:`Checkpoint.tensor` says; a copy where the converter's work is undone."""
        stored = super().tensor(name)
        if name in self._orders:
            return stored[self._orders[name]]
        if name in self._offsets:
            return stored.float().sub(self._offsets[name]).to(stored.dtype)
        return stored

    def mapping(self, name: str) -> object | None:
        made_anew = name in self._orders or name in self._offsets
        return None if made_anew else super().mapping(name)

    def read_into(self, name: str, target: torch.Tensor, first: int = 0) -> None:
        if name in self._orders:
            stored, order = super().tensor(name), self._orders[name]
            row = stored[0].nbytes
            begin, end = first // row, -(-(first + len(target)) // row)
            rows = stored[order[begin:end]].view(-1).view(torch.uint8)
            target.copy_(rows[first - begin * row :][: len(target)])
        elif name in self._offsets:
            target.copy_(self.tensor(name).view(torch.uint8)[first : first + len(target)])
        else:
            super().read_into(name, target, first)


def layers_of(contents: GGUFContents) -> Any:
    """The layers that a token passes, without the heads for several tokens (MTP) behind them."""
    blocks, extra = contents.own("block_count"), contents.own("nextn_predict_layers", 0)
    return blocks - extra if is_int(blocks) and is_int(extra) else blocks


def _layer_of(placed: PlacedTensor) -> int:
    """The number of a tensor's layer, -1 for none."""
    match = _NUMBER.match(placed.tensor.name)
    return int(match[1]) if match else -1


def _infos(placed: PlacedTensor, family: GGUFFamily) -> list[TensorInfo] | None:
    """The tensors of a checkpoint that a tensor of the file stands for; None where it isn't known,
    and none of them where a config has what it says."""
    tensor = placed.tensor
    if tensor.name in ROPE_TENSORS:
        return []
    name = family.checkpoint_name(tensor.name)
    if name is None:
        return None
    shape, dtype = tensor.shape, tensor.type.dtype or torch.uint8
    if tensor.type.dtype is None:
        shape = (*shape[:-1], shape[-1] // tensor.type.block * tensor.type.nbytes)
    if "{}" not in name:
        return [_info(placed, name, family.shape(tensor.name, shape), dtype, 0)]
    kind, dims = ("bias", 2) if tensor.name.endswith(".bias") else ("matrix", 3)
    if len(shape) != dims or shape[0] > _MOST_EXPERTS:
        raise CheckpointError(
            f"{placed.file.path}: tensor {tensor.name!r} is {list(tensor.shape)}; expected is a "
            f"{kind} for each of at most {_MOST_EXPERTS} experts: download it again"
        )
    return [_info(placed, name.format(i), shape[1:], dtype, i) for i in range(shape[0])]


def _check_new(placed: PlacedTensor, infos: list[TensorInfo], found: Container[str]) -> None:
    """CheckpointError where another tensor of the file stands for the same weights."""
    if twice := [info.name for info in infos if info.name in found]:
        raise CheckpointError(
            f"{placed.file.path}: tensor {placed.tensor.name!r} is {twice[0]}, and so is another: "
            f"download the model again"
        )


def _info(
    placed: PlacedTensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, index: int
) -> TensorInfo:
    """The tensor, or the index-th of those that it holds one behind the other."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return TensorInfo(
        name=name,
        dtype=dtype,
        shape=shape,
        nbytes=nbytes,
        file=placed.file.path,
        offset=placed.tensor.offset + index * nbytes,
    )


def _halves(path: Path, info: TensorInfo, heads: Any) -> torch.Tensor:
    """Where each row of a projection lies, int64 (rows,).

    The converter puts the rows of a head that are rotated together, i and D / 2 + i, one behind
    the other: row 2 i of a head in the file is row i of the checkpoint, 2 i + 1 is D / 2 + i.
    """
    rows = info.shape[0]
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or rows % (2 * heads):
        raise CheckpointError(
            f"{path}: tensor {info.name!r} has {rows} rows, which are not {quoted(heads)} heads of "
            f"pairs: download it again"
        )
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def packed_types(contents: GGUFContents) -> dict[str, str]:
    """Layer -> the type of its packed matrix; those of floats are left out."""
    _, _, family = contents.family()
    return {
        info.name.removesuffix(".weight"): placed.tensor.type.name
        for placed in contents.tensors.values()
        if placed.tensor.type.dtype is None
        for info in _infos(placed, family) or ()
    }
