"""A model over hosts behaves like one on one machine: adapters, saved caches, a draft, an embedding
in host memory, weights chosen by a plan, and another model in its place."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapters import linears_of, write_adapter
from cluster_hosts import alone, cluster_of
from heads import agreeing, with_head
from on_cpu import on_cpu
from runs import Readable
from simproc import run_sim
from tiny import GEMMA4_SHARED, TINY, gemma4, llama, reference, save, save_tokenizer
from torch import Tensor

import exkv
from exkv import Cache, Cache8bit, DynamicCache, KVCache, Model, PagedCache
from exkv.cluster import Cluster, ClusterModel
from exkv.planning import Workload, expected_time
from exkv.planning.ledgers import plan_where

IDS = torch.randint(3, 320, (2, 24), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of one vocabulary, and adapters for the first; scenarios write files here, too."""
    top = tmp_path_factory.mktemp("models")
    first = reference(llama(num_hidden_layers=4, hidden_size=64, intermediate_size=96))
    second = reference(llama(num_hidden_layers=2, hidden_size=32, intermediate_size=48), seed=2)
    layers = linears_of(first, ("q_proj", "v_proj", "down_proj"))
    for seed, name in enumerate(("a", "b")):
        write_adapter(top / name, layers, seed=seed)
    save(first, top / "first")
    save(second, top / "second")
    types = ["linear_attention", "full_attention"] * 2
    third = TINY["Qwen3NextForCausalLM"](num_hidden_layers=4, layer_types=types)
    save_tokenizer(save(reference(third), top / "states"))
    save_tokenizer(save(reference(gemma4(**GEMMA4_SHARED)), top / "shared"))
    agreeing("Glm4MoeForCausalLM", top / "a head")
    with_head("Qwen3_5ForCausalLM", top / "states and a head")
    routed = TINY["Qwen3MoeForCausalLM"](num_hidden_layers=6, num_experts=16)
    save(reference(routed), top / "routed")
    return str(top)


def on_hosts(folder: Path, cluster: Cluster, **options) -> ClusterModel:
    return ClusterModel(folder, cluster, max_input_len=16, **options)


def load(model: ClusterModel, cache: KVCache) -> bool:
    """Whether every host has units, of the sizes that were planned."""
    model.load_autosplit(cache, objective="balance")
    rows = [row for host in model.measured for row in host]
    as_planned = all(row["measured"] == row["predicted"] for row in rows)
    return as_planned and set(model.host_map.values()) == set(model.cluster.names)


def steps(model: Model, cache: KVCache, ids: Tensor = IDS, **options) -> list[Tensor]:
    """Logits of a prompt, and of the three tokens after it."""
    found = [model.forward(ids, cache, last_id_only=True, **options).cpu()]
    for _ in range(3):
        tokens = found[-1][:, -1].argmax(-1, keepdim=True)
        found.append(model.forward(tokens, cache, last_id_only=True, **options).cpu())
    return found


def same(one: list[Tensor], other: list[Tensor], atol: float = 0.0) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=atol) for a, b in pairs)


def held(cluster: Cluster) -> list[int]:
    return [torch.accelerator.memory_allocated(0), *(h["sim:0"] for h in cluster.ask("allocated"))]


# Scenarios ----------------------------------------------------------------------------------


