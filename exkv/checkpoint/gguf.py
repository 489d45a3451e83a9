"""Checkpoints in GGUF, llama.cpp's file format, under the names that Hugging Face's have.

A model is one file, or its parts ``-00001-of-0000N``. :class:`GGUFContents` is what the headers say
(``gguf_header.py`` reads them), :class:`GGUFCheckpoint` gives the tensors to a load. What the
converter did to them is undone here, as each architecture's family says: the rows of Llama's
queries and keys are put back in order, packed as they are; Gemma's norms lose the 1 that was added;
a tensor of all experts is one for each. ``gguf_config.py`` makes a config of the metadata,
``exkv/text/gguf.py`` a tokenizer.
"""

from __future__ import annotations

import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from .families import FAMILIES, ExpertsConfig, Family
from .files import quoted
from .gguf_header import Header, StoredTensor, read_gguf_header
from .gguf_names import GGUFFamily
from .open_file import CheckpointError, OpenFile
from .safetensors import Checkpoint, TensorInfo

SUFFIX = ".gguf"
#: What stands for rotary frequencies, which a config holds.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

logger = logging.getLogger(__name__)

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS, _MOST_EXPERTS = 1024, 4096
_SHOWN = 5
#: Headers that are kept: a load asks for the same one some five times.
_KEPT = 4
_headers: OrderedDict[tuple[Path, tuple[int, ...]], Header] = OrderedDict()


def find_gguf(path: str | os.PathLike[str]) -> Path | None:
    """The GGUF file that a path stands for, the first of several parts; None where it is another
    kind of model.

    A path is a file, or a folder that holds one GGUF and no safetensors.

    Raises:
        CheckpointError: a folder holds several of them.
    """
    path = Path(path)
    if path.suffix.lower() == SUFFIX and not path.is_dir():
        return _parts_of(path)[0]
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = sorted(file for file in path.glob(f"*{SUFFIX}") if not file.name.startswith("mmproj"))
    models = list(dict.fromkeys(_parts_of(file)[0] for file in files))
    if len(models) > 1:
        names = ", ".join(model.name for model in models[:_SHOWN])
        raise CheckpointError(
            f"{path} holds {len(models)} models in GGUF: {names}"
            f"{', ...' if len(models) > _SHOWN else ''}. Name the file that you mean"
        )
    return models[0] if models else None


