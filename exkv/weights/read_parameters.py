"""A unit's parameters, from a checkpoint's files to a device.

To the host: what is stored as it is used stays where it lies, in the mapped file, be it part of a
larger tensor, as one expert is of all; the rest goes into one stretch of large pages for a unit.
Two threads read the one in and fill the other, and no page is touched twice. To an accelerator:
through two pinned buffers, one of which is filled while the other is copied; what is stored in
another dtype is converted on the device. Only what a format makes anew of stored tensors goes by
way of mapped files. Of experts that memory has no room for nothing is read. For tensors with no
memory behind them, on simulated devices that run dry, no file is read.

Every piece is checked for NaN and infinity right after it was read, while it is in the processor's
cache (``finite.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from exkv import devices, sim
from exkv.checkpoint import Checkpoint, CheckpointError, ExpectedTensor
from exkv.errors import Attempt

from .expert_groups import expert_of
from .finite import first_in_stored, first_not_finite
from .source import Source

#: Bytes that are read, or copied to a device, at once.
PIECE = 8 << 20
#: Two read as fast as a machine copies; more only take turns.
_THREADS = 2


def read_parameters(
    checkpoint: Checkpoint,
    sources: Sequence[Source],
    shapes: Mapping[str, torch.Tensor],
    device: torch.device,
    on_host: Container[str] = (),
    resident: float = 1.0,
) -> dict[str, torch.Tensor]:
    """What the sources make, on the device, by the parameters' names.

    Args:
        shapes: shape and dtype of every parameter, on ``meta``.
        on_host: parameters that are read to host memory instead.
        resident: the share of mapped experts that memory has room for. Below 1, these are neither
            read nor checked before they are used.

    Raises:
        CheckpointError: a file was changed or replaced since it was opened, or holds a number that
            is not finite.
        torch.OutOfMemoryError: the device is full.
    """
    names = [name for source in sources for name in source.parameters]
    host = {n: shapes[n] for n in names if device.type == "cpu" or n in on_host}
    there = {n: shapes[n] for n in names if n not in host}
    if checkpoint.hollow:  # zeros are valid as indices, too
        made = devices.zeros_on(device, there) if there else {}
        return {**made, **devices.zeros_on(devices.CPU, host)}
    made = devices.empty_tensors(there, device) if there else {}
    found = _converted(checkpoint, sources, shapes)
    stays: list[_Made] = []
    if there:
        _read_to_accelerator(checkpoint, sources, _without(host, found, stays), made, device)
    made |= _read_to_host(checkpoint, [*stays, *found], host, resident)
    checkpoint.check(name for source in sources for name in source.stored)
    return made


def mapped_parameters(
    checkpoint: Checkpoint, sources: Iterable[Source], shapes: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Those parameters of these that are used as they are stored, where they lie in mapped files;
    no page is touched."""
    return {
        each.parameter: each.values
        for each in _converted(checkpoint, sources, shapes)
        if each.values.dtype == shapes[each.parameter].dtype and _is_mapped(checkpoint, each)
    }


def _without(
    host: Container[str], converted: Iterable[_Made], stays: list[_Made]
) -> Iterator[_Made]:
    """What moves to a device; the list gets what stays on the host."""
    for each in converted:
        if each.parameter not in host:
            yield each
        else:
            stays.append(each)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What a parameter is to hold.

    Attributes:
        values: on the host, in the stored dtype where a format left them as they are stored.
        stored: the stored tensor that these are, or part of which they are, byte for byte; or None.
        start: the first of its bytes that they have.
        source: what makes it.
        file: of the source's tensors, for messages.
        dtype: on the device.
    """

    parameter: str
    values: torch.Tensor
    stored: str | None
    start: int
    source: Source
    file: Path
    dtype: torch.dtype

    @property
    def expected(self) -> ExpectedTensor:
        """The stored tensor's."""
        assert self.stored is not None
        return self.source.stored[self.stored]

    def pieces(self) -> Iterator[tuple[int, int]]:
        """The first byte of every piece, and how many it has: whole blocks, if it has some."""
        step = PIECE // self.expected.block * self.expected.block
        nbytes = self.values.nbytes
        return ((first, min(step, nbytes - first)) for first in range(0, nbytes, step))

    def check_piece(self, piece: torch.Tensor, first: int) -> None:
        """CheckpointError for a number that is not finite in bytes from its ``first`` on."""
        found = first_in_stored(piece, self.values.dtype, self.expected, self.dtype)
        if found is not None:
            packed = bool(self.expected.halves)
            unit = self.expected.block if packed else self.values.dtype.itemsize
            what = "a scale of block" if packed else "number"
            raise self._damaged(f"{self.stored}: {what} {(self.start + first) // unit + found}")

    def check(self) -> None:
        """CheckpointError for a number among all values that is not finite."""
        dtype = self.dtype if self.dtype.is_floating_point else None
        found = first_not_finite(self.values, dtype)
        if found is not None:
            name = self.stored or f"{next(iter(self.source.stored))}: {self.parameter}"
            raise self._damaged(f"{name}: number {found}")

    def _damaged(self, place: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file}: {place} is NaN, infinite or too large for {self.dtype}: download the "
            "model again"
        )