def in_turn(top: str) -> dict[str, object]:
    """Two models take turns on the hosts, one of which has no copy of either."""
    first, second = Path(top) / "first", Path(top) / "second"
    cluster = cluster_of("24M", "24M", "24M", streamed=["host2"])
    empty, result = held(cluster), {}
    one = on_hosts(first, cluster)
    cache = Cache(one, 64, 2)
    expected = alone(first)
    own = Cache(expected, 64, 2)
    result["first"] = load(one, cache) and same(steps(one, cache), steps(expected, own))
    other = on_hosts(second, cluster)
    others = Cache(other, 64, 2)
    offered = {budget.place: budget.limit for budget in other.budgets()}
    try:
        other.load_autosplit(others)
    except ValueError as error:
        result["refused"] = "have another model loaded: call its unload() first" in str(error)
    result["it stays"] = same(
        [one.forward(IDS[:, :1], cache).cpu()], [expected.forward(IDS[:, :1], own)]
    )
    waiting = [DynamicCache(each.config, 64) for each in (one, expected)]
    result["a cache that waited"] = same(steps(one, waiting[0]), steps(expected, waiting[1]))
    one.unload()
    result["planned as if alone"] = all(
        budget.limit == offered[budget.place] for budget in other.budgets() if budget.host
    )
    result["second"] = load(other, others) and same(
        steps(other, others), steps(unlike := alone(second), Cache(unlike, 64, 2))
    )
    one.unload()  # which is not there: nothing happens
    result["stays, too"] = other.loaded and other.forward(IDS, Cache(other, 32, 2)) is not None
    other.unload()
    result["first again"] = load(one, cache) and same(
        steps(one, cache), steps(expected, Cache(expected, 64, 2))
    )
    one.unload()
    result["clean"] = held(cluster) == empty
    cluster.close()
    return result


def adapted(top: str) -> dict[str, object]:
    """Rows with different adapters, loaded before and after the model; a host dies."""
    folder = Path(top) / "first"
    cluster = cluster_of("24M", "24M", "24M", timeout=5.0, streamed=["host2"])
    empty, expected, model = held(cluster), alone(folder), on_hosts(folder, cluster)
    cache, result, names = Cache(model, 64, 2), {}, ["b", "a"]
    model.load_adapter(Path(top) / "a")
    result["planned"] = load(model, cache)
    rows = model.full_report().devices
    result["all reported"] = all(row.measured["weights"] == row.ledger.weights for row in rows)
    result["places"] = [str(row.ledger.place) for row in rows][1:] == ["host1/sim:0", "host2/sim:0"]
    model.load_adapter(Path(top) / "b", strength=0.5)
    expected.load_adapter(Path(top) / "a")
    expected.load_adapter(Path(top) / "b", strength=0.5)
    own = Cache(expected, 64, 2)
    result["same"] = same(steps(model, cache, adapter=names), steps(expected, own, adapter=names))
    os.kill(cluster.launcher.pids["host1"], signal.SIGKILL)
    more = IDS[:, :5]
    again = steps(model, cache, more, adapter=names), steps(expected, own, more, adapter=names)
    places = [str(row.ledger.place) for row in model.full_report().devices]
    result["reported"] = places == ["sim:0", "host2/sim:0"]
    result["without a host"] = cluster.gone == ["host1"] and same(*again, atol=1e-5)
    result["they matter"] = not same(again[1], steps(expected, own, more), atol=1e-2)
    result["made with"] = cache.made_with == [model.adapters[name].key for name in names]
    before = held(cluster)
    model.unload_adapter("b")
    result["gives back"] = all(now < then for now, then in zip(held(cluster), before, strict=True))
    try:
        model.forward(IDS, Cache(model, 32, 2), adapter="b")
    except ValueError as error:
        result["unknown"] = "there is no adapter 'b'" in str(error)
    model.unload()
    result["clean"] = held(cluster) == empty[:2]
    cluster.close()
    return result


def in_files(top: str) -> dict[str, object]:
    """A saved cache is the same file, byte by byte, and each side can continue from the other's."""
    folder, result = Path(top) / "first", {}
    cluster = cluster_of("24M", "24M", "24M")
    expected, model = alone(folder), on_hosts(folder, cluster)
    kept = Cache(model, 64, 2)
    load(model, kept)
    for name, make in (
        ("8bit", lambda model: Cache8bit(model, 64, 2)),
        ("paged", lambda model: PagedCache(model, 64, 2, page=16)),
    ):
        many, one = Path(top) / f"{name} of many", Path(top) / f"{name} of one"
        caches = make(model), make(expected)
        for each, cache, file in zip((model, expected), caches, (many, one), strict=True):
            each.forward(IDS, cache, new_lens=[24, 9], preprocess_only=True)
            cache.save(file)
        result[f"{name}: same file"] = many.read_bytes() == one.read_bytes()
        caches = make(model), make(expected)
        model.forward(IDS[:, :5], caches[0])  # which is replaced
        caches[0].load(one)
        caches[1].load(many)
        result[f"{name}: goes on"] = same(
            steps(model, caches[0], IDS[:, :2]), steps(expected, caches[1], IDS[:, :2])
        )
    try:
        Cache(model, 64, 2).load(one)
    except ValueError as error:
        result["another kind"] = "this cache's" in str(error)
    cluster.close()
    return result


