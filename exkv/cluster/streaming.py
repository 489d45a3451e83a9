"""Weights for hosts without a copy of the checkpoint: the driver reads and sends each tensor on
request.

A host knows every tensor's shape beforehand, and the sample of its bytes that goes into the
checkpoint's fingerprint, and verifies what it receives. It holds only the tensors of the unit that
it is loading.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exkv.checkpoint import Checkpoint, CheckpointError, TensorInfo, open_checkpoint
from exkv.checkpoint.safetensors import sample_of

from .wire import PIECE, WEIGHTS, Wire

#: Seconds between two polls for requests.
_POLL = 0.002


class StreamedTensor(NamedTuple):
    """What a host knows about a tensor before it receives it.

    Attributes:
        sample: some bytes of the tensor in the driver's file, in hexadecimal.
        as_stored: whether the bytes are sent as they are stored.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    sample: str
    as_stored: bool


def describe(path: Path) -> list[StreamedTensor]:
    """Describe a checkpoint's tensors for hosts."""
    with open_checkpoint(path) as checkpoint:
        samples = checkpoint.samples()
        infos = [checkpoint.info(name) for name in checkpoint.names()]
        return [
            StreamedTensor(
                name=info.name,
                dtype=info.dtype,
                shape=info.shape,
                nbytes=info.nbytes,
                sample=samples[info.name].hex(),
                as_stored=checkpoint.mapping(info.name) is not None,
            )
            for info in infos
        ]


# Driver -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(path: Path, wire: Wire, ranks: Sequence[int]) -> Iterator[None]:
    """Send tensors to the hosts of these ranks on request, from a thread, within the context."""
    if not ranks:
        yield
        return
    stop = threading.Event()
    server = threading.Thread(
        target=_serve, args=(path, wire, ranks, stop), name="exkv-weights", daemon=True
    )
    server.start()
    try:
        yield
    finally:
        stop.set()
        server.join()


def _serve(path: Path, wire: Wire, ranks: Sequence[int], stop: threading.Event) -> None:
    left = list(ranks)
    with open_checkpoint(path) as checkpoint:
        while not stop.is_set():
            idle = True
            for rank in list(left):
                try:
                    idle &= not _answer(checkpoint, wire, rank)
                except RuntimeError:  # the host is gone; waiting for its answer will report it
                    left.remove(rank)
            if idle:
                stop.wait(_POLL)


def _answer(checkpoint: Checkpoint, wire: Wire, rank: int) -> bool:
    """Send a host the tensor that it requests; False if it requests none."""
    name = wire.asked_for(rank)
    if name is None:
        return False
    try:
        data = checkpoint.tensor(name).contiguous().view(-1).view(torch.uint8)
        checkpoint.check([name])
    except (CheckpointError, OSError) as error:
        wire.tell({"failed": str(error)}, rank, tag=WEIGHTS)
        return True
    wire.tell({"nbytes": data.numel()}, rank, tag=WEIGHTS)
    for piece in data.split(PIECE):
        wire.send(piece, rank, tag=WEIGHTS)
    checkpoint.unmap()
    return True


# Host -------------------------------------------------------------------------------------------


class StreamedCheckpoint(Checkpoint):
    """The driver's checkpoint, on a host without a copy.

    Args:
        folder: its name in messages.
        tensors: its tensors.
        wire: gives the current wire to the driver.
    """

    described_by = "the driver's config"

    def __init__(
        self, folder: Path, tensors: Sequence[StreamedTensor], wire: Callable[[], Wire]
    ) -> None:
        self._tensors = {each.name: each for each in tensors}
        self._wire = wire
        self._held: dict[str, Tensor] = {}
        super().__init__(folder)

    def _open(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(
                name=name,
                dtype=each.dtype,
                shape=tuple(each.shape),
                nbytes=each.nbytes,
                file=self.folder,
                offset=0,
            )
            for name, each in self._tensors.items()
        }

    def samples(self) -> dict[str, bytes]:
        return {name: bytes.fromhex(each.sample) for name, each in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """A tensor on the CPU, fetched unless this host holds it.

        Raises:
            CheckpointError: the driver can't read it, or its file has changed.
            WireError: the driver is gone.
        """
        info = self.info(name)
        if name not in self._held:
            self._held[name] = self._fetched(info).view(info.dtype).reshape(info.shape)
        return self._held[name]

    def _fetched(self, info: TensorInfo) -> Tensor:
        wire, data = self._wire(), torch.empty(info.nbytes, dtype=torch.uint8)
        wire.ask_for(info.name)
        answer: dict[str, Any] = wire.hear(0, tag=WEIGHTS)
        if "failed" in answer:
            raise CheckpointError(f"the driver can't send {info.name!r}: {answer['failed']}")
        if answer["nbytes"] != info.nbytes:
            raise CheckpointError(self._changed_error(info))
        for piece in data.split(PIECE):
            wire.receive_into(piece, 0, tag=WEIGHTS)
        known = self._tensors[info.name]
        if known.as_stored and sample_of(_reader(data), info).hex() != known.sample:
            raise CheckpointError(self._changed_error(info))
        return data

    def _changed_error(self, info: TensorInfo) -> str:
        return (
            f"{self.folder}: the driver's {info.name!r} is not what it announced: the model was "
            "replaced meanwhile, build and load it again"
        )

    def read_into(self, name: str, target: Tensor, first: int = 0) -> None:
        data = self.tensor(name).view(-1).view(torch.uint8)
        target.copy_(data[first : first + len(target)])

    def mapping(self, name: str) -> None:
        """None: tensors are received, not mapped."""

    def fetch(self, name: str, first: int, nbytes: int) -> None:
        raise AssertionError("nothing is mapped")

    def check(self, names: Iterable[str]) -> None:
        """Do nothing: the driver checks before it sends."""

    def unmap(self) -> None:
        """Release the tensors received for the unit just loaded."""
        self._held = {}

    def close(self) -> None:
        self.unmap()
        super().close()


def _reader(data: Tensor) -> Callable[[int, int], bytes]:
    return lambda count, first: data[first : first + count].numpy().tobytes()
