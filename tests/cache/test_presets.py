"""Caches under transformers' names, with transformers' arguments."""

from __future__ import annotations

import pytest
import torch
import transformers
from cases import bits_of
from tiny import llama, loaded, reference

from exkv import (
    CACHES,
    Cache,
    Cache8bit,
    DynamicCache,
    HybridCache,
    OffloadedCache,
    OffloadedStaticCache,
    QuantizedCache,
    SinkCache,
    SlidingWindowCache,
    make_cache,
)
from exkv.cache import Dynamic, KeepAll, OnHost, Sinks, Storage, Window, base

IDS = torch.randint(3, 320, (2, 60), generator=torch.Generator().manual_seed(4))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return loaded(llama(head_dim=32), tmp_path_factory.mktemp("model"), max_input_len=16)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dynamic", DynamicCache),
        ("static", Cache),
        ("offloaded", OffloadedCache),
        ("offloaded_static", OffloadedStaticCache),
        ("quantized", QuantizedCache),
        ("sliding_window", SlidingWindowCache),
        ("sink", SinkCache),
        ("hybrid", HybridCache),
        *CACHES.items(),
    ],
)
def test_names_of_hugging_face_and_exkv(model, name, kind):
    cache = make_cache(name, model, max_seq_len=64, batch_size=2)
    assert type(cache) is kind
    assert (cache.max_seq_len, cache.batch_size) == (64, 2)


def test_options_reach_the_kind(model):
    sinks = make_cache("sink", model, max_seq_len=64, window_length=20, num_sink_tokens=2)
    assert sinks.layers[0].spec.retention == Sinks(18, 2)
    window = make_cache("sliding_window", model, max_seq_len=64, window_length=20)
    assert window.layers[0].spec.retention == Window(20)
    mixed = make_cache("quantized", model, max_seq_len=64, key_bits=8, value_bits=2, rotate=False)
    assert mixed.layers[0].spec.storage == Storage(keys="int8", values="int2")
    assert QuantizedCache(model, 64).layers[0].spec.storage == Storage(
        keys="int4", values="int4", rotate=True
    )
    away = make_cache("offloaded", model, max_seq_len=64, block=32)
    assert (away.layers[0].spec.residence, away.layers[0].spec.growth) == (OnHost(), Dynamic(32))
    assert away.layers[0].spec.retention == KeepAll()


@pytest.mark.parametrize(
    ("name", "config", "error", "match"),
    [
        ("quanto", {}, ValueError, "'quanto' is none of fp16, dynamic"),
        ("quantized", {"nbits": 3}, ValueError, "no format of 3 bits: choose 16, 8, 4 or 2"),
        ("sink", {"window_length": 4}, ValueError, "num_sink_tokens is 4 of a window_length of 4"),
        ("sink", {"num_sink_tokens": 0}, ValueError, "0 sinks"),
        ("sliding_window", {"window_length": 0}, ValueError, "a window of 0 tokens"),
        ("dynamic", {"block": 0}, ValueError, "a block of 0 tokens"),
        ("static", {"max_seq_len": 0}, ValueError, "max_seq_len is 0"),
        ("static", {"dtype": torch.int8}, ValueError, "not torch.int8"),
        ("dynamic", {"nbits": 4}, TypeError, "DynamicCache has no 'nbits'; .* block, offloading$"),
        (
            "quantized",
            {"bits": 4},
            TypeError,
            "no 'bits'; it takes max_seq_len, .* nbits, key_bits",
        ),
        ("static", {"head_dim": 4}, TypeError, "Cache has no 'head_dim'"),
        ("kivi", {"nbit": 2}, TypeError, "KiviCache has no 'nbit'; .* nbits, .* axis, .* rotate$"),
        ("static", {"max_seq_len": 10**10}, ValueError, "max_seq_len is 10000000000.*2,147,483"),
        ("static", {"max_seq_len": 10**5000}, ValueError, "max_seq_len is 10[*][*]18 or more"),
        ("static", {"batch_size": 10**9}, ValueError, "batch_size is 1000000000.*16,384 at most"),
        ("static", {"batch_size": 2.0}, TypeError, "batch_size is 2.0: it must be a whole number"),
        ("static", {"max_seq_len": "64"}, TypeError, "max_seq_len is '64': it must be a whole"),
        ("static", {"max_seq_len": True}, TypeError, "max_seq_len is True"),
        ("static", {"storage": "int8"}, TypeError, "storage is 'int8': it must be a value such as"),
        ("static", {"retention": Window}, TypeError, "retention is .*such as Window"),
        ("static", {"growth": 256}, TypeError, "growth is 256: .*such as Dynamic"),
        ("quantized", {"nbits": "4"}, TypeError, "nbits is '4'"),
        ("dynamic", {"block": 1.5}, TypeError, "block is 1.5"),
        ("sliding_window", {"window_length": "8"}, TypeError, "window_length is '8'"),
        ("sink", {"window_length": 2**70}, ValueError, "window_length is 10[*][*]18 or more"),
        ("sink", {"num_sink_tokens": None}, TypeError, "num_sink_tokens is None"),
    ],
)
def test_invalid_options_are_refused(model, name, config, error, match):
    with pytest.raises(error, match=match):
        make_cache(name, model, **config)
    assert not model.caches


