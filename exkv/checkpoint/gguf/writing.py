"""Write GGUF files: one of any metadata and floats, and one with other types than an existing
file, whose metadata, tokenizer included, is copied unchanged."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from .contents import GGUFContents
from .header import MAGIC, TENSOR_TYPES, metadata_span

_ALIGNMENT = 32
_NUMBERS = {type.name: number for number, type in TENSOR_TYPES.items()}
#: Type of most matrices -> llama.cpp's number for the file.
_FILE_TYPES = {
    **{"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9},
    **{"Q2_K": 10, "Q3_K": 11, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18},
}


class GGUFRewriter:
    """A new file of the same model, whose tensors are written in any order.

    Args:
        contents: headers of the file, which has one part.
        path: path of the new file.
        types: tensor -> its new type, if it changes.

    Raises:
        ValueError: the model has several parts.
    """

    def __init__(self, contents: GGUFContents, path: Path, types: Mapping[str, str]) -> None:
        if len(contents.files) > 1:
            raise ValueError(
                f"{contents.path} is one of {len(contents.files)} parts; join them by llama.cpp's "
                "llama-gguf-split --merge"
            )
        self._contents, self._types = contents, types
        (source,) = contents.files
        begin, end = metadata_span(source)
        metadata = bytearray(source.read(end - begin, begin))
        _set_file_type(metadata, types)
        alignment = contents.metadata.get("general.alignment", _ALIGNMENT)
        tensors = {
            name: (types.get(name, placed.tensor.type.name), placed.tensor.shape)
            for name, placed in contents.tensors.items()
        }
        entries, self._offsets, size = _laid_out(tensors, alignment)
        head = MAGIC + struct.pack("<IQQ", 3, len(contents.tensors), len(contents.metadata))
        head += bytes(metadata) + entries
        self._begin = -(-len(head) // alignment) * alignment
        self._file: BinaryIO = path.open("wb")
        self._file.write(head)
        self._file.truncate(self._begin + size)

    def write(self, name: str, data: bytes) -> None:
        self._file.seek(self._begin + self._offsets[name])
        self._file.write(data)

    def copy_others(self) -> None:
        """Write the tensors that keep their type."""
        for name, placed in self._contents.tensors.items():
            if name not in self._types:
                self.write(name, placed.file.read(placed.tensor.nbytes, placed.tensor.offset))

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


#: Tensor -> its type and shape.
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def write_empty(path: Path, metadata: Mapping[str, Any], tensors: Tensors) -> None:
    """Write a file whose tensors are zeros, and take no room on disk until they are written."""
    entries, _, size = _laid_out(tensors, _ALIGNMENT)
    head = MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items()) + entries
    with path.open("wb") as file:
        file.write(head)
        file.truncate(-(-len(head) // _ALIGNMENT) * _ALIGNMENT + size)


def _laid_out(tensors: Tensors, alignment: int) -> tuple[bytes, dict[str, int], int]:
    """The header's entries, where each tensor begins in the data, and the data's size."""
    entries, offsets, at = bytearray(), dict[str, int](), 0
    for name, (type_name, shape) in tensors.items():
        type = TENSOR_TYPES[_NUMBERS[type_name]]
        entries += _text(name) + struct.pack("<I", len(shape))
        entries += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        entries += struct.pack("<IQ", _NUMBERS[type_name], at)
        offsets[name] = at
        at += -(-math.prod(shape) // type.block * type.nbytes // alignment) * alignment
    return bytes(entries), offsets, at


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    """A number, bool or text, or a list of one of these, with its type in front."""
    if not isinstance(value, list):
        kind, form = _kind(value)
        return struct.pack("<I", kind) + _scalar(value, form)
    kind, form = _kind(value[0])
    if kind == _UINT32:
        kind, form = _INT32, "i"  # as llama.cpp has lists of integers
    items = b"".join(_scalar(each, form) for each in value)
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + items


_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


def _kind(value: Any) -> tuple[int, str]:
    """A value's type in the file, and its struct format."""
    if isinstance(value, bool):
        return _BOOL, "?"
    if isinstance(value, int):
        return (_UINT32, "I") if value >= 0 else (_INT32, "i")
    return (_FLOAT32, "f") if isinstance(value, float) else (_STRING, "s")


def _scalar(value: Any, form: str) -> bytes:
    return _text(value) if form == "s" else struct.pack(f"<{form}", value)


def _set_file_type(metadata: bytearray, types: Mapping[str, str]) -> None:
    """Set the type of most tensors, if the metadata names one."""
    key = b"general.file_type"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<I", 4)
    at = metadata.find(entry)
    named = [type for type in types.values() if type in _FILE_TYPES]
    if at >= 0 and named:
        most = max(_FILE_TYPES, key=named.count)
        struct.pack_into("<I", metadata, at + len(entry), _FILE_TYPES[most])