def _parts_of(path: Path) -> list[Path]:
    """All parts of the model, whichever of them is named."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    if not 0 < int(count) <= _MOST_PARTS:
        raise CheckpointError(f"{path}: it is one of {count} parts, and 1 to {_MOST_PARTS} can be")
    return [path.with_name(f"{stem}-{i + 1:05}-of-{count}{SUFFIX}") for i in range(int(count))]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTensor:
    """A tensor and the file in which it is."""

    file: OpenFile
    tensor: StoredTensor


class GGUFContents:
    """What the headers of a GGUF model say.

    Args:
        path: the file, or its first part.

    Attributes:
        metadata: the first part's, which has all of it.
        tensors: by their names in the file.
        files: open, the parts in order.

    Raises:
        FileNotFoundError: a part is missing.
        CheckpointError: a header is damaged, or parts are not of one model.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        parts = _parts_of(self.path)
        for part in parts:
            if not part.is_file():
                raise FileNotFoundError(f"{part} is missing{_of_parts(len(parts))}: download it")
        self.files = [OpenFile(part) for part in parts]
        headers = [_header(file) for file in self.files]
        self.metadata: Mapping[str, Any] = MappingProxyType(headers[0].metadata)
        self.tensors: dict[str, PlacedTensor] = {}
        for index, (file, header) in enumerate(zip(self.files, headers, strict=True)):
            self._add(index, file, header)
        total = self.metadata.get("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise CheckpointError(
                f"{self.path}: split.tensors.count is {quoted(total)}, and there are "
                f"{len(self.tensors)} tensors{_of_parts(len(parts))}: download it again"
            )

    def _add(self, index: int, file: OpenFile, header: Header) -> None:
        stated = header.metadata.get("split.no", 0), header.metadata.get("split.count", 0)
        wanted = (index, len(self.files)) if len(self.files) > 1 else stated
        if stated != wanted or (len(self.files) == 1 and stated[1] not in (0, 1)):
            raise CheckpointError(
                f"{file.path}: split.no and split.count are {quoted(stated)}, and by its name it "
                f"is part {index} of {len(self.files)}: download the model again, under its own "
                f"names"
            )
        for tensor in header.tensors:
            if tensor.name in self.tensors:
                other = self.tensors[tensor.name].file.path.name
                raise CheckpointError(
                    f"{file.path}: tensor {tensor.name!r} is also in {other}: the folder mixes two "
                    f"models, download the model into an empty one"
                )
            self.tensors[tensor.name] = PlacedTensor(file=file, tensor=tensor)

    @property
    def architecture(self) -> str:
        """What the file calls it, which its keys begin with."""
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str):
            raise CheckpointError(
                f"{self.path}: general.architecture is {quoted(found)}; it must say what the model "
                f"is: download it again"
            )
        return found

    def own(self, key: str, default: Any = None) -> Any:
        """Metadata under the architecture's name."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def family(self) -> tuple[str, Family, GGUFFamily]:
        """The architecture as config.json has it, and how to read it.

        Raises:
            CheckpointError: it isn't known.
        """
        mixture = bool(self.own("expert_count", 0))
        for name, family in FAMILIES.items():
            gguf = family.gguf
            if gguf is None or gguf.architecture != self.architecture:
                continue
            if mixture == (family.specific is ExpertsConfig):
                return name, family, gguf
        known = sorted({f.gguf.architecture for f in FAMILIES.values() if f.gguf is not None})
        raise CheckpointError(
            f"{self.path}: architecture {quoted(self.architecture)}{' with experts' * mixture} is "
            f"not supported in GGUF; known are: {', '.join(known)}"
        )

    def floats(self, name: str) -> list[float]:
        """The numbers of a small tensor of floats."""
        placed = self.tensors[name]
        tensor = placed.tensor
        if tensor.type.dtype is None or tensor.nbytes > 1 << 20:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is {tensor.type.name} of {tensor.nbytes} bytes; "
                f"expected are a few floats: download it again"
            )
        data = bytearray(placed.file.read(tensor.nbytes, tensor.offset))
        return torch.frombuffer(data, dtype=tensor.type.dtype).tolist()


def _of_parts(count: int) -> str:
    return "" if count == 1 else f" of {count} parts"


def _header(file: OpenFile) -> Header:
    """The file's header, read once while the file stays as it is."""
    key = (file.path, file.identity)
    if key not in _headers:
        _headers[key] = read_gguf_header(file)
        if len(_headers) > _KEPT:
            _headers.popitem(last=False)
    return _headers[key]


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

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        if self.unindexed:
            unused, shown = len(self.unindexed), ", ".join(self.unindexed[:_SHOWN])
            logger.warning("%s: %d of its tensors are not used: %s", path, unused, shown)

    def _open(self) -> dict[str, TensorInfo]:
        contents = GGUFContents(self.folder)
        self._files = {file.path: file for file in contents.files}
        self._identities = {file.path: file.identity for file in contents.files}
        _, _, family = contents.family()
        self._orders: dict[str, torch.Tensor] = {}
        self._offsets: dict[str, float] = {}
        found: dict[str, TensorInfo] = {}
        for placed in contents.tensors.values():
            infos = _infos(placed, family)
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
        return [_info(placed, name, shape, dtype, 0)]
    if len(shape) != 3 or shape[0] > _MOST_EXPERTS:
        raise CheckpointError(
            f"{placed.file.path}: tensor {tensor.name!r} is {list(tensor.shape)}; expected is a "
            f"matrix for each of at most {_MOST_EXPERTS} experts: download it again"
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


#: What opens a checkpoint that lies in no folder here, by the path that stands for it.
_MOUNTED: dict[Path, Callable[[], Checkpoint]] = {}


def mount(path: Path, opened: Callable[[], Checkpoint]) -> None:
    """From now on this path stands for what ``opened`` makes, whatever lies there."""
    _MOUNTED[path] = opened


def unmount(path: Path) -> None:
    """The path stands for itself again."""
    _MOUNTED.pop(path, None)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The weights of a model folder, or of a GGUF file or a folder that holds one, or what was
    mounted there.

    Raises FileNotFoundError and CheckpointError as :class:`Checkpoint` does.
    """
    if (opened := _MOUNTED.get(Path(path))) is not None:
        return opened()
    gguf = find_gguf(path)
    return Checkpoint(path) if gguf is None else GGUFCheckpoint(gguf)