def _converted(
    checkpoint: Checkpoint, sources: Iterable[Source], shapes: Mapping[str, torch.Tensor]
) -> Iterator[_Made]:
    for source in sources:
        stored = {name: checkpoint.tensor(name) for name in source.stored}
        file = checkpoint.info(next(iter(stored))).file
        for parameter, values in _convert(file, source, stored).items():
            name, start = _place(values, source, stored, checkpoint)
            yield _Made(
                parameter=parameter,
                values=values,
                stored=name,
                start=start,
                source=source,
                file=file,
                dtype=shapes[parameter].dtype,
            )


def _place(
    values: torch.Tensor,
    source: Source,
    stored: Mapping[str, torch.Tensor],
    checkpoint: Checkpoint,
) -> tuple[str | None, int]:
    """The stored tensor that the values are, or in whose mapping they lie as they are, in whole
    blocks; and the first of its bytes that they have."""
    for name, tensor in stored.items():
        if tensor is values:
            return name, 0
        start = values.data_ptr() - tensor.data_ptr()
        inside = start >= 0 and start + values.nbytes <= tensor.nbytes
        alike = values.dtype == tensor.dtype and values.is_contiguous() and tensor.is_contiguous()
        if inside and alike and checkpoint.mapping(name) is not None:
            return (name, start) if not start % source.stored[name].block else (None, 0)
    return None, 0


def _convert(
    file: Path, source: Source, stored: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """CheckpointError, with the file, where the tensors hold what cannot be."""
    try:
        return source.convert(stored)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _read_to_host(
    checkpoint: Checkpoint,
    found: Sequence[_Made],
    shapes: Mapping[str, torch.Tensor],
    resident: float,
) -> dict[str, torch.Tensor]:
    mapped = {
        each.parameter: each.values
        for each in found
        if each.values.dtype == shapes[each.parameter].dtype and _is_mapped(checkpoint, each)
    }
    others = {name: like for name, like in shapes.items() if name not in mapped}
    made = {**mapped, **devices.empty_tensors(others, devices.CPU)}
    with ThreadPoolExecutor(_THREADS) as threads:
        steps = [
            step
            for each in found
            for step in _steps(checkpoint, each, made[each.parameter], resident)
        ]
        for step in [threads.submit(step) for step in steps]:
            step.result()
    return made


def _is_mapped(checkpoint: Checkpoint, made: _Made) -> bool:
    return made.stored is not None and checkpoint.mapping(made.stored) is not None


def _steps(
    checkpoint: Checkpoint, made: _Made, target: torch.Tensor, resident: float
) -> Iterator[Callable[[], object]]:
    """What brings a parameter's values into memory, to be called in any threads."""
    if made.stored is None or made.values.dtype != target.dtype:
        yield partial(_copy, made, target)
        return
    if target is made.values:
        share = 1.0 if expert_of(made.parameter) is None else resident
        devices.count_mapped(checkpoint.mapping(made.stored), round(share * target.nbytes))
        if share < 1:
            return
    for first, count in made.pieces():
        yield partial(_read_piece, checkpoint, made, target, first, count)


def _copy(made: _Made, target: torch.Tensor) -> None:
    target.copy_(made.values)
    made.check()


def _read_piece(
    checkpoint: Checkpoint, made: _Made, target: torch.Tensor, first: int, count: int
) -> None:
    """Have bytes of a stored tensor in memory, those of a mapped one where they lie."""
    assert made.stored is not None
    piece = _bytes(target)[first : first + count]
    if target is made.values:
        checkpoint.fetch(made.stored, made.start + first, count)
    else:
        checkpoint.read_into(made.stored, piece, made.start + first)
    made.check_piece(piece, first)


def _read_to_accelerator(
    checkpoint: Checkpoint,
    sources: Sequence[Source],
    converted: Iterable[_Made],
    made: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    stored = [name for source in sources for name in source.stored]
    largest = max((checkpoint.info(name).nbytes for name in stored), default=0)
    staging = Staging(min(PIECE, largest), device)
    for each in converted:
        if each.stored is None:
            made[each.parameter].copy_(each.values)
            each.check()
            continue
        dtype, target = each.values.dtype, made[each.parameter].view(-1)
        for first, count in each.pieces():
            with staging.buffer(count) as buffer:
                if not sim.is_dry(target):
                    checkpoint.read_into(each.stored, buffer, each.start + first)
                    each.check_piece(buffer, first)
                begin = first // dtype.itemsize
                part = target[begin : begin + count // dtype.itemsize]
                staging.copy(part, buffer.view(dtype))
    staging.finish()


class Staging:
    """Two buffers of so many bytes on the host, by which others go to an accelerator."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        self._pairs = [
            (devices.staging_buffer(nbytes, device), devices.SideStream(device)) for _ in range(2)
        ]

    @contextlib.contextmanager
    def buffer(self, nbytes: int) -> Iterator[torch.Tensor]:
        """The buffer that has been idle longer, once it may be written to; uint8 (nbytes,)."""
        memory, copies = self._pairs[0]
        copies.synchronize()
        yield memory[:nbytes]
        self._pairs.reverse()

    def copy(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Begin to copy what was put into the buffer, converted on the device if there is room for
        both, else on the host."""
        copies = self._pairs[0][1]
        with copies:
            copies.uses(target)
            if target.dtype != values.dtype:
                values = self._sent(values)
            target.copy_(values, non_blocking=True)

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        """The values on the device; on the host where it has no room for them, which only its
        allocator knows: free memory may lie in segments that are in use."""
        with Attempt():
            return values.to(self.device, non_blocking=True)
        return values

    def finish(self) -> None:
        """What follows on the device finds every copy complete, and the buffers may go."""
        for _, copies in self._pairs:
            copies.wait()
            copies.synchronize()