def otherwise(top: str) -> dict[str, object]:
    """A draft beside the driver's units, the embedding in host memory, weights that a plan
    chooses."""
    folder, small = Path(top) / "first", Path(top) / "second"
    cluster, result = cluster_of("24M", "24M", "24M"), {}
    empty, expected = held(cluster), alone(folder)
    want = expected.generate(IDS[:1], max_new_tokens=9, do_sample=False).tolist()

    model, draft = on_hosts(folder, cluster), Model(small, max_input_len=16)
    drafts, cache = Cache(draft, 64), Cache(model, 64)
    model.load_autosplit(cache, objective="balance", draft=drafts)
    said = model.generate(
        IDS[:1], cache=cache, max_new_tokens=9, do_sample=False, assistant_model=draft
    )
    spread = len(set(model.host_map.values())) == 3
    result["draft"] = spread and said.tolist() == want
    os.kill(cluster.launcher.pids["host1"], signal.SIGKILL)
    cache.reset()
    again = model.generate(IDS[:1], cache=cache, max_new_tokens=9, do_sample=False)
    result["draft, without a host"] = again.tolist() == want and draft.loaded
    model.unload()
    draft.unload()
    result["clean"] = held(cluster) == empty[:2]

    model = on_hosts(folder, cluster, embed_cpu=True)
    cache = Cache(model, 64, 2)
    in_host_memory = load(model, cache) and model.device_map["model.embed_tokens"].type == "cpu"
    result["embed_cpu"] = in_host_memory and same(
        steps(model, cache), steps(expected, Cache(expected, 64, 2))
    )
    model.unload()

    model = on_hosts(folder, cluster, weights="best")
    cache = Cache(model, 64, 2)
    plain = Model(folder, max_input_len=16)
    stored = exkv.place(plain, cache, hosts={"a": "24M", "b": "24M"}, margin=0, allocator="exact")
    need = sum(ledger.weights + ledger.cache for ledger in stored.ledgers)
    model.load([0.46 * need / 2**30, 0.7 * need / 2**30])
    chosen = set(model.choice.kept.values())
    other = Model(folder, max_input_len=16, weights="best")
    other.choose(model.choice)
    other._chooses = False
    other.load(devices=["cpu"])
    result["best"] = len(chosen) > 1 and same(
        steps(model, cache), steps(other, Cache(other, 64, 2))
    )
    model.unload()

    model, ids = ClusterModel(folder, cluster), IDS.repeat(1, 22)
    cache = Cache(model, 600, 2)
    for size in range(1 << 20, 24 << 20, 1 << 18):
        with contextlib.suppress(exkv.PlacementError):
            model.load([size / 2**30] * 2)
            break
    chunks = model.max_input_len < 2048 and model.plan.fitted == model.report.fitted != ()
    result["chunks that fit"] = chunks and same(
        [model.forward(ids, cache).cpu()], [expected.forward(ids, Cache(expected, 600, 2))], 1e-5
    )
    cluster.close()
    return result


def with_states(top: str) -> dict[str, object]:
    """Layers with a recurrent state. This machine computes them as modules, as the hosts' cards do:
    its bound run sums in another order (``tests/models/test_bound_states.py``)."""
    with Readable():
        return rows_that_move(Path(top) / "states")


def with_shared_keys(top: str) -> dict[str, object]:
    """Layers that share keys and values with layers on another host."""
    return rows_that_move(Path(top) / "shared")