def test_ignored_options_are_logged_once(model, caplog, monkeypatch):
    monkeypatch.setattr(base, "_noted", set())
    guides = {
        "nbits": 4,
        "backend": "quanto",
        "axis_key": 0,
        "axis_value": 0,
        "q_group_size": 64,
        "residual_length": 128,
        "compute_dtype": torch.float16,
        "device": "cuda",
    }
    caches = [make_cache("quantized", model, max_seq_len=200, **guides) for _ in range(2)]
    expected = Storage(keys="int4", values="int4", rotate=True, recent=128)
    assert [cache.layers[3].spec.storage for cache in caches] == [expected] * 2
    noted = [record.getMessage() for record in caplog.records]
    assert len(noted) == 6 and "makes no use of q_group_size: 32 values share" in noted[3]
    with pytest.raises(TypeError, match="Cache8bit has no 'backend'"):
        Cache8bit(model, 16, backend="quanto")


@pytest.mark.parametrize("kind", CACHES)
def test_keys_and_values_read_like_transformers(model, kind):
    cache = CACHES[kind](model, max_seq_len=64, batch_size=3)
    assert cache.get_seq_length() == 0 and cache.layers[0].keys.shape == (3, 2, 0, 32)
    seen = transformers.DynamicCache()
    peer = reference(llama())
    ids = IDS[:1, :12]
    with torch.no_grad():
        peer(ids, cache=seen)
    model.forward(ids, cache)
    assert cache.get_seq_length() == seen.get_seq_length() == 12
    # Of numbers in 2^bits steps; behind a layer's values its keys are as coarse.
    coarse = max(1e-4, 4.8 * 2 ** -min(bits_of(cache.layers[0].spec, 12)))
    for ours, theirs in zip(cache.layers, seen.layers, strict=True):
        for found, expected in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert found.shape == (3, 2, 12, 32) and not found[1:].any()
            assert (found[:1] - expected).abs().max() <= coarse * expected.abs().max()


def test_keys_of_windows_and_forks_are_in_text_order(model):
    whole, sink = Cache(model, 64), SinkCache(model, 64, window_length=20, num_sink_tokens=2)
    for cache in (whole, sink):
        for part in IDS[:1].split(7, dim=1):
            model.forward(part, cache)
    expected = whole.layers[0].keys
    kept = [0, 1, *range(42, 60)]
    assert torch.allclose(sink.layers[0].keys, expected[:, :, kept], atol=1e-5)
    fork = whole.fork(2)
    model.forward(torch.tensor([[5], [6]]), fork)
    held = fork.layers[0].keys
    assert held.shape == (2, 2, 61, 32)
    assert torch.equal(held[:, :, :60], expected.expand(2, -1, -1, -1))


def test_a_dynamic_cache_grows_in_blocks_and_shrinks_when_it_is_reset(model):
    cache = DynamicCache(model, 60, block=16)
    token = Cache(model, 64).nbytes()[CPU] // 64
    taken = []
    for part in IDS[:1].split(6, dim=1):
        model.forward(part, cache)
        taken.append(cache.nbytes()[CPU] // token)
    assert taken == [16, 16, 32, 32, 32, 48, 48, 48, 60, 60]
    cache.reset()
    assert cache.nbytes()[CPU] == 16 * token


@pytest.mark.parametrize(
    ("kind", "bits"), [(Cache8bit, 8.5), (QuantizedCache, 5), (CACHES["2bit"], 3), (Cache, 32)]
)
def test_bits_a_value(model, kind, bits):
    values = 256 * 2 * 4 * 2 * 32  # tokens, keys and values, layers, heads, features
    assert kind(model, 256).nbytes() == {CPU: values * bits / 8}


def test_memory_of_windows_is_independent_of_length(model):
    token = Cache(model, 64).nbytes()[CPU] // 64
    for kind in (SlidingWindowCache, SinkCache):
        cache = kind(model, 60, window_length=20)
        assert cache.nbytes()[CPU] == 20 * token
        model.forward(IDS[:1], cache)
        assert cache.seq_lens == [60] and cache.nbytes()[CPU] == 20 * token
