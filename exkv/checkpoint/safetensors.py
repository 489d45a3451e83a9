"""Checkpoint: a folder of safetensors files, from tensor names to bytes to tensors.

The header of every file is read and checked in the constructor, before a byte of data is used: a
damaged, truncated or hostile file raises a CheckpointError that names it, and never yields a wrong
tensor or a crash. The format is https://huggingface.co/docs/safetensors, read strictly: no holes,
no overlaps, no trailing bytes, no repeated keys.

Tensors are views over a private mapping of the file, made by `mmap` and `torch.frombuffer` and not
by the safetensors library: the header is parsed here in any case, for the ledger and for messages,
and a second parser could only disagree with it.

A load calls `expect` to check the tensors against the configuration, and copies `tensor(name)` to
the device that the plan names.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import functools
import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from .files import parse_json_object, quoted, read_json_object
from .open_file import CheckpointError, OpenFile, refuse_lfs_pointer
from .unread import unread

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMS = 64  # torch's operators take no more
_LONGEST_NAME = 255  # bytes; the limit of file systems
_SHOWN = 5  # tensors named in one message
_SAMPLE = 64  # bytes at a place that a fingerprint reads

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Place of a stored tensor: `nbytes` bytes, `offset` bytes after the file's start."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int


#: Dtypes of unquantized weights.
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    """The required shape and dtype of a stored tensor.

    Attributes:
        shape: shape of the tensor.
        dtypes: allowed dtypes; the first needs no cast.
        block: bytes of a packed block, for a tensor of bytes with floats in its blocks.
        halves: byte offsets of a block's float16s, which must be finite.
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    block: int = 1
    halves: tuple[int, ...] = ()

    @classmethod
    def of_floats(cls, shape: tuple[int, ...], dtype: torch.dtype) -> ExpectedTensor:
        """A tensor of floats that will be used in ``dtype``."""
        others = (other for other in _FLOATS if other != dtype)
        return cls(shape=shape, dtypes=(dtype, *others))


