"""Torch's caching allocator as the planner models it and simulated devices play it, beside what
torch's own answered (recorded, see ``tests/torch_allocator``)."""

from __future__ import annotations

import json
import random

import pytest
import torch
from simproc import run_sim
from torch_allocator import CASES, TRACES, requests

from exkv.caching_allocator import LARGE, CachingAllocator, Rules

RECORDED = json.loads(TRACES.read_text())
MEBI = 1 << 20


@pytest.mark.parametrize("case", CASES)
def test_the_model_reserves_what_torchs_own_allocator_reserved(case):
    settings, capacity, seed = CASES[case]
    allocator = CachingAllocator(Rules.parse(settings), capacity)
    held, found = {}, []
    for what, *numbers in requests(seed):
        answer = []
        if what == "a":
            try:
                held[numbers[0]] = allocator.allocate(numbers[1])
            except MemoryError:
                answer = [-1]
        elif what == "f":
            if (block := held.pop(numbers[0], None)) is not None:
                allocator.free(block)
        else:
            allocator.empty_cache()
        found.append([allocator.reserved, allocator.allocated, *answer])
    expected = [[reserved, allocated, *rest] for reserved, allocated, _, *rest in RECORDED[case]]
    assert found == expected
    assert ("full" in case) == any(len(answer) > 2 for answer in found)


def on_simulated_devices(seed):
    held, found = {}, []
    for what, *numbers in requests(seed):
        answer = []
        if what == "a":
            try:
                held[numbers[0]] = torch.empty(numbers[1], dtype=torch.uint8, device="sim:0")
            except torch.OutOfMemoryError:
                answer = [-1]
        elif what == "f":
            held.pop(numbers[0], None)
        else:
            torch.accelerator.empty_cache()
        stats = torch.accelerator.memory_stats(0)
        lines = ("reserved_bytes", "allocated_bytes", "inactive_split_bytes")
        free, capacity = torch.accelerator.get_memory_info(0)
        assert capacity - free == 2 * MEBI + torch.accelerator.memory_reserved(0)
        found.append([*(stats[f"{line}.all.current"] for line in lines), *answer])
    return found


@pytest.mark.parametrize("case", CASES)
def test_simulated_devices_reserve_what_torchs_own_allocator_reserved(case):
    settings, capacity, seed = CASES[case]
    env = {
        "EXKV_SIM_ALLOCATOR": "cuda",
        "EXKV_SIM_DRY": "1",
        "PYTORCH_CUDA_ALLOC_CONF": settings,
    }
    context = 2 * MEBI
    found = run_sim(on_simulated_devices, str(capacity + context), args=[seed], env=env)
    assert found == RECORDED[case]


@pytest.mark.parametrize("nbytes", [1, 300 << 10, MEBI, 3 * MEBI, 7 * MEBI, LARGE, 33 * MEBI + 1])
@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "large_segment_size_mb:40"])
def test_what_lives_long_reserves_its_share_of_segments(nbytes, settings):
    rules = Rules.parse(settings)
    allocator, count = CachingAllocator(rules), 37
    for _ in range(count):
        allocator.allocate(rules.request_size(nbytes))
    beyond = allocator.reserved - count * rules.share(nbytes)
    assert -count < beyond < rules.large_segment  # shares are rounded up, and one is open


@pytest.mark.parametrize("seed", range(8))
def test_sizes_in_any_order_reserve_no_more_than_their_shares(seed):
    """One after the other, in a pattern, or by chance; one segment of each kind is open."""
    rng, rules, worst = random.Random(seed), Rules(), 0.0
    for _ in range(60):
        limits = rng.choice([(MEBI, 20 * MEBI), (512, MEBI), (512, 30 * MEBI)])
        sizes = [rng.randint(*limits) for _ in range(rng.randint(1, 4))]
        requests = rng.choices(sizes, k=rng.randint(1, 120))
        if rng.random() < 0.6:
            requests = requests[: rng.randint(1, 4)] * rng.randint(1, 40)
        elif rng.random() < 0.5:
            requests.sort(key=sizes.index)
        allocator, shares = CachingAllocator(rules), 0
        for nbytes in requests:
            allocator.allocate(rules.request_size(nbytes))
            shares += rules.share(nbytes, sizes)
            beyond = allocator.reserved - shares - rules.open_segments(sizes)
            assert beyond <= 0, (sizes, requests)
        worst = max(worst, shares / allocator.reserved)
    assert worst < 2.1  # never twice what is reserved, but for the last segment
