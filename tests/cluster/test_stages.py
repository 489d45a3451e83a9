"""Models over hosts: the same bits as on one machine, with every kind of cache, and the planned
memory on each host.

Hosts are processes on loopback, each with simulated devices of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import combinations, product

import pytest
import torch
from bench import cluster_product
from cluster_hosts import alone, cluster_of, use
from simproc import run_sim
from tiny import llama, reference, save
from torch import Tensor

from exkv import CACHES, Cache, Cache4bit, KVCache, Model, OffloadedStaticCache
from exkv.cache import OnHost
from exkv.cluster import ClusterModel

IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))
#: Kinds of cache that differ in more than their storage format.
UNLIKE = ["fp16", "dynamic", "kivi", "sliding_window", "offloaded_static"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = reference(llama(num_hidden_layers=8, hidden_size=64, intermediate_size=96))
    return str(save(model, tmp_path_factory.mktemp("model")))


def on_hosts(folder: str, count: int, **options) -> ClusterModel:
    cluster = cluster_of("24M", *["24M"] * (count - 1))
    return ClusterModel(folder, cluster, max_input_len=16, **options)


def session(model: Model, cache: KVCache, forks: bool = False) -> list[Tensor]:
    """Logits of many kinds of calls: chunks of a long prompt, ragged rows, reordered, cropped and
    forked rows, and single tokens."""
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


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# Scenarios ----------------------------------------------------------------------------------


@contextlib.contextmanager
def side_by_side(folder: str, stages: int) -> Iterator[tuple[ClusterModel, Model]]:
    """The model over hosts and on one machine. Hosts are forked once this process has measured the
    workspace of calls."""
    use(cluster_product.MEMORY)
    cluster_product.predict(folder)
    with cluster_of(*[cluster_product.MEMORY] * stages) as cluster:
        yield cluster_product.models(folder, cluster)


def over_three(folder: str) -> dict[str, object]:
    with side_by_side(folder, 3) as (model, one):
        return {
            "calls": calls_of_all_sorts(model, one),
            "generations": generations(model, one),
            "memory": memory(model),
        }


def compared(folder: str, stages: int) -> dict[str, object]:
    """Compare all kinds of cache that can share one load."""
    with side_by_side(folder, stages) as (model, one):
        found = []
        for way in cluster_product.WAYS:
            chosen = {k: batches for w, k, batches in cluster_product.cells(stages) if w == way}
            found.append(cluster_product.compare(model, one, way, chosen))
    return {
        "wrong": [text for each in found for text in each.wrong],
        "unequal": [text for each in found for text in each.unequal],
        "same": sum(each.same for each in found),
        "loads": sum(each.loads for each in found),
    }


def calls_of_all_sorts(model: ClusterModel, one: Model) -> dict[str, bool]:
    kept, found = Cache(model, 64, 2), {}
    model.load_autosplit(kept, objective="balance")
    for name in UNLIKE:
        caches = [CACHES[name](each, 64, 2) for each in (model, one)]
        found[name] = same(*(session(c.model, c, forks=name == "fp16") for c in caches))
    model.unload()
    return found


def generations(model: ClusterModel, one: Model) -> list[bool]:
    kept = Cache(model, 32, 6)
    model.load_autosplit(kept, objective="balance")
    prompts = [IDS[0, :20].tolist(), IDS[1, :9].tolist()]
    calls = [
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "seed": 5, "num_return_sequences": 2},
    ]
    found = [
        one.generate(prompts, max_new_tokens=5, **call).tolist()
        == model.generate(prompts, max_new_tokens=5, **call).tolist()
        for call in calls
    ]
    found.append(len(set(model.host_map.values())) == 3)
    model.unload()
    return found


def memory(model: ClusterModel) -> dict[str, object]:
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
    return {"reports": reports, "before": before, "after": allocated(model)}


def allocated(model: ClusterModel) -> list[int]:
    model.cluster.ask("allocated")
    theirs = [host["sim:0"] for host in model.cluster.ask("allocated")]
    return [torch.accelerator.memory_allocated(0), *theirs]


def refusals(folder: str) -> list[str]:
    model = on_hosts(folder, 2)
    said = []
    for call in (
        lambda: model.load(lazy=True),
        lambda: model.load_autosplit(Cache(model, 200_000, 2)),
        lambda: model.load_autosplit(Cache(model, 64), objective="speed"),
        lambda: model.forward(IDS),
        lambda: model.load([0.0007, 0.02]),
        lambda: model.forward(IDS + 400),
        lambda: model.load_autosplit(Cache(model, 64), draft=Cache(model, 64)),
    ):
        try:
            call()
            said.append("")
        except (ValueError, torch.OutOfMemoryError) as error:
            said.append(str(error))
    said.append(same([alone(folder).forward(IDS)], [model.forward(IDS)]))
    said.append(len(set(model.host_map.values())) == 2)
    model.cluster.close()
    return said


# Tests --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(folder):
    return run_sim(over_three, "", args=[folder])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stages", cluster_product.STAGES)
def test_stages_give_the_bits_of_one_machine_with_every_kind_of_cache(folder, stages):
    """And take the planned bytes. Every pair of stages, splits, kinds and batches occurs;
    ``python -m tests.bench cluster-product`` runs every combination."""
    these = run_sim(compared, "", args=[folder, stages])
    assert (these["wrong"], these["unequal"]) == ([], [])
    assert these["same"] == 2 * len(cluster_product.KINDS)
    assert these["loads"] == 2 * (stages - 1)


def test_all_kinds_of_calls_give_the_bits_of_one_machine(found):
    assert found["calls"] == dict.fromkeys(UNLIKE, True)


def test_every_pair_of_choices_occurs():
    cells = [
        (stages, way, kind, batch)
        for stages in cluster_product.STAGES
        for way, kind, batches in cluster_product.cells(stages)
        for batch in batches
    ]
    choices = [cluster_product.STAGES, cluster_product.WAYS, cluster_product.KINDS]
    choices.append(cluster_product.BATCHES)
    for (a, these), (b, those) in combinations(enumerate(choices), 2):
        assert {(cell[a], cell[b]) for cell in cells} == set(product(these, those))


def test_generations_are_those_of_one_machine(found):
    assert found["generations"] == [True] * 4


def test_every_host_takes_the_planned_bytes_and_frees_them(found):
    these = found["memory"]
    assert len(these["reports"]) == 2
    for row in these["reports"]:
        assert row["measured"] == row["predicted"]
        assert row["measured"]["weights"] > 0
    assert these["after"] == these["before"]


def test_unsupported_calls_are_refused_and_others_continue(folder):
    said = run_sim(refusals, "", args=[folder])
    for text, part in zip(
        said,
        (
            "can't be loaded lazily: leave lazy out",
            "no room for",
            "the bandwidth of other hosts' devices is not measured",
            "not loaded",
            "",
            "outside the vocabulary",
            "call unload() first to load it elsewhere",
        ),
        strict=False,
    ):
        assert part in text
    assert said[4] == "" and said[-2:] == [True, True]
