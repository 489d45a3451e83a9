"""Messages between hosts, by torch.distributed's point-to-point calls only.

A :class:`Wire` is one gloo process group, for as long as its members live, with an NCCL group for
hidden states between GPUs (``gpu_wire.py``). Commands and answers are JSON in byte tensors, hidden
states are their tensors' bytes. Sends are asynchronous: hidden states may be in flight to a host
while the next one is computed (``sends.py`` bounds them).

There is no deadlock: every process goes through the same commands in the same order, and within a
call through the units in order. Consider the process that is farthest behind. What it waits to
receive was sent by one ahead of it, and what it waits to deliver goes to one ahead, which has
received it. That includes logits, although the driver reads them later: their receive is posted
with their call (:class:`Expected`).
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from exkv.planning.plan import EMBEDDED_IN_FLIGHT

from .errors import WireError
from .gpu_wire import CUDA, GpuWire, kind_of_host
from .rendezvous import while_alive
from .sends import Sends
from .values import dumps, loads

#: Bytes of a command's first message, including its length; the rest follows in a second one.
_FRAME = 4096
#: Seconds that a host waits for its next command.
_IDLE = timedelta(days=30)
_COMMAND, _HIDDEN, WEIGHTS, _LOGITS, EMBEDDED = range(5)  # tags
#: Bytes of weights per message.
PIECE = 8 << 20
#: Bytes in flight to one host; for hidden states and logits those of the largest tensor, and for
#: embeddings sent to an MTP head, which takes them last, those of a few, as in the plan's ledger.
_ROOM = {_COMMAND: 64 * _FRAME, WEIGHTS: 2 * PIECE}


def address_towards(host: str, port: int) -> str:
    """This machine's address towards another one, by the routing table."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 1))  # UDP: sends nothing
        return str(probe.getsockname()[0])


class Expected:
    """Logits that a host will send; their receive is already posted.

    Attributes:
        into: the receive buffer, in host memory.
        work: the receive; None once it is complete, or was aborted.
        x: the logits on the target device, once they have arrived.
    """

    def __init__(self, into: Tensor, work: distributed.Work) -> None:
        self.into = into
        self.work: distributed.Work | None = work
        self.x: Tensor | None = None