class Checkpoint:
    """The tensors of a model folder: model.safetensors, or an index with shards, or else the only
    ``*.safetensors`` in it, in this order.

    An index decides: tensors in a shard that it doesn't list are ignored, and listed in
    `unindexed`. Files may be symbolic links.

    Raises FileNotFoundError for a missing folder, file or shard, CheckpointError for a bad one.
    """

    #: Whether there is nothing to read: tensors are zeros.
    hollow: ClassVar[bool] = False
    #: What describes the tensors, for messages.
    described_by = CONFIG_NAME
    #: Whether all tensors must belong to the model.
    complete = False
    #: Whether matrices that transformers saves in one tensor are separate tensors.
    apart = False

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.unindexed: list[str] = []
        self._files: dict[Path, OpenFile] = {}
        self._identities: dict[Path, tuple[int, ...]] = {}
        self._closed = False
        self._infos = self._open()

    def _open(self) -> dict[str, TensorInfo]:
        """Open the files; returns the tensors by name."""
        single, index = _find_files(self.folder)
        return _with_prefix(self._read_shards(index) if index else self._read_file(single))

    def names(self) -> list[str]:
        """The names of all tensors, in their order on disk."""
        return list(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def __len__(self) -> int:
        return len(self._infos)

    def info(self, name: str) -> TensorInfo:
        """A tensor's dtype, shape, size and place; CheckpointError if there is none."""
        try:
            return self._infos[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._infos, n=3)
            hint = f"; similar names: {', '.join(near)}" if near else ""
            raise CheckpointError(
                f"{self.folder}: no tensor {name!r} among {len(self._infos)}{hint}"
            ) from None

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, of the stored dtype and shape: a view over the mapped file.

        Nothing is read until it is used. Treat it as read-only: a write would not reach the file,
        but every other view over the same bytes. (A tensor that doesn't start at a multiple of its
        element size, which the format allows, is a copy.) It stays valid after `close`. Raises
        CheckpointError if the file was changed or replaced since it was opened; truncating the file
        later, while a view is in use, still kills the process (SIGBUS).
        """
        return self.view(self.info(name))

    def view(self, info: TensorInfo) -> torch.Tensor:
        """:meth:`tensor` for a place in one of its files."""
        file = self._file(info)
        file.check(f"tensor {info.name!r} can't be read")
        mapped = file.mapped()
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        if info.offset % info.dtype.itemsize:
            raw = torch.frombuffer(mapped, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
            return raw.clone().view(info.dtype).reshape(info.shape)
        count = info.nbytes // info.dtype.itemsize
        flat = torch.frombuffer(mapped, dtype=info.dtype, count=count, offset=info.offset)
        return flat.reshape(info.shape)

    def read_into(self, name: str, target: torch.Tensor, first: int = 0) -> None:
        """Fill uint8 (n,) on the host with the tensor's bytes from ``first`` on.

        Other threads run meanwhile. Call `check` once everything is read.
        """
        info = self.info(name)
        memory = (ctypes.c_char * len(target)).from_address(target.data_ptr())
        self._file(info).read_into(memoryview(memory).cast("B"), info.offset + first)

    def mapping(self, name: str) -> object | None:
        """The mapped file of which `tensor` is a view, which lives as long as any view; None if
        `tensor` is a copy."""
        info = self.info(name)
        return None if info.offset % info.dtype.itemsize else self._file(info).mapped()

    def fetch(self, name: str, first: int, nbytes: int) -> None:
        """Read bytes of a mapped tensor into memory. Other threads run meanwhile.

        Raises CheckpointError if they can't be read.
        """
        info = self.info(name)
        self._file(info).fetch(info.offset + first, nbytes)

    def check(self, names: Iterable[str]) -> None:
        """CheckpointError if a file of these tensors was changed or replaced after opening."""
        found = {info.file: info for info in map(self.info, names)}
        for info in found.values():
            self._file(info).check(f"tensor {info.name!r} can't be read")

    def expect(self, tensors: Mapping[str, ExpectedTensor], unused: Sequence[str] = ()) -> None:
        """Check that all these tensors are present as required.

        Unread tensors of other models are named in a warning.

        Args:
            unused: names of modules that may be present although the model doesn't use them.

        Raises CheckpointError with the first few tensors that are missing or of another shape, or
        one of another dtype, or those of the model's layers that exkv doesn't read.
        """
        wrong = list(filter(None, (self._other_shape(*item) for item in tensors.items())))
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise CheckpointError(
                f"{self.folder}: {len(wrong)} of {len(tensors)} tensors are not what "
                f"{self.described_by} says: {'; '.join(wrong[:_SHOWN])}{more}. {self.described_by} "
                f"and the weights are not of the same model, or one of them was changed"
            )
        for name, expected in tensors.items():
            info = self._infos[name]
            if info.dtype not in expected.dtypes:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in expected.dtypes)
                raise CheckpointError(
                    f"{info.file}: tensor {name!r} holds {info.dtype}, and must hold one of: "
                    f"{known}. If this checkpoint is quantized, its config.json doesn't say how"
                )
        self._check_unread(tensors, tuple(f"{name}." for name in unused))

    def _check_unread(self, tensors: Iterable[str], unused: tuple[str, ...]) -> None:
        """Refuse unread tensors that would change the model's results, and warn about others."""
        found = [
            (name, runs)
            for name, runs in unread(self._infos, tensors)
            if not name.startswith(unused) and not self._has_no_effect(name)
        ]
        if inside := [name for name, runs in found if runs or self.complete]:
            raise CheckpointError(
                f"{self.folder}: the model has no place for {len(inside)} of its tensors: "
                f"{', '.join(inside[:_SHOWN])}. It is of a kind that exkv doesn't do"
            )
        if found:
            logger.warning(
                "%s: %d tensors are not read, e.g. %s: exkv runs the text model alone",
                self.folder,
                len(found),
                found[0][0],
            )

    def _has_no_effect(self, name: str) -> bool:
        """Whether a tensor is a bias or zero point of zeros, which some packers write, or a
        Hadamard matrix that compressed-tensors' settings name."""
        if name.endswith("_input.weight"):
            return _is_hadamard(self.tensor(name))
        return name.endswith((".bias", "_zero_point")) and not self.tensor(name).any()

    def _other_shape(self, name: str, expected: ExpectedTensor) -> str | None:
        """What is wrong with a tensor's shape; None if it is right."""
        info, shape = self._infos.get(name), list(expected.shape)
        if info is None:
            return f"{name} is missing, expected {shape}"
        if info.shape != expected.shape:
            return f"{name} in {info.file.name} is {list(info.shape)}, expected {shape}"
        return None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash that identifies the weights: over the name, dtype and shape of every tensor and its
        first, middle and last few bytes. It doesn't depend on how tensors are spread over files.
        Reads the files again, even once this is closed."""
        found = hashlib.blake2b(digest_size=16)
        for name, sample in sorted(self.samples().items()):
            info = self._infos[name]
            found.update(f"{name} {info.dtype} {info.shape}\n".encode() + sample)
        return found.hexdigest()

    def samples(self) -> dict[str, bytes]:
        """Some stored bytes of every tensor, by name; reads the files again, like
        :attr:`fingerprint`."""
        files = {path: self._again(path) for path in self._identities}
        return {
            name: sample_of(files[info.file].read, info, info.offset)
            for name, info in self._infos.items()
        }

    def _again(self, path: Path) -> OpenFile:
        """Reopen the file.

        Raises:
            CheckpointError: it was changed or replaced.
        """
        file = OpenFile(path)
        if file.identity != self._identities[path]:
            raise CheckpointError(
                f"{path}: the file was replaced or written to since the model was read, so that "
                "its weights can't be identified: load the model again"
            )
        return file

    def unmap(self) -> None:
        """Release the mapped files, so that their pages no longer count as this process's. The next
        `tensor` maps again; existing views stay valid."""
        for file in self._files.values():
            file.unmap()

    def close(self) -> None:
        """Release the files; each is unmapped when its last tensor is gone."""
        self._closed, self._files = True, {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_file(self, path: Path) -> dict[str, TensorInfo]:
        file = self._files[path] = OpenFile(path)
        self._identities[path] = file.identity
        if (known := _headers.get()) is None:
            return read_header(file)
        key = (path, file.identity)
        if key not in known:
            known[key] = read_header(file)
        return known[key]

    def _read_shards(self, index: Path) -> dict[str, TensorInfo]:
        """Tensors of an index, each checked to be in its shard and in no other."""
        shard_of = _read_index(index)
        counts: dict[str, int] = {}
        for shard in shard_of.values():
            counts[shard] = counts.get(shard, 0) + 1
        found: dict[str, TensorInfo] = {}
        for shard in sorted(counts):
            file = self.folder / shard
            if not file.is_file():
                raise FileNotFoundError(
                    f"{file} is missing; {index.name} says that it holds {counts[shard]} of "
                    f"{len(shard_of)} tensors: download it, or the whole model again"
                )
            for name, info in self._read_file(file).items():
                if name in found:
                    raise CheckpointError(
                        f"{file}: tensor {name!r} is also in {found[name].file.name}: the folder "
                        f"mixes two checkpoints, download the model into an empty one"
                    )
                found[name] = info
        for name, shard in shard_of.items():
            if name not in found or found[name].file.name != shard:
                place = f"it is in {found[name].file.name}" if name in found else "nowhere"
                raise CheckpointError(
                    f"{self.folder / shard}: tensor {name!r} is not in it ({place}), though "
                    f"{index.name} says so: index and shards are not of the same checkpoint, "
                    f"download all of them again"
                )
        self.unindexed = [name for name in found if name not in shard_of]
        return {name: info for name, info in found.items() if name in shard_of}

    def _file(self, info: TensorInfo) -> OpenFile:
        if self._closed:
            raise ValueError(f"{self.folder}: the checkpoint is closed; open it again")
        return self._files[info.file]


#: Tensors of files by path and identity, within :func:`headers_read_once`.
_headers: ContextVar[dict[tuple[Path, tuple[int, ...]], dict[str, TensorInfo]] | None]
_headers = ContextVar("_headers", default=None)


@contextlib.contextmanager
def headers_read_once() -> Iterator[None]:
    """Within the block, the header of a file that doesn't change is read once, however often its
    checkpoint is opened: mixtures have hundreds of thousands of tensors."""
    token = _headers.set(_headers.get() or {})
    try:
        yield
    finally:
        _headers.reset(token)


def sample_of(read: Callable[[int, int], bytes], info: TensorInfo, offset: int = 0) -> bytes:
    """The first, middle and last few bytes of a tensor.

    Args:
        read: reads a number of bytes from an offset on.
        offset: offset of the tensor's first byte.
    """
    starts = (0, info.nbytes // 2, max(info.nbytes - _SAMPLE, 0))
    return b"".join(read(min(_SAMPLE, info.nbytes - start), offset + start) for start in starts)


def read_header(opened: OpenFile) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file in the order of their data; reads only the header.

    Raises CheckpointError for whatever the format forbids, so that every tensor returned is inside
    of the file, and overlaps with no other.
    """
    file, size = opened.path, opened.size
    prefix = opened.read(8, 0)
    if len(prefix) < 8:
        raise CheckpointError(
            f"{file}: {size} bytes are too few for a safetensors file, whose first 8 give the "
            f"header's length: download it again"
        )
    refuse_lfs_pointer(file, prefix)
    length = int.from_bytes(prefix, "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{file}: a header of {length} bytes does not fit, the file has {size} bytes and "
            f"the format allows {MAX_HEADER_BYTES}: it is incomplete or not a safetensors "
            f"file, download it again"
        )
    text = opened.read(length, 8)
    if len(text) < length or not text.startswith(b"{"):
        raise CheckpointError(f"{file}: the header does not start as JSON: download it again")
    entries = parse_json_object(text, f"{file}: the header", CheckpointError)
    _check_metadata(file, entries.pop("__metadata__", {}))
    start = 8 + length
    infos = [_tensor_info(file, name, entry, start) for name, entry in entries.items()]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    _check_layout(file, infos, start, size)
    return {info.name: info for info in infos}


def _with_prefix(infos: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Add the prefix that names lack in a checkpoint of a model without its head."""
    if "embed_tokens.weight" not in infos:
        return infos
    heads = ("lm_head.", "model.")
    return {n if n.startswith(heads) else f"model.{n}": info for n, info in infos.items()}


def _check_metadata(file: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ must map strings to strings")


def _tensor_info(file: Path, name: str, entry: Any, start: int) -> TensorInfo:
    """One entry of a header; `start` is where the data begins, in bytes."""

    def bad(problem: str) -> CheckpointError:
        return CheckpointError(f"{file}: tensor {name!r}: {problem}: download it again")

    if not name.isprintable():
        raise bad("the name has characters that can't be printed")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad(f"needs dtype, shape and data_offsets, has {quoted(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise bad(f"dtype {quoted(dtype)} is unknown, exkv reads {', '.join(DTYPES)}")
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise bad(f"shape {quoted(shape)} is not a list of up to {_MAX_DIMS} sizes")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise bad(f"data_offsets {quoted(offsets)} are not [begin, end]")
    itemsize = DTYPES[dtype].itemsize
    # Strides are products of the other dimensions, so that an empty tensor can overflow too.
    sizes = [max(n, 1) for n in shape] if 0 in shape else shape
    if math.prod(sizes) * itemsize >= 2**63:
        raise bad(f"shape {quoted(shape)} has more than 2**63 bytes")
    nbytes = math.prod(shape) * itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise bad(
            f"data_offsets {offsets} are {offsets[1] - offsets[0]} bytes, but shape {shape} of "
            f"{dtype} is {nbytes} bytes"
        )
    return TensorInfo(
        name=name,
        dtype=DTYPES[dtype],
        shape=tuple(shape),
        nbytes=nbytes,
        file=file,
        offset=start + offsets[0],
    )


def _check_layout(file: Path, infos: Iterable[TensorInfo], start: int, size: int) -> None:
    """Check that tensors, in the order of their data, cover the bytes from `start` to `size`
    once."""
    end = start
    for info in infos:
        if info.offset != end:
            kind = "overlaps with the tensor before it" if info.offset < end else "follows a hole"
            raise CheckpointError(
                f"{file}: tensor {info.name!r} {kind}: it begins at byte {info.offset}, expected "
                f"{end}: download it again"
            )
        end += info.nbytes
    if end > size:
        raise CheckpointError(
            f"{file}: the download is incomplete: expected {end} bytes, the file has {size}; "
            f"download it again"
        )
    if end < size:
        raise CheckpointError(
            f"{file}: {size - end} bytes after the last tensor belong to none: expected {end} "
            f"bytes, the file has {size}; download it again"
        )


def _find_files(folder: Path) -> tuple[Path, Path | None]:
    """The single file to read, and the index if there is one instead."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; exkv reads a model from a local folder")
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if single.is_file():
        return single, None
    if index.is_file():
        return single, index
    others = sorted(p for p in folder.glob("*.safetensors") if p.is_file())
    if len(others) == 1:
        return others[0], None
    if others:
        raise FileNotFoundError(
            f"{index} is missing; the folder has {len(others)} safetensors files "
            f"({', '.join(p.name for p in others[:_SHOWN])}, ...) and only the index says which "
            f"tensor is in which: download it too"
        )
    pickles = sorted(p for end in ("bin", "pt", "pth") for p in folder.glob(f"*.{end}"))
    if pickles:
        raise CheckpointError(
            f"{pickles[0]} is a pickle, which can run code when it is read; exkv reads only "
            f"safetensors. Convert it with transformers: AutoModelForCausalLM."
            f"from_pretrained(folder).save_pretrained(new_folder), or take a version of the model "
            f"with {SINGLE_NAME}"
        )
    raise FileNotFoundError(
        f"{single} is missing, and so are {INDEX_NAME} and any other safetensors file: download "
        f"the model's weights into {folder}"
    )


def _read_index(index: Path) -> dict[str, str]:
    """The index's weight_map: tensor -> name of its file beside the index."""
    shard_of = read_json_object(index, CheckpointError).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{index}: weight_map must map tensors to files: download it again")
    for name, shard in shard_of.items():
        plain = isinstance(shard, str) and shard.isprintable() and not set(shard) & set("/\\:")
        plain = plain and len(shard.encode()) <= _LONGEST_NAME
        if not plain or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: tensor {name!r} is said to be in {quoted(shard)}, which is not a plain "
                f"name of a safetensors file in this folder: don't load it, download it again"
            )
    return shard_of


def _are_counts(value: Any) -> bool:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        return False
    return not value or 0 <= min(value) <= max(value) < 2**63


def _is_hadamard(matrix: torch.Tensor) -> bool:
    """Whether it is Sylvester's matrix: each quarter is that of half the size, the last negated."""
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        return False
    while len(matrix) % 2 == 0:
        half = len(matrix) // 2
        first, others = matrix[:half, :half], (matrix[:half, half:], matrix[half:, :half])
        if not all(torch.equal(first, each) for each in (*others, -matrix[half:, half:])):
            return False
        matrix = first
    return len(matrix) == 1 and matrix.item() == 1
