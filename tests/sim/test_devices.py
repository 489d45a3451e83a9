"""Which devices there are, and what they say of their memory."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from exkv import devices


def test_an_accelerator_that_cannot_tell_its_memory_is_passed_over(monkeypatch):
    apples = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: apples)
    assert devices.present_devices() == [devices.CPU]


def test_the_cpu_has_memory_and_rounding_is_up_to_whole_blocks():
    assert devices.available_memory(devices.CPU) > 1 << 20
    assert [devices.rounded(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_only_real_gpus_get_a_margin():
    assert devices.default_margin(torch.device("cuda", 0)) > 0
    for other in (devices.CPU, torch.device("meta")):
        assert devices.default_margin(other) == 0


def test_the_cpu_comes_last(monkeypatch):
    card = torch.device("cuda", 0)
    monkeypatch.setattr(devices, "present_devices", lambda: [card])
    assert devices.resolve_devices(["cuda", "cpu"]) == [card, devices.CPU]
    with pytest.raises(ValueError, match="put it last"):
        devices.resolve_devices(["cpu", "cuda:0"])


def _asks_for_huge_pages(address: int) -> bool:
    """Whether the mapping that holds the address is advised to (proc(5), smaps: ``hg``)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if first.count("-") == 1 and not first.endswith(":"):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return "hg" in rest.split()
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are asked for on Linux")
def test_tensors_for_weights_on_the_host_lie_in_huge_pages():
    shapes = {
        "small": torch.empty(3, dtype=torch.bfloat16, device="meta"),
        "large": torch.empty(2048, 1024, device="meta"),
        "none": torch.empty(0, 4, dtype=torch.int8, device="meta"),
    }
    made = devices.empty_tensors(shapes, devices.CPU)
    assert {name: (x.shape, x.dtype) for name, x in made.items()} == {
        name: (x.shape, x.dtype) for name, x in shapes.items()
    }
    large = made["large"]
    assert large.is_contiguous() and all(x.data_ptr() % 512 == 0 for x in made.values())
    assert _asks_for_huge_pages(large.data_ptr() + (large.nbytes >> 1))
    # A mapping of its own: memory that malloc hands out again keeps the advice of its last owner.
    with contextlib.closing(mmap.mmap(-1, 32 << 20)) as other:
        address = np.frombuffer(other, dtype=np.uint8).ctypes.data
        assert not _asks_for_huge_pages(address + (len(other) >> 1))


def test_what_is_too_small_for_a_large_page_is_memory_all_the_same():
    made = devices.empty_tensors({"a": torch.empty(5, device="meta")}, devices.CPU)
    assert made["a"].fill_(2).tolist() == [2] * 5
