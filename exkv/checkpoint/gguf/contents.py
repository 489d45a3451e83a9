"""What the headers of a GGUF model say, and which file a path stands for."""

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
        names = ", ".join(model.name for model in models[:SHOWN])
        raise CheckpointError(
            f"{path} holds {len(models)} models in GGUF: {names}"
            f"{', ...' if len(models) > SHOWN else ''}. Name the file that you mean"
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
            if gguf is None or self.architecture not in (gguf.architecture, gguf.mixture):
                continue
            if all(_says(self.own(key, 0), says) for key, says in gguf.marks.items()):
                return name, family, gguf
        families = [family.gguf for family in FAMILIES.values() if family.gguf is not None]
        names = {each for gguf in families for each in (gguf.architecture, gguf.mixture)}
        known = sorted(name for name in names if name is not None)
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


def _says(value: Any, wanted: bool | tuple[int, ...]) -> bool:
    """Whether metadata says something, or one of some numbers."""
    return bool(value) == wanted if isinstance(wanted, bool) else value in wanted


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
