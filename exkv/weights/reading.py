"""A unit's parameters, from a checkpoint's files to a device.

To the host: one stretch of large pages for a unit, filled by two threads straight from the files,
so that no page is touched twice. To an accelerator: through two pinned buffers, one of which is
filled while the other is copied; what is stored in another dtype is converted on the device. Only
what a format makes anew of stored tensors goes by way of mapped files. For tensors with no memory
behind them, on simulated devices that run dry, no file is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from exkv import devices, sim
from exkv.checkpoint import CheckpointError, WeightReader

from .source import Source

#: Bytes that are read, or copied to a device, at once.
PIECE = 8 << 20
#: Two read as fast as a machine copies; more only take turns.
_THREADS = 2


def read_parameters(
    checkpoint: WeightReader,
    sources: Sequence[Source],
    shapes: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """What the sources make, on the device, by the parameters' names.

    Args:
        shapes: shape and dtype of every parameter, on ``meta``.

    Raises:
        CheckpointError: a file was changed or replaced since it was opened.
        torch.OutOfMemoryError: the device is full.
    """
    wanted = {name: shapes[name] for source in sources for name in source.parameters}
    if device.type == "cpu":
        made = devices.host_tensors(wanted)
        _read_to_host(checkpoint, sources, made)
    else:
        made = {name: torch.empty_like(like, device=device) for name, like in wanted.items()}
        _read_to_accelerator(checkpoint, sources, made, device)
    checkpoint.check(name for source in sources for name in source.stored)
    return made


def _converted(
    checkpoint: WeightReader, sources: Iterable[Source]
) -> Iterator[tuple[str, torch.Tensor, str | None]]:
    """Each parameter, its values on the host, and the stored tensor whose bytes these are."""
    for source in sources:
        stored = {name: checkpoint.tensor(name) for name in source.stored}
        for parameter, values in _convert(checkpoint, source, stored).items():
            same = (name for name, tensor in stored.items() if tensor is values)
            yield parameter, values, next(same, None)


def _convert(
    checkpoint: WeightReader, source: Source, stored: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """CheckpointError, with the file, where the tensors hold what cannot be."""
    try:
        return source.convert(stored)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.info(next(iter(stored))).file}: {error}") from None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _read_to_host(
    checkpoint: WeightReader, sources: Iterable[Source], made: Mapping[str, torch.Tensor]
) -> None:
    with ThreadPoolExecutor(_THREADS) as threads:
        steps = list(_steps(checkpoint, sources, made))
        for step in [threads.submit(step) for step in steps]:
            step.result()


def _steps(
    checkpoint: WeightReader, sources: Iterable[Source], made: Mapping[str, torch.Tensor]
) -> Iterator[Callable[[], object]]:
    """What fills the parameters on the host, to be called in any threads."""
    for parameter, values, name in _converted(checkpoint, sources):
        target = made[parameter]
        if name is None or values.dtype != target.dtype:
            yield partial(target.copy_, values)
            continue
        whole = _bytes(target)
        for first in range(0, len(whole), PIECE):
            yield partial(checkpoint.read_into, name, whole[first : first + PIECE], first)


def _read_to_accelerator(
    checkpoint: WeightReader,
    sources: Sequence[Source],
    made: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    stored = [name for source in sources for name in source.stored]
    largest = max((checkpoint.info(name).nbytes for name in stored), default=0)
    staging = Staging(min(PIECE, largest), device)
    for parameter, values, name in _converted(checkpoint, sources):
        if name is None:
            made[parameter].copy_(values)
            continue
        itemsize = values.dtype.itemsize
        target = made[parameter].view(-1)
        for first in range(0, values.nbytes, PIECE):
            count = min(PIECE, values.nbytes - first)
            with staging.buffer(count) as buffer:
                if not sim.is_dry(target):
                    checkpoint.read_into(name, buffer, first)
                begin = first // itemsize
                part = target[begin : begin + count // itemsize]
                staging.copy(part, buffer.view(values.dtype))
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
            if target.dtype != values.dtype and self._has_room(values.nbytes):
                values = values.to(self.device, non_blocking=True)
            target.copy_(values, non_blocking=True)

    def _has_room(self, nbytes: int) -> bool:
        return devices.available_memory(self.device) >= devices.rounded(nbytes)

    def finish(self) -> None:
        """What follows on the device finds every copy complete, and the buffers may go."""
        for _, copies in self._pairs:
            copies.wait()
            copies.synchronize()
