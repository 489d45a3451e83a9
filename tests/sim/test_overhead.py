"""What a GPU's driver and libraries take, measured at the first touch of a card that is played."""

from __future__ import annotations

import pytest
import torch

from exkv import devices, overhead
from exkv.caching_allocator import CachingAllocator
from exkv.planning.budgets import present_budget

MEBI = 1 << 20
CARD = torch.device("cuda", 0)
LARGE, SMALL = 32 * MEBI, 8320 << 10  # torch's workspaces of cuBLAS, by its table


class Card:
    """A GPU by what torch answers: the driver's context comes with the first question for its
    memory, a cuBLAS handle and the stream's workspace with the first product."""

    capacity, others, context, handle = 24 << 30, 900 * MEBI, 440 * MEBI, 30 * MEBI

    def __init__(self, workspace: int = LARGE, capability: tuple[int, int] = (9, 0)) -> None:
        self.workspace, self.capability = workspace, capability
        self.touched, self.multiplied, self.full, self.nvml = False, False, False, True
        self.allocator = CachingAllocator()

    def used(self, device: torch.device) -> int:
        if not self.nvml:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
        outside = self.context * self.touched + self.handle * self.multiplied
        return self.others + outside + self.allocator.reserved

    def memory_info(self, device: torch.device) -> tuple[int, int]:
        self.touched, nvml, self.nvml = True, self.nvml, True
        used, self.nvml = self.used(device), nvml
        return self.capacity - used, self.capacity

    def multiply(self, device: torch.device) -> None:
        if self.full:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
        inputs = [self.allocator.allocate(512), self.allocator.allocate(512)]
        if not self.multiplied:
            self.allocator.allocate(self.workspace)
        self.multiplied = True
        for block in inputs:
            self.allocator.free(block)

    def stats(self, device: torch.device) -> dict[str, int]:
        blocks = self.allocator._free.values()
        pieces = [b for pool in blocks for *_, b in pool if b.before or b.after]
        return {
            "allocated_bytes.all.current": self.allocator.allocated,
            "reserved_bytes.all.current": self.allocator.reserved,
            "inactive_split_bytes.all.current": sum(block.size for block in pieces),
        }


@pytest.fixture
def card(monkeypatch):
    """Makes the card that is there."""

    def make(*args, **options):
        card = Card(*args, **options)
        for module, name, answer in (
            (torch.accelerator, "get_memory_info", card.memory_info),
            (torch.accelerator, "memory_stats", card.stats),
            (torch.cuda, "memory_allocated", lambda device: card.allocator.allocated),
            (torch.cuda, "device_memory_used", card.used),
            (torch.cuda, "get_device_capability", lambda device: card.capability),
            (torch._C, "_cuda_hasPrimaryContext", lambda index: card.touched),
            (overhead, "multiply", card.multiply),
            (overhead, "_contexts", {}),
            (overhead, "_capturing", set()),
        ):
            monkeypatch.setattr(module, name, answer, raising=False)
        overhead._workspace.cache_clear()
        return card

    yield make
    overhead._workspace.cache_clear()


@pytest.mark.parametrize(("workspace", "reserved"), [(LARGE, LARGE), (SMALL, 20 * MEBI)])
def test_the_first_touch_measures_context_and_workspace(card, workspace, reserved):
    card = card(workspace)
    budget = present_budget(CARD)
    assert budget.context == card.context
    assert budget.in_use_by_others == card.others + card.handle
    # The workspace of calls is in use, with the rest of its segment; that of captures is to come.
    assert budget.in_use == reserved and budget.libraries == reserved
    assert budget.graphs == 46 * MEBI
    free = card.memory_info(CARD)[0]
    idle = 2 * MEBI  # of the product's inputs
    assert budget.limit == free + idle - reserved - 46 * MEBI - budget.margin


def test_what_is_measured_once_is_measured_no_more(card):
    card = card()
    first = present_budget(CARD)
    card.full = True  # a second product would fail
    assert present_budget(CARD) == first
    overhead.note_captures(CARD)
    later = present_budget(CARD)
    assert later.libraries == 0 and later.limit == first.limit + LARGE


def test_without_the_drivers_count_the_context_is_among_what_others_use(card):
    there = card()
    budget = present_budget(CARD)
    card().nvml = False
    without = present_budget(CARD)
    assert without.context == 0
    assert without.in_use_by_others == budget.in_use_by_others + there.context
    assert without.limit == budget.limit


def test_a_context_that_was_there_before_is_not_measured_again(card):
    card = card()
    card.touched = True
    assert present_budget(CARD).context == 0
    assert present_budget(CARD).in_use_by_others == card.others + card.context + card.handle


@pytest.mark.parametrize(
    ("capability", "config", "reserved"),
    [
        ((7, 5), "", 20 * MEBI),  # 8.125 MiB, of a medium segment
        ((8, 9), "", 20 * MEBI),
        ((9, 0), "", 32 * MEBI),
        ((10, 0), "", 32 * MEBI),
        ((12, 0), "", 32 * MEBI),
        ((9, 0), ":4096:2:16:8", 20 * MEBI),
        ((8, 6), ":16:8", 2 * MEBI),
        ((8, 6), ":4096:12", 48 * MEBI),
        ((8, 6), "nonsense", 20 * MEBI),
    ],
)
def test_who_multiplied_before_leaves_torchs_table(card, monkeypatch, capability, config, reserved):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    there = card(capability=capability)
    there.multiply(CARD)
    assert present_budget(CARD).libraries == reserved


def test_a_card_without_room_for_a_product_is_planned_by_the_table(card):
    there = card(capability=(8, 0))
    there.full = True
    assert present_budget(CARD).libraries == 20 * MEBI


def test_a_card_that_is_not_here_has_everything_to_come(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    absent = overhead.of_absent("cuda")
    assert (absent.context, absent.libraries, absent.graphs) == (512 * MEBI, 64 * MEBI, 46 * MEBI)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert overhead.of_absent("cuda").libraries == 40 * MEBI
    for other in (devices.CPU, torch.device("meta")):
        none = overhead.Overhead()
        assert overhead.of_absent(other.type) == overhead.of_present(other) == none
