"""Sixteen clients of a server over three stages, one of which dies: every answer is the one that
its request gets alone, and nothing is leaked."""

from __future__ import annotations

import asyncio
import os
import signal

import uvicorn
from bench.serve_load import (
    DEMO,
    Outcome,
    Settings,
    all_clients,
    requests_of,
    split_evenly,
    texts_alone,
)
from cluster_hosts import cluster_of
from simproc import run_sim

from exkv import Engine, Model, PagedCache, SamplingParams, Tokenizer
from exkv.serve.app import build
from exkv.serve.hosting import ServedModel
from exkv.serve.serving import Serving

STAGES = 3
LOAD = Settings(seconds=2.0, clients=16, requests=9, prompt=100, new=12, tokens=1024, page=32)


def soak() -> dict[str, object]:
    cluster = cluster_of(*[""] * STAGES, timeout=10.0)
    bodies = requests_of(LOAD)
    texts = texts_alone(LOAD, bodies)
    alone, model = (Model(DEMO, max_input_len=256) for _ in range(2))
    pages = [PagedCache(each, LOAD.cache, page=LOAD.page) for each in (alone, model)]
    alone.load_autosplit(pages[0], devices=["cpu"])
    cluster.spread(model)
    model.load(split_evenly(alone.plan, STAGES))
    stages = len(set(model.host_map.values()))
    engine = Engine(model, pages[1], Tokenizer(DEMO))
    usual = SamplingParams.recommended(DEMO)
    out, files = Outcome(), []

    async def die() -> None:
        await asyncio.sleep(LOAD.seconds / 2)
        files.append(_files())
        os.kill(cluster.launcher.pids["host1"], signal.SIGKILL)

    async def serve() -> None:
        app = build(Serving(ServedModel(engine=engine, name="demo", usual=usual)))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        asked = list(zip(bodies, texts, strict=True))
        await asyncio.gather(all_clients(port, LOAD, asked, out), die())
        server.should_exit = True
        await serving

    asyncio.run(serve())
    while engine.busy:
        engine.iterate()
    result = {
        "stages": stages,
        "gone": cluster.gone,
        "bad": {kind: count for kind, count in out.counts.items() if kind in ("wrong", "lost")},
        "right": out.counts["right"],
        "pages": engine.pool.pages - engine.pool.available,
        "files": files[0] >= _files(),
    }
    engine.close()
    cluster.close()
    return result


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_clients_over_three_stages_lose_nothing_when_a_host_dies():
    found = run_sim(soak, "")
    assert found.pop("right") > 5
    assert found == {"stages": 3, "gone": ["host1"], "bad": {}, "pages": 0, "files": True}
