"""Read a unit's parameters from a checkpoint's files to a device.

To the host: values that are used as stored stay in the mapped file, even as part of a larger tensor
(one expert of all); the rest goes into one allocation of large pages for a unit. Two threads read
the former in and fill the latter, and touch each page once. To an accelerator: through two pinned
buffers, one filled while the other is copied; values of another dtype are converted on the device.
Only tensors that a format computes from stored ones go through mapped files. Experts that memory
has no room for are not read, nor is any file for tensors without memory, on simulated devices that
run dry.

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

#: Bytes read, or copied to a device, at a time.
PIECE = 8 << 20
#: Two threads saturate the memory; more don't help.
_THREADS = 2


def read_parameters(
    checkpoint: Checkpoint,
    sources: Sequence[Source],
    shapes: Mapping[str, torch.Tensor],
    device: torch.device,
    on_host: Container[str] = (),
    resident: float = 1.0,
) -> dict[str, torch.Tensor]:
    """Read the sources' parameters to the device; returns them by name.

    Args:
        shapes: shape and dtype of every parameter, on ``meta``.
        on_host: parameters to read to host memory instead.
        resident: share of mapped experts that memory has room for. Below 1, these are neither read
            nor checked before they are used.

    Raises:
        CheckpointError: a file was changed or replaced since it was opened, or has a number that is
            not finite.
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
    """The parameters that are used as stored, in their mapped files, without touching a page."""
    return {
        each.parameter: each.values
        for each in _converted(checkpoint, sources, shapes)
        if each.values.dtype == shapes[each.parameter].dtype and _is_mapped(checkpoint, each)
    }


def _without(
    host: Container[str], converted: Iterable[_Made], stays: list[_Made]
) -> Iterator[_Made]:
    """Yield what moves to a device, and add what stays on the host to ``stays``."""
    for each in converted:
        if each.parameter not in host:
            yield each
        else:
            stays.append(each)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """The values of a parameter.

    Attributes:
        values: on the host, in the stored dtype if the format left them as stored.
        stored: name of the stored tensor that has these values byte for byte; None if computed.
        start: offset of the values in that tensor, in bytes.
        source: the parameter's source.
        file: file of the source's tensors, for messages.
        dtype: dtype on the device.
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
        """Description of the stored tensor."""
        assert self.stored is not None
        return self.source.stored[self.stored]

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield offset and length of each piece, in bytes: whole blocks if the tensor has any."""
        step = PIECE // self.expected.block * self.expected.block
        nbytes = self.values.nbytes
        return ((first, min(step, nbytes - first)) for first in range(0, nbytes, step))

    def check_piece(self, piece: torch.Tensor, first: int) -> None:
        """CheckpointError if a piece that begins at byte ``first`` has a number that isn't
        finite."""
        found = first_in_stored(piece, self.values.dtype, self.expected, self.dtype)
        if found is not None:
            packed = bool(self.expected.halves)
            unit = self.expected.block if packed else self.values.dtype.itemsize
            what = "a scale of block" if packed else "number"
            raise self._damaged(f"{self.stored}: {what} {(self.start + first) // unit + found}")

    def check(self) -> None:
        """CheckpointError if any value is not finite."""
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
    """Name of the stored tensor that is these values, or whose mapping contains them in whole
    blocks, and their offset in bytes; None and 0 for other values."""
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
    """Convert a source's tensors; CheckpointError, with the file, for invalid contents."""
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
    """Yield calls that bring a parameter's values into memory, from any thread."""
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
    """Read bytes of a stored tensor into memory; those of a mapped one stay in place."""
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
    """Two host buffers of ``nbytes`` each, through which values go to an accelerator."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        self._pairs = [
            (devices.staging_buffer(nbytes, device), devices.SideStream(device)) for _ in range(2)
        ]

    @contextlib.contextmanager
    def buffer(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Wait for the buffer that has been idle longer, and yield it; uint8 (nbytes,)."""
        memory, copies = self._pairs[0]
        copies.synchronize()
        yield memory[:nbytes]
        self._pairs.reverse()

    def copy(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Start to copy the buffer's contents, converted on the device if it has room for both, or
        else on the host."""
        copies = self._pairs[0][1]
        with copies:
            copies.uses(target)
            if target.dtype != values.dtype:
                values = self._sent(values)
            target.copy_(values, non_blocking=True)

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        """The values on the device, or on the host if it has no room for them, which only its
        allocator knows: free memory may be in segments that are in use."""
        with Attempt():
            return values.to(self.device, non_blocking=True)
        return values

    def finish(self) -> None:
        """Wait for every copy, so that the buffers can be freed; later work on the device sees the
        copies."""
        for _, copies in self._pairs:
            copies.wait()
            copies.synchronize()
