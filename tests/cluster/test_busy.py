"""Stages at work at the same time: the chunks of one prompt, and jobs beside each other, over eight
hosts and over two; and nobody waits for ever."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
from cluster_hosts import cluster_of
from simproc import run_sim
from tiny import llama, reference, save, save_tokenizer

from exkv import Cache, Engine, Job, Model, PagedCache, SamplingParams, Tokenizer
from exkv.models import Transformer

STAGES, CHUNK, PROMPT = 8, 16, 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = llama(num_hidden_layers=8, hidden_size=64, intermediate_size=96, eos_token_id=None)
    return str(save_tokenizer(save(reference(shape), tmp_path_factory.mktemp("model"))))


@dataclass(frozen=True)
class Costs:
    """Seconds that each unit takes, whatever the processor does meanwhile."""

    chunk: float
    row: float  # of a decode step

    def of(self, tokens: int, rows: int) -> float:
        return self.row * rows if tokens == 1 else self.chunk


ALIKE, LONG_CHUNKS = Costs(0.015, 0.015), Costs(0.04, 0.001)


def slow_units(costs: Costs) -> None:
    """As if each were large, here and on hosts that are forked from here."""
    standing, chunk = Transformer._standing, Transformer.forward_chunk

    def slow(self, unit):
        time.sleep(self.seconds_now)
        return standing(self, unit)

    def noted(self, input_ids, cache, lengths, **options):
        self.seconds_now = costs.of(lengths.chunk, len(lengths.new))
        return chunk(self, input_ids, cache, lengths, **options)

    Transformer._standing, Transformer.forward_chunk = slow, noted


def seconds(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def busy(folder: str) -> dict[str, object]:
    slow_units(ALIKE)
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
    prompts = [[30 + i, *range(20, 100)] for i in range(8)]
    result = {
        "stages": len(set(model.host_map.values())),
        "prompt": together / one_by_one,
        "jobs": share_of_work(model, pages, folder, prompts, 2, ALIKE),
        "decoding": share_of_work(model, pages, folder, [[30 + i] for i in range(8)], 7, ALIKE),
        "groups": cluster._epoch,
    }
    cluster.close()
    return result


def mixed(folder: str) -> float:
    """Two stages, with jobs that decode between the long chunks of others' prompts."""
    slow_units(LONG_CHUNKS)
    model = Model(folder, max_input_len=CHUNK)
    pages = PagedCache(model, 1024, page=CHUNK)
    cluster = cluster_of("24M", "24M", timeout=10.0)
    model.load_autosplit(pages, objective="balance", cluster=cluster)
    prompts = [[30 + i, *range(20, 20 + 5 * CHUNK - 1)] for i in range(4)]
    share = share_of_work(model, pages, folder, prompts, 20, LONG_CHUNKS)
    cluster.close()
    return share


def share_of_work(model, pages, folder, prompts, new: int, costs: Costs) -> float:
    """How long jobs take, by what units take for all of their calls together."""
    calls = []
    forward = model._forward

    def counted(ids, *args, **options):
        calls.append(costs.of(ids.shape[1], ids.shape[0]))
        return forward(ids, *args, **options)

    model._forward = counted
    options = {"settings": SamplingParams.greedy(), "max_new_tokens": new}
    with Engine(model, pages, Tokenizer(folder), chunk=CHUNK) as engine:
        took = seconds(lambda: engine.run([Job(prompt=prompt, **options) for prompt in prompts]))
    model._forward = forward
    return took / (sum(calls) * len(model.units))


def test_eight_stages_work_at_the_same_time(folder):
    found = run_sim(busy, "", args=[folder])
    assert (found["stages"], found["groups"]) == (STAGES, 0)
    assert max(found["prompt"], found["jobs"], found["decoding"]) < 0.7


def test_a_host_goes_on_while_another_one_runs_a_chunk(folder):
    assert run_sim(mixed, "", args=[folder]) < 0.72
