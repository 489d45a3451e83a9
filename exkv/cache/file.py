"""Saved caches: a safetensors file with the tokens in its metadata, and their stored keys and
values.

Only what is used is written: rows with tokens, up to the longest, and keys and values that layers
share once, as those of the first of these layers. The tensor ``layers.3.k`` is the
fourth layer's ``k`` of shape (rows, tokens, ...), as the kind of cache stores it. The format is
https://huggingface.co/docs/safetensors, and its library reads it.
"""

from __future__ import annotations

import functools
import glob
import json
import math
import os
import re
import secrets
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from exkv.checkpoint.safetensors import DTYPES

from .arrangement import OneState
from .slots import count
from .state import is_snapshot

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from .base import KVCache
    from .layer import CacheLayer

_FORMAT = "exkv cache 5"
#: Format 4 repeats shared keys and values for every layer.
_KNOWN = ("exkv cache 4", _FORMAT)
#: Placeholder in the metadata for the file's checksum, which is computed with this in its place.
NO_CHECKSUM = {"crc32": "00000000"}
_CHECKSUM = re.compile(rb'"crc32": ?"([0-9a-f]{8})"')
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save(cache: KVCache, file: str | os.PathLike[str]) -> None:
    """Write the cache's contents; see :meth:`KVCache.save`."""
    if any(layer.shared for layer in cache.layers):
        raise ValueError("a fork shares its prefix: save the cache that it came from")
    rows = max((i + 1 for i, ids in enumerate(cache.sequences) if ids), default=0)
    lens = cache.seq_lens[:rows]
    parts = {
        name: part for name, part in _parts(cache, lens).items() if name == _source(cache, name)
    }
    about = {
        **NO_CHECKSUM,
        "format": _FORMAT,
        "checkpoint": _fingerprint(cache),
        "layers": json.dumps([_encoding_of(layer) for layer in cache.layers]),
        "sequences": json.dumps(cache.sequences[:rows]),
        "stale": json.dumps(sorted(cache.stale)),
        "written": json.dumps(cache.written[:rows]),
        "made_with": json.dumps(cache.made_with[:rows]),
    }
    nbytes = sum(part.nbytes for part in parts.values())
    try:
        with replacing(Path(file)) as stream:
            _write(stream, parts, about)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{file}: {nbytes:,} bytes of cache could not be written there ({error.strerror}); "
            "the file is unchanged",
        ) from None


class Part(Protocol):
    """One tensor of a layer, (rows, tokens, ...) in the file."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def values(self) -> Tensor:
        """The tensor, in host memory."""

    def become(self, values: Tensor) -> None:
        """Store these values instead; there is room for them."""


class Elsewhere(Protocol):
    """The layers of a cache in other processes."""

    def parts(self, cache: KVCache, lens: Sequence[int]) -> dict[str, Part]:
        """Parts of rows of ``lens`` tokens, by their names in the file."""

    def make_room(self, cache: KVCache, lens: Sequence[int]) -> None:
        """Grow the remote layers to hold rows of these lengths."""

    def become(self, cache: KVCache) -> None:
        """Set the rows' tokens remotely to those of this cache."""


def _parts(cache: KVCache, lens: Sequence[int]) -> dict[str, Part]:
    """All parts by name, in the order of the layers."""
    here: dict[str, Part] = {
        f"layers.{index}.{name}": OwnPart(layer=layer, name=name, lens=lens)
        for index, layer in enumerate(cache.layers)
        for name in layer.tensors
        if not is_snapshot(name)
    }
    if cache.elsewhere is None:
        return here
    found = here | cache.elsewhere.parts(cache, lens)
    return dict(sorted(found.items(), key=lambda pair: int(pair[0].split(".")[1])))


def _source(cache: KVCache, name: str) -> str:
    """Name of the part with the same contents in the first layer that has these keys and values."""
    _, index, tensor = name.split(".", 2)
    layer = cache.layers[int(index)]
    while (reads := layer.spec.reads) is not None:
        source = cache.layers[reads]
        if _encoding_of(source) != _encoding_of(layer) or source.spec.dtype != layer.spec.dtype:
            break
        layer, index = source, str(reads)
    return f"layers.{index}.{tensor}"