def with_a_head(top: str) -> dict[str, object]:
    """An MTP head's proposals, whichever host it is on; a host dies."""
    result = {}
    for name in ("states and a head", "a head"):
        cluster = cluster_of("24M", "24M", "24M", timeout=5.0)
        empty, folder = held(cluster), Path(top) / name
        expected = on_cpu(folder, max_input_len=16, mtp=True)
        for where, split in SPLITS.items() if name == "a head" else [("apart", SPLITS["apart"])]:
            model = on_hosts(folder, cluster, mtp=True)
            cache = room(model)
            plan = split_at(model, cache, split)
            model.load(plan=plan)
            rows = [row for host in model.measured for row in host]
            result[f"{name} {where}: planned"] = all(
                row["measured"] == row["predicted"] for row in rows
            )
            result[f"{name} {where}"] = guessed(model, cache) == guessed(expected, room(expected))
            texts = [proposed_by_jobs(each) for each in (model, expected)]
            result[f"{name} {where}: jobs"] = texts[0] == texts[1]
            if where == "apart":
                os.kill(cluster.launcher.pids["host1"], signal.SIGKILL)
                cache.reset()
                again = guessed(model, cache)[0], guessed(expected, room(expected))[0]
                result[f"{name}: without a host"] = again[0] == again[1]
                result[f"{name}: it is gone"] = cluster.gone == ["host1"]
            model.unload()
        result[f"{name}: clean"] = held(cluster) == empty[:2]
        cluster.close()
    return result


#: The hosts of the embedding, the layers, the MTP head and the head.
SPLITS = {"together": [0, 1, 2, 2], "first": [1, 2, 0, 0], "apart": [0, 2, 1, 2]}


def split_at(model: ClusterModel, cache: KVCache, split: Sequence[int]) -> exkv.Plan:
    """A plan of the model's units over its hosts."""
    embedding, layers, mtp_head, head = split
    hosts = [embedding, *[layers] * model.config.num_hidden_layers, mtp_head, head]
    budgets = [each for each in model.budgets() if each.device.type != "cpu"]
    workload = Workload.of(model, [cache])
    costs = workload.costs(workload.peaks(budgets))
    plan = plan_where(costs, budgets, [budgets[host].place for host in hosts], "pack", "listed")
    return replace(plan, max_input_len=workload.promise.max_input_len)


def room(model: Model, kind: type[KVCache] = Cache, *sizes: int, **options) -> KVCache:
    return kind(model, *(sizes or (64, 2)), snapshots=model.config.has_states, **options)


def guessed(model: Model, cache: KVCache) -> list[object]:
    """Generated tokens, and the number of the MTP head's proposals."""
    options = {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0, "use_mtp": True}
    found = model.generate(
        IDS, cache=cache, max_new_tokens=9, return_dict_in_generate=True, **options
    )
    return [found.sequences.tolist(), found.proposed_tokens, found.accepted_tokens]


def proposed_by_jobs(model: Model) -> list[object]:
    """Tokens of jobs with the MTP head's proposals, one of which is preempted."""
    cache, tokenizer = room(model, PagedCache, 64, page=16), exkv.Tokenizer(model.config.path)
    with exkv.Engine(model, cache, tokenizer, draft=exkv.MTP(tokens=3, confidence=0)) as engine:
        how = {"max_new_tokens": 20, "settings": exkv.SamplingParams.greedy(), "ignore_eos": True}
        prompts = [IDS[0].tolist(), IDS[1, :9].tolist(), IDS[0, :20].tolist()]
        handles = [engine.submit(exkv.Job(prompt=prompt, **how)) for prompt in prompts]
        while engine.busy:
            engine.iterate()
        assert engine.stats.proposed_tokens and engine.stats.put_away
    return [handle.tokens for handle in handles]


def rows_that_move(folder: Path) -> dict[str, object]:
    cluster = cluster_of("24M", "24M")
    empty, expected, model = held(cluster), alone(folder), on_hosts(folder, cluster)
    cache, own, result = Cache(model, 64, 2), Cache(expected, 64, 2), {}
    result["same"] = load(model, cache) and same(steps(model, cache), steps(expected, own))
    for each in (cache, own):
        each.reorder([1, 0])
    tokens = IDS[:, :1]
    result["rows in other places"] = same(
        [model.forward(tokens, cache).cpu()], [expected.forward(tokens, own)]
    )
    for each in (cache, own):
        each.crop([20, 11])
    result["cropped"] = same([model.forward(tokens, cache).cpu()], [expected.forward(tokens, own)])
    cache.save(file := folder / "cache")
    (again := Cache(model, 64, 2)).load(file)
    forks = again.fork(1), own.fork(1)
    result["saved and forked"] = same(
        [model.forward(tokens, forks[0]).cpu()], [expected.forward(tokens, forks[1])]
    )
    result["verified"] = same(*map(verified, (model, expected)))
    texts = [tokens_of_jobs(each) for each in (model, expected)]
    result["jobs"] = texts[0] == texts[1] and all(map(len, texts[0]))
    model.unload()
    result["clean"] = held(cluster) == empty
    cluster.close()
    return result


