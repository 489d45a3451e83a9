"""The headers of a GGUF model's parts, and the file that a path means."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..families import FAMILIES, Family
from ..files import quoted
from ..open_file import CheckpointError, OpenFile
from .header import Header, StoredTensor, read_gguf_header
from .names import GGUFFamily

SUFFIX = ".gguf"
SHOWN = 5  # names in one message

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS = 1024
#: Memoized headers: a load asks for the same one about five times.
_KEPT = 4
_headers: OrderedDict[tuple[Path, tuple[int, ...]], Header] = OrderedDict()


def find_gguf(path: str | os.PathLike[str]) -> Path | None:
    """The GGUF file that a path means, the first of several parts; None for other kinds of models.

    A path is a file, or a folder with one GGUF model and no safetensors.

    Raises:
        CheckpointError: a folder has several GGUF models.
    """
    path = Path(path)
    if path.suffix.lower() == SUFFIX and not path.is_dir():
        return _parts_of(path)[0]
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = sorted(file for file in path.glob(f"*{SUFFIX}") if not file.name.startswith("mmproj"))
    models = list(dict.fromkeys(_parts_of(file)[0] for file in files))
    if len(models) > 1:
        names = ", ".join(model.name for model in models[:SHOWN])
        raise CheckpointError(
            f"{path} has {len(models)} GGUF models: {names}"
            f"{', ...' if len(models) > SHOWN else ''}. Name one of the files"
        )
    return models[0] if models else None


def _parts_of(path: Path) -> list[Path]:
    """All parts of the model, given any of them."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    if not 0 < int(count) <= _MOST_PARTS:
        raise CheckpointError(
            f"{path}: it is one of {count} parts; there must be 1 to {_MOST_PARTS}"
        )
    return [path.with_name(f"{stem}-{i + 1:05}-of-{count}{SUFFIX}") for i in range(int(count))]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTensor:
    """A tensor and the file in which it is."""

    file: OpenFile
    tensor: StoredTensor


class GGUFContents:
    """The headers of a GGUF model.

    Args:
        path: the file, or its first part.

    Attributes:
        metadata: the metadata, all of which is in the first part.
        tensors: tensors by their names in the file.
        files: the open parts, in order.

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
                f"{file.path}: split.no and split.count are {quoted(stated)}, but its name says "
                f"part {index} of {len(self.files)}: download the model again, and keep its files' "
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
        """The architecture's name in the file, with which its keys begin."""
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str):
            raise CheckpointError(
                f"{self.path}: general.architecture is {quoted(found)} and not a name: download it "
                f"again"
            )
        return found

    def own(self, key: str, default: Any = None) -> Any:
        """Metadata under the architecture's name."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def family(self) -> tuple[str, Family, GGUFFamily]:
        """The architecture's name in config.json, and how to read it.

        Raises:
            CheckpointError: it isn't known.
        """
        mixture = bool(self.own("expert_count", 0))
        for name, family in FAMILIES.items():
            gguf = family.gguf
            if gguf is None or self.architecture not in (gguf.architecture, gguf.mixture):
                continue
            if all(_matches(self.own(key, 0), mark) for key, mark in gguf.marks.items()):
                return name, family, gguf
        families = [family.gguf for family in FAMILIES.values() if family.gguf is not None]
        names = {each for gguf in families for each in (gguf.architecture, gguf.mixture)}
        known = sorted(name for name in names if name is not None)
        raise CheckpointError(
            f"{self.path}: architecture {quoted(self.architecture)}{' with experts' * mixture} is "
            f"not supported in GGUF; known are: {', '.join(known)}"
        )

    def floats(self, name: str) -> list[float]:
        """The values of a small tensor of floats."""
        placed = self.tensors[name]
        tensor = placed.tensor
        if tensor.type.dtype is None or tensor.nbytes > 1 << 20:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is {tensor.type.name} of {tensor.nbytes} bytes, "
                f"expected a few floats: download it again"
            )
        data = bytearray(placed.file.read(tensor.nbytes, tensor.offset))
        return torch.frombuffer(data, dtype=tensor.type.dtype).tolist()


def _matches(value: Any, wanted: bool | tuple[int, ...]) -> bool:
    """Whether a metadata value is as true as wanted, or one of some numbers."""
    return bool(value) == wanted if isinstance(wanted, bool) else value in wanted


def _of_parts(count: int) -> str:
    return "" if count == 1 else f" of {count} parts"


def _header(file: OpenFile) -> Header:
    """The file's header, memoized while the file is unchanged."""
    key = (file.path, file.identity)
    if key not in _headers:
        _headers[key] = read_gguf_header(file)
        if len(_headers) > _KEPT:
            _headers.popitem(last=False)
    return _headers[key]
