"""Hidden states between hosts with NVIDIA GPUs: NCCL copies them from one host's first GPU to the
other's, bypassing host memory.

Hosts announce in the store whether they have GPUs when a group is formed. Between other hosts gloo
carries hidden states, and it carries commands and answers in any case. NCCL doesn't detect a dead
peer: waits are bounded here, and a group is aborted when it is closed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from .errors import WireError
from .sends import Sends

#: Makes a process group from a store, rank, size and time-out.
MakeGroup = Callable[[Any, int, int, timedelta], Any]
#: The device type that NCCL connects.
CUDA = "cuda"
#: Seconds between two polls for a message.
_POLL = 2e-5


def kind_of_host() -> str:
    """The device type from which this process can exchange hidden states."""
    here = distributed.is_nccl_available() and torch.cuda.is_available()
    return CUDA if here else "cpu"


def nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """An NCCL group without a watchdog: its user must detect dead peers."""
    # With a watchdog, a thread of NCCL's ends this process when a message takes too long.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, size, options)


class GpuWire:
    """The GPU part of a :class:`Wire`.

    Args:
        kind: this host's device type; ``device`` sends and receives hidden states.
        make: makes the group when the first hidden state is sent or awaited.
    """

    def __init__(
        self,
        store: distributed.Store,
        rank: int,
        size: int,
        timeout: float,
        *,
        kind: str,
        device: torch.device,
        make: MakeGroup = nccl_group,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._kind, self._device, self._make = kind, device, make
        self._timeout = timeout
        self._kinds: dict[int, str] = {rank: kind}
        self._group: Any = None
        self._sends: dict[int, Sends] = {}
        store.set(f"kind/{rank}", kind)

    def reaches(self, other: int) -> bool:
        """Whether hidden states to and from a process go by NCCL."""
        if self._kind != CUDA:
            return False
        if other not in self._kinds:
            self._kinds[other] = self._store.get(f"kind/{other}").decode()
        return self._kinds[other] == CUDA

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send a tensor.

        Raises:
            WireError: earlier ones were not received in time.
        """
        taken = partial(self._wait, otherwise=f"rank {to} took no hidden state")
        sends = self._sends.setdefault(to, Sends(taken))
        sends.make_room(x.nbytes)
        data = x.detach().to(self._device).contiguous()
        sends.add(self._nccl().send([data], to, 0), data)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Receive the next tensor from a process, on this process's device.

        Raises:
            WireError: none arrived in time.
        """
        x = torch.empty(shape, dtype=dtype, device=self._device)
        self._wait(self._nccl().recv([x], source, 0), f"no hidden state came from rank {source}")
        return x

    def _nccl(self) -> Any:
        if self._group is None:
            store = distributed.PrefixStore("gpus", self._store)
            limit = timedelta(seconds=self._timeout)
            self._group = self._make(store, self._rank, self._size, limit)
        return self._group

    def _wait(self, work: Any, otherwise: str) -> None:
        deadline = time.monotonic() + self._timeout
        try:
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise WireError(f"{otherwise} within {self._timeout:g} s")
                time.sleep(_POLL)
            work.wait()  # orders later work on this device after it
        except RuntimeError as error:
            raise WireError(str(error).split("\n")[0][:200]) from None

    def close(self) -> None:
        """Abort the group, with all sends and receives in flight."""
        group, self._group = self._group, None
        self._sends.clear()
        if group is not None:
            group.abort()
