"""The header of a GGUF file: metadata and the list of tensors, checked before a byte is used.

The format is that of ggml (docs/gguf.md in its repository), versions 2 and 3, little endian: magic,
version, two counts, pairs of key and value, tensors with their shapes and types, and after padding
their data. Counts and lengths are compared with the rest of the file before anything is allocated,
and a header must not be larger than that of a safetensors file. ``tensors.py`` makes a checkpoint
from it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ..files import quoted
from ..open_file import CheckpointError, OpenFile, refuse_lfs_pointer

MAGIC = b"GGUF"
VERSIONS = (2, 3)
#: Upper bounds on bytes of a header (as for safetensors), and on entries of an array.
MAX_HEADER_BYTES, MOST_ITEMS = 100_000_000, 1 << 22
#: Upper bounds on nesting of arrays, and on dimensions of a tensor.
_DEEPEST, _MAX_DIMS = 4, 4
#: Upper bounds on bytes of a key, and of a tensor's name (ggml cuts names after 63).
_LONGEST_KEY, _LONGEST_NAME = 65535, 255
#: Fewest bytes of a pair of key and value, and of a tensor's entry.
_LEAST_PAIR, _LEAST_TENSOR = 13, 32
_ALIGNMENT, _MOST_ALIGNMENT = "general.alignment", 1 << 16
_PIECE = 1 << 20

_STRING, _ARRAY = 8, 9
#: Type of a value -> its code in ``struct``.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """One of ggml's types: ``block`` numbers in ``nbytes`` bytes.

    Attributes:
        dtype: dtype of plain floats; None for packed blocks.
    """

    name: str
    block: int
    nbytes: int
    dtype: torch.dtype | None = None


def _packed(name: str, block: int, nbytes: int) -> TensorType:
    return TensorType(name=name, block=block, nbytes=nbytes)


#: ggml's number -> type, for supported types.
TENSOR_TYPES = {
    0: TensorType(name="F32", block=1, nbytes=4, dtype=torch.float32),
    1: TensorType(name="F16", block=1, nbytes=2, dtype=torch.float16),
    2: _packed("Q4_0", 32, 18),
    3: _packed("Q4_1", 32, 20),
    6: _packed("Q5_0", 32, 22),
    7: _packed("Q5_1", 32, 24),
    8: _packed("Q8_0", 32, 34),
    10: _packed("Q2_K", 256, 84),
    11: _packed("Q3_K", 256, 110),
    12: _packed("Q4_K", 256, 144),
    13: _packed("Q5_K", 256, 176),
    14: _packed("Q6_K", 256, 210),
    16: _packed("IQ2_XXS", 256, 66),
    17: _packed("IQ2_XS", 256, 74),
    18: _packed("IQ3_XXS", 256, 98),
    19: _packed("IQ1_S", 256, 50),
    20: _packed("IQ4_NL", 32, 18),
    21: _packed("IQ3_S", 256, 110),
    22: _packed("IQ2_S", 256, 82),
    23: _packed("IQ4_XS", 256, 136),
    29: _packed("IQ1_M", 256, 56),
    34: _packed("TQ1_0", 256, 54),
    35: _packed("TQ2_0", 256, 66),
    39: _packed("MXFP4", 32, 17),
    40: _packed("NVFP4", 64, 36),
    30: TensorType(name="BF16", block=1, nbytes=2, dtype=torch.bfloat16),
}
#: ggml's number -> name of other types, for messages.
_OTHER_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    41: "Q1_0",
    42: "Q2_0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a GGUF file.

    Attributes:
        shape: rows first and a row's length last (the reverse of ggml's order).
        offset: in bytes from the file's start.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The part of a file before the data.

    Attributes:
        metadata: key -> number, bool, text, or a list of them.
        tensors: in the order of their data.
    """

    metadata: dict[str, Any]
    tensors: tuple[StoredTensor, ...]


def read_gguf_header(file: OpenFile) -> Header:
    """Read the header of an open file. Every tensor returned is inside of the file, and overlaps
    with no other.

    Raises:
        CheckpointError: the header violates the format.
    """
    cursor = _Cursor(file)
    _check_version(cursor)
    tensors, pairs = cursor.scalar("Q"), cursor.scalar("Q")
    cursor.expect_room("tensors", tensors, _LEAST_TENSOR)
    cursor.expect_room("keys", pairs, _LEAST_PAIR)
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key, value = _pair(cursor)
        if key in metadata:
            cursor.refuse(f"the key {quoted(key)} occurs twice")
        metadata[key] = value
    alignment = _alignment(cursor, metadata)
    entries = [_entry(cursor) for _ in range(tensors)]
    start = _padded(cursor.position, alignment)
    found = [_tensor(cursor, entry, start) for entry in entries]
    found.sort(key=lambda tensor: tensor.offset)
    _check_layout(cursor, found, start, alignment)
    return Header(metadata=metadata, tensors=tuple(found))


