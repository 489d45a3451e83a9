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
