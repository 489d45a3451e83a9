"""A server over hosts: changing models, planning meanwhile, and readmitting hosts while idle."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from cluster_hosts import cluster_of
from simproc import run_sim
from tiny import llama, reference, save, save_tokenizer

from exkv import Job, SamplingParams
from exkv.cluster import Cluster, ClusterModel
from exkv.model import Model
from exkv.serve import serving as module
from exkv.serve.answers import RequestError
from exkv.serve.hosting import ModelFolder, Prepared, ServeOptions
from exkv.serve.serving import Serving

OPTIONS = ServeOptions(max_seq_len=128, page=16, chunk_size=16, objective="balance")
JOB = Job(prompt=list(range(20, 60)), settings=SamplingParams.greedy(), max_new_tokens=8)


@pytest.fixture(scope="module")
def top(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, layers in (("first", 4), ("second", 2)):
        shape = llama(num_hidden_layers=layers, hidden_size=64, intermediate_size=96)
        shape.eos_token_id = None
        save_tokenizer(save(reference(shape, seed=layers), folder / name))
    return str(folder)


def loaded(path: Path, thread: ThreadPoolExecutor, make=Model):
    prepared = Prepared(path, OPTIONS, make=make)
    for _ in prepared.load():
        pass
    return prepared.serve(thread)


def alone(top: Path) -> dict[str, list[int]]:
    """The job's tokens by each model on one machine."""
    found = {}
    for name in ("first", "second"):
        one = loaded(top / name, ThreadPoolExecutor(1))
        handle = one.engine.submit(JOB)
        handle.result()
        found[name] = handle.tokens
        one.unload()
    return found


async def ask(serving: Serving) -> list[int]:
    tokens: list[int] = []
    async for found in serving.events(serving.model, [JOB]):
        tokens += [event.token for _, event in found if event.token is not None]
    return tokens


async def change(serving: Serving, top: Path, name: str) -> list[dict]:
    prepared = await serving.prepared(lambda: serving.prepare(top / name, OPTIONS, name))
    return [step async for step in serving.load(prepared, now=False)]


async def until(happened) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.02)


async def play(serving: Serving, cluster: Cluster, top: Path) -> dict[str, object]:
    """The clients' results; each client waits for the one before."""
    readmitting = asyncio.create_task(serving.readmit_hosts())
    found: dict[str, object] = {"first": await ask(serving)}
    plan = serving.prepare(top / "second", OPTIONS, "second").plan(serving.leaving)
    found["planned over"] = {unit["host"] for unit in plan["plans"]["model"]["units"]}
    os.kill(cluster.launcher.pids["host1"], signal.SIGKILL)
    found["without host1"] = await ask(serving)
    cluster.restore()
    await until(lambda: "host1" in cluster.names)
    found["with host1"] = await ask(serving)
    said = await change(serving, top, "second")
    found["finished"] = said[-1]["status"]
    found["second"] = await ask(serving)
    found["hosts"] = set(serving.loaded.models[0].host_map.values())
    os.kill(cluster.launcher.pids["host2"], signal.SIGKILL)  # while the server is idle
    await serving.unload(now=False)
    try:
        await ask(serving)
    except RequestError as error:
        found["nothing"] = str(error)
    found["finished again"] = (await change(serving, top, "first"))[-1]["status"]
    found["first again"] = await ask(serving)
    readmitting.cancel()
    return found


def served(folder: str) -> dict[str, object]:
    module._POLL, top = 0.05, Path(folder)
    want = alone(top)
    cluster = cluster_of("24M", "24M", "24M", timeout=5.0, spares=1)
    make, thread = partial(ClusterModel, cluster=cluster), ThreadPoolExecutor(1)
    serving = Serving(
        loaded(top / "first", thread, make), folder=ModelFolder(top), thread=thread, make=make
    )
    found = asyncio.run(play(serving, cluster, top))
    serving.close()
    cluster.close()
    first = ("first", "without host1", "with host1", "first again")
    return {
        "tokens": [found[name] == want["first"] for name in first],
        "second": found["second"] == want["second"] != want["first"],
        "planned over": sorted(found["planned over"]),
        "hosts": sorted(found["hosts"]),
        "said": [found["finished"], found["nothing"][:18], found["finished again"]],
    }


def test_server_over_hosts_changes_models_and_readmits_hosts(top):
    found = run_sim(served, "", args=[top])
    assert found == {
        "tokens": [True] * 4,
        "second": True,
        "planned over": ["", "host1", "host2"],
        "hosts": ["driver", "host1", "host2"],
        "said": ["finished", "no model is loaded", "finished"],
    }
