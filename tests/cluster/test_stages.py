"""Models over hosts: the same bits as on one machine, over every kind of cache, and the memory of
each host as it was planned.

Hosts are processes on loopback, each with simulated devices of its own.
"""

from __future__ import annotations

import pytest
import torch
from cluster_hosts import cluster_of
from simproc import run_sim
from tiny import llama, reference, save

from exkv import CACHES, Cache, Cache4bit, KVCache, Model, OffloadedStaticCache
from exkv.cache import OnHost
from exkv.cluster import ClusterModel

IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))
#: Kinds of cache that differ in more than the format that layers store.
UNLIKE = ["fp16", "dynamic", "kivi", "sliding_window", "offloaded_static"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = reference(llama(num_hidden_layers=8, hidden_size=64, intermediate_size=96))
    return str(save(model, tmp_path_factory.mktemp("model")))


def on_cpu(folder: str) -> Model:
    model = Model(folder, max_input_len=16)
    model.load(devices=["cpu"])
    return model


def on_hosts(folder: str, count: int, **options) -> ClusterModel:
    cluster = cluster_of("24M", *["24M"] * (count - 1))
    return ClusterModel(folder, cluster, max_input_len=16, **options)


def session(model: Model, cache: KVCache, forks: bool = False) -> list[torch.Tensor]:
    """What calls of all sorts give: chunks of a long prompt, ragged rows, rows that are moved,
    cropped and forked, and tokens one by one."""
    found = [model.forward(IDS, cache)]
    found.append(model.forward(IDS[:, :5], cache, new_lens=[5, 2], last_id_only=True))
    cache.reorder([1, 1])
    found.append(model.forward(IDS[:, :1], cache))
    cache.crop([30, 38])
    found.append(model.forward(IDS[:, :3], cache, each_token=True))
    if forks:
        fork = cache.fork(2, 60)
        found += [model.forward(IDS[[0, 1, 1, 0], i : i + 1], fork) for i in range(2)]
    cache.reset()
    model.forward(IDS[:1, :20], cache, preprocess_only=True)
    found.append(model.forward(IDS[:1, :1], cache))
    return [logits.cpu() for logits in found]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# Scenarios ----------------------------------------------------------------------------------


def every_kind(folder: str, count: int, names: list[str]) -> dict[str, bool]:
    alone, model = on_cpu(folder), on_hosts(folder, count)
    first = CACHES[names[0]](model, 64, 2)  # which stays
    model.load_autosplit(first, objective="balance")
    found = {}
    for name in names:
        cache = first if name == names[0] else CACHES[name](model, 64, 2)
        forks = name == "fp16"
        expected = session(alone, CACHES[name](alone, 64, 2), forks)
        found[name] = same(expected, session(model, cache, forks))
        del cache
    found["spread"] = len(set(model.host_map.values())) == count
    model.cluster.close()
    return found


def generations(folder: str) -> list[bool]:
    alone, model = on_cpu(folder), on_hosts(folder, 3)
    model.load_autosplit(Cache(model, 32, 6), objective="balance")
    prompts = [IDS[0, :20].tolist(), IDS[1, :9].tolist()]
    calls = [
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "seed": 5, "num_return_sequences": 2},
    ]
    found = [
        alone.generate(prompts, max_new_tokens=5, **call).tolist()
        == model.generate(prompts, max_new_tokens=5, **call).tolist()
        for call in calls
    ]
    found.append(len(set(model.host_map.values())) == 3)
    model.cluster.close()
    return found


def memory(folder: str) -> dict[str, object]:
    model = on_hosts(folder, 3)
    before = allocated(model)
    cache, offloaded = Cache4bit(model, 64, 2), OffloadedStaticCache(model, 64, 2)
    model.load_autosplit(cache, objective="balance")
    reports = [row for host in model.measured for row in host]
    session(model, cache)
    session(model, offloaded, forks=True)
    cache.convert(residence=OnHost())
    later = Cache(model, 64, 2)
    model.forward(IDS, later)
    model.unload()
    del cache, offloaded, later
    result = {
        "reports": reports,
        "before": before,
        "after": allocated(model),
    }
    model.cluster.close()
    return result


def allocated(model: ClusterModel) -> list[int]:
    model.cluster.ask("allocated")
    theirs = [host["sim:0"] for host in model.cluster.ask("allocated")]
    return [torch.accelerator.memory_allocated(0), *theirs]


def refusals(folder: str) -> list[str]:
    model = on_hosts(folder, 2)
    said = []
    for call in (
        lambda: ClusterModel(folder, model.cluster, embed_cpu=True),
        lambda: model.load_autosplit(Cache(model, 200_000, 2)),
        lambda: model.load_adapter("nowhere"),
        lambda: model.forward(IDS),
        lambda: model.load([0.0007, 0.02]),
        lambda: model.forward(IDS + 400),
        lambda: Cache(model, 64).save("file"),
    ):
        try:
            call()
            said.append("")
        except (ValueError, torch.OutOfMemoryError) as error:
            said.append(str(error))
    said.append(same([on_cpu(folder).forward(IDS)], [model.forward(IDS)]))
    said.append(len(set(model.host_map.values())) == 2)
    model.cluster.close()
    return said


# Tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "names"), [(2, ["8bit"]), (3, UNLIKE), (8, ["fp16"])])
def test_stages_give_the_bits_of_one_machine_over_every_kind_of_cache(folder, count, names):
    found = run_sim(every_kind, "", args=[folder, count, names])
    assert found == dict.fromkeys([*names, "spread"], True)


def test_generations_are_those_of_one_machine(folder):
    assert run_sim(generations, "", args=[folder]) == [True] * 4


def test_every_host_takes_what_was_planned_and_gives_all_of_it_back(folder):
    found = run_sim(memory, "", args=[folder])
    assert len(found["reports"]) == 2
    for row in found["reports"]:
        assert row["measured"] == row["predicted"]
        assert row["measured"]["weights"] > 0
    assert found["after"] == found["before"]


def test_what_is_not_done_over_hosts_is_refused_and_the_rest_goes_on(folder):
    said = run_sim(refusals, "", args=[folder])
    for text, part in zip(
        said,
        (
            "for a model on one machine",
            "no room for",
            "adapters are for a model on one machine",
            "not loaded",
            "",
            "outside the vocabulary",
            "cache.save is for a model on one machine",
        ),
        strict=False,
    ):
        assert part in text
    assert said[4] == "" and said[-2:] == [True, True]
