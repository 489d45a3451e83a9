"""Rewrite a GGUF file with other types; its metadata, tokenizer included, is copied unchanged."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

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
        entries, at = bytearray(), 0
        self._offsets: dict[str, int] = {}
        for name, placed in contents.tensors.items():
            tensor = placed.tensor
            type = TENSOR_TYPES[_NUMBERS[types[name]]] if name in types else tensor.type
            count = tensor.nbytes // tensor.type.nbytes * tensor.type.block
            encoded = name.encode()
            entries += struct.pack("<Q", len(encoded)) + encoded
            entries += struct.pack("<I", len(tensor.shape))
            entries += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
            entries += struct.pack("<IQ", _NUMBERS[type.name], at)
            self._offsets[name] = at
            at += -(-count // type.block * type.nbytes // alignment) * alignment
        head = MAGIC + struct.pack("<IQQ", 3, len(contents.tensors), len(contents.metadata))
        head += bytes(metadata) + bytes(entries)
        self._begin = -(-len(head) // alignment) * alignment
        self._file: BinaryIO = path.open("wb")
        self._file.write(head)
        self._file.truncate(self._begin + at)

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


def _set_file_type(metadata: bytearray, types: Mapping[str, str]) -> None:
    """Set the type of most tensors, if the metadata names one."""
    key = b"general.file_type"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<I", 4)
    at = metadata.find(entry)
    named = [type for type in types.values() if type in _FILE_TYPES]
    if at >= 0 and named:
        most = max(_FILE_TYPES, key=named.count)
        struct.pack_into("<I", metadata, at + len(entry), _FILE_TYPES[most])
