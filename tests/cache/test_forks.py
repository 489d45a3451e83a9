"""Forks share a prompt's storage, and converting a live cache to another kind keeps its tokens."""

from __future__ import annotations

import copy
import functools

import arithmetic
import pytest
import torch
from cases import KINDS
from on_cpu import on_cpu
from simproc import run_sim
from tiny import llama, reference, save

from exkv import (
    CACHES,
    Cache,
    Cache8bit,
    KVCache,
    Model,
    PlacementError,
    SinkCache,
    SlidingWindowCache,
    sim,
)
from exkv.cache import Dynamic, OnDevice, OnHost, Storage, Window, common_prefix, rows

IDS = torch.randint(3, 320, (4, 60), generator=torch.Generator().manual_seed(4))
CPU = torch.device("cpu")
INT8 = Storage(keys="int8", values="int8")
INT4 = Storage(keys="int4", values="int4", rotate=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save(reference(llama()), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def model(folder):
    return on_cpu(folder, max_input_len=32)


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


#: Equal but for the order of sums, which may turn over a quantized value's last step.
near = functools.partial(arithmetic.near, tolerance=3e-3)


def prompts(model, kind, rows: int = 2):
    """Two prompts of different lengths in a cache."""
    cache = kind(model, 64, rows)
    model.forward(IDS[:2, :30], cache, new_lens=[30, 17])
    return cache


def plain(model, kind):
    """The same prompts, each twice, without sharing."""
    cache = kind(model, 64, 4)
    model.forward(IDS[[0, 0, 1, 1], :30], cache, new_lens=[30, 30, 17, 17])
    return cache


def test_fork_continues_like_a_cache_that_ran_the_prompt(model, kind):
    fork, expected = prompts(model, kind).fork(2), plain(model, kind)
    assert fork.sequences == expected.sequences
    for new in ([9, 9, 9, 9], [1, 1, 1, 1], [3, 0, 5, 1]):
        ids = IDS[:, 30 : 30 + max(new)]
        one, two = (
            model.forward(ids, c, new_lens=new, last_id_only=True) for c in (fork, expected)
        )
        rows = [row for row in range(4) if new[row]]
        assert near(one[rows], two[rows])


def test_forks_reorder_and_crop_into_the_prompt(model, kind):
    fork, expected = prompts(model, kind).fork(2), plain(model, kind)
    for cache in (fork, expected):
        model.forward(IDS[:, 30:36], cache)
        cache.reorder([1, 0, 3, 3])
        cache.crop([33, 20, 9, 19])
        model.forward(IDS[:, 40:43], cache)
        cache.reorder([2, 1, 0, 0])
    assert fork.sequences == expected.sequences
    one, two = (model.forward(IDS[:, 50:52], cache) for cache in (fork, expected))
    assert near(one, two)
    fork.reset()
    assert near(model.forward(IDS[:, :9], fork), model.forward(IDS[:, :9], kind(model, 64, 4)))


def test_fork_selects_rows_in_reverse(model, kind):
    fork, expected = prompts(model, kind).fork(2), plain(model, kind)
    for cache in (fork, expected):
        model.forward(IDS[:, 30:36], cache)
        cache.select([3, 1])
    assert fork.sequences == expected.sequences
    one, two = (model.forward(IDS[:2, 50:52], cache) for cache in (fork, expected))
    assert near(one, two)


def test_reorder_cost_is_independent_of_the_prompt(model, monkeypatch):
    """The host's work, too, depends only on what follows the prompt."""
    looked_at = []

    def spy(first, second):
        looked_at.append(max(len(first), len(second)))
        return common_prefix(first, second)

    monkeypatch.setattr(rows, "common_prefix", spy)
    given = Cache(model, 64, 4)
    model.forward(IDS[:1, :50], given)
    fork = given.fork(4)
    given.repeat_interleave(4, rows=1)
    looked_at.clear()
    for cache in (fork, given):
        for step in range(5):
            model.forward(IDS[:, step : step + 1], cache)
            cache.reorder([step % 4, 1, 0, 2])
    assert 0 < max(looked_at) <= 5


def test_owner_of_forks_may_continue_crop_and_die(model, kind):
    cache, expected = prompts(model, kind), plain(model, kind)
    fork, other = cache.fork(2), cache.fork(2)
    cache.reorder([1, 0])
    model.forward(IDS[2:4, :5], cache)
    cache.trim(5)
    cache.crop(4)
    model.forward(IDS[2:4, 20:40], cache)
    assert near(model.forward(IDS[:, 30:33], fork), model.forward(IDS[:, 30:33], expected))
    del cache
    expected.trim(3)
    assert near(model.forward(IDS[:, 30:33], other), model.forward(IDS[:, 30:33], expected))


def test_copies_of_forks_are_independent(model, kind):
    fork = prompts(model, kind).fork(2)
    model.forward(IDS[:, 30:36], fork)
    other = copy.deepcopy(fork)
    other.reorder([3, 2, 1, 0])
    other.crop(3)
    model.forward(IDS[:, 40:50], other)
    expected = plain(model, kind)
    model.forward(IDS[:, 30:36], expected)
    assert near(model.forward(IDS[:, 36:39], fork), model.forward(IDS[:, 36:39], expected))


def test_fork_allocates_only_what_follows_the_prompt(model):
    cache = Cache(model, 64)
    model.forward(IDS[:1, :50], cache)
    fork = cache.fork(10, max_seq_len=56)
    assert fork.nbytes()[CPU] == Cache(model, 6, 10).nbytes()[CPU]
    assert fork.max_seq_len == 56 and fork.seq_lens == [50] * 10
    model.forward(IDS[:1, :6].expand(10, 6), fork)
    with pytest.raises(ValueError, match="more than its max_seq_len of 56"):
        model.forward(IDS[:1, :1].expand(10, 1), fork)


@pytest.mark.parametrize("kind", [SlidingWindowCache, SinkCache])
def test_fork_beyond_the_prompts_window_evicts_like_its_cache(model, kind):
    short, long = (kind(model, length, window_length=32) for length in (24, 60))
    model.forward(IDS[:1, :20], short)
    model.forward(IDS[:1, :20], long)
    fork = short.fork(max_seq_len=60)
    for new in (IDS[:1, 20:50], IDS[:1, 50:51]):  # a chunk, and a single token
        assert near(model.forward(new, fork), model.forward(new, long))


def test_invalid_forks_are_refused(model, tmp_path):
    cache = Cache(model, 64)
    with pytest.raises(ValueError, match="the cache must not be empty"):
        cache.fork(2)
    model.forward(IDS[:1, :50], cache)
    for arguments in ({"n": 0}, {"max_seq_len": 50}):
        with pytest.raises(ValueError, match="room for one more token"):
            cache.fork(**arguments)
    fork = cache.fork()
    with pytest.raises(ValueError, match="a fork can't be forked"):
        fork.fork()
    with pytest.raises(ValueError, match="save the cache that it came from"):
        fork.save(tmp_path / "fork")


# Converting what is there -----------------------------------------------------------------------


@pytest.mark.parametrize("forked", [False, True])
def test_cache_converted_to_host_memory_is_bit_identical(model, kind, forked):
    cache = prompts(model, kind).fork(2) if forked else plain(model, kind)
    twin = cache.clone()
    cache.convert(residence=OnHost())
    if cache.pages is None:  # whose rows don't come out of the pool
        cache.convert(growth=Dynamic(16))
    for start, stop in ((30, 36), (36, 37), (37, 50)):
        ids = IDS[:, start:stop]
        assert torch.equal(model.forward(ids, cache), model.forward(ids, twin))


@pytest.mark.parametrize("storage", [INT8, INT4], ids=str)
@pytest.mark.parametrize("forked", [False, True])
def test_converted_cache_equals_one_stored_that_way(model, storage, forked):
    def made(**properties) -> KVCache:
        cache = KVCache(model, 64, 2, **properties)
        model.forward(IDS[:2, :30], cache, new_lens=[30, 17])
        return cache.fork(2) if forked else cache

    cache, expected = made(), made(storage=storage)
    ids = IDS[: cache.batch_size, 30:36]
    cache.convert(storage=storage)
    assert [layer.spec.storage for layer in cache.layers] == [storage] * len(cache.layers)
    # The first layer stores the very same; the later ones' keys came from exact attention here.
    mine, theirs = cache.layers[0], expected.layers[0]
    stores = [(mine.shared.tensors, theirs.shared.tensors)] if forked else []
    for one, two in [*stores, (mine.tensors, theirs.tensors)]:
        assert all(torch.equal(one[name], two[name]) for name in two)
    assert near(model.forward(ids, cache), model.forward(ids, expected), tolerance=0.2)


def test_forks_are_converted_with_their_owner(model):
    cache = prompts(model, Cache)
    first, second = cache.fork(2), cache.fork(2)
    first.convert(storage=INT8)
    storages = {layer.spec.storage for c in (cache, first, second) for layer in c.layers}
    assert storages == {INT8}
    logits = model.forward(IDS[:, 30:36], first)
    assert torch.equal(model.forward(IDS[:, 30:36], second), logits)
    model.forward(IDS[:2, 30:36], cache)
    assert near(logits, model.forward(IDS[:, 30:36], plain(model, Cache8bit)), tolerance=0.05)


def test_windows_are_converted_but_retention_is_fixed(model):
    cache = SinkCache(model, 64, window_length=20)
    model.forward(IDS[:1, :50], cache)
    twin = cache.clone()
    cache.convert(residence=OnHost())
    assert torch.equal(model.forward(IDS[:1, 50:53], cache), model.forward(IDS[:1, 50:53], twin))
    with pytest.raises(ValueError, match="can't change a cache's retention"):
        cache.convert(retention=Window(10))


# On devices -------------------------------------------------------------------------------------


def offloaded_traffic(folder, kind):
    model = Model(folder, max_input_len=32)
    cache = CACHES[kind](model, 64)
    model.load_autosplit(cache)
    model.forward(IDS[:1, :40], cache, preprocess_only=True)
    sim.reset_transfer_bytes()
    model.forward(IDS[:1, 40:41], cache, preprocess_only=True)
    moved = sim.transfer_bytes()
    return moved["sim:0", "cpu"], moved["cpu", "sim:0"]


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_only_new_tokens_are_written_back_to_the_host(folder, kind):
    to_host, to_device = run_sim(offloaded_traffic, "64M", args=[folder, kind])
    token = 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, features, bytes
    assert to_host == token
    assert 40 * token <= to_device < 41 * token  # and rotary factors


def converted_without_room(folder):
    """Every step of a conversion once meets a full device; the logits stay the same."""
    model = Model(folder, max_input_len=32)
    cache = Cache(model, 64, 2)
    model.load_autosplit(cache)
    model.forward(IDS[:2, :40], cache)
    ids = IDS[:2, 40:41]
    expected = model.forward(ids, cache).cpu()
    cache.trim(1)
    seen = {"same": True, "failed": 0}
    number = 1
    while True:
        twin = cache.clone()
        sim.fail_allocation(number)
        try:
            twin.convert(storage=INT8)
            done = True
        except torch.OutOfMemoryError:
            seen["failed"] += 1
            done = False
        finally:
            sim.fail_allocation(None)
        logits = model.forward(ids, twin).cpu()
        seen["same"] &= near(logits, expected, tolerance=0.05)
        del twin
        if done:
            break
        number += 1
    before = torch.accelerator.memory_allocated(0)
    taken = sum(n for d, n in cache.nbytes().items() if d.type == "sim")
    cache.convert(residence=OnHost())
    seen["moved"] = before - torch.accelerator.memory_allocated(0) == taken
    seen["same bits"] = torch.equal(model.forward(ids, cache).cpu(), expected)
    cache.trim(1)
    cache.convert(residence=OnDevice())
    seen["back"] = torch.equal(model.forward(ids, cache).cpu(), expected)
    seen["plan"] = model.plan.ledgers[0].cache == taken
    return seen


def test_conversion_out_of_memory_leaves_a_usable_cache(folder):
    seen = run_sim(converted_without_room, "64M", args=[folder])
    assert seen.pop("failed") >= 8
    assert seen == {"same": True, "moved": True, "same bits": True, "back": True, "plan": True}


def forks_at_the_edge(folder):
    """A device with exactly the memory planned for a fork."""
    model = Model(folder, max_input_len=32)
    cache = Cache(model, 64)
    model.load_autosplit(cache)
    model.forward(IDS[:1, :50], cache, preprocess_only=True)
    fork = cache.fork(12, max_seq_len=60)
    (ledger,) = model.plan.ledgers
    sim.set_capacity(0, ledger.total)
    for step in range(10):
        model.forward(IDS[:1, step : step + 1].expand(12, 1), fork, last_id_only=True)
    fork.crop(50)
    model.forward(IDS[:1, :10].expand(12, 10), fork)
    room = torch.accelerator.get_memory_info(0)[0]
    try:
        cache.fork(200)
    except PlacementError as error:
        return room, str(error)


def test_a_fork_is_planned_like_any_cache(folder):
    room, message = run_sim(forks_at_the_edge, "64M", args=[folder])
    assert room >= 0
    assert "too few" in message