def metadata_span(file: OpenFile) -> tuple[int, int]:
    """Byte positions where the pairs of key and value begin and end; errors as for
    :func:`read_gguf_header`."""
    cursor = _Cursor(file)
    _check_version(cursor)
    _, pairs = cursor.scalar("Q"), cursor.scalar("Q")
    begin = cursor.position
    for _ in range(pairs):
        _pair(cursor)
    return begin, cursor.position


class _Cursor:
    """Reads a header from its start, piece by piece."""

    def __init__(self, file: OpenFile) -> None:
        self.file = file
        self.position = 0
        self.end = min(file.size, MAX_HEADER_BYTES)
        self._piece, self._first = b"", 0

    def refuse(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.file.path}: {problem}: download it again")

    def expect_room(self, what: str, count: int, nbytes: int) -> None:
        """CheckpointError unless ``count`` items of at least ``nbytes`` bytes can still follow."""
        left = self.end - self.position
        if count * nbytes > left:
            self.refuse(
                f"{quoted(count)} {what} of at least {nbytes} bytes do not fit in the {left} bytes "
                f"from byte {self.position} on (the file has {self.file.size} bytes, and a header "
                f"at most {MAX_HEADER_BYTES})"
            )

    def expect_few(self, key: str, count: int) -> None:
        """CheckpointError for an array with more entries than any vocabulary has."""
        if count > MOST_ITEMS:
            self.refuse(f"{quoted(key)} has {count} entries, more than the {MOST_ITEMS} allowed")

    def take(self, nbytes: int, what: str = "bytes") -> bytes:
        """The next bytes, all of them."""
        begin = self.position - self._first
        if begin + nbytes > len(self._piece):
            self.expect_room(what, nbytes, 1)
            self._piece = self.file.read(max(nbytes, _PIECE), self.position)
            self._first, begin = self.position, 0
            if len(self._piece) < nbytes:
                self.refuse(f"the file ends at byte {self.position + len(self._piece)}")
        self.position += nbytes
        return self._piece[begin : begin + nbytes]

    def scalar(self, kind: str) -> Any:
        """Read one number by its code in ``struct``."""
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]

    def text(self, what: str, longest: int = MAX_HEADER_BYTES) -> str:
        """Read a text that follows its length in bytes."""
        (length,) = _LENGTH.unpack(self.take(8))
        if length > longest:
            self.refuse(f"{what} has {length} bytes, more than the {longest} allowed")
        data = self.take(length, "bytes of a text")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            self.refuse(f"{what} is not UTF-8 text at byte {error.start} of it")

    def texts(self, what: str, count: int) -> list[str]:
        """Read ``count`` adjacent texts. A vocabulary has hundreds of thousands: those that are
        complete in the current piece are read in one loop."""
        found: list[str] = []
        while len(found) < count:
            begin = self.position - self._first
            end = _whole_texts(self._piece, begin, count - len(found), found)
            self.position += end - begin
            if len(found) < count:
                found.append(self.text(what))
        return found


_LENGTH = struct.Struct("<Q")


def _whole_texts(piece: bytes, begin: int, most: int, found: list[str]) -> int:
    """Append up to ``most`` complete texts of the piece from ``begin`` on; returns the end of the
    last valid one."""
    unpack, size = _LENGTH.unpack_from, len(piece)
    for _ in range(most):
        if begin + 8 > size:
            break
        end = begin + 8 + unpack(piece, begin)[0]
        if end > size:
            break
        try:
            found.append(piece[begin + 8 : end].decode())
        except UnicodeDecodeError:
            break
        begin = end
    return begin


def _check_version(cursor: _Cursor) -> None:
    file = cursor.file
    magic = file.read(8, 0)
    refuse_lfs_pointer(file.path, magic)
    if magic[:4] != MAGIC:
        cursor.refuse(f"the file begins with {magic[:4]!r}, and a GGUF file with {MAGIC!r}")
    cursor.take(4)
    version = cursor.scalar("I")
    if version in VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise CheckpointError(
            f"{file.path}: the file is big endian: convert the model again for little endian"
        )
    raise CheckpointError(
        f"{file.path}: version {version} of GGUF is not supported, only versions 2 and 3: convert "
        f"the model again with a current llama.cpp"
    )


def _pair(cursor: _Cursor) -> tuple[str, Any]:
    key = cursor.text(f"the key at byte {cursor.position}", _LONGEST_KEY)
    if not key or not key.isprintable():
        cursor.refuse(f"the key {quoted(key)} is not printable")
    return key, _value(cursor, key, cursor.scalar("I"))


def _value(cursor: _Cursor, key: str, kind: int, depth: int = 0) -> Any:
    if kind == _STRING:
        return cursor.text(f"the text of {quoted(key)}")
    if kind == _ARRAY:
        return _array(cursor, key, depth + 1)
    if kind not in _SCALARS:
        cursor.refuse(f"{quoted(key)} is of the type {kind}, which GGUF doesn't have")
    return _scalars(cursor, key, kind, 1)[0]


