"""Sliding-window caches against caches that keep every token, after eviction, trimming, moving and
saving."""

from __future__ import annotations

import pytest
import torch
from arithmetic import near
from hypothesis import given
from hypothesis import strategies as st
from on_cpu import on_cpu
from tiny import TINY, reference, save

from exkv import Cache, HybridCache, Model, PlacementError, place
from exkv.cache.retention import KeepAll, Window

IDS = torch.randint(3, 320, (3, 120), generator=torch.Generator().manual_seed(4))
NAMES = ["MistralForCausalLM", "Gemma2ForCausalLM"]


@pytest.fixture(scope="module", params=NAMES)
def model(request, tmp_path_factory):
    theirs = reference(TINY[request.param]())
    model = on_cpu(save(theirs, tmp_path_factory.mktemp("model")), max_input_len=32)
    assert 0 < model.config.sliding_window < 60
    return model


def both(model, rows: int = 1):
    return HybridCache(model, 120, rows), Cache(model, 120, rows)


def same_answer(model, ring, full, ids, **options) -> None:
    assert near(model.forward(ids, ring, **options), model.forward(ids, full, **options))


def test_only_layers_with_a_window_keep_a_ring(model):
    window = model.config.sliding_window
    ring, full = both(model)
    kept = [layer.spec.retention for layer in ring.layers]
    sliding = [model.config.slides(i) for i in range(len(kept))]
    assert any(sliding)
    assert kept == [Window(window) if slides else KeepAll() for slides in sliding]
    share = sum(window if slides else 120 for slides in sliding) / (120 * len(sliding))
    cpu = torch.device("cpu")
    assert ring.nbytes()[cpu] == pytest.approx(share * full.nbytes()[cpu], rel=0.02)
    plan = place(model, ring, ["cpu"])
    assert plan.ledgers[0].cache == ring.nbytes()[cpu]


@pytest.mark.parametrize("cut", [[120], [1] * 120, [60, 60], [5, 1, 90, 1, 23], [31, 33, 1, 55]])
def test_split_into_calls_is_irrelevant(model, cut):
    ring, full = both(model)
    expected = model.forward(IDS[:1], full)
    parts = [model.forward(part, ring) for part in IDS[:1].split(cut, dim=1)]
    assert near(torch.cat(parts, dim=1), expected)


def test_ragged_rows(model):
    ring, full = both(model, 3)
    for new in ([50, 3, 0], [1, 1, 1], [2, 40, 1], [1, 0, 1], [30, 30, 30], [1, 1, 1]):
        ids = IDS[:, : max(new)]
        a, b = (
            model.forward(ids, cache, new_lens=new, last_id_only=True) for cache in (ring, full)
        )
        rows = [row for row in range(3) if new[row]]
        assert near(a[rows], b[rows])
    assert ring.seq_lens == full.seq_lens


@pytest.mark.parametrize("kept", [2, 30, 70, 78])
def test_cropped_tokens_become_visible_again(model, kept):
    """The ring has evicted tokens that the one after ``kept`` sees; the model recomputes them."""
    ring, full = both(model)
    model.forward(IDS[:1, :80], ring)
    model.forward(IDS[:1, :80], full)
    ring.crop(kept)
    full.crop(kept)
    assert ring.stale == {0}
    same_answer(model, ring, full, IDS[:1, 90:95])
    assert ring.stale == set()
    same_answer(model, ring, full, IDS[:1, 95:96])
    assert ring.sequences == full.sequences


def test_tokens_cropped_one_by_one(model, tmp_path):
    """Overwritten tokens are lost, even if the row was cropped in between."""
    ring, full = both(model)
    length = model.config.sliding_window + 1
    for cache in (ring, full):
        model.forward(IDS[:1, :length], cache)
        cache.trim(1)
    assert ring.stale == set()
    ring.save(tmp_path / "ring")
    other = HybridCache(model, 120)
    other.load(tmp_path / "ring")
    copy = ring.clone()
    for cache in (ring, full, other, copy):
        cache.trim(1)
    expected = model.forward(IDS[:1, 90:93], full)
    for cache in (ring, other, copy):
        assert cache.stale == {0}
        assert near(model.forward(IDS[:1, 90:93], cache), expected)


