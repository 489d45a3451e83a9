"""A model over hosts beside the same one on one machine, bit by bit, for every number of stages,
way to split, kind of cache and batch: ``python -m tests.bench cluster-product``.

A tiny random model in float32, hosts with simulated devices. Of each combination all logits of a
prompt in chunks and of two steps are compared, and the tokens of beams; of each load, on every
host, what was planned with what was measured. The tests run some of the combinations, in which any
two choices meet: :func:`cells`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from exkv import CACHES, KVCache, Model, PagedCache, sim
from exkv.cluster import Cluster, ClusterModel
from exkv.planning import Scenario, Workload, workspace
from exkv.planning.solve import plans_for

from .harness import apart, setting
from .shapes import Shape, write_checkpoint

STAGES, WAYS = (2, 3, 8), ("autosplit", "split")
BATCHES = ("one row", "eight rows", "ragged rows", "beams")
KINDS = (*CACHES, "paged")
SHAPE = Shape(vocab=96, hidden=64, intermediate=256, layers=8, heads=4, kv_heads=2, head_dim=16)
ROWS, TOKENS, CHUNK, MEMORY = 8, 48, 16, "24M"
_IDS = torch.randint(3, SHAPE.vocab, (ROWS, 20), generator=torch.Generator().manual_seed(3))
_RAGGED = [20, 3, 17, 9, 1, 16, 12, 5]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The outcome of some combinations.

    Attributes:
        same: combinations that gave the same bits.
        wrong: the others, in words.
        loads: hosts on which a load was measured.
        unequal: hosts where the measured bytes differ from the planned ones.
    """

    same: int
    wrong: list[str]
    loads: int
    unequal: list[str]


def cells(stages: int) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Of so many stages each kind of cache with one way and two batches, so that over all numbers
    of stages any two choices meet."""
    for number, kind in enumerate(KINDS, start=STAGES.index(stages)):
        yield WAYS[number // 2 % 2], kind, (BATCHES[number % 4], BATCHES[(number + 2) % 4])


def cache_of(kind: str, model: Model) -> KVCache:
    if kind == "paged":
        return PagedCache(model, TOKENS, ROWS, page=CHUNK)
    return CACHES[kind](model, TOKENS, ROWS)


def outputs(model: Model, cache: KVCache, batch: str) -> list[torch.Tensor]:
    """All logits of a prompt and some steps; for beams the tokens."""
    cache.reset()
    if batch == "beams":
        prompts = [_IDS[0].tolist(), _IDS[1, :9].tolist()]
        options = {"num_beams": 3, "do_sample": False, "max_new_tokens": 4}
        return [model.generate(prompts, cache=cache, **options)]
    ids = _IDS[: 1 if batch == "one row" else ROWS]
    lens = _RAGGED if batch == "ragged rows" else None
    found = [model.forward(ids, cache, new_lens=lens, last_id_only=True).cpu()]
    for _ in range(2):
        tokens = found[-1][:, -1].argmax(-1, keepdim=True)
        found.append(model.forward(tokens, cache, last_id_only=True).cpu())
    return found


def load(model: ClusterModel, way: str) -> None:
    """Load over all hosts evenly: automatically, or by an equal manual split."""
    if way == "autosplit":
        model.load_autosplit(model.caches[0], objective="balance")
        return
    budgets = model.budgets()
    workload = Workload.of(model, model.caches)
    scenario = Scenario(workloads=(workload,), budgets=tuple(budgets), objective="balance")
    (plan,) = plans_for(scenario)
    totals = {ledger.place: ledger.total for ledger in plan.ledgers}
    model.load([(totals[budget.place] + 1) / 2**30 for budget in budgets])


def compare(
    model: ClusterModel, alone: Model, way: str, kinds: Mapping[str, Sequence[str]]
) -> Found:
    """One load, with a cache of each kind for its batches."""
    caches = {kind: cache_of(kind, model) for kind in kinds}
    load(model, way)
    stages, wrong = len(model.cluster.names), []
    if len(set(model.host_map.values())) != stages:
        wrong.append(f"{way} over {stages} hosts leaves one empty: {model.host_map}")
    for kind, batches in kinds.items():
        own = cache_of(kind, alone)
        for batch in batches:
            pairs = zip(
                outputs(model, caches[kind], batch), outputs(alone, own, batch), strict=True
            )
            if not all(torch.equal(one, other) for one, other in pairs):
                wrong.append(f"{stages} stages, {way}, {kind}, {batch}")
    hosts = zip(model.cluster.names[1:], model.measured, strict=True)
    rows = [(host, row) for host, rows in hosts for row in rows]
    unequal = [
        f"{stages} stages, {way}, {', '.join(kinds)}: {host} {row}"
        for host, row in rows
        if row["measured"] != row["predicted"]
    ]
    model.unload()
    total = sum(map(len, kinds.values()))
    return Found(same=total - len(wrong), wrong=wrong, loads=len(rows), unequal=unequal)


def predict(folder: str | Path) -> None:
    """Find out what calls take; from now on all models of this process and of its forks know, which
    are to be of this config."""
    known: dict[object, Any] = {}
    workspace._predicted = SimpleNamespace(setdefault=lambda rotary, none: known)
    model = Model(folder, max_input_len=CHUNK)
    caches = [cache_of(kind, model) for kind in KINDS]
    for device_type in ("cpu", "sim"):
        workspace.predict_workspaces(model, Workload.of(model, caches).promise, device_type)


def models(folder: str | Path, cluster: Cluster) -> tuple[ClusterModel, Model]:
    """Over the hosts, and on this machine's CPU."""
    alone = Model(folder, max_input_len=CHUNK)
    alone.load(devices=["cpu"])
    return ClusterModel(folder, cluster, max_input_len=CHUNK), alone


def everything(folder: Path, stages: int) -> list[dict[str, Any]]:
    """All combinations of this number of stages, with a load for each way and kind."""
    sim.enable(MEMORY)
    with Cluster.local([MEMORY] * (stages - 1)) as cluster:
        model, alone = models(folder, cluster)
        return [
            asdict(compare(model, alone, way, {kind: BATCHES})) for way in WAYS for kind in KINDS
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is compared."""

    stages: tuple[int, ...] = setting(STAGES, "numbers of stages")


def measure(settings: Settings) -> dict[str, Any]:
    """Number of stages -> the outcome of its combinations."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as top:
        folder = write_checkpoint(Path(top), SHAPE, torch.float32)
        return {"found": {stages: apart(everything, folder, stages) for stages in settings.stages}}


def report(result: dict[str, Any]) -> list[str]:
    """Counts; differences are in :func:`wrong`."""
    lines = []
    for stages, found in result["found"].items():
        same, loads = (sum(each[key] for each in found or []) for key in ("same", "loads"))
        wrong, unequal = (sum(len(e[k]) for e in found or []) for k in ("wrong", "unequal"))
        lines.append(
            f"{stages} stages: {same} combinations of {len(KINDS)} kinds of cache with the bits of "
            f"one machine, {wrong} without; measured as planned on {loads - unequal} of {loads} "
            "hosts' loads."
        )
    return lines


def wrong(result: dict[str, Any]) -> list[str]:
    """Combinations and hosts that differ, and numbers of stages that did not finish."""
    texts = [f"{stages} stages: nothing" for stages, found in result["found"].items() if not found]
    every = [each for found in result["found"].values() for each in found or []]
    return texts + [text for each in every for text in (*each["wrong"], *each["unequal"])]


QUICK = {"stages": (2,)}
