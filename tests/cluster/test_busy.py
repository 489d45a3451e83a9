"""Stages that compute at the same time: the chunks of one prompt, and jobs beside each other, over
eight hosts and over two, without deadlock."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
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
    """Seconds that each unit takes, whatever the processor's load."""

    chunk: float
    row: float  # of a decode step

    def of(self, tokens: int, rows: int) -> float:
        return self.row * rows if tokens == 1 else self.chunk


ALIKE, LONG_CHUNKS = Costs(0.015, 0.015), Costs(0.04, 0.001)


class AtWork:
    """Slows units down, as if each were large, here and on hosts that are forked from here, and
    counts how many are running when one begins."""

    def __init__(self, costs: Costs) -> None:
        # Over all processes: running units, begun units, and the sum of running ones at each begin.
        self._counts = multiprocessing.get_context("fork").Array("q", 3)
        standing, chunk, at_work = Transformer.standing, Transformer.forward_chunk, self

        def slow(self, unit):
            at_work._add(1)
            time.sleep(self.seconds_now)
            at_work._add(-1)
            return standing(self, unit)

        def noted(self, input_ids, cache, lengths, **options):
            self.seconds_now = costs.of(lengths.chunk, len(lengths.new))
            return chunk(self, input_ids, cache, lengths, **options)

        Transformer.standing, Transformer.forward_chunk = slow, noted

    def _add(self, number: int) -> None:
        with self._counts:
            self._counts[0] += number
            if number > 0:
                self._counts[1] += 1
                self._counts[2] += self._counts[0]

    def during(self, call: Callable[[], object]) -> float:
        """How many units are running when one begins, on average: 1 if they take turns."""
        self._counts[:] = [0, 0, 0]
        call()
        return self._counts[2] / self._counts[1]


def busy(folder: str) -> dict[str, object]:
    at_work = AtWork(ALIKE)
    model = Model(folder, max_input_len=CHUNK)
    cache, pages = Cache(model, 256), PagedCache(model, 1024, page=CHUNK)
    cluster = cluster_of(*["24M"] * STAGES, timeout=10.0)
    model.load_autosplit(cache, objective="balance", cluster=cluster)
    ids = torch.arange(20, 20 + PROMPT)[None]
    one = ids[:, :CHUNK]
    prompts = [[30 + i, *range(20, 100)] for i in range(8)]
    result = {
        "stages": len(set(model.host_map.values())),
        "alone": at_work.during(lambda: model.forward(one, cache, last_id_only=True)),
        "prompt": at_work.during(lambda: model.forward(ids, cache, last_id_only=True)),
        "jobs": at_work.during(lambda: run_jobs(model, pages, folder, prompts, 2)),
        "decoding": at_work.during(
            lambda: run_jobs(model, pages, folder, [prompt[:1] for prompt in prompts], 7)
        ),
        "groups": cluster._epoch,
    }
    cluster.close()
    return result


def mixed(folder: str) -> float:
    """Run two stages, with jobs that decode between the long chunks of others' prompts."""
    at_work = AtWork(LONG_CHUNKS)
    model = Model(folder, max_input_len=CHUNK)
    pages = PagedCache(model, 1024, page=CHUNK)
    cluster = cluster_of("24M", "24M", timeout=10.0)
    model.load_autosplit(pages, objective="balance", cluster=cluster)
    prompts = [[30 + i, *range(20, 20 + 5 * CHUNK - 1)] for i in range(4)]
    number = at_work.during(lambda: run_jobs(model, pages, folder, prompts, 20))
    cluster.close()
    return number


def run_jobs(model, pages, folder, prompts, new: int) -> None:
    options = {"settings": SamplingParams.greedy(), "max_new_tokens": new}
    with Engine(model, pages, Tokenizer(folder), chunk=CHUNK) as engine:
        engine.run([Job(prompt=prompt, **options) for prompt in prompts])


@pytest.mark.sweep(0)
def test_eight_stages_compute_at_the_same_time(folder):
    found = run_sim(busy, "", args=[folder])
    assert (found["stages"], found["groups"], found["alone"]) == (STAGES, 0, 1)
    assert min(found["prompt"], found["jobs"], found["decoding"]) > 1.5


def test_host_decodes_while_another_runs_a_chunk(folder):
    assert run_sim(mixed, "", args=[folder]) > 1.3
