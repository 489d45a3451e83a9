"""An engine over hosts: each job gives the tokens that it gives alone on one machine, whatever runs
beside it, is preempted or dies."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch
from cluster_hosts import cluster_of, wait_for
from simproc import run_sim
from tiny import llama, reference, save, save_tokenizer

from exkv import Engine, Generator, Job, Model, PagedCache, SamplingParams, Tokenizer
from exkv.decode import Handle

WAYS = (SamplingParams.greedy(), SamplingParams(), SamplingParams(temperature=1.3, top_p=1.0))
SHARED = list(range(20, 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = llama(num_hidden_layers=4, hidden_size=64, intermediate_size=96, eos_token_id=None)
    return str(save_tokenizer(save(reference(shape), tmp_path_factory.mktemp("model"))))


def jobs() -> list[Job]:
    """Jobs with shared prefixes, all kinds of sampling, priorities, and guidance."""
    made = [
        Job(
            prompt=[*SHARED[: 40 * (i % 2)], *range(70 + i, 75 + 4 * i)],
            settings=WAYS[i % 3],
            seed=i,
            max_new_tokens=34 + i,
            priority=int(i == 5),
            logprobs=0,
        )
        for i in range(7)
    ]
    made[2] = replace(made[2], guidance_scale=1.5, negative_prompt=[9, 8, 7], logprobs=None)
    return made


def model_of(folder: str) -> Model:
    return Model(folder, max_input_len=64)


def alone(folder: str) -> list[list[object]]:
    """Run one job after the other on one machine -> their tokens."""
    model = model_of(folder)
    cache = PagedCache(model, 160, page=16)
    model.load_autosplit(cache, devices=["cpu"])
    with Engine(model, cache, Tokenizer(folder)) as engine:
        found = []
        for job in jobs():
            handle = engine.submit(job)
            handle.result()
            found.append(said(handle))
    return found


def said(handle: Handle) -> list[object]:
    """A job's tokens, and the bits of their probabilities."""
    return [handle.tokens, *([each.logprob] for each in handle.logprobs)]


def on_hosts(
    folder: str, cards: str, tokens: int, spares: int = 0, **options
) -> tuple[Engine, Model]:
    model = model_of(folder)
    cache = PagedCache(model, tokens, page=16, **options)
    cluster = cluster_of(cards, cards, cards, timeout=5.0, spares=spares)
    model.load_autosplit(cache, objective="balance", cluster=cluster)
    return Engine(model, cache, Tokenizer(folder), max_running=5, ngrams=3), model


def in_use(engine: Engine) -> int:
    return engine.pool.pages - engine.pool.available


# Scenarios ----------------------------------------------------------------------------------


def crowded(folder: str) -> dict[str, object]:
    """Too few pages for all jobs: some are preempted, swapped out and readmitted."""
    want = alone(folder)
    engine, model = on_hosts(folder, "24M", 160, host_tokens=64)
    handles = [engine.submit(job) for job in jobs()]
    dropped = engine.submit(jobs()[0])
    while engine.busy and not engine.stats.put_away:
        engine.iterate()
    dropped.cancel()
    again = [engine.submit(job) for job in jobs()[1:3]]
    while engine.busy:
        engine.iterate()
    found = {
        "same": [said(handle) for handle in handles] == want,
        "again": [said(handle) for handle in again] == want[1:3],
        "found": engine.stats.found_tokens > 0 and engine.stats.accepted_tokens > 0,
        "tiers": sum(engine.pool.in_tiers) > 0,
        "cancelled": dropped.reason == "cancelled",
        "pages": in_use(engine),
        "spread": len(set(model.host_map.values())),
        "groups": len(engine._running.groups) > 1,
    }
    engine.close()
    model.forward(torch.tensor([[5, 6]]), PagedCache(model, 32, page=16))  # commands were heard
    model.unload()
    found["left"] = [host["sim:0"] for host in model.cluster.ask("allocated")]
    model.cluster.close()
    return found


def dying(folder: str) -> dict[str, object]:
    """A host dies while a job is preempted, and comes back; another one dies."""
    want = alone(folder)
    engine, model = on_hosts(folder, "", 128, spares=1)
    children = dict(model.cluster.launcher.pids)
    handles = [engine.submit(job) for job in jobs()]
    while engine.busy and not any(handle.away for handle in handles):
        engine.iterate()
    away = sum(handle.away is not None for handle in handles)
    os.kill(children["host2"], signal.SIGKILL)
    for _ in range(20):
        engine.iterate()
    first = list(model.cluster.gone)
    model.cluster.restore()
    wait_for(model, "host2")
    back = model.replan()
    for _ in range(10):
        engine.iterate()
    os.kill(children["host1"], signal.SIGKILL)
    while engine.busy:
        engine.iterate()
    found = {
        "same": [said(handle) for handle in handles] == want,
        "gone": [first, model.cluster.gone],
        "pages": in_use(engine),
        "away": away,
        "back": back,
    }
    engine.close()
    return found


def generating(folder: str) -> list[bool]:
    """Paged caches without an engine: generations, beams and forks, and a host that dies."""
    one, model = model_of(folder), model_of(folder)
    caches = PagedCache(one, 96, 3, page=16), PagedCache(model, 96, 3, page=16)
    one.load_autosplit(caches[0], devices=["cpu"])
    model.load_autosplit(caches[1], objective="balance", cluster=cluster_of(*["24M"] * 3))
    calls = [{"do_sample": False}, {"num_beams": 3}, {"do_sample": True, "seed": 4}]
    results = [
        [each.generate([SHARED], cache=cache, max_new_tokens=9, **call).tolist() for call in calls]
        for each, cache in zip((one, model), caches, strict=True)
    ]
    forked = []
    for each, cache in zip((one, model), caches, strict=True):
        cache.reset()
        each.forward(torch.tensor([SHARED[:21]]), cache, preprocess_only=True)
        fork = cache.fork(2)
        forked += [each.forward(torch.tensor([[7], [8]]), fork, last_id_only=True)]
        forked += [each.forward(torch.tensor([[9]]), cache, last_id_only=True)]
    texts = []
    for each, cache in zip((one, model), caches, strict=True):
        stream = Generator(each, cache, Tokenizer(folder)).stream("here it is", WAYS[0], 12)
        pieces = [next(stream)]
        if each is model:
            os.kill(model.cluster.launcher.pids["host1"], signal.SIGKILL)
        texts.append([*pieces, *stream])
    return [
        results[0] == results[1],
        all(torch.equal(a, b) for a, b in zip(forked[:2], forked[2:], strict=True)),
        texts[0] == texts[1],
    ]


# Tests --------------------------------------------------------------------------------------


def test_jobs_give_the_same_tokens_as_alone_and_free_every_page(folder):
    found = run_sim(crowded, "", args=[folder])
    assert found["left"] == [0, 0]
    assert (found["pages"], found["spread"]) == (0, 3)
    names = ("same", "again", "found", "tiers", "cancelled", "groups")
    assert all(found[name] for name in names), found


def test_jobs_continue_with_the_same_tokens_when_hosts_die_and_return(folder):
    found = run_sim(dying, "", args=[folder])
    gone = [["host2"], ["host2", "host1"]]
    assert found == {"same": True, "gone": gone, "pages": 0, "away": 1, "back": ["host2"]}


def test_paged_caches_work_over_hosts_without_an_engine(folder):
    assert run_sim(generating, "", args=[folder]) == [True] * 3