def _read_tensors(cache: KVCache, stored: Any, parts: Mapping[str, Part]) -> dict[str, Tensor]:
    """Read the tensors of all parts; those that layers share only once, if the file does so."""
    there, read = set(stored.keys()), functools.cache(stored.get_tensor)
    return {name: read(name if name in there else _source(cache, name)) for name in parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPart:
    """A part of a layer in this process."""

    layer: CacheLayer
    name: str
    lens: Sequence[int]

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.tensors[self.name].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        slots = self.layer.spec.arrangement.slots(self.name, 0, max(self.lens, default=0))
        return len(self.lens), count(slots), *self.layer.tensors[self.name].shape[2:]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def values(self) -> Tensor:
        return self.layer.rows(self.name, self.lens).cpu().contiguous()

    def become(self, values: Tensor) -> None:
        self.layer.set_rows(self.name, self.lens, values)


def _fingerprint(cache: KVCache) -> str:
    """Fingerprint of the weights behind the contents."""
    checkpoint = cache.model.checkpoint
    return "" if checkpoint is None else checkpoint.fingerprint


def _write(stream: BinaryIO, parts: Mapping[str, Part], about: dict[str, str]) -> None:
    """Write a safetensors file, copying one tensor at a time to the host."""
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, part in parts.items():
        begin, end = end, end + part.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[part.dtype],
            "shape": list(part.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    chunks = (
        part.values().view(torch.uint8).flatten().numpy().data
        for part in parts.values()
        if part.nbytes
    )
    write_checked(stream, len(text).to_bytes(8, "little") + text, chunks)


def write_checked(stream: BinaryIO, header: bytes, chunks: Iterable[Buffer]) -> None:
    """Write a safetensors file with the CRC-32 of all of it in its metadata.

    Args:
        header: its length and the JSON, whose metadata includes :data:`NO_CHECKSUM`.
        chunks: of the data.
    """
    place = _CHECKSUM.search(header)
    assert place is not None, "NO_CHECKSUM is in the metadata"
    stream.write(header)
    crc = zlib.crc32(header)
    for chunk in chunks:
        stream.write(chunk)
        crc = zlib.crc32(chunk, crc)
    stream.seek(place.start(1))
    stream.write(f"{crc:08x}".encode())


def check_checksum(file: str | os.PathLike[str]) -> None:
    """Raise ValueError unless the file is what :func:`write_checked` wrote."""
    with open(file, "rb") as stream:
        length = stream.read(8)
        header = length + stream.read(int.from_bytes(length, "little"))
        place = _CHECKSUM.search(header)
        if place is None:
            raise ValueError("its metadata has no checksum: the file is damaged")
        crc = zlib.crc32(header[: place.start(1)] + b"00000000" + header[place.end(1) :])
        while chunk := stream.read(1 << 23):
            crc = zlib.crc32(chunk, crc)
    if crc != int(place[1], 16):
        raise ValueError(
            f"its checksum is {crc:08x} and should be {place[1].decode()}: the file is "
            "damaged; run the prompt again"
        )


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """Open a stream whose contents replace the file atomically at the end of the block.

    Until then, and if the block fails, the file is unchanged. Where the system supports it
    (O_TMPFILE, open(2)), the temporary file has no name, so that not even a killed process leaves
    anything behind; elsewhere the next call cleans up. A symbolic link is kept: the file it points
    to is replaced.

    Raises:
        ValueError: the file exists, and is not a regular one: a folder, a device, a pipe.
        OSError: it can't be written.
    """
    target = Path(os.path.realpath(file))
    if target.exists() and not target.is_file():
        raise ValueError(f"{file} is not a regular file: name another one")
    name: Path | None = None
    try:
        stream = _without_name(target.parent)
        if stream is None:
            _clear_beside(target)
            name = _beside(target)
            stream = name.open("xb")
            _in_use(stream)
        with stream:
            yield stream
            stream.flush()
            if target.exists():
                os.fchmod(stream.fileno(), target.stat().st_mode & 0o777)
            if name is None:
                name = _named(stream, target)
        if name != target:
            os.replace(name, target)
    except BaseException:
        if name is not None and name != target:
            name.unlink(missing_ok=True)
        raise


def _without_name(folder: Path) -> BinaryIO | None:
    """A new unnamed file on the folder's disk; None if the system does not support that."""
    with suppress(OSError, AttributeError):
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb")
    return None


def _beside(target: Path) -> Path:
    """A name for a temporary file next to the target."""
    return target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")


def _in_use(stream: BinaryIO) -> bool:
    """Lock a file while it is open, flock(2); False if it is locked already, or can't be."""
    try:
        import fcntl

        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _clear_beside(target: Path) -> None:
    """Remove the target's temporary files that dead processes left."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.????????"):
        with suppress(OSError), left.open("rb") as stream:
            if _in_use(stream):
                left.unlink()


def _named(stream: BinaryIO, target: Path) -> Path:
    """Link an unnamed file to the target's name, or to a temporary one if that is taken."""
    source = f"/proc/self/fd/{stream.fileno()}"
    link = functools.partial(  # with src_dir_fd, Python calls linkat, which can follow symlinks
        os.link, source, src_dir_fd=stream.fileno(), follow_symlinks=True
    )
    with suppress(FileExistsError):
        link(target)
        return target
    beside = _beside(target)
    link(beside)
    return beside


def load(cache: KVCache, file: str | os.PathLike[str]) -> None:
    """Read a saved cache; see :meth:`KVCache.load`."""
    if not Path(file).exists():
        raise FileNotFoundError(f"{file} does not exist: save a cache to it first")
    if not Path(file).is_file():
        raise ValueError(f"{file} is not a regular file: name one that a cache was saved to")
    if any(layer.shared for layer in cache.layers):
        raise ValueError("a fork shares its prefix: load into another cache")
    cache.allocate(cache.model.cache_map)
    try:
        with safe_open(file, framework="pt") as stored:
            about = stored.metadata() or {}
            _check_format(about)
            check_checksum(file)
            sequences = _check_about(cache, about)
            (stale,) = _read_rows(f"[{about.get('stale', '')}]", len(sequences))
            (written,) = _read_rows(f"[{about.get('written', '')}]", sys.maxsize)
            if len(written) != len(sequences):
                raise ValueError(f"'written' has {len(written)} entries for {len(sequences)} rows")
            made_with = _read_made_with(about.get("made_with", "[]"), len(sequences))
            lens = [len(ids) for ids in sequences]
            parts = _parts(cache, lens)
            tensors = _read_tensors(cache, stored, parts)
        _check_shapes(parts, tensors)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None
    if cache.pages is not None:  # so as not to write to shared pages, nor need twice as many
        cache.crop(0)
    cache.make_room(lens)
    if cache.elsewhere is not None:
        cache.elsewhere.make_room(cache, lens)
    for name, part in parts.items():
        part.become(tensors[name])
    cache.become(sequences, stale)
    cache.written[: len(written)] = written
    cache.made_with[: len(made_with)] = made_with
    if cache.elsewhere is not None:
        cache.elsewhere.become(cache)


def _read_made_with(text: str, rows: int) -> list[str | None]:
    """The adapters of the rows; an empty list if the file has none."""
    found = json.loads(text)
    names = isinstance(found, list) and all(isinstance(each, str | None) for each in found)
    if not names or len(found) not in (0, rows):
        raise ValueError(f"its metadata has made_with {text!r:.80} for {rows} rows")
    return found


def _check_format(about: dict[str, str]) -> None:
    found = str(about.get("format"))[:40]
    if not found.startswith("exkv cache"):
        raise ValueError(f"it is not a cache saved by exkv (format {found!r})")
    if found not in _KNOWN:
        raise ValueError(
            f"its format is {found!r}, and this exkv reads {_FORMAT!r}: run the prompt again"
        )


def _check_about(cache: KVCache, about: dict[str, str]) -> list[list[int]]:
    """Check that the contents fit this cache, and return the rows' tokens."""
    theirs, mine = json.loads(about.get("layers", "[]")), list(map(_encoding_of, cache.layers))
    if not isinstance(theirs, list) or len(theirs) != len(mine):
        count = len(theirs) if isinstance(theirs, list) else "no"
        raise ValueError(f"it has {count} layers, and this cache has {len(mine)}")
    for layer, (here, there) in enumerate(zip(mine, theirs, strict=True)):
        if here != there:
            raise ValueError(f"its layer {layer} has {there}, and this cache's has {here}")
    if about.get("checkpoint") != _fingerprint(cache):
        raise ValueError(
            "it was computed with other weights than this model's (another checkpoint of the same "
            "shape, or a changed one): run the prompt again"
        )
    sequences = _read_rows(about.get("sequences", ""), cache.model.config.vocab_size)
    longest = max(map(len, sequences), default=0)
    if len(sequences) > cache.batch_size or longest > cache.max_seq_len:
        raise ValueError(
            f"it has {len(sequences)} rows of up to {longest} tokens, and this cache has room for "
            f"{cache.batch_size} of {cache.max_seq_len}"
        )
    return sequences


def _encoding_of(layer: CacheLayer) -> str:
    """What determines the meaning of the tensors; residence and growth don't."""
    spec = layer.spec
    if spec.state is not None:
        return str(OneState(tuple(each for each in spec.state if not is_snapshot(each.name))))
    return f"{spec.storage} {spec.retention}"


def _read_rows(text: str, limit: int) -> list[list[int]]:
    """Rows of numbers below the limit, from JSON."""
    rows: Any = json.loads(text)
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, list) or not all(type(n) is int and 0 <= n < limit for n in row):
            raise ValueError(f"its metadata has no rows of numbers below {limit}")
    return rows


def _check_shapes(parts: Mapping[str, Part], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        mine = parts[name]
        if tuple(tensor.shape) != mine.shape or tensor.dtype != mine.dtype:
            raise ValueError(
                f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, and this "
                f"cache stores {mine.dtype} {mine.shape}: it is another model's, or of another "
                "dtype"
            )
