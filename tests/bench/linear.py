"""How fast linear layers read their weights in decoding: ``python -m tests.bench linear``.

torch's ``F.linear`` and exkv's op on the same floats, and exkv on packed weights: integers in
groups, and blocks as GGUF files have them. Each figure is the rate at which weights are read, as a
share of what the memory probe reads before and after, and arithmetic, 2 x rows x outputs x inputs
a product. Enough weights of a size are read in turn that none is in cache when its turn comes.
With ``--threads 1`` time is the thread's own, so that neighbours who take the processor count for
nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from exkv.weights.floats import FLOATS
from exkv.weights.format import Tensors
from exkv.weights.gguf import FORMATS
from exkv.weights.methods import register
from exkv.weights.on_load import BITS, OnLoad

from .harness import (
    MemoryProbe,
    Sample,
    disturbed,
    in_turns,
    machine,
    markdown,
    ratios,
    seconds,
    setting,
    show,
    spread,
)
from .shapes import DTYPES, SHAPES, Shape

PEER, GROUP = "torch", 64
KINDS = (PEER, *DTYPES, *BITS, *FORMATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    shapes: tuple[str, ...] = setting(("150M", "1.1B"), "models", SHAPES)
    sizes: int = setting(9, "of a model's matrices, the largest")
    kinds: tuple[str, ...] = setting(
        ("bf16", "int8", "int4", "Q8_0", "Q4_0", "Q4_K", "Q6_K"), "", KINDS
    )
    rows: tuple[int, ...] = setting((1, 2, 4, 8, 12, 16), "of x, e.g. tokens of a batch")
    dtype: str = setting("bf16", "of x and torch's weights", DTYPES)
    threads: int = setting(0, "0 for torch's own number")
    megabytes: int = setting(128, "of weights that a sample reads at least")
    rounds: int = 5


def projections(shape: Shape) -> list[tuple[int, int]]:
    """(out, in) of a model's linear layers, each once, the largest first."""
    tensors = {name: size for name, size in shape.tensors().items() if "embed" not in name}
    return sorted({size for size in tensors.values() if len(size) == 2}, reverse=True)


Call = Callable[[Tensor, Tensors], Tensor]


def made(kind: str, size: tuple[int, int], seed: int, dtype: torch.dtype) -> tuple[Call, Tensors]:
    """A random matrix of a kind, and what multiplies by it."""
    generator = torch.Generator().manual_seed(seed)
    if kind == PEER or kind in DTYPES:
        dtype = DTYPES.get(kind, dtype)
        weight = torch.randn(size, generator=generator).to(dtype)
        call = FLOATS[dtype].linear if kind != PEER else _torch
        return call, {"weight": weight}
    if kind in FORMATS:
        from packers.blocks import random_blocks

        blocks = random_blocks(kind, size, 1e-3, generator)
        return FORMATS[kind].linear, FORMATS[kind].convert({"weight": blocks})
    format = register(OnLoad(bits=BITS[kind], group=GROUP, scale=torch.float16))
    codes, scale = format.layout(size).values()
    return format.linear, {
        "codes": torch.randint(256, codes[0], generator=generator, dtype=torch.uint8),
        "scale": torch.rand(scale[0], generator=generator).to(scale[1]),
    }


def _torch(x: Tensor, tensors: Tensors, bias: None) -> Tensor:
    return F.linear(x, tensors["weight"], bias)


class Held:
    """Matrices of one size and kind, as many as take ``megabytes``, one at least."""

    def __init__(self, kind: str, size: tuple[int, int], settings: Settings) -> None:
        dtype = DTYPES[settings.dtype]
        self.call, first = made(kind, size, 0, dtype)
        nbytes = sum(part.nbytes for part in first.values())
        others = range(1, -(-(settings.megabytes << 20) // nbytes))
        self.matrices = [first, *(made(kind, size, seed, dtype)[1] for seed in others)]
        self.nbytes = nbytes * len(self.matrices)
        self.timer = time.thread_time if settings.threads == 1 else time.perf_counter

    def seconds(self, x: Tensor, index: int) -> float:
        """For x by all of them; the best of three."""
        return seconds(partial(self._all, x), 3, self.timer)

    @torch.no_grad()
    def _all(self, x: Tensor) -> None:
        for tensors in self.matrices:
            self.call(x, tensors, None)


def cases(size: tuple[int, int], settings: Settings, probe: MemoryProbe) -> list[dict[str, Any]]:
    """Every kind and number of rows with matrices of one size, in turns."""
    held = {kind: Held(kind, size, settings) for kind in dict.fromkeys((PEER, *settings.kinds))}
    found = []
    for rows in settings.rows:
        x = torch.randn(rows, size[1]).to(DTYPES[settings.dtype])
        ways = {kind: partial(each.seconds, x) for kind, each in held.items()}
        samples = list(in_turns(ways, settings.rounds, probe, warm=1))
        for kind, each in held.items():
            own = [sample for sample in samples if sample.way == kind]
            figures = _figures(own, each, 2 * rows * size[0] * size[1])
            base = [
                sample.value / len(held[PEER].matrices) for sample in samples if sample.way == PEER
            ]
            took = [sample.value / len(each.matrices) for sample in own]
            about = {"outputs": size[0], "inputs": size[1], "rows": rows, "kind": kind}
            found.append(about | figures | {"ratio": ratios(base, took)})
    return found


def _figures(samples: Sequence[Sample], held: Held, operations: int) -> dict[str, Any]:
    share = [held.nbytes / sample.value / sample.limit for sample in samples]
    speed = [1e-9 * operations * len(held.matrices) / sample.value for sample in samples]
    return {
        "gflops": spread(speed),
        "share": spread(share),
        "disturbed": len(disturbed(samples)),
        "samples": len(samples),
    }


def measure(settings: Settings) -> dict[str, Any]:
    """Every figure."""
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads or before)
    try:
        probe = MemoryProbe()
        each = (projections(SHAPES[shape])[: settings.sizes] for shape in settings.shapes)
        sizes = dict.fromkeys(itertools.chain(*each))
        found = [case for size in sizes for case in cases(size, settings, probe)]
        return {"machine": machine(), "cases": found}
    finally:
        torch.set_num_threads(before)


def report(result: dict[str, Any]) -> list[str]:
    """A row for each size, number of rows and kind."""
    found, dtype = result["cases"], result["settings"]["dtype"]
    rows = [
        (
            f"{case['outputs']} x {case['inputs']}",
            *(case["rows"], case["kind"], show(case["gflops"], 1)),
            *(show(case[key]) for key in ("share", "ratio")),
        )
        for case in found
    ]
    noisy, samples = (sum(case[key] for case in found) for key in ("disturbed", "samples"))
    return [
        f"x in {dtype}. Read: weights read a second, as a share of what the memory probe reads "
        f"around the sample. Beside {PEER}: times as fast as F.linear in {dtype}, in one round. "
        "Median (min..max).",
        markdown(("out x in", "rows", "weights", "GFLOP/s", "read", f"beside {PEER}"), rows),
        f"Disturbed samples (the memory probe was slow): {noisy} of {samples}.",
    ]


QUICK = {
    **{"shapes": ("tiny",), "sizes": 2, "kinds": ("bf16", "int4", "Q4_0"), "rows": (1, 5)},
    **{"rounds": 2, "megabytes": 1},
}
