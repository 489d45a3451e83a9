"""Hosts that come back, and hosts that have no copy of the checkpoint."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from cluster_hosts import cluster_of
from simproc import run_sim
from tiny import llama, reference, save

from exkv import Cache, KVCache, Model
from exkv.cluster import ClusterModel

PROMPT = torch.randint(3, 320, (1, 20), generator=torch.Generator().manual_seed(3))
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = reference(llama(num_hidden_layers=6, hidden_size=64, intermediate_size=96))
    return str(save(model, tmp_path_factory.mktemp("model")))


def alone(folder: str) -> Model:
    model = Model(folder, max_input_len=16)
    model.load(devices=["cpu"])
    return model


class Decoding:
    """A greedy generation, a token a call."""

    def __init__(self, model: Model, cache: KVCache, prompt: torch.Tensor) -> None:
        self._model, self._cache = model, cache
        self.tokens = [int(model.forward(prompt, cache, last_id_only=True)[0, -1].argmax())]

    def go(self, steps: int) -> None:
        for _ in range(steps):
            ids = torch.tensor([self.tokens[-1:]])
            logits = self._model.forward(ids, self._cache, last_id_only=True)
            self.tokens.append(int(logits[0, -1].argmax()))


def decoded(model: Model) -> list[list[int]]:
    """What a cache, and a fork of it, are to give."""
    cache = Cache(model, 64, 1)
    first = Decoding(model, cache, PROMPT)
    second = Decoding(model, cache.fork(1, 60), PROMPT[:, :3])
    for each in (first, second):
        each.go(STEPS)
    return [first.tokens, second.tokens]


def wait_for(model: ClusterModel, *hosts: str) -> None:
    deadline = time.monotonic() + 30
    while sorted(model.cluster.waiting) != sorted(hosts):
        assert time.monotonic() < deadline, model.cluster.waiting
        time.sleep(0.01)


# Scenarios ----------------------------------------------------------------------------------


def comes_back(folder: str) -> dict[str, object]:
    """A host that is killed, started again and taken in again, in the middle of generations of a
    cache and of its fork; weights of it and of another one are sent by the driver."""
    expected = decoded(alone(folder))
    cluster = cluster_of("24M", "24M", "24M", timeout=5.0, streamed=["host1", "host2"], spares=1)
    model = ClusterModel(folder, cluster, max_input_len=16)
    cache = Cache(model, 64, 1)
    model.load_autosplit(cache, objective="balance")
    places = dict(model.host_map)
    measured = [row for host in model.measured for row in host]
    first = Decoding(model, cache, PROMPT)
    second = Decoding(model, cache.fork(1, 60), PROMPT[:, :3])
    first.go(2)
    os.kill(cluster.launcher.pids["host1"], signal.SIGKILL)
    second.go(3)
    result = {"without": "host1" not in model.host_map.values() and cluster.gone == ["host1"]}
    result["started"] = cluster.restore() == ["host1"]
    wait_for(model, "host1")
    result["taken"] = model.replan() == ["host1"] and cluster.waiting == []
    result["places"] = model.host_map == places
    first.go(STEPS - 2)
    second.go(STEPS - 3)
    result["same"] = [first.tokens, second.tokens] == expected
    result["measured"] = all(row["measured"] == row["predicted"] for row in measured)
    model.unload()
    result["clean"] = [list(each.values()) for each in cluster.ask("allocated")] == [[0], [0]]
    cluster.close()
    return result


def dies_while_others_recover(folder: str) -> dict[str, object]:
    """A second host dies while caches are computed again, or units moved, for the first."""
    result = {}
    expected = decoded(alone(folder))[0]
    for during in ("_rebuild", "_hand_out"):
        model = ClusterModel(folder, cluster_of(*["24M"] * 4, timeout=5.0), max_input_len=16)
        pids, original = model.cluster.launcher.pids, getattr(model, during)
        cache = Cache(model, 64, 1)
        model.load_autosplit(cache, objective="balance")
        decoding = Decoding(model, cache, PROMPT)
        decoding.go(3)

        def dies(*args, _pids=pids, _original=original):
            if "host2" in _pids:
                os.kill(_pids["host2"], signal.SIGKILL)
            return _original(*args)

        setattr(model, during, dies)
        os.kill(pids["host1"], signal.SIGKILL)
        decoding.go(STEPS - 3)
        result[during] = decoding.tokens == expected
        result[f"{during} gone"] = sorted(model.cluster.gone) == ["host1", "host2"]
        model.cluster.close()
    return result


# Tests --------------------------------------------------------------------------------------


def test_a_host_that_comes_back_is_taken_in_and_generations_go_on_with_the_same_tokens(folder):
    found = run_sim(comes_back, "", args=[folder])
    assert found == dict.fromkeys(found, True)


def test_a_host_that_dies_during_a_recovery_changes_no_token(folder):
    found = run_sim(dies_while_others_recover, "", args=[folder])
    assert found == dict.fromkeys(found, True)
