"""What only a machine with several GPUs can show, for ``multi.sh``.

``python tests/gpu/cards.py PART DEVICE OUT.json``, as ``measure.py``: DEVICE is the first card, and
the next one is the second. ``sim:0`` with ``EXKV_SIM_DEVICES=2G,2G`` tries the script itself.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from bench.shapes import SHAPES, write_checkpoint
from hostile_calls import MAKERS, WITHOUT_CUDA, Maker, tensors_in
from measure import Row, is_gpu, main, part, seconds, wrong
from torch.utils._pytree import tree_map_only

from exkv import Cache, Model, sim
from exkv.models.graph_run import GraphRun

STEPS = 32
#: Holds all but 20 MiB of GPU 0, as another program does, until its input ends.
FILLER = """
import sys, torch
torch.zeros(1, device="cuda:0")
held = []
size = 1 << 30
while size >= 1 << 20:
    if torch.cuda.mem_get_info(0)[0] - size < 20 << 20:
        size //= 2
        continue
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda:0"))
    except torch.OutOfMemoryError:
        size //= 2
print("full", flush=True)
sys.stdin.read()
"""


def second(device: torch.device) -> torch.device:
    return torch.device(device.type, device.index + 1)


@contextmanager
def checkpoint(device: torch.device) -> Iterator[Path]:
    shape = SHAPES["150M" if is_gpu(device) else "tiny"]
    with tempfile.TemporaryDirectory() as folder:
        yield write_checkpoint(Path(folder), shape, torch.float32)


def greedy(folder: Path, **options) -> tuple[list[int], set[str], float]:
    """Tokens of a model that is loaded so, where its units are, and seconds a step."""
    model = Model(folder, max_input_len=64)
    cache = Cache(model, 256)
    model.load(**options)
    where = set(map(str, model.device_map.values()))
    tokens = model.generate([[5, 6, 7]], cache=cache, max_new_tokens=STEPS)[0].tolist()
    cache.crop(8)
    ids = torch.tensor([[9]])
    first = next(iter(model.device_map.values()))
    taken = seconds(lambda: (model.forward(ids, cache), cache.trim(1)), first)
    model.unload()
    return tokens, where, taken


def same(name: str, found: list[int], expected: list[int]) -> Row:
    if found != expected:
        wrong(f"{name}: other tokens than on the host")
    return name, "tokens as on the host", float(len(expected)), float(_common(found, expected))


def _common(found: list[int], expected: list[int]) -> int:
    pairs = zip(found, expected, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(expected))


@part
def alone(device: torch.device) -> Iterator[Row]:
    """The second card alone: its tokens, and no context of this process on the first."""
    with checkpoint(device) as folder:
        expected, *_ = greedy(folder, devices=["cpu"])
        found, where, _ = greedy(folder, devices=[second(device)])
    yield same(f"{second(device)} alone", found, expected)
    contexts = _contexts() if is_gpu(device) else sim.touches(device.index)
    if where != {str(second(device))} or contexts > is_gpu(device):
        wrong(f"units are on {where}, and there are {contexts} contexts")
    yield "GPUs with a context of this process", "", float(is_gpu(device)), float(contexts)


def _contexts() -> int:
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return sum(line.split(",")[0].strip() == str(os.getpid()) for line in lines)


@part
def filled(device: torch.device) -> Iterator[Row]:
    """The first card filled by another program: devices=None takes the second, and says why."""
    with checkpoint(device) as folder, _filled(device):
        found, where, _ = greedy(folder)
        expected, *_ = greedy(folder, devices=["cpu"])
    yield same("beside a full card", found, expected)
    if str(device) in where or "cpu" in where:
        wrong(f"beside a full {device}, units are on {where}")
    yield "units on the full card or the host", "", 0.0, float(bool({str(device), "cpu"} & where))


@contextmanager
def _filled(device: torch.device) -> Iterator[None]:
    if not is_gpu(device):
        sim.refuse(device.index, "CUDA error: out of memory")
        yield
        sim.refuse(device.index, None)
        return
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", FILLER], **pipes) as program:
        assert program.stdout.readline() == "full\n"
        yield
        program.stdin.close()


@part
def hops(device: torch.device) -> Iterator[Row]:
    """Half of the layers on each card: tokens, and milliseconds a step beside one card's."""
    with checkpoint(device) as folder:
        expected, *_ = greedy(folder, devices=["cpu"])
        _, _, one = greedy(folder, devices=[device])
        whole = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**30
        found, where, both = greedy(
            folder, devices=[device, second(device)], gpu_split=[0.7 * whole, 2 * whole]
        )
    if len(where) != 2:
        wrong(f"all units are on {where}")
    yield same("over two cards", found, expected)
    yield "over two cards", "ms a step", one * 1e3, both * 1e3


@part
def graphs(device: torch.device) -> Iterator[Row]:
    """Captured steps on both cards, of one model after the other."""
    if not is_gpu(device):
        return
    replays: list[str] = []
    call = GraphRun.__call__

    def counted(run, *args):
        replays.append(str(run.device))
        return call(run, *args)

    GraphRun.__call__ = counted
    try:
        with checkpoint(device) as folder:
            expected, *_ = greedy(folder, devices=["cpu"])
            for card in (device, second(device)):
                found, *_ = greedy(folder, devices=[card])
                yield same(f"captured on {card}", found, expected)
                if replays.count(str(card)) < STEPS - 2:
                    wrong(f"{replays.count(str(card))} of {STEPS} steps were captured on {card}")
    finally:
        GraphRun.__call__ = call


@part
def unlike(device: torch.device) -> Iterator[Row]:
    """Every op on the second card with the first as the current one, beside the same call with the
    second as current: bit by bit, whatever either card is."""
    other = second(device)
    for name in sorted(set(MAKERS) - WITHOUT_CUDA):
        apart = 0
        for seed in range(20 if is_gpu(device) else 2):
            made = []
            for current in (device, other):
                torch.manual_seed(seed)
                given = MAKERS[name](Maker(random.Random(f"{name} {seed}")))
                args = tree_map_only(torch.Tensor, lambda t: t.clone().to(other), given)
                with torch.accelerator.device_index(current.index):
                    result = getattr(torch.ops.exkv, name)(*args)
                results = [result] if isinstance(result, torch.Tensor) else result
                made.append([t.cpu() for t in (tensors_in(args) if result is None else results)])
            apart += not all(
                torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*made, strict=True)
            )
        if apart:
            wrong(f"{name} depends on the current device")
        yield name, "calls that depend on the current device", 0.0, float(apart)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], torch.device(sys.argv[2]), Path(sys.argv[3])))