def with_host_experts(top: str) -> dict[str, object]:
    """Experts in the memory of the host that has their layer, whose card is larger than its limit;
    then it dies."""
    expected_time.CARD, expected_time.HOST = 1e6, 6e4  # so that few bytes count
    folder, result = Path(top) / "routed", {}
    cluster = cluster_of("640K", "4M", "640K", timeout=5.0)
    cluster._caps = {"host1": [640 << 10]}  # as of --hosts
    empty, expected, model = held(cluster), alone(folder), on_hosts(folder, cluster)
    cache, own = Cache(model, 64, 2), Cache(expected, 64, 2)
    model.load_autosplit(cache, devices=["sim:0", "cpu"])
    result["experts on hosts"] = "host1" in hosts_with_experts(model)
    limited = [each for each in model._whole.ledgers if str(each.place) == "host1/sim:0"]
    result["within its limit"] = [0 < each.total <= 640 << 10 for each in limited] == [True]
    rows = [row for host in model.measured for row in host]
    result["as planned"] = all(row["measured"] == row["predicted"] for row in rows)
    result["same"] = same(steps(model, cache), steps(expected, own))
    os.kill(cluster.launcher.pids["host1"], signal.SIGKILL)
    more = IDS[:, :5]
    result["without a host"] = same(steps(model, cache, more), steps(expected, own, more), 1e-5)
    result["on those that are left"] = "host2" in hosts_with_experts(model)
    model.unload()
    result["clean"] = held(cluster) == empty[:2]
    cluster.close()
    return result


def hosts_with_experts(model: ClusterModel) -> set[str]:
    """Hosts with experts in memory, and their layers on a card."""
    return {unit.host for unit in model._whole.units if unit.host_experts}


def verified(model: Model) -> list[torch.Tensor]:
    """Logits of verified tokens, some of which are rejected, twice."""
    cache = Cache(model, 64, 2, snapshots=True)
    model.forward(IDS[:, :20], cache, new_lens=[20, 9])
    found = []
    for kept in ([22, 10], [24, 14]):
        found.append(model.forward(IDS[:, 20:24], cache, each_token=True).cpu())
        settled = list(cache.snapshot_lens)
        cache.crop(kept)
        found.append(model.forward(IDS[:, 3:4], cache).cpu())
        assert cache.snapshot_lens == settled and all(settled) == model.config.has_states
    cache.free()
    model.forget_cache(cache)
    return found


def tokens_of_jobs(model: Model) -> list[list[int]]:
    """Tokens of jobs of different lengths, one of which is preempted."""
    settings = exkv.SamplingParams.greedy()
    prompts = [IDS[0].tolist(), IDS[1, :9].tolist(), IDS[0, :20].tolist()]
    with exkv.Engine(model, PagedCache(model, 64, page=16), exkv.Tokenizer(model.config.path)) as e:
        how = {"max_new_tokens": 20, "settings": settings, "ignore_eos": True}
        jobs = [exkv.Job(prompt=prompt, **how) for prompt in prompts]
        handles = [e.submit(job) for job in jobs]
        while e.busy:
            e.iterate()
        assert e.stats.put_away
    return [handle.tokens for handle in handles]


# Tests --------------------------------------------------------------------------------------

SCENARIOS = [in_turn, adapted, in_files, otherwise, with_states, with_shared_keys, with_a_head]
SCENARIOS.append(with_host_experts)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_results_over_hosts_match_one_machine(folders, scenario):
    found = run_sim(scenario, "", args=[folders])
    assert found == dict.fromkeys(found, True)
