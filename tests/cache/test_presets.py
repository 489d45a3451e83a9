"""Caches by their familiar names, with the arguments that people know."""

from __future__ import annotations

import pytest
import torch
from tiny import llama, reference, save

from exkv import (
    CACHES,
    Cache,
    Cache8bit,
    DynamicCache,
    HybridCache,
    Model,
    OffloadedCache,
    OffloadedStaticCache,
    QuantizedCache,
    SinkCache,
    SlidingWindowCache,
    make_cache,
)
from exkv.cache import Dynamic, KeepAll, OnHost, Sinks, Storage, Window

IDS = torch.randint(3, 320, (2, 60), generator=torch.Generator().manual_seed(4))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = Model(
        save(reference(llama(head_dim=32)), tmp_path_factory.mktemp("model")), max_input_len=16
    )
    model.load(devices=["cpu"])
    return model


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
def test_hugging_faces_names_and_our_own(model, name, kind):
    cache = make_cache(name, model, max_seq_len=64, batch_size=2)
    assert type(cache) is kind
    assert (cache.max_seq_len, cache.batch_size) == (64, 2)


def test_what_a_kind_takes_is_passed_on(model):
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
        ("quantized", {"nbits": 3}, ValueError, "no format of 3 bits: take 16, 8, 4 or 2"),
        ("sink", {"window_length": 4}, ValueError, "num_sink_tokens is 4 of a window_length of 4"),
        ("sink", {"num_sink_tokens": 0}, ValueError, "0 sinks"),
        ("sliding_window", {"window_length": 0}, ValueError, "a window of 0 tokens"),
        ("dynamic", {"block": 0}, ValueError, "a block of 0 tokens"),
        ("static", {"max_seq_len": 0}, ValueError, "max_seq_len is 0"),
        ("static", {"dtype": torch.int8}, ValueError, "not torch.int8"),
        ("dynamic", {"nbits": 4}, TypeError, "DynamicCache.*'nbits'"),
    ],
)
def test_what_makes_no_sense_is_refused(model, name, config, error, match):
    with pytest.raises(error, match=match):
        make_cache(name, model, **config)
    assert not model.caches


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


def test_windows_take_memory_for_a_window_however_long_the_text(model):
    token = Cache(model, 64).nbytes()[CPU] // 64
    for kind in (SlidingWindowCache, SinkCache):
        cache = kind(model, 60, window_length=20)
        assert cache.nbytes()[CPU] == 20 * token
        model.forward(IDS[:1], cache)
        assert cache.seq_lens == [60] and cache.nbytes()[CPU] == 20 * token
