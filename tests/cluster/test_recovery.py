"""A host that dies or stops in the middle of a generation: the others continue with the same
tokens, or there is one clear error and nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import torch
from cluster_hosts import PROMPT, alone, cluster_of
from simproc import run_sim
from tiny import llama, reference, save

from exkv import Cache, Cache4bit, KVCache, Model, SlidingWindowCache
from exkv.cluster import ClusterError, ClusterModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = reference(llama(num_hidden_layers=6, hidden_size=64, intermediate_size=96))
    return str(save(model, tmp_path_factory.mktemp("model")))


class Dying:
    """Sends a signal to a host's process before a call of the model, counted from 0."""

    def __init__(self, model: ClusterModel, host: str, call: int, number: int) -> None:
        pid = model.cluster.launcher.pids[host]
        forward, calls = model._forward_once, iter(range(1000))

        def counted(*args):
            if next(calls) == call:
                os.kill(pid, number)
            return forward(*args)

        model._forward_once = counted


def on_hosts(folder: str, sizes: list[str], timeout: float) -> ClusterModel:
    return ClusterModel(folder, cluster_of(*sizes, timeout=timeout), max_input_len=16)


# Scenarios ----------------------------------------------------------------------------------


def go_on(folder: str, host: str, call: int, number: int, beams: int) -> dict[str, object]:
    """A generation in which a host gets a signal half-way; then another one dies, too."""
    reference_model = alone(folder)
    model = on_hosts(folder, ["24M"] * 3, timeout=2.0)
    kept = Cache(model, 64, 1)
    model.load_autosplit(kept, objective="balance")
    other = Cache4bit(model, 64, 1)
    ring = SlidingWindowCache(model, 64, 1, window_length=16)
    expected = [
        said(reference_model, kind(reference_model, 64, 1, **extra))
        for kind, extra in ((Cache4bit, {}), (SlidingWindowCache, {"window_length": 16}))
    ]
    begun = [model.forward(PROMPT, cache, last_id_only=True) for cache in (other, ring)]
    options = {"do_sample": False, "max_new_tokens": 8, "num_beams": beams}
    want = reference_model.generate(PROMPT, **options).tolist()
    Dying(model, host, call, number)
    got = model.generate(PROMPT, cache=None if beams > 1 else kept, **options).tolist()
    groups = model.cluster._epoch
    rest = [go(model, cache, x) for cache, x in zip((other, ring), begun, strict=True)]
    result = {
        "same": got == want,
        "others": rest == expected,
        "gone": model.cluster.gone == [host] and host not in model.host_map.values(),
        "once": groups == 1,
    }
    model.unload()
    result["clean"] = torch.accelerator.memory_allocated(0) == 0
    model.cluster.close()
    return result


def said(model: Model, cache: KVCache) -> list[int]:
    return go(model, cache, model.forward(PROMPT, cache, last_id_only=True))


def go(model: Model, cache: KVCache, logits: torch.Tensor, steps: int = 5) -> list[int]:
    found = []
    for _ in range(steps):
        found.append(int(logits[0, -1].argmax()))
        logits = model.forward(torch.tensor([[found[-1]]]), cache, last_id_only=True)
    return found


def nothing_fits(folder: str) -> dict[str, object]:
    model = on_hosts(folder, ["600K", "1M", "1M"], timeout=2.0)
    cache = Cache(model, 32, 1)
    model.load_autosplit(cache)
    Dying(model, "host2", 3, signal.SIGKILL)
    threads = threading.active_count()
    try:
        model.generate(PROMPT, cache=cache, max_new_tokens=8, do_sample=False)
        said = ""
    except ClusterError as error:
        said = str(error)
    left = [torch.accelerator.memory_allocated(0), *model.cluster.ask("allocated")]
    result = {"said": said, "left": left, "loaded": model.loaded, "names": model.cluster.names}
    result["threads"] = threading.active_count() - threads
    model.cluster.close()
    return result


def dies_while_loading(folder: str) -> dict[str, object]:
    model = on_hosts(folder, ["24M"] * 3, timeout=5.0)
    cache = Cache(model, 32, 1)
    pid = model.cluster.launcher.pids["host2"]
    try:
        model.load_autosplit(
            cache, objective="balance", callback=lambda *_: os.kill(pid, signal.SIGSTOP)
        )
        said = ""
    except ClusterError as error:
        said = str(error)
    left = [torch.accelerator.memory_allocated(0), *model.cluster.ask("allocated")]
    model.load_autosplit(cache)
    tokens = model.generate(PROMPT, cache=cache, max_new_tokens=4, do_sample=False).tolist()
    expected = alone(folder).generate(PROMPT, max_new_tokens=4, do_sample=False).tolist()
    model.cluster.close()
    return {"said": said, "left": left, "same": tokens == expected}


def driver_dies(folder: str) -> bool:
    """Whether the hosts of a driver end when it is killed in the middle of a load."""
    reading, writing = os.pipe()
    if not (driver := os.fork()):
        model = on_hosts(folder, ["24M"] * 3, timeout=5.0)
        model.load_autosplit(Cache(model, 32, 1), objective="balance")
        os.write(writing, b"%d %d" % tuple(model.cluster.launcher.pids.values()))
        time.sleep(100)
    hosts = [int(pid) for pid in os.read(reading, 100).split()]
    os.kill(driver, signal.SIGKILL)
    os.waitpid(driver, 0)
    deadline = time.monotonic() + 20
    while any(map(alive, hosts)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(hosts) == 2 and not any(map(alive, hosts))


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for is a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "beams", "call"),
    [
        (signal.SIGSTOP, 1, 0),  # in the middle of a prompt's chunks
        (signal.SIGKILL, 3, random.Random(5).randint(1, 7)),
    ],
)
def test_generations_continue_with_the_same_tokens_when_a_host_dies_or_stops(
    folder, number, beams, call
):
    found = run_sim(go_on, "", args=[folder, f"host{1 + call % 2}", call, number, beams])
    assert found == dict.fromkeys(found, True)


def test_recovery_without_room_is_one_error_and_frees_every_device(folder):
    found = run_sim(nothing_fits, "", args=[folder])
    assert "host2 is gone" in found["said"] and "no room" in found["said"]
    assert found["left"] == [0, {"sim:0": 0}] and not found["loaded"]
    assert found["names"] == ["driver", "host1"] and found["threads"] == 0


def test_hosts_exit_when_the_driver_is_killed(folder):
    assert run_sim(driver_dies, "", args=[folder])


def test_error_names_a_host_that_stops_during_a_load_and_others_can_reload(folder):
    found = run_sim(dies_while_loading, "", args=[folder])
    assert "host2 is gone" in found["said"]
    assert found["left"] == [0, {"sim:0": 0}] and found["same"]
