"""Which devices there are, and what they say of their memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from exkv import devices
from exkv.models.units import Unit, unit_spec


def test_an_accelerator_that_cannot_tell_its_memory_is_passed_over(monkeypatch):
    def refuse(device):
        raise RuntimeError("Allocator is not a DeviceAllocator")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuse)
    assert devices.default_devices() == [devices.CPU]


def test_the_cpu_has_memory_and_rounding_is_up_to_whole_blocks():
    assert devices.available_memory(devices.CPU) > 1 << 20
    assert [devices.rounded(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_real_gpus_get_a_margin_and_those_that_are_not_here_a_larger_one():
    card = torch.device("cuda", 0)
    assert 0 < devices.default_margin(card) < devices.default_margin(card, present=False)
    for other in (devices.CPU, torch.device("meta")):
        assert devices.default_margin(other) == devices.default_margin(other, present=False) == 0


def test_the_cpu_stands_last(monkeypatch):
    card = torch.device("cuda", 0)
    monkeypatch.setattr(devices, "default_devices", lambda: [card])
    assert devices.resolve_devices(None) == [card]
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
def test_weights_on_the_host_lie_in_huge_pages():
    class Weights:
        """What a unit takes for a checkpoint."""

        def tensor(self, name: str) -> torch.Tensor:
            return torch.arange(2 << 20, dtype=torch.float32).view(2048, 1024)

    def build() -> torch.nn.Module:
        return torch.nn.Linear(1024, 2048, bias=False)

    no_formats = None  # it is no layer of ours
    unit = Unit(0, unit_spec("a map", build, str, formats=no_formats))
    unit.read(Weights(), devices.CPU, {})
    found = unit.module.weight
    assert torch.equal(found, Weights().tensor("weight"))
    assert _asks_for_huge_pages(found.data_ptr() + (found.nbytes >> 1))
    other = torch.ones(8 << 20)
    assert not _asks_for_huge_pages(other.data_ptr() + (other.nbytes >> 1))
    small = torch.ones(3)
    assert devices.in_huge_pages(small) is small
