"""Which devices there are, and what they say of their memory."""

from __future__ import annotations

import pytest
import torch

from exkv import devices


def test_an_accelerator_that_cannot_tell_its_memory_is_passed_over(monkeypatch):
    def refuse(device):
        raise RuntimeError("Allocator is not a DeviceAllocator")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuse)
    assert devices.default_devices() == [devices.CPU]


def test_the_cpu_has_memory_and_rounding_is_up_to_whole_blocks():
    assert devices.available_memory(devices.CPU) > 1 << 20
    assert [devices.rounded(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_real_gpus_get_a_reserve_by_default_and_the_first_a_larger_one():
    cards = [torch.device("cuda", 0), torch.device("cuda", 1), devices.CPU]
    first, second, host = devices.default_reserve(cards)
    assert first > second > host == 0


def test_the_cpu_stands_last(monkeypatch):
    card = torch.device("cuda", 0)
    monkeypatch.setattr(devices, "default_devices", lambda: [card])
    assert devices.resolve_devices(None) == [card]
    assert devices.resolve_devices(["cuda", "cpu"]) == [card, devices.CPU]
    with pytest.raises(ValueError, match="put it last"):
        devices.resolve_devices(["cpu", "cuda:0"])