def _array(cursor: _Cursor, key: str, depth: int) -> list[Any]:
    kind, count = cursor.scalar("I"), cursor.scalar("Q")
    if depth > _DEEPEST:
        cursor.refuse(f"{quoted(key)} has arrays {depth} deep; at most {_DEEPEST} are allowed")
    if kind in _SCALARS:
        return _scalars(cursor, key, kind, count)
    least = {_STRING: 8, _ARRAY: 12}.get(kind)
    if least is None:
        cursor.refuse(f"{quoted(key)} has elements of the type {kind}, which GGUF doesn't have")
    cursor.expect_room(f"entries of {quoted(key)}", count, least)
    cursor.expect_few(key, count)
    if kind == _STRING:
        return cursor.texts(f"a text of {quoted(key)}", count)
    return [_array(cursor, key, depth + 1) for _ in range(count)]


def _scalars(cursor: _Cursor, key: str, kind: int, count: int) -> list[Any]:
    form = _SCALARS[kind]
    size = struct.calcsize("<" + form)
    cursor.expect_room(f"numbers of {quoted(key)}", count, size)
    cursor.expect_few(key, count)
    data = cursor.take(count * size)
    if form == "?" and not set(data) <= {0, 1}:
        cursor.refuse(f"{quoted(key)} has a bool that is neither 0 nor 1")
    return list(struct.unpack(f"<{count}{form}", data))


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get(_ALIGNMENT, 32)
    sound = isinstance(value, int) and 0 < value <= _MOST_ALIGNMENT and not value & (value - 1)
    if not sound:
        cursor.refuse(
            f"{_ALIGNMENT} is {quoted(value)}; it must be a power of two up to {_MOST_ALIGNMENT}"
        )
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A tensor's entry in the header: ``sizes`` begin with a row's length, ``offset`` counts from
    the start of the data."""

    name: str
    sizes: tuple[int, ...]
    kind: int
    offset: int


def _entry(cursor: _Cursor) -> _Entry:
    name = cursor.text(f"the tensor's name at byte {cursor.position}", _LONGEST_NAME)
    if not name or not name.isprintable():
        cursor.refuse(f"a tensor's name {quoted(name)} is not printable")
    dims = cursor.scalar("I")
    if not 0 < dims <= _MAX_DIMS:
        cursor.refuse(f"tensor {quoted(name)} has {dims} dimensions; 1 to {_MAX_DIMS} are allowed")
    sizes = struct.unpack(f"<{dims}Q", cursor.take(8 * dims))
    kind, offset = struct.unpack("<IQ", cursor.take(12))
    return _Entry(name=name, sizes=sizes, kind=kind, offset=offset)


def _tensor(cursor: _Cursor, entry: _Entry, start: int) -> StoredTensor:
    name = entry.name
    type = TENSOR_TYPES.get(entry.kind)
    if type is None:
        known = ", ".join(each.name for each in TENSOR_TYPES.values())
        raise CheckpointError(
            f"{cursor.file.path}: tensor {quoted(name)} is of the type "
            f"{_OTHER_TYPES.get(entry.kind, entry.kind)}; exkv reads {known}: take a version of "
            f"the model in these"
        )
    row = entry.sizes[0]
    if not all(entry.sizes) or row % type.block:
        cursor.refuse(
            f"tensor {quoted(name)} has the sizes {list(entry.sizes)}; none may be 0, and the "
            f"first must be a multiple of {type.block} in {type.name}"
        )
    nbytes = math.prod(entry.sizes) // type.block * type.nbytes
    begin = start + entry.offset
    if begin + nbytes > cursor.file.size:
        cursor.refuse(
            f"tensor {quoted(name)} is {nbytes} bytes from byte {begin} on, and the file has "
            f"{cursor.file.size}"
        )
    shape = tuple(reversed(entry.sizes))
    return StoredTensor(name=name, shape=shape, type=type, offset=begin, nbytes=nbytes)


def _check_layout(
    cursor: _Cursor, tensors: Iterable[StoredTensor], start: int, alignment: int
) -> None:
    """Check that tensors, in the order of their data, follow each other, each padded."""
    end, names = start, set()
    for tensor in tensors:
        if tensor.name in names:
            cursor.refuse(f"tensor {quoted(tensor.name)} occurs twice")
        names.add(tensor.name)
        if tensor.offset != end:
            kind = "overlaps with the one before it" if tensor.offset < end else "follows a hole"
            cursor.refuse(
                f"tensor {quoted(tensor.name)} {kind}: it begins at byte {tensor.offset}, expected "
                f"{end}"
            )
        end = _padded(end + tensor.nbytes, alignment)
    if end < cursor.file.size and names:
        cursor.refuse(
            f"{cursor.file.size - end} bytes after the last tensor belong to none: expected {end} "
            f"bytes, the file has {cursor.file.size}"
        )


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
