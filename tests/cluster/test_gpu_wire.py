"""Hidden states between GPUs: which hosts use NCCL, the order of messages, and silent peers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import distributed

from exkv.cluster.errors import WireError
from exkv.cluster.gpu_wire import CUDA, GpuWire, kind_of_host

CPU = torch.device("cpu")


class Work:
    def __init__(self, is_completed):
        self.is_completed, self.waits = is_completed, 0

    def wait(self):
        self.waits += 1


class Group:
    """Fake NCCL group: sent tensors are in a list until they are awaited."""

    lying: dict[tuple[int, int], list[torch.Tensor]] = {}

    def __init__(self, store, rank, size, timeout):
        self.rank, self.aborted = rank, False

    def send(self, tensors, to, tag):
        lying = self.lying.setdefault((self.rank, to), [])
        lying.append(tensors[0])
        return Work(lambda: not any(each is tensors[0] for each in lying))

    def recv(self, tensors, source, tag):
        def come():
            if not (lying := self.lying.get((source, self.rank))):
                return False
            tensors[0].copy_(lying.pop(0))
            return True

        return Work(come)

    def abort(self):
        self.aborted = True


def ends(*kinds: str) -> list[GpuWire]:
    store = distributed.HashStore()
    Group.lying.clear()
    size = len(kinds)
    return [
        GpuWire(store, rank, size, 0.05, kind=kind, device=CPU, make=Group)
        for rank, kind in enumerate(kinds)
    ]


def test_nccl_joins_only_hosts_with_gpus():
    found = [[one.reaches(other) for other in range(3)] for one in ends(CUDA, "cpu", CUDA)]
    assert found == [[True, False, True], [False] * 3, [True, False, True]]
    assert kind_of_host() == (CUDA if torch.cuda.is_available() else "cpu")


def test_hidden_states_are_ordered_and_bounded_and_silence_is_an_error():
    one, other = ends(CUDA, CUDA)
    x = torch.randn(2, 3)
    one.send(x, 1)
    with pytest.raises(WireError, match="rank 1 took no hidden state within 0.05 s"):
        one.send(x + 1, 1)
    assert torch.equal(other.receive((2, 3), x.dtype, 0), x)
    one.send(x + 1, 1)
    assert torch.equal(other.receive((2, 3), x.dtype, 0), x + 1)
    with pytest.raises(WireError, match="no hidden state came from rank 0 within 0.05 s"):
        other.receive((2, 3), x.dtype, 0)
    group = other._group
    other.close()
    other.close()
    assert group.aborted


_PROGRAM = """
import sys, torch
from torch import distributed
from exkv.cluster.gpu_wire import CUDA, GpuWire
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = distributed.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
device = torch.device(CUDA, rank)
wire = GpuWire(store, rank, 2, 60.0, kind=CUDA, device=device)
x = torch.arange(6.0).view(2, 3)
if rank == 0:
    wire.send(x, 1)
    back = wire.receive((2, 3), x.dtype, 1)
    assert back.device == device and torch.equal(back.cpu(), 2 * x)
else:
    wire.send(2 * wire.receive((2, 3), x.dtype, 0), 0)
    torch.cuda.synchronize()
store.add("done", 1)
while store.add("done", 0) < 2:
    pass
wire.close()
"""


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL joins two GPUs: needs two")
def test_nccl_carries_hidden_states_between_two_gpus():
    port = 29600 + os.getpid() % 1000
    command = [sys.executable, "-c", _PROGRAM]
    both = [subprocess.Popen([*command, str(rank), str(port)]) for rank in range(2)]
    assert [each.wait(timeout=120) for each in both] == [0, 0]
