"""The knapsack over matrices, compared with trying all choices."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from exkv.planning.search.knapsack import Item, front, least_lossy


def items_of(chance: np.random.Generator, count: int, options: int) -> list[Item]:
    return [Item(chance.integers(1, 30, options), chance.random(options)) for _ in range(count)]


def all_choices(items: list[Item]) -> list[tuple[int, float]]:
    """Bytes and loss of every choice."""
    found = []
    for choice in itertools.product(*(range(len(item.sizes)) for item in items)):
        pairs = list(zip(items, choice, strict=True))
        size = sum(int(item.sizes[option]) for item, option in pairs)
        found.append((size, sum(float(item.losses[option]) for item, option in pairs)))
    return found


def cost(items: list[Item], choice: list[int]) -> tuple[int, float]:
    pairs = list(zip(items, choice, strict=True))
    return sum(int(i.sizes[o]) for i, o in pairs), sum(float(i.losses[o]) for i, o in pairs)


def test_it_finds_what_trying_all_finds():
    chance = np.random.default_rng(1)
    refused = 0
    for _ in range(60):
        items = items_of(chance, 5, 4)
        room = int(chance.integers(10, 110))
        losses = [loss for size, loss in all_choices(items) if size <= room]
        found = least_lossy(items, room)
        if not losses:
            assert found is None
            refused += 1
            continue
        size, loss = cost(items, found)
        assert size <= room and loss == pytest.approx(min(losses))
    assert 0 < refused < 30


def test_a_front_is_all_choices_that_no_other_beats_and_a_thinned_one_a_cell_smaller():
    chance = np.random.default_rng(2)
    items = items_of(chance, 5, 4)
    choices = sorted(all_choices(items))
    best = [c for c in choices if not any(s <= c[0] and o < c[1] for s, o in choices)]
    whole, options = front(items, 10_000)
    expected = sorted({size: loss for size, loss in reversed(best)}.items())
    assert list(whole.sizes) == [size for size, _ in expected]
    assert whole.losses == pytest.approx([loss for _, loss in expected])
    for size, loss, choice in zip(whole.sizes, whole.losses, options, strict=True):
        assert cost(items, choice) == (size, pytest.approx(loss))
    for most in (2, 5, 9):
        thin, options = front(items, most)
        assert len(options) <= most < len(whole.sizes)
        cell = (whole.sizes[-1] - whole.sizes[0]) / (most - 1)
        for size, loss in zip(whole.sizes, whole.losses, strict=True):
            near = thin.losses[(thin.sizes <= size) & (thin.sizes >= size - cell)]
            assert len(near) and near.min() >= loss - 1e-12
        assert {thin.sizes[0], thin.sizes[-1]} == {whole.sizes[0], whole.sizes[-1]}


def test_80_layers_of_7_matrices_and_48_of_experts_are_chosen_in_seconds():
    chance = np.random.default_rng(3)
    bits = np.array([16, 8.25, 6.25, 5.25, 4.25, 3.25])
    widths = (64, 8, 8, 64, 224, 224, 224)
    for layers, sizes in ((80, widths), (48, (16, 1, 1, 16, 768, 768, 768))):
        items, count = [], 0
        for _, width in itertools.product(range(layers), sizes):
            weights = 8192 * 128 * width
            losses = chance.lognormal(-8, 1.5) * 4.0 ** (4.25 - bits[1:])
            losses *= chance.uniform(0.8, 1.2, 5)
            items.append(Item((weights * bits / 8).astype(np.int64), np.array([0, *losses])))
            count += weights
        began = time.process_time()
        for asked in (3.5, 4.25, 6.0):
            room = int(count * asked / 8)
            size, _ = cost(items, least_lossy(items, room))
            assert size <= room < size + 8192 * 128 * max(sizes)
        assert time.process_time() - began < 20
