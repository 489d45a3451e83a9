"""A cache's contents in a safetensors file: the tokens in its metadata, and what is stored of them.

Only what is used is written: the rows that have tokens, up to the longest. The tensor
``layers.3.k`` is the fourth layer's ``k`` with the shape (rows, tokens, ...), as the kind of cache
stores it. https://huggingface.co/docs/safetensors is the format, and its library reads.
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

from exkv.checkpoint.safetensors import DTYPES

from .slots import count

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from .base import KVCache
    from .layer import CacheLayer

_FORMAT = "exkv cache 4"
#: A part of the metadata, until the checksum of the whole file, with this in its place, is known.
NO_CHECKSUM = {"crc32": "00000000"}
_CHECKSUM = re.compile(rb'"crc32": ?"([0-9a-f]{8})"')
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save(cache: KVCache, file: str | os.PathLike[str]) -> None:
    """Write the cache's contents; see :meth:`KVCache.save`."""
    if any(layer.shared for layer in cache.layers):
        raise ValueError("a fork shares its beginning: save the cache that it came from")
    rows = max((i + 1 for i, ids in enumerate(cache.sequences) if ids), default=0)
    lens = cache.seq_lens[:rows]
    parts = _parts(cache, lens)
    about = {
        **NO_CHECKSUM,
        "format": _FORMAT,
        "checkpoint": _fingerprint(cache),
        "layers": json.dumps([_kept_as(layer) for layer in cache.layers]),
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
            "what was there before is as it was",
        ) from None


class Part(Protocol):
    """What one of a layer's tensors stores of rows, (rows, tokens, ...) in the file."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def values(self) -> torch.Tensor:
        """It, in host memory."""

    def become(self, values: torch.Tensor) -> None:
        """Store this instead, for which there is room."""


class Elsewhere(Protocol):
    """What other processes hold of a cache: the layers that are not here."""

    def parts(self, cache: KVCache, lens: Sequence[int]) -> dict[str, Part]:
        """By their names in the file, of rows with so many tokens."""

    def make_room(self, cache: KVCache, lens: Sequence[int]) -> None:
        """See that rows of these lengths fit there, too."""

    def become(self, cache: KVCache) -> None:
        """Rows hold there what they hold here."""


def _parts(cache: KVCache, lens: Sequence[int]) -> dict[str, Part]:
    """In the order of the layers."""
    here: dict[str, Part] = {
        f"layers.{index}.{name}": OwnPart(layer=layer, name=name, lens=lens)
        for index, layer in enumerate(cache.layers)
        for name in layer.tensors
    }
    if cache.elsewhere is None:
        return here
    found = here | cache.elsewhere.parts(cache, lens)
    return dict(sorted(found.items(), key=lambda pair: int(pair[0].split(".")[1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPart:
    """Of a layer that is in this process."""

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

    def values(self) -> torch.Tensor:
        return self.layer.rows(self.name, self.lens).cpu().contiguous()

    def become(self, values: torch.Tensor) -> None:
        self.layer.set_rows(self.name, self.lens, values)


def _fingerprint(cache: KVCache) -> str:
    """Of the weights that the contents were computed with."""
    checkpoint = cache.model.checkpoint
    return "" if checkpoint is None else checkpoint.fingerprint


def _write(stream: BinaryIO, parts: Mapping[str, Part], about: dict[str, str]) -> None:
    """A safetensors file; of tensors that lie elsewhere, one at a time is on the host."""
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
    """Write a safetensors file and, in its metadata, the CRC-32 of all of it.

    Args:
        header: its length and the JSON, of whose metadata :data:`NO_CHECKSUM` is a part.
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
    """ValueError where a file is not what :func:`write_checked` wrote."""
    with open(file, "rb") as stream:
        length = stream.read(8)
        header = length + stream.read(int.from_bytes(length, "little"))
        place = _CHECKSUM.search(header)
        if place is None:
            raise ValueError("its metadata has no checksum: it is damaged")
        crc = zlib.crc32(header[: place.start(1)] + b"00000000" + header[place.end(1) :])
        while chunk := stream.read(1 << 23):
            crc = zlib.crc32(chunk, crc)
    if crc != int(place[1], 16):
        raise ValueError(
            f"its checksum is {crc:08x} and should be {place[1].decode()}: it is damaged, run the "
            "prompt again"
        )


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """A stream whose contents become the file's all at once, at the end of the block.

    Until then, and where the block fails, the file is as it was. The stream has no name meanwhile
    where the system can do that (O_TMPFILE, open(2)), so that nothing is left behind even by a
    process that is killed; elsewhere the next one cleans up. A symbolic link stays one: the file
    that it names is replaced.

    Raises:
        ValueError: the file is there, and is no regular one: a folder, a device, a pipe.
        OSError: it can't be written.
    """
    target = Path(os.path.realpath(file))
    if target.exists() and not target.is_file():
        raise ValueError(f"{file} is no regular file: name one, or a new one")
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
    """A new file on the folder's disk; None where the system knows no such files."""
    with suppress(OSError, AttributeError):
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb")
    return None


