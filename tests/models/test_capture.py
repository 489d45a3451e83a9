"""What a capture of a CUDA graph leaves in torch's caching allocator, using a stand-in for torch
that books pools as it does (aten/src/ATen/cuda/CUDAGraph.cpp): without a GPU, whatever fails."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from exkv.models import graph_run

POOL = (0, 7)
DEVICE = torch.device("cuda", 1)
INVALIDATED = "CUDA error: operation failed due to a previous error during capture"


class Torch:
    """Pools that allocations are captured to, and who uses them.

    Args:
        fails: "begin", "step" (and CUDA's capture goes on), "invalidated" (a step that CUDA ends
            the capture for), "end" (the step did something forbidden without an error),
            "instantiate", or "" for nothing.
    """

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.underway: list[tuple] = []
        self.users: Counter = Counter()
        self.calls: list[str] = []

    def end(self, device: int, pool: tuple) -> None:
        self.calls.append(f"end pool on {device}")
        if pool not in self.underway:
            raise RuntimeError("endAllocateToPool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, device: int, pool: tuple) -> None:
        self.calls.append(f"release pool on {device}")
        self.users[pool] -= 1

    def graph(self) -> Graph:
        return Graph(self)


class Graph:
    def __init__(self, torch_: Torch) -> None:
        self.torch, self.ended = torch_, False

    def capture_begin(self, pool, capture_error_mode) -> None:
        assert capture_error_mode == "thread_local"
        self.torch.calls.append("capture_begin")
        self._pool = pool
        self.torch.underway.append(pool)
        self.torch.users[pool] += 1
        if self.torch.fails == "begin":
            raise RuntimeError("CUDA error: operation not permitted")

    def capture_end(self) -> None:
        self.torch.calls.append("capture_end")
        if self.torch.fails in ("invalidated", "end"):
            raise RuntimeError(INVALIDATED)
        self.torch.underway.remove(self._pool)
        self.ended = True
        if self.torch.fails == "instantiate":
            raise torch.AcceleratorError("CUDA error: out of memory")

    def pool(self):
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def __del__(self) -> None:
        if self.ended:
            self.torch.users[self._pool] -= 1


@pytest.fixture
def captured(monkeypatch):
    """Capture a step with a stand-in for torch: the bookings, and the error."""

    def run(fails: str):
        stand_in = Torch(fails)
        stream = SimpleNamespace(wait_stream=lambda other: None)
        monkeypatch.setattr(graph_run, "_capture_stream", lambda device: stream)
        monkeypatch.setattr(graph_run, "_failed", [])
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", stand_in.graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", stand_in.end, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", stand_in.release, raising=False)

        def step():
            stand_in.calls.append("step")
            if fails in ("step", "invalidated"):
                raise torch.OutOfMemoryError("the step's own words")
            return torch.ones(3)

        owner = SimpleNamespace(device=DEVICE, pool=None)
        try:
            recording, error = graph_run.capture(step, owner), None
        except RuntimeError as reason:
            recording, error = None, reason
        return stand_in, owner, recording, error

    return run


def test_a_capture_that_succeeds_keeps_its_pool_as_long_as_its_graph(captured):
    stand_in, owner, recording, error = captured("")
    assert error is None and owner.pool == POOL
    assert stand_in.calls == ["capture_begin", "step", "capture_end"]
    assert not stand_in.underway and stand_in.users[POOL] == 1
    del recording
    gc.collect()
    assert stand_in.users[POOL] == 0


@pytest.mark.parametrize(
    ("fails", "says", "calls"),
    [
        ("begin", "not permitted", ["capture_begin", "end pool on 1", "release pool on 1"]),
        ("step", "the step's own words", ["capture_begin", "step", "capture_end"]),
        (
            "invalidated",
            "the step's own words",
            ["capture_begin", "step", "capture_end", "end pool on 1", "release pool on 1"],
        ),
        (
            "end",
            "previous error during capture",
            ["capture_begin", "step", "capture_end", "end pool on 1", "release pool on 1"],
        ),
        ("instantiate", "out of memory", ["capture_begin", "step", "capture_end"]),
    ],
)
def test_nothing_is_under_way_after_a_capture_that_failed(captured, fails, says, calls):
    stand_in, _, recording, error = captured(fails)
    assert recording is None and says in str(error)
    assert stand_in.calls == calls
    del error
    gc.collect()
    assert not stand_in.underway and stand_in.users[POOL] == 0
    # A graph that the pinned allocator may still query exists.
    assert len(graph_run._failed) == (len(calls) > 3 or fails == "begin")
