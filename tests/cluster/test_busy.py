"""Stages at work at the same time: the chunks of one prompt, and jobs beside each other, over eight
hosts; and nobody waits for ever."""

from __future__ import annotations

import time

import pytest
import torch
from cluster_hosts import cluster_of
from simproc import run_sim
from tiny import llama, reference, save, save_tokenizer

from exkv import Cache, Engine, Job, Model, PagedCache, SamplingParams, Tokenizer
from exkv.models import Transformer

STAGES, CHUNK, PROMPT = 8, 16, 160
#: Seconds that each unit takes, whatever the processor does meanwhile.
UNIT = 0.015


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = llama(num_hidden_layers=8, hidden_size=64, intermediate_size=96, eos_token_id=None)
    return str(save_tokenizer(save(reference(shape), tmp_path_factory.mktemp("model"))))


def slow_units() -> None:
    """As if each were large, here and on hosts that are forked from here."""
    standing = Transformer._standing

    def slow(self, unit):
        time.sleep(UNIT)
        return standing(self, unit)

    Transformer._standing = slow


def seconds(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def busy(folder: str) -> dict[str, object]:
    slow_units()
    model = Model(folder, max_input_len=CHUNK)
    cache, pages = Cache(model, 256), PagedCache(model, 1024, page=CHUNK)
    cluster = cluster_of(*["24M"] * STAGES, timeout=10.0)
    model.load_autosplit(cache, objective="balance", cluster=cluster)
    ids = torch.arange(20, 20 + PROMPT)[None]
    model.forward(ids, cache, last_id_only=True)
    cache.reset()
    chunks = ids.split(CHUNK, dim=1)
    one_by_one = seconds(
        lambda: [model.forward(chunk, cache, last_id_only=True) for chunk in chunks]
    )
    cache.reset()
    together = seconds(lambda: model.forward(ids, cache, last_id_only=True))
    calls = []
    forward = model._forward
    model._forward = lambda *args, **options: (calls.append(1), forward(*args, **options))[1]
    options = {"settings": SamplingParams.greedy(), "max_new_tokens": 5}
    jobs = [Job(prompt=[30 + i, *range(20, 100)], **options) for i in range(8)]
    with Engine(model, pages, Tokenizer(folder), chunk=CHUNK) as engine:
        jobs_took = seconds(lambda: engine.run(jobs))
    result = {
        "stages": len(set(model.host_map.values())),
        "prompt": together / one_by_one,
        "jobs": jobs_took / (len(calls) * one_by_one / len(chunks)),
        "groups": cluster._epoch,
    }
    cluster.close()
    return result


def test_eight_stages_work_at_the_same_time(folder):
    found = run_sim(busy, "", args=[folder])
    assert (found["stages"], found["groups"]) == (STAGES, 0)
    assert found["prompt"] < 0.7 and found["jobs"] < 0.7
