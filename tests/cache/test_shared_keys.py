"""Layers that attend to an earlier layer's keys and values: one storage on a device, and results
equal to the bit to a cache with a copy for each layer."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from cases import KINDS
from on_cpu import on_cpu
from safetensors import safe_open
from simproc import run_sim
from tiny import GEMMA4_SHARED, gemma4, loaded, reference, save, save_tokenizer
from torch import Tensor

from exkv import Engine, Job, KVCache, Model, ModelConfig, SamplingParams, Tokenizer
from exkv.cache import KeepAll, Paged, Sinks, Storage, Window

CONFIG = gemma4(**GEMMA4_SHARED)
IDS = torch.randint(3, 320, (2, 90), generator=torch.Generator().manual_seed(6))
RETENTIONS = {
    "all": KeepAll(),
    "window": Window(12),
    "long window": Window(45),
    "sinks": Sinks(40, 3),
}
STORAGES = {
    "float": Storage(),
    "int4": Storage(keys="int4", values="int4"),
    "recent": Storage(keys="int2c", values="int2", recent=32),
}
#: Layers with keys and values of their own.
OWN = range(4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return loaded(CONFIG, tmp_path_factory.mktemp("shared"), max_input_len=32)


def apart(model: Model, kind: type[KVCache], *sizes: int, **options: object) -> KVCache:
    """A cache with separate storage for each layer."""
    specs = kind.layer_specs(model, *sizes, **options)
    cache = kind.of(model, [spec.alone for spec in specs])
    assert not any(layer.shares for layer in cache.layers)
    return cache


def use(model: Model, cache: KVCache) -> list[Tensor]:
    """Logits of rows of unlike length, single tokens and chunks, cropped, reordered, converted and
    forked rows."""
    out = [model.forward(IDS[:, :40], cache, new_lens=[40, 33])]
    out += [model.forward(IDS[:, 40:41], cache), model.forward(IDS[:, 41:60], cache)]
    cache.reorder([1, 0])
    out.append(model.forward(IDS[:, 60:62], cache))
    cache.crop([50, 38])
    out.append(model.forward(IDS[:, 62:70], cache))
    out.append(model.forward(IDS[:, 70:71], cache.fork(1)))
    if not cache.layers[0].spec.storage.recent:
        cache.convert(storage=Storage(keys="int8", values="int8"))
    out.append(model.forward(IDS[:, 71:72], cache))
    cache.reset()
    out.append(model.forward(IDS[:, :50], cache))
    return out


def test_config_names_the_source_of_shared_keys():
    config = ModelConfig.from_dict({**CONFIG.to_dict(), "architectures": ["Gemma4ForCausalLM"]})
    assert [config.kv_source(layer) for layer in range(7)] == [None] * 4 + [2, 3, 2]
    assert [config.reads(layer) for layer in range(7)] == [None] * 4 + [2, 3, 4]
    assert config.shared_keys == (2, 3)
    with pytest.raises(ValueError, match=r"num_kv_shared_layers 6 of num_hidden_layers 7.*layer 2"):
        ModelConfig.from_dict(
            {
                **CONFIG.to_dict(),
                "architectures": ["Gemma4ForCausalLM"],
                "num_kv_shared_layers": 6,
            }
        )


@pytest.mark.sweep(6)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_share_have_no_bytes_and_the_bits_of_layers_with_their_own(model, kind):
    cache = KINDS[kind](model, 96, 2)
    alone = apart(model, KINDS[kind], 96, 2)
    assert [layer.shares for layer in cache.layers] == [False] * 4 + [True] * 3
    assert cache.nbytes()[torch.device("cpu")] == sum(alone.layers[i].nbytes() for i in OWN)
    for found, expected in zip(use(model, cache), use(model, alone), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.sweep(7)
@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("storage", STORAGES)
def test_every_storage_and_retention_shows_all_layers_the_same_tokens(model, storage, retention):
    options = {"storage": STORAGES[storage], "retention": RETENTIONS[retention]}
    caches = KVCache(model, 96, 2, **options), apart(model, KVCache, 96, 2, **options)
    for part in IDS.split([41, 1, 30, 1, 17], dim=1):
        found, expected = (model.forward(part, cache) for cache in caches)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["fp16", "sliding_window", "paged", "offloaded"])
def test_a_saved_cache_goes_on_alike(model, kind, tmp_path):
    cache, again = (KINDS[kind](model, 96, 2) for _ in range(2))
    model.forward(IDS[:, :40], cache)
    cache.save(tmp_path / "cache")
    again.load(tmp_path / "cache")
    for other in (again, cache.clone()):
        assert torch.equal(*(model.forward(IDS[:, 40:60], each) for each in (other, cache)))
        cache.crop(40)


@pytest.mark.parametrize("kind", ["fp16", "paged", "4bit"])
def test_files_have_shared_keys_once_and_older_files_are_read(model, kind, tmp_path, monkeypatch):
    cache, alone = KINDS[kind](model, 96, 2), apart(model, KINDS[kind], 96, 2)
    for each in (cache, alone):
        model.forward(IDS[:, :40], each)
    cache.save(tmp_path / "new")
    monkeypatch.setattr("exkv.cache.file._FORMAT", "exkv cache 4")
    alone.save(tmp_path / "old")
    monkeypatch.undo()
    names = {}
    for file in ("new", "old"):
        with safe_open(tmp_path / file, "pt") as stored:
            names[file] = set(stored.keys())
    assert names["new"] == {name for name in names["old"] if int(name.split(".")[1]) in OWN}
    assert names["new"] < names["old"]
    expected = model.forward(IDS[:, 40:60], cache)
    for file in ("new", "old"):
        again = KINDS[kind](model, 96, 2)
        again.load(tmp_path / file)
        assert torch.equal(model.forward(IDS[:, 40:60], again), expected)


def test_an_engine_answers_as_transformers_does(tmp_path):
    """Its rows share a pool of pages, and are swapped out where it is full."""
    theirs = reference(gemma4(**GEMMA4_SHARED, eos_token_id=None))
    theirs.get_output_embeddings().weight.data[2] = 0  # nor the tokenizer's end
    ours = on_cpu(save_tokenizer(save(theirs, tmp_path)), max_input_len=16)
    prompts = [IDS[0, :30].tolist(), IDS[1, :7].tolist(), IDS[1, :28].tolist()]
    greedy = {"max_new_tokens": 36, "settings": SamplingParams.greedy()}
    cache = KVCache(ours, 96, growth=Paged(16, pages=6))
    with Engine(ours, cache, Tokenizer(tmp_path)) as engine:
        jobs = [engine.submit(Job(prompt=ids, **greedy)) for ids in prompts]
        for job in jobs:
            job.result()
        assert engine.stats.put_away > 0
    for ids, job in zip(prompts, jobs, strict=True):
        expected = theirs.generate(
            torch.tensor([ids]), max_new_tokens=36, do_sample=False, pad_token_id=0
        )
        assert job.tokens == expected[0, len(ids) :].tolist()


def split(folder: str, kind: str) -> dict[str, object]:
    """Logits over two devices, each layer's device and whether it shares, and bytes."""
    whole = on_cpu(folder, max_input_len=32)
    expected = [logits.cpu() for logits in use(whole, KINDS[kind](whole, 96, 2))]
    model = Model(folder, max_input_len=32)
    cache = KINDS[kind](model, 96, 2)
    model.load_autosplit(cache, objective="balance")
    planned = {str(each.device): each.cache for each in model.plan.ledgers}
    held = {str(device): nbytes for device, nbytes in cache.nbytes().items()}
    found = [logits.cpu() for logits in use(model, cache)]
    return {
        "bits": all(map(torch.equal, found, expected)),
        "where": [model.cache_map[layer].index for layer in range(7)],
        "shares": [layer.shares for layer in cache.layers],
        "bytes": [held.get(device, 0) == planned[device] for device in ("sim:0", "sim:1")],
    }


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["fp16", "8bit", "dynamic", "kivi", "paged", "offloaded"])
def test_over_two_devices_each_has_one_storage_of_shared_keys(tmp_path, kind):
    save(reference(CONFIG), tmp_path)
    result = run_sim(split, "64M,64M", args=[str(tmp_path), kind])
    where, reads = result["where"], [None] * 4 + [2, 3, 4]
    assert where[2] == 0 and where[6] == 1, "the borrowed layers lie before the others"
    assert result["shares"] == [
        r is not None and where[r] == where[layer] for layer, r in enumerate(reads)
    ]
    assert result["bits"] and all(result["bytes"])


