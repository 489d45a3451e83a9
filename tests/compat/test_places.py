"""Splits, device maps and memory over simulated devices, through ExLlamaV2's interface."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from simproc import run_sim
from tiny import llama, reference, save, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save(reference(llama(), torch.bfloat16), folder)
    return str(save_tokenizer(folder))


def names():
    from exkv.compat import exllamav2

    return exllamav2


def places(folder, split):
    """Placement and a few tokens, with the cache built before or after the load."""
    return [placed(folder, split, *way) for way in product(("before", "after"), (False, True))]


def placed(folder, split, order, lazy):
    v2 = names()
    model = v2.ExLlamaV2(v2.ExLlamaV2Config(folder))
    if order == "before":
        cache = v2.ExLlamaV2Cache(model, max_seq_len=4096, lazy=lazy)
    model.load(split)
    if order == "after":
        cache = v2.ExLlamaV2Cache(model, max_seq_len=4096, lazy=lazy)
    tokenizer = v2.ExLlamaV2Tokenizer(model.config)
    generator = v2.generator.ExLlamaV2BaseGenerator(model, cache, tokenizer)
    text = generator.generate_simple(
        "anna put", v2.generator.ExLlamaV2Sampler.Settings(), 8, seed=3
    )
    seen = [model.cache_map, cache.footprint(), model.get_cache_devices(), text]
    model.unload()
    return seen


@pytest.mark.parametrize("split", [[0.005, 1], [0, 1], []])
def test_split_excludes_caches(folder, split):
    """The caches exceed the first share of the split, which doesn't include them."""
    found = run_sim(places, "16M,64M", args=[folder, split])
    assert len(found) == 4 and all(each == found[0] for each in found)
    first = found[0][1][0]
    if split == [0.005, 1]:
        assert found[0][2] == ["sim:0", "sim:1"]
    assert (first == 0) == (split == [0, 1])


def mapped(folder):
    v2 = names()
    model = v2.ExLlamaV2(v2.ExLlamaV2Config(folder))
    cache = v2.ExLlamaV2Cache(model, max_seq_len=512)
    left = model.set_device_map([0.005, 1])
    first = [model.cache_map, left, model.loaded, torch.accelerator.memory_allocated(0)]
    logits = model.forward(torch.ones((1, 4), dtype=torch.long), cache)
    model.load([0, 1])
    again = model.forward(torch.ones((1, 4), dtype=torch.long), cache)
    second = [model.get_cache_devices(), model.loaded, torch.equal(logits.cpu(), again.cpu())]
    del logits, again
    model.unload()
    free = [torch.accelerator.memory_allocated(i) for i in range(2)]
    return [*first, *second, free, cache.footprint()]


def test_load_replaces_a_device_map(folder):
    cache_map, left, loaded, taken, devices, then, same, free, bytes_left = run_sim(
        mapped, "16M,64M", args=[folder]
    )
    assert sorted(set(cache_map.values())) == ["sim:0", "sim:1"]
    assert 0 <= left[0] < 0.005 and 0.9 < left[1] < 1
    assert not loaded and 0 < taken < 2**20  # only the cache
    assert devices == ["sim:1"] and then
    assert same
    assert free == [0, 0] and not any(bytes_left)


def too_much(folder):
    v2 = names()
    model = v2.ExLlamaV2(v2.ExLlamaV2Config(folder))
    v2.ExLlamaV2Cache(model, max_seq_len=4096)
    kept = v2.ExLlamaV2Cache(model, max_seq_len=8 * 4096)
    errors = []
    for split in ([0.005, 1], [0.0001, 0.0001], [0.005, 1, 1]):
        try:
            model.load(split)
        except (torch.OutOfMemoryError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    model.load([0, 1])
    try:
        v2.ExLlamaV2Cache(model, max_seq_len=400 * 4096)
    except torch.OutOfMemoryError as error:
        errors.append(f"{type(error).__name__}: {error}")
    model.unload()
    return [errors, [torch.accelerator.memory_allocated(i) for i in range(2)], kept.footprint()]


def test_failed_loads_are_reported_and_leave_nothing(folder):
    (beside, tight, many, later), free, left = run_sim(too_much, "16M,64M", args=[folder])
    for error in (beside, tight, later):
        assert error.startswith("PlacementError: ")
        assert "out of memory" in error and "Insufficient VRAM" in error  # searched by scripts
    assert "sim:0" in beside
    assert many == "ValueError: gpu_split names 3 devices, and there are 2: sim:0, sim:1"
    assert free == [0, 0] and not any(left)


def asked_of_cuda() -> list[object]:
    import torch

    from exkv.compat.exllamav2.cuda import stand_in_for_cuda

    stand_in_for_cuda()
    torch.cuda._lazy_init()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    capabilities = [torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count())]
    return [torch.cuda.is_available(), capabilities]


@pytest.mark.parametrize(("devices", "count"), [("", 1), ("8M,8M,8M", 3)])
def test_stand_in_for_cuda(devices, count):
    assert run_sim(asked_of_cuda, devices) == [False, [[8, 0]] * count]
