"""The tensors of a GGUF model under Hugging Face's names.

The converter's changes are undone as each architecture's family describes: the rows of Llama's
queries and keys are restored to their order, still packed; the 1 that was added to Gemma's norms is
subtracted; a tensor of all experts becomes one for each.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..files import quoted
from ..open_file import CheckpointError
from ..safetensors import Checkpoint, TensorInfo
from ..value_checks import is_int, is_number
from .contents import SHOWN, GGUFContents, PlacedTensor
from .names import GGUFFamily, Rows, most

#: Tensors with rotary frequencies, which belong to the config.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

logger = logging.getLogger(__name__)

_MOST_EXPERTS = 4096
_NUMBER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.")


class GGUFCheckpoint(Checkpoint):
    """The tensors of a GGUF model under Hugging Face's names.

    Packed ones are uint8 (rows, bytes a row), as in the file.

    Args:
        path: the file, or its first part.

    Raises:
        FileNotFoundError: a part is missing.
        CheckpointError: the file is damaged, or its architecture unknown.
    """

    described_by = "the metadata"
    complete = True
    apart = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        if self.unindexed:
            self._warn(self.unindexed)

    def _open(self) -> dict[str, TensorInfo]:
        contents = GGUFContents(self.folder)
        self._files = {file.path: file for file in contents.files}
        self._identities = {file.path: file.identity for file in contents.files}
        _, _, family = contents.family()
        self._made: dict[str, _Made] = {}
        #: Tensors of an MTP head: name in the checkpoint -> name in the file.
        self._behind: dict[str, str] = {}
        found: dict[str, TensorInfo] = {}
        count = layers_of(contents)
        for placed in contents.tensors.values():
            infos = _infos(contents, placed, family)
            if infos and _layer_of(placed) >= count:
                self._behind |= {info.name: placed.tensor.name for info, _ in infos}
            if infos is None:
                self.unindexed.append(placed.tensor.name)
                continue
            _check_new(placed, infos, found)
            found |= {info.name: info for info, _ in infos}
            self._made |= {info.name: made for info, made in infos if made is not None}
        for info, made in _scalars(contents, family):
            found[info.name], self._made[info.name] = info, made
        return found

    def _check_unread(self, tensors: Iterable[str], unused: tuple[str, ...]) -> None:
        """Tensors of an MTP head may stay unread."""
        head = {name: stored for name, stored in self._behind.items() if name not in {*tensors}}
        if head:
            self._warn(list(dict.fromkeys(head.values())))
        super()._check_unread([*tensors, *head], unused)

    def _warn(self, unused: Sequence[str]) -> None:
        shown = ", ".join(unused[:SHOWN])
        logger.warning("%s: %d of its tensors are not used: %s", self.folder, len(unused), shown)

    def tensor(self, name: str) -> torch.Tensor:
        """As :meth:`Checkpoint.tensor`; a copy if the converter's changes are undone."""
        made = self._made.get(name)
        if made is None:
            return super().tensor(name)
        if made.value is not None:
            return made.value
        stored = self.view(made.whole)
        if made.order is not None:
            stored = stored[made.order]
        if made.restore is not None:
            stored = made.restore(stored.float()).to(stored.dtype)
        return stored

    def rows_in_file(self, name: str) -> tuple[TensorInfo, torch.Tensor | None] | None:
        """The file's rows that a tensor consists of, and the index among them of each of its own
        (None: in order); None if its numbers differ from the file's."""
        made = self._made.get(name)
        if made is not None and (made.restore or made.value is not None):
            return None
        return self.place(name)

    def place(self, name: str) -> tuple[TensorInfo, torch.Tensor | None]:
        """:meth:`rows_in_file`, also if the numbers differ."""
        made = self._made.get(name)
        return (self.info(name), None) if made is None else (made.whole, made.order)

    def mapping(self, name: str) -> object | None:
        return None if name in self._made else super().mapping(name)

    def read_into(self, name: str, target: torch.Tensor, first: int = 0) -> None:
        made = self._made.get(name)
        if made is None:
            super().read_into(name, target, first)
        elif made.order is None or made.restore is not None:
            target.copy_(self.tensor(name).view(-1).view(torch.uint8)[first : first + len(target)])
        else:
            stored = self.view(made.whole)
            row = stored[0].nbytes
            begin, end = first // row, -(-(first + len(target)) // row)
            rows = stored[made.order[begin:end]].view(-1).view(torch.uint8)
            target.copy_(rows[first - begin * row :][: len(target)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """How a checkpoint's tensor is made from the file's.

    Attributes:
        whole: the file's tensor.
        order: index of each row there, int64; None for the same order.
        restore: function from the file's numbers; None if they are the same.
        value: the tensor itself, if it comes from the metadata.
    """

    whole: TensorInfo
    order: torch.Tensor | None = None
    restore: Callable[[torch.Tensor], torch.Tensor] | None = None
    value: torch.Tensor | None = None


#: A checkpoint's tensor, and how it is made from the file's; None if the file has it unchanged.
_Part = tuple[TensorInfo, _Made | None]


def layers_of(contents: GGUFContents) -> Any:
    """Number of decoder layers, without MTP heads after them."""
    blocks, extra = contents.own("block_count"), contents.own("nextn_predict_layers", 0)
    return blocks - extra if is_int(blocks) and is_int(extra) else blocks


def _layer_of(placed: PlacedTensor) -> int:
    """Index of a tensor's layer; -1 if it is in none."""
    match = _NUMBER.match(placed.tensor.name)
    return int(match[1]) if match else -1


def _infos(contents: GGUFContents, placed: PlacedTensor, family: GGUFFamily) -> list[_Part] | None:
    """The checkpoint's tensors that a tensor of the file has; None if unknown, and empty if it
    belongs to the config."""
    tensor = placed.tensor
    if tensor.name in ROPE_TENSORS:
        return []
    names = family.checkpoint_names(tensor.name)
    if not names:
        return None
    shape, dtype = tensor.shape, tensor.type.dtype or torch.uint8
    if tensor.type.dtype is None:
        shape = (*shape[:-1], shape[-1] // tensor.type.block * tensor.type.nbytes)
    if not any("{}" in name for name in names):
        whole = _info(placed, family.shape(tensor.name, shape), dtype)
        return [_part(contents, family, whole, name, rows) for name, rows in names.items()]
    kind, dims = ("bias", 2) if tensor.name.endswith(".bias") else ("matrix", 3)
    if len(shape) != dims or shape[0] > _MOST_EXPERTS:
        raise CheckpointError(
            f"{placed.file.path}: tensor {tensor.name!r} is {list(tensor.shape)}, expected a "
            f"{kind} for each of at most {_MOST_EXPERTS} experts: download it again"
        )
    whole = _info(placed, shape[1:], dtype)
    first = [_part(contents, family, whole, name, rows) for name, rows in names.items()]
    return [_of_expert(part, i, whole.nbytes) for i in range(shape[0]) for part in first]


def _of_expert(part: _Part, index: int, nbytes: int) -> _Part:
    """The first expert's part moved to another expert, with ``nbytes`` bytes for each."""
    info, made = part
    found = TensorInfo(  # `replace` is slow, and there may be 40,000
        name=info.name.format(index),
        dtype=info.dtype,
        shape=info.shape,
        nbytes=info.nbytes,
        file=info.file,
        offset=info.offset + index * nbytes,
    )
    if made is None:
        return found, None
    whole = replace(made.whole, offset=made.whole.offset + index * nbytes)
    return found, replace(made, whole=whole)


def _part(
    contents: GGUFContents, family: GGUFFamily, whole: TensorInfo, name: str, rows: Rows | None
) -> _Part:
    """A checkpoint's tensor, and how it is made from ``whole``, or from a contiguous piece of
    it."""
    order = None if rows is None else _order(contents, whole, rows)
    if order is not None and bool((order.diff() == 1).all()):
        row = whole.nbytes // whole.shape[0]
        shape, first = (len(order), *whole.shape[1:]), int(order[0])
        nbytes, offset = row * len(order), whole.offset + row * first
        whole, order = replace(whole, shape=shape, nbytes=nbytes, offset=offset), None
    heads = {"q_proj": "head_count", "k_proj": "head_count_kv"}.get(name.split(".")[-2])
    if family.interleaved and heads is not None:
        count = most(contents.own(f"attention.{heads}", contents.own("attention.head_count")))
        rows_of = whole.shape[0] if order is None else len(order)
        halves = _halves(contents.path, name, rows_of, count)
        order = halves if order is None else order[halves]
    restore = family.restoring(name)
    if order is None and restore is None:
        return replace(whole, name=name), None
    made = _Made(whole=whole, order=order, restore=restore)
    if order is None:
        return replace(whole, name=name), made
    nbytes = whole.nbytes // whole.shape[0] * len(order)
    return replace(whole, name=name, shape=(len(order), *whole.shape[1:]), nbytes=nbytes), made


def _order(contents: GGUFContents, whole: TensorInfo, rows: Rows) -> torch.Tensor | None:
    count = whole.shape[0] if whole.shape else 0
    try:
        return rows(contents.own, count)
    except ValueError as error:
        raise CheckpointError(
            f"{contents.path}: tensor {whole.name!r} has {count} rows: {error}: download it again"
        ) from None


def _scalars(contents: GGUFContents, family: GGUFFamily) -> list[tuple[TensorInfo, _Made]]:
    """Parameters of layers that are in the metadata."""
    found: list[tuple[TensorInfo, _Made]] = []
    layers, file = layers_of(contents), contents.files[0].path
    few = is_int(layers) and 0 < layers <= len(contents.tensors)
    for key, (part, shape) in family.scalars.items():
        stated = contents.metadata.get(key)
        each = stated if isinstance(stated, list) else [stated] * (layers if few else 0)
        if not few or len(each) != layers or not all(map(is_number, each)):
            raise CheckpointError(
                f"{contents.path}: {key} is {quoted(stated)}, expected a number for each of "
                f"{quoted(layers)} layers: download it again"
            )
        for layer, number in enumerate(each):
            value = torch.full(shape, number, dtype=torch.float32)
            info = TensorInfo(
                name=f"model.layers.{layer}.{part}",
                dtype=value.dtype,
                shape=shape,
                nbytes=value.nbytes,
                file=file,
                offset=0,
            )
            found.append((info, _Made(whole=info, value=value)))
    return found


def _check_new(placed: PlacedTensor, infos: list[_Part], found: Container[str]) -> None:
    """CheckpointError if another tensor of the file has the same weights."""
    if twice := [info.name for info, _ in infos if info.name in found]:
        raise CheckpointError(
            f"{placed.file.path}: tensor {placed.tensor.name!r} has the weights {twice[0]}, which "
            f"another has already: download the model again"
        )


def _info(placed: PlacedTensor, shape: tuple[int, ...], dtype: torch.dtype) -> TensorInfo:
    """Description of the file's tensor, or of the first of the adjacent ones in it."""
    return TensorInfo(
        name=placed.tensor.name,
        dtype=dtype,
        shape=shape,
        nbytes=torch.Size(shape).numel() * dtype.itemsize,
        file=placed.file.path,
        offset=placed.tensor.offset,
    )


def _halves(path: Path, name: str, rows: int, heads: Any) -> torch.Tensor:
    """Index in the file of each row of a projection, int64 (rows,).

    The converter makes the rows of a head that are rotated together, i and D / 2 + i, adjacent:
    row 2 i of a head in the file is row i of the checkpoint, and 2 i + 1 is D / 2 + i.
    """
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or rows % (2 * heads):
        raise CheckpointError(
            f"{path}: tensor {name!r} has {rows} rows, which are not {quoted(heads)} heads of "
            f"pairs: download it again"
        )
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def names_by_tensor(contents: GGUFContents) -> dict[str, list[str]]:
    """Tensor of the file -> names of its tensors in a checkpoint; without unknown ones."""
    _, _, family = contents.family()
    return {
        name: [info.name for info, _ in infos]
        for name, placed in contents.tensors.items()
        if (infos := _infos(contents, placed, family))
    }


def packed_types(contents: GGUFContents) -> dict[str, str]:
    """Layer -> type of its packed matrix; without layers of floats."""
    _, _, family = contents.family()
    return {
        info.name.removesuffix(".weight"): placed.tensor.type.name
        for placed in contents.tensors.values()
        if placed.tensor.type.dtype is None
        for info, _ in _infos(contents, placed, family) or ()
    }