def test_moved_layers_share_storage_on_their_new_device(model):
    """A cluster moves layers; tokens are kept, with one storage on each device."""
    cpu = torch.device("cpu")
    cache = KVCache(model, 96, 2)
    expected = [model.forward(IDS[:, :40], cache), model.forward(IDS[:, 40:60], cache)][1]
    cache.crop(40)
    bytes_before, source = cache.nbytes(), cache.layers[2]
    kept = source.tensors["k"].clone()
    source.move_out()
    assert [layer.shares for layer in cache.layers[4:]] == [False, True, True]
    assert cache.nbytes() == bytes_before, "another layer has the storage"
    source.allocate(cpu)
    assert source.tensors is cache.layers[6].tensors and torch.equal(source.tensors["k"], kept)
    assert cache.nbytes() == bytes_before
    assert torch.equal(model.forward(IDS[:, 40:60], cache), expected)
    cache.layers[6].move_out()
    cache.layers[6].allocate(cpu)
    assert cache.layers[6].shares and cache.nbytes() == bytes_before


def test_a_cache_that_is_dropped_holds_no_storage(model):
    cache = KVCache(model, 96, 2)
    kept = [weakref.ref(layer.tensors["k"]) for layer in cache.layers]
    gc.disable()
    try:
        del cache
        assert not any(ref() is not None for ref in kept)
    finally:
        gc.enable()