def test_cropped_row_becomes_another_with_its_prefix(model):
    ring, full = both(model, 2)
    length = model.config.sliding_window + 1
    ids = torch.cat((IDS[:1, :2].expand(2, 2), IDS[:2, 2:length]), dim=1)
    for cache in (ring, full):
        model.forward(ids, cache, new_lens=[length, 9])
        cache.crop([length - 1, 9])
        cache.reorder([1, 1])
    same_answer(model, ring, full, IDS[:2, 90:93])


def test_row_that_becomes_a_cropped_one_is_stale(model):
    ring, full = both(model, 2)
    length = model.config.sliding_window + 1
    for cache in (ring, full):
        model.forward(IDS[:2, :length], cache, new_lens=[5, length])
        cache.crop([5, length - 1])
        cache.reorder([1, 0])
        cache.crop([length - 2, 5])
    assert ring.stale == {0}
    same_answer(model, ring, full, IDS[:2, 90:93])


def test_crop_within_the_window_reruns_nothing(model):
    ring, full = both(model)
    length = model.config.sliding_window
    model.forward(IDS[:1, :length], ring)
    model.forward(IDS[:1, :length], full)
    ring.trim(3)
    full.trim(3)
    assert ring.stale == set()
    same_answer(model, ring, full, IDS[:1, 90:95])
    ring.reset()
    assert ring.stale == set() and ring.seq_lens == [0]


def test_failed_call_that_overwrote_tokens_is_rolled_back(model, monkeypatch):
    ring, full = both(model)
    model.forward(IDS[:1, :70], ring)
    model.forward(IDS[:1, :70], full)
    head = model.units[-1]

    def fail(*args):
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(head.module, "forward", fail)
        model.forward(IDS[:1, 70:90], ring)
    assert ring.sequences == full.sequences
    same_answer(model, ring, full, IDS[:1, 100:104])


@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 1], [0, 2]], ids=str)
def test_reorder(model, rows):
    ring, full = both(model, 3)
    for cache in (ring, full):
        model.forward(IDS[:, :80], cache, new_lens=[80, 20, 60])
        cache.trim(2)
        cache.reorder(rows)
    assert ring.sequences == full.sequences
    assert ring.stale == {to for to, row in enumerate(rows) if row != 1}
    same_answer(model, ring, full, IDS[: len(rows), 80:82])


def test_copies_and_files(model, tmp_path):
    ring, full = both(model, 3)
    for cache in (ring, full):
        model.forward(IDS[:, :80], cache, new_lens=[80, 20, 60])
    ring.crop([80, 20, 50])
    full.crop([80, 20, 50])
    copy = ring.clone()
    ring.save(tmp_path / "ring")
    other = HybridCache(model, 100, 3)
    other.load(tmp_path / "ring")
    expected = model.forward(IDS[:, 80:83], full)
    for cache in (ring, copy, other):
        assert cache.stale == {2}
        assert near(model.forward(IDS[:, 80:83], cache), expected)
    with pytest.raises(ValueError, match="the last 24 tokens, and this cache's .* all tokens"):
        full.load(tmp_path / "ring")


@given(st.integers(1, 30), st.integers(0, 60), st.integers(0, 60))
def test_lost_tokens_are_overwritten_and_visible_ones(size, kept, more):
    """Against a ring of positions that is written one by one."""
    ring = [-1] * size
    for position in range(kept + more):
        ring[position % size] = position
    seen = range(max(kept - (size - 1), 0), kept)
    missing = any(ring[position % size] != position for position in seen)
    assert Window(size).lost(kept + more, kept) == missing
    assert not KeepAll().lost(kept + more, kept)


def test_a_window_of_one_token(tmp_path):
    theirs = reference(TINY["MistralForCausalLM"](sliding_window=1))
    model = on_cpu(save(theirs, tmp_path), max_input_len=8)
    ring, full = both(model)
    for ids in (IDS[:1, :20], IDS[:1, 20:21]):
        assert near(model.forward(ids, ring), model.forward(ids, full))


def test_window_grows(tmp_path):
    """On a card too small for all tokens the ring fits, and the refusal says so."""
    model = Model(save(reference(TINY["MistralForCausalLM"]()), tmp_path), max_input_len=32)
    ring = HybridCache(model, 5000)
    need = place(model, ring, "1G", margin=0, allocator="exact").ledgers[0].total
    assert place(model, ring, str(need), margin=0, allocator="exact").fits
    with pytest.raises(PlacementError) as caught:
        place(model, Cache(model, 5000), str(need), margin=0, allocator="exact")
    assert "HybridCache at the same length" in caught.value.suggestions
