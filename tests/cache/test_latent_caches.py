"""Caches of latent attention, whose values are the keys: one stored tensor serves as both, in every
kind of cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from arithmetic import near
from cases import KINDS, small_pages
from test_composition import RETENTIONS, STORAGES, TOLERANCES, definition, in_calls
from tiny import LATENT, ROUTED, loaded, small

from exkv import CACHES, Cache, KVCache, QuantizedCache
from exkv.cache import HostTier, Paged, Storage
from exkv.ops.kv_formats import FORMATS

#: No experts, whose choice may turn over where something is rounded.
DENSE = small("DeepseekV3", first_k_dense_replace=2, **ROUTED, **LATENT)
STORED = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
IDS = torch.randint(3, 320, (2, 60), generator=torch.Generator().manual_seed(6))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return loaded(DENSE(), tmp_path_factory.mktemp("latent"), max_input_len=32)


@pytest.mark.parametrize("kind", CACHES)
def test_a_token_is_stored_once(model, kind):
    layer = CACHES[kind](model, 64).layers[0]
    sides = {name.removeprefix("recent_").removeprefix("first_")[0] for name in layer.tensors}
    assert sides == {"k"}
    assert layer.spec.storage.tensors_of("v", {"k": 1, **layer.tensors})[0] is not None


def test_bytes_are_those_of_the_latent_vector_and_the_shared_key(model):
    tokens, layers = 256 * 3, 2
    assert Cache(model, 256, 3).nbytes() == {torch.device("cpu"): tokens * layers * STORED * 4}
    packed = CACHES["8bit"](model, 256, 3).nbytes()
    assert packed == {torch.device("cpu"): tokens * layers * (STORED + STORED // 32 * 2)}


@pytest.mark.parametrize("cut", [[60], [4, 1, 9, 46]], ids=lambda cut: str(cut[:3]))
@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("storage", STORAGES)
def test_queries_see_the_keys_of_the_definition(model, storage, retention, cut):
    """Values are the dequantized keys, whatever format the storage names for values."""
    two_formats, kept = STORAGES[storage], RETENTIONS[retention]
    one_format = replace(two_formats, values=two_formats.keys)
    found = in_calls(model, two_formats, kept, cut)
    tolerance = 3 * TOLERANCES[storage]  # a step that turns over is one of keys and of values
    assert near(found, definition(model, one_format, kept), tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_forked_and_moved_caches_continue_alike(model, kind, tmp_path):
    cache = KINDS[kind](model, 64, 2)
    model.forward(IDS[:, :40], cache)
    cache.save(tmp_path / "cache")
    again = KINDS[kind](model, 64, 2)
    again.load(tmp_path / "cache")
    fork = cache.fork(2)
    found = model.forward(IDS[[0, 0, 1, 1], 40:41], fork)
    expected = model.forward(IDS[:, 40:41], again)
    assert near(found, expected[[0, 0, 1, 1]], 1e-3)
    again.reorder([1, 0])
    cache = KINDS[kind](model, 64, 2)
    model.forward(IDS.flip(0)[:, :40], cache)
    model.forward(IDS.flip(0)[:, 40:41], cache)
    follow = IDS[:, 41:44]
    assert near(model.forward(follow, again), model.forward(follow, cache), 1e-3)


def test_keys_and_values_are_shown_as_one(model):
    cache = CACHES["dynamic"](model, 64)
    model.forward(IDS[:1, :9], cache)
    layer = cache.layers[0]
    assert layer.keys.shape == (1, 1, 9, STORED)
    assert torch.equal(layer.keys, layer.values)


def test_converted_cache_equals_a_stored_one(model):
    cache, stored_so = Cache(model, 64), CACHES["8bit"](model, 64)
    for each in (cache, stored_so):
        model.forward(IDS[:1, :40], each)
    cache.convert(storage=Storage(keys="int8", values="int8"))
    assert cache.layers[1].spec.storage == stored_so.layers[1].spec.storage
    assert cache.layers[0].tensors.keys() == {"k", "k_scale"}
    follow = IDS[:1, 40:44]
    assert near(model.forward(follow, cache), model.forward(follow, stored_so), 2e-2)


def test_evicted_pages_go_to_the_host_and_come_back_rounded(model):
    rounded = HostTier(pages=4, storage=Storage(keys="int8", values="int8"))
    cache = KVCache(model, 32, growth=Paged(16, 2, (rounded,)))
    model.forward(IDS[:1, :32], cache)
    layer = cache.layers[0]
    kept = layer.tensors["k"][1].clone()
    layer.host_pages.move(layer.tensors, 1, 0, 2, 1)
    layer.host_pages.move(layer.tensors, 2, 1, 0, 0)
    int8 = FORMATS["int8"]
    assert torch.equal(layer.tensors["k"][0], int8.widen(int8.encode(kept), torch.float32, STORED))


def test_the_keys_format_counts(model):
    cache = QuantizedCache(model, 64, key_bits=8, value_bits=2, rotate=False)
    (storage,) = {layer.spec.storage for layer in cache.layers}
    assert storage.formats == ("int8", "int8")
    assert str(storage) == "int8 keys, which are the values"


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_without_a_model_takes_the_shape_of_its_first(model, kind):
    cache = CACHES[kind](config=model.config, max_seq_len=32, **small_pages(kind))
    cache.bind(model)
    assert all(spec.values_are_keys for spec in (layer.spec for layer in cache.layers))
    assert Storage(values_are_keys=True).values == "float"