class Wire:
    """One process group.

    Args:
        store: for the rendezvous, with a prefix of its own.
        rank, size: this process's rank, and the group's size.
        address: this machine's, on which it listens.
        timeout: seconds that a message may take; at least what a host's units take for a chunk.

    Raises:
        WireError: not all members joined in that time.
    """

    def __init__(
        self, store: distributed.Store, rank: int, size: int, address: str, timeout: float
    ) -> None:
        gloo: Any = distributed.ProcessGroupGloo  # torch's stubs leave most of it out
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [gloo.create_device(hostname=address)]
        self.rank, self.size, self._store = rank, size, store
        self._timeout = timedelta(seconds=timeout)
        self._sends: dict[tuple[int, int], Sends] = {}
        self._expected: deque[Expected] = deque()
        device = torch.device(kind := kind_of_host(), *([0] if kind == CUDA else []))
        self._place = device
        self._gpus = GpuWire(store, rank, size, timeout, kind=kind, device=device)
        try:
            self._group: Any = gloo(store, rank, size, options)
        except RuntimeError as error:
            raise WireError(f"the hosts can't connect: {_first_line(error)}") from None

    # Hidden states ------------------------------------------------------------------------

    def send(self, x: Tensor, to: int, *, tag: int = _HIDDEN) -> None:
        """Send a tensor; hidden states between GPUs by NCCL."""
        if tag == _HIDDEN and self._gpus.reaches(to):
            self._gpus.send(x, to)
        else:
            self._send(_bytes(x), to, tag)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
        """Receive the next hidden state from a host, on a GPU if both hosts have one, else in host
        memory."""
        if self._gpus.reaches(source):
            return self._gpus.receive(shape, dtype, source)
        x = torch.empty(shape, dtype=dtype)
        self._receive(_bytes(x), source, _HIDDEN, self._timeout)
        return x

    def send_logits(self, x: Tensor) -> None:
        """Send logits to the driver, always through host memory: NCCL orders messages between two
        GPUs, so the driver's next hidden states would wait."""
        self._send(_bytes(x), 0, _LOGITS)

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Expected:
        """Post the receive of a call's logits from a host."""
        into = torch.empty(shape, dtype=dtype)
        try:
            work = self._group.recv([_bytes(into)], source, _LOGITS)
        except RuntimeError as error:
            raise WireError(_first_line(error)) from None
        self._expected.append(made := Expected(into, work))
        return made

    def take(self, expected: Expected) -> Tensor:
        """Wait for logits, and for those of earlier calls.

        Raises:
            WireError: they did not arrive in time, or were aborted.
        """
        while expected.x is None:
            if expected.work is None:
                raise WireError("the logits were lost: the hosts have formed a new group")
            self._take_first()
        return expected.x

    def take_all(self) -> None:
        """Wait for all expected logits; errors as of :meth:`take`."""
        while self._expected:
            self._take_first()

    def _take_first(self) -> None:
        first = self._expected.popleft()
        work, first.work = first.work, None
        assert work is not None
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise WireError(_first_line(error)) from None
        first.x = first.into.to(self._place)

    def receive_into(self, x: Tensor, source: int, *, tag: int = _HIDDEN) -> None:
        """Receive the next tensor from a host into a buffer of its size in host memory."""
        self._receive(_bytes(x), source, tag, self._timeout)

    # Weights ------------------------------------------------------------------------------

    def ask_for(self, name: str) -> None:
        """Request a tensor of the driver's checkpoint."""
        self._store.set(f"want/{self.rank}", name)

    def asked_for(self, rank: int) -> str | None:
        """The tensor that a host requests, if any; clears the request."""
        key = f"want/{rank}"
        if not self._store.check([key]):
            return None
        name = self._store.get(key).decode()
        self._store.delete_key(key)
        return name

    # Commands -----------------------------------------------------------------------------

    def tell(self, message: Any, to: int, *, tag: int = _COMMAND) -> None:
        """Send a message."""
        text = dumps(message)
        frame = torch.zeros(_FRAME, dtype=torch.uint8)
        frame[:8] = torch.tensor([len(text)]).view(torch.uint8)
        room, body = _FRAME - 8, torch.frombuffer(bytearray(text), dtype=torch.uint8)
        frame[8 : 8 + min(room, len(text))] = body[:room]
        self._send(frame, to, tag)
        if len(text) > room:
            self._send(body[room:].clone(), to, tag)

    def hear(self, source: int, *, idle: bool = False, tag: int = _COMMAND) -> Any:
        """Receive the next message from a host.

        Args:
            idle: wait without a time-out.
        """
        frame = torch.empty(_FRAME, dtype=torch.uint8)
        self._receive(frame, source, tag, _IDLE if idle else self._timeout)
        length, room = int(frame[:8].view(torch.int64)), _FRAME - 8
        if length > room:
            rest = torch.empty(length - room, dtype=torch.uint8)
            self._receive(rest, source, tag, self._timeout)
            frame = torch.cat((frame, rest))
        return loads(frame[8 : 8 + length].numpy().tobytes())

    # ---------------------------------------------------------------------------------------

    def _send(self, data: Tensor, to: int, tag: int) -> None:
        most = EMBEDDED_IN_FLIGHT if tag == EMBEDDED else 1
        made = Sends(lambda work: work.wait(self._timeout), _ROOM.get(tag, 0), most)
        sends = self._sends.setdefault((to, tag), made)
        try:
            sends.make_room(data.nbytes)
            sends.add(self._group.send([data], to, tag), data)
        except RuntimeError as error:
            raise WireError(_first_line(error)) from None

    def _receive(self, data: Tensor, source: int, tag: int, limit: timedelta) -> None:
        try:
            self._group.recv([data], source, tag).wait(limit)
        except RuntimeError as error:
            raise WireError(_first_line(error)) from None

    def close(self) -> None:
        """Leave the group, if not done yet. Peers that wait for this process get an error, since no
        send or receive keeps the group alive."""
        self._sends.clear()
        for expected in self._expected:
            expected.work = None
        self._expected.clear()
        self._gpus.close()
        self._group = None


def form_group(
    store: Any,
    epoch: int,
    names: Sequence[str],
    name: str,
    address: str,
    timeout: float,
    ended: Callable[[str], bool] = lambda name: False,
) -> Wire:
    """Connect host ``name`` to the members of a group, which are listed by rank.

    Raises:
        WireError: not all members connected in that time, or one died meanwhile.
        ClusterError: the driver is gone.
    """
    # A connection of its own, so that gloo's waiting for a dead host doesn't block other requests.
    own = distributed.PrefixStore(f"wire/{epoch}", store.clone())
    others = [other for other in names[1:] if other != name]
    at = names.index(name), len(names), address, timeout
    return while_alive(store, others, ended, lambda: Wire(own, *at))


def pieces(x: Tensor) -> Sequence[Tensor]:
    """The bytes of a contiguous tensor in host memory, in pieces of :data:`PIECE`."""
    return x.view(-1).view(torch.uint8).split(PIECE) if x.numel() else ()


def _bytes(x: Tensor) -> Tensor:
    """A tensor's bytes in host memory, uint8 (nbytes,); a view if it is there already."""
    return x.detach().cpu().contiguous().flatten().view(torch.uint8)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0][:200]
