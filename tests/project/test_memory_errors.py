"""Which errors mean that memory ran out: the words of torch, CUDA, its libraries, and the host."""

from __future__ import annotations

import errno
import gc
import weakref

import pytest
import torch

from exkv import errors
from exkv.cluster.errors import ClusterError
from exkv.errors import Attempt, is_out_of_memory

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
    errors.OutOfMemoryError("a forward call ran out of memory"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
    torch.AcceleratorError("HIP error: out of memory"),
    RuntimeError("rms_norm on cuda:1 failed to launch: out of memory"),
    RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 18014398509481984 bytes. Error code 12"
    ),
]
OTHERS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: operation not permitted when stream is capturing"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasGemmEx(...)`"),
    RuntimeError("linear on cuda:0 failed to launch: too many resources requested for launch"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    ClusterError("a is gone, and the others can't hold the model: b: out of memory"),
    ValueError("the prompt says: CUDA error: out of memory"),
    OSError(errno.ENOSPC, "No space left on device"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_every_word_for_out_of_memory_is_known(error):
    assert is_out_of_memory(error)
    with Attempt() as attempt:
        raise error
    assert attempt.why == (str(error) or "MemoryError")


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_something_else(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)), Attempt():
        raise error


def test_what_the_host_says_is_known_as_torch_says_it():
    with Attempt() as attempt:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert "CPUAllocator" in attempt.why


def test_tensors_of_a_call_that_ran_out_of_memory_are_free_behind_it():
    held = []

    def call():
        tensor = torch.empty(3)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("full")

    gc.disable()
    try:
        with Attempt():
            call()
        assert held[0]() is None
    finally:
        gc.enable()


def test_every_refusal_says_once_what_programs_search():
    facts = {"unit": "layer 1", "device": "sim:0", "needed": 2, "available": 1}
    first = errors.PlacementError("no room", **facts, suggestions=lambda: ["8 bits"])
    assert str(first) == "no room (out of memory: Insufficient VRAM). What would fit: 8 bits"
    assert str(errors.PlacementError(f"later: {first}", **facts)) == f"later: {first}"