def _beside(target: Path) -> Path:
    """A name for a file that is about to become the target."""
    return target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")


def _in_use(stream: BinaryIO) -> bool:
    """Lock a file for as long as it is open, flock(2); False if somebody has it, or nobody can."""
    try:
        import fcntl

        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _clear_beside(target: Path) -> None:
    """Remove what processes that are gone were about to make the target of."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.????????"):
        with suppress(OSError), left.open("rb") as stream:
            if _in_use(stream):
                left.unlink()


def _named(stream: BinaryIO, target: Path) -> Path:
    """Give a file without a name the target's, or one beside it where that is taken."""
    source = f"/proc/self/fd/{stream.fileno()}"
    link = functools.partial(  # with a folder's number Python calls linkat, which can follow
        os.link, source, src_dir_fd=stream.fileno(), follow_symlinks=True
    )
    with suppress(FileExistsError):
        link(target)
        return target
    beside = _beside(target)
    link(beside)
    return beside


def load(cache: KVCache, file: str | os.PathLike[str]) -> None:
    """Read a cache's contents back; see :meth:`KVCache.load`."""
    if not Path(file).exists():
        raise FileNotFoundError(f"{file} is not there: save a cache to it first")
    if not Path(file).is_file():
        raise ValueError(f"{file} is no regular file: name one that a cache was saved to")
    if any(layer.shared for layer in cache.layers):
        raise ValueError("a fork shares its beginning: load into a cache of its own")
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
                raise ValueError(f"it says of {len(written)} rows what was written, of others not")
            made_with = _read_made_with(about.get("made_with", "[]"), len(sequences))
            lens = [len(ids) for ids in sequences]
            parts = _parts(cache, lens)
            tensors = {name: stored.get_tensor(name) for name in parts}
        _check_shapes(parts, tensors)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None
    if cache.pages is not None:  # not to write where others read, nor to need twice the pages
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
    """The adapters by which rows were made; of a file that says nothing, none."""
    found = json.loads(text)
    names = isinstance(found, list) and all(isinstance(each, str | None) for each in found)
    if not names or len(found) not in (0, rows):
        raise ValueError(f"it says of {rows} rows that they were made with {text!r:.80}")
    return found


def _check_format(about: dict[str, str]) -> None:
    found = str(about.get("format"))[:40]
    if not found.startswith("exkv cache"):
        raise ValueError(f"it is no cache that exkv saved (format {found!r})")
    if found != _FORMAT:
        raise ValueError(
            f"its format is {found!r}, and this exkv reads {_FORMAT!r}: run the prompt again"
        )


def _check_about(cache: KVCache, about: dict[str, str]) -> list[list[int]]:
    """The rows' tokens, once it is clear that they fit here."""
    theirs, mine = json.loads(about.get("layers", "[]")), list(map(_kept_as, cache.layers))
    if not isinstance(theirs, list) or len(theirs) != len(mine):
        count = len(theirs) if isinstance(theirs, list) else "no"
        raise ValueError(f"it has {count} layers, and this cache {len(mine)}")
    for layer, (here, there) in enumerate(zip(mine, theirs, strict=True)):
        if here != there:
            raise ValueError(f"its layer {layer} has {there}, and this cache's {here}")
    if about.get("checkpoint") != _fingerprint(cache):
        raise ValueError(
            "it was computed with other weights than this model's (another checkpoint of the same "
            "shape, or a changed one): run the prompt again"
        )
    sequences = _read_rows(about.get("sequences", ""), cache.model.config.vocab_size)
    longest = max(map(len, sequences), default=0)
    if len(sequences) > cache.batch_size or longest > cache.max_seq_len:
        raise ValueError(
            f"it has {len(sequences)} rows of up to {longest} tokens, and this cache room for "
            f"{cache.batch_size} of {cache.max_seq_len}"
        )
    return sequences


def _kept_as(layer: CacheLayer) -> str:
    """What says how to read the tensors; where they lie and when they grow makes no difference."""
    return f"{layer.spec.storage} {layer.spec.retention}"


def _read_rows(text: str, limit: int) -> list[list[int]]:
    """Rows of numbers below the limit, from JSON."""
    rows: Any = json.loads(text)
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, list) or not all(type(n) is int and 0 <= n < limit for n in row):
            raise ValueError(f"its metadata has no rows of numbers below {limit}")
    return rows


def _check_shapes(parts: Mapping[str, Part], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        mine = parts[name]
        if tuple(tensor.shape) != mine.shape or tensor.dtype != mine.dtype:
            raise ValueError(
                f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, and this "
                f"cache stores {mine.dtype} {mine.shape}: it is another model's, or of another "
                "dtype"
            )
