"""A cache has one user at a time; the error for a second names the first."""

from __future__ import annotations

import copy
import pickle
import threading
import time

import pytest
import torch
from tiny import llama, loaded

from exkv import Cache, CacheUseError


@pytest.fixture
def model(tmp_path_factory):
    return loaded(llama(), tmp_path_factory.mktemp("model"), max_input_len=16)


def ids(length: int) -> torch.Tensor:
    return torch.randint(3, 320, (1, length), generator=torch.Generator().manual_seed(2))


def texts(model, cache, prompt, user):
    """Generate one token at a time, like a stream, so that other code runs in between."""
    lease = cache.lease(user)
    try:
        with lease:
            cache.reset()
            logits = model.forward(prompt, cache, last_id_only=True)
        while True:
            token = logits[:, -1].argmax(-1, keepdim=True)
            yield int(token)
            with lease:
                logits = model.forward(token, cache)
    finally:
        lease.release()


def test_second_of_two_interleaved_users_is_refused_by_name(model):
    alone = texts(model, Cache(model, 32), ids(5), "alone")
    expected = [next(alone) for _ in range(6)]
    cache = Cache(model, 32)
    first, second = texts(model, cache, ids(5), "the first"), texts(model, cache, ids(9), "second")
    found = [next(first), next(first)]
    with pytest.raises(CacheUseError, match="second wants Cache.*which the first is using"):
        next(second)
    found += [next(first) for _ in range(4)]
    assert found == expected
    first.close()
    next(texts(model, cache, ids(9), "third"))


CHANGES = {
    "reset": lambda cache: cache.reset(),
    "crop": lambda cache: cache.crop(1),
    "trim": lambda cache: cache.trim(1),
    "reorder": lambda cache: cache.reorder([0]),
    "select": lambda cache: cache.select([0]),
    "repeat_interleave": lambda cache: cache.repeat_interleave(1),
    "convert": lambda cache: cache.convert(),
    "load": lambda cache: cache.load("nowhere"),
    "forward": lambda cache: cache.model.forward(ids(1), cache),
    "current_seq_len": lambda cache: setattr(cache, "current_seq_len", 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_leased_cache_cannot_be_changed_by_others(model, change):
    cache = Cache(model, 32)
    stream = texts(model, cache, ids(5), "a stream")
    next(stream)
    with pytest.raises(CacheUseError, match="which a stream is using.*second cache"):
        CHANGES[change](cache)
    assert cache.seq_lens == [5]
    next(stream)
    assert cache.seq_lens == [6]


def test_between_two_calls_of_its_user_a_cache_can_be_read(model, tmp_path):
    cache = Cache(model, 32)
    stream = texts(model, cache, ids(5), "a stream")
    next(stream)
    cache.save(tmp_path / "cache")
    copies = cache.clone(), copy.deepcopy(cache), cache.fork(2)
    assert [other.sequences for other in copies] == [[ids(5)[0].tolist()] * n for n in (1, 1, 2)]
    other = Cache(model, 32)
    other.load(tmp_path / "cache")
    assert other.sequences == cache.sequences
    next(stream)


@pytest.mark.parametrize("end", ["unload", "free"])
def test_user_of_a_freed_cache_is_told_who_freed_it(model, end):
    cache = Cache(model, 32)
    stream = texts(model, cache, ids(5), "a stream")
    next(stream)
    (model.unload if end == "unload" else cache.free)()
    with pytest.raises(CacheUseError, match=f"{end} freed Cache.*while a stream was using it"):
        next(stream)
    if end == "unload":
        model.load(devices=["cpu"])
    next(texts(model, cache, ids(5), "the next one"))


def test_cache_freed_within_a_call_raises_at_the_next(model):
    cache = Cache(model, 32)
    with pytest.raises(CacheUseError, match="unload freed"), cache.use("generate"):
        model.unload()
        model.load(devices=["cpu"])
        model.forward(ids(3), cache)
    model.forward(ids(3), cache)


def test_second_of_two_threads_is_refused(model, monkeypatch):
    cache, within, go_on = Cache(model, 32), threading.Event(), threading.Event()
    forward = type(model).forward_chunk

    def slow(self, *args, **kwargs):
        within.set()
        assert go_on.wait(30)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward_chunk", slow)
    thread = threading.Thread(target=lambda: model.forward(ids(5), cache))
    thread.start()
    assert within.wait(30)
    for call in (lambda: model.forward(ids(2), cache), model.unload, cache.free, cache.clone):
        with pytest.raises(CacheUseError, match="which model.forward is using"):
            call()
    go_on.set()
    thread.join()
    assert cache.seq_lens == [5] and model.loaded


def test_lease_can_be_revoked_after_the_running_call(model):
    cache = Cache(model, 32)
    within, seen, lease = threading.Event(), [], cache.lease("me")

    def calls():
        with lease:
            within.set()
            while lease.revoked_by is None:  # it is told at once, and waited for
                time.sleep(0.001)
            time.sleep(0.05)
            seen.append("done")

    thread = threading.Thread(target=calls, daemon=True)
    thread.start()
    assert within.wait(30)
    cache.revoke("you", wait=True)
    assert seen == ["done"]
    thread.join()
    with pytest.raises(CacheUseError, match="you freed"), lease:
        pass
    cache.free()


def test_leases_nest_and_end_once(model):
    cache = Cache(model, 32)
    lease = cache.lease("me")
    with lease, lease, cache.use("inner"):
        cache.reset()
        model.forward(ids(3), cache)
    with pytest.raises(CacheUseError, match="me is using"):
        cache.lease("you")
    lease.release()
    lease.release()
    other = cache.lease("you")
    lease.release()
    with pytest.raises(CacheUseError, match="you is using"):
        cache.reset()
    other.release()
    cache.reset()


def test_pickling_a_cache_says_what_to_do_instead(model):
    with pytest.raises(TypeError, match="cache.save"):
        pickle.dumps(Cache(model, 32))
    with pytest.raises(TypeError, match="cache.save"):
        copy.copy(Cache(model, 32))
