"""Measurements that need a real GPU, each beside its prediction.

``python tests/gpu/measure.py PART DEVICE OUT.json``. A part is a function under ``@part``, in the
order in which ``check.sh`` runs them. Each row of OUT.json has a name, a unit, what was predicted
(None for nothing) and what was measured. A run that is cut off leaves the rows so far; the exit
status is 1 if something is wrong. ``cpu`` or ``sim:0`` as DEVICE runs tiny sizes to try the script
itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from bench.engine import Wordless
from bench.shapes import SHAPES
from hostile_calls import _sections, random_packed

from exkv import CACHES, Engine, Job, Model, PagedCache, devices, overhead
from exkv.checkpoint import ModelConfig
from exkv.cli.simulate import HollowCheckpoint
from exkv.errors import is_out_of_memory
from exkv.loading import load_units
from exkv.loading.options import LoadOptions
from exkv.models import graph_run
from exkv.ops import REFERENCES
from exkv.planning.budgets import present_budget
from exkv.weights import GroupFormat, register
from exkv.weights.bitsandbytes import Bnb4Format
from exkv.weights.fp8 import Fp8Format
from exkv.weights.gguf import FORMATS
from exkv.weights.mxfp4 import MXFP4

#: name, unit, predicted, measured
Row = tuple[str, str, float | None, float]
PARTS: dict[str, Callable[[torch.device], Iterator[Row]]] = {}
MEBI = 1 << 20
#: Of the largest value, as in ``check_kernels.py``.
TOLERANCE = 2e-2
QWEN_32B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_wrong: list[str] = []


def part(function: Callable[[torch.device], Iterator[Row]]) -> Callable:
    PARTS[function.__name__] = function
    return function


def wrong(line: str) -> None:
    """Say that something is wrong, which ends the run with exit status 1."""
    _wrong.append(line)


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


# Formats of weights ----------------------------------------------------------------------------


def formats(outputs: int, inputs: int) -> dict[str, Any]:
    """Every kind of packed weights of a matrix of this size, those that never ran first."""
    made = {
        name: FORMATS[name] for name in FORMATS if name.endswith("_K") or name.startswith("IQ4")
    }
    made |= {"EXL2": _sections(outputs, inputs), "MXFP4": MXFP4}
    made["FP8"] = Fp8Format(block=(128, 128), scale_dtype=torch.float32)
    made["nf4"] = Bnb4Format(kind="nf4", block=64, nested=0, state=0)
    return {name: register(format) for name, format in made.items()}


def packed(format: Any, size: tuple[int, int], device: torch.device) -> list[torch.Tensor]:
    return [each.to(device) for each in random_packed(format, size)]


@part
def right(device: torch.device) -> Iterator[Row]:
    """Products of every packed format beside float32 references, for few and many rows."""
    size = (1024, 1024) if is_gpu(device) else (64, 512)
    for name, format in formats(*size).items():
        tensors, native = packed(format, size, torch.device("cpu")), list(format.native(size))
        for rows in (1, 4, 8, 16, 64) if is_gpu(device) else (1, 4):
            x = torch.randn(rows, size[1]).bfloat16()
            found = torch.ops.exkv.linear_packed(
                x.to(device), [t.to(device) for t in tensors], format.name, native, size[0], None
            )
            call = (x.float(), tensors, format.name, native, size[0], None)
            expected = REFERENCES["linear_packed"](*call)
            error = (found.cpu().float() - expected).abs().max() / expected.abs().max()
            if not error <= TOLERANCE:
                wrong(f"{name}, {rows} rows: off by {float(error):.2g}")
            yield f"{name}, {rows} rows", "of the largest value", 0.0, float(error)


@part
def bandwidth(device: torch.device) -> Iterator[Row]:
    """Seconds of a product by format, rows and outputs; predicted: what a copy of the same bytes
    would take to read."""
    inputs = 4096 if is_gpu(device) else 512
    outputs = (1024, 4096, 14336, 128256) if is_gpu(device) else (64,)
    rate = devices.measured_bandwidth(device)
    for many in outputs:
        x = torch.randn(16, inputs, device=device).bfloat16()
        for name, call, nbytes in _products(many, inputs, device):
            for rows in (1, 4, 8, 16):
                taken = seconds(lambda c=call, few=x[:rows]: c(few), device)
                yield (
                    f"{name}, {many} x {inputs}, {rows} rows",
                    "us",
                    nbytes / rate * 1e6,
                    taken * 1e6,
                )


def _products(
    outputs: int, inputs: int, device: torch.device
) -> Iterator[tuple[str, Callable[[torch.Tensor], object], int]]:
    """A format, a product by a matrix of it, and the matrix' bytes."""
    weight = torch.randn(outputs, inputs, device=device).bfloat16()
    yield "bf16", lambda x: F.linear(x, weight), weight.nbytes
    for bits in (4, 8):
        groups = GroupFormat(bits=bits, group=64, scale=torch.float16)
        shape = (outputs // 8, inputs // 32, 32 * bits)
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        scale = torch.rand(outputs, inputs // 64, device=device).half()
        both, layout = [codes, scale], list(groups.groups)
        product = lambda x, b=both, g=layout: torch.ops.exkv.linear_groups(x, b, g, None)  # noqa: E731
        yield f"int{bits}", product, codes.nbytes + scale.nbytes
    for name, format in formats(outputs, inputs).items():
        tensors, native = (
            packed(format, (outputs, inputs), device),
            list(format.native((outputs, inputs))),
        )
        args = (tensors, format.name, native, outputs, None)
        product = lambda x, a=args: torch.ops.exkv.linear_packed(x, *a)  # noqa: E731
        yield name, product, sum(t.nbytes for t in tensors)


def seconds(call: Callable[[], object], device: torch.device, rounds: int = 10) -> float:
    """The median of a few calls, by the clock, each waited for."""
    call()
    taken = []
    for _ in range(rounds if is_gpu(device) else 1):
        devices.synchronize(device)
        started = time.perf_counter()
        call()
        devices.synchronize(device)
        taken.append(time.perf_counter() - started)
    return sorted(taken)[len(taken) // 2]


# Models without files ----------------------------------------------------------------------------


def hollow(
    config: dict[str, Any], device: torch.device, cache: Callable[[Model], Any], **options: Any
) -> tuple[Model, Any]:
    """A model of zeros with its cache, loaded by a plan as any other, and the cache."""
    model = Model(ModelConfig.from_dict(config), **options)
    made = cache(model)
    scenario = model._scenario_of(LoadOptions(devices=[device], last_id_only=True))
    steps = load_units(
        model,
        scenario,
        checkpoint=HollowCheckpoint(model),
        lazy=False,
        on_loaded=model._keep_record,
    )
    for _ in steps:
        pass
    return model, made


def shape_of(device: torch.device) -> dict[str, Any]:
    return SHAPES["1.1B" if is_gpu(device) else "tiny"].config(torch.bfloat16)


@part
def engine(device: torch.device) -> Iterator[Row]:
    """A decode step of jobs in pages: kernels that are launched, and milliseconds; predicted: what
    reading all weights takes."""
    rate = devices.measured_bandwidth(device)
    for rows in (1, 8, 16) if is_gpu(device) else (1, 2):
        model, cache = hollow(
            shape_of(device), device, lambda m, n=rows: PagedCache(m, n * 512, page=256)
        )
        weights = model.plan.ledgers[0].weights
        with Engine(model, cache, Wordless(), max_running=rows) as running:
            for _ in range(rows):
                running.submit(Job(prompt=[5, 6, 7], max_new_tokens=200))
            for _ in range(2 * rows + 4):  # until all of them decode
                running.iterate()
            taken = seconds(running.iterate, device)
            yield f"{rows} rows", "ms a step", weights / rate * 1e3, taken * 1e3
            if is_gpu(device):
                yield f"{rows} rows", "launches a step", None, _launches(running.iterate)
        model.unload()


def _launches(call: Callable[[], object]) -> int:
    with torch.profiler.profile() as profile:
        call()
        torch.cuda.synchronize()
    events = profile.key_averages()
    return sum(event.count for event in events if "Launch" in event.key)


# What a card reserves ----------------------------------------------------------------------------


@part
def reserved(device: torch.device) -> Iterator[Row]:
    """Qwen2.5-32B in int4 from a bare config: what the plan counts beside what torch reserves; and
    what the driver and cuBLAS took at the first touch beside the table."""
    if is_gpu(device):
        tabled, found = overhead.of_absent(device.type), present_budget(device)
        yield "driver's context", "MiB", tabled.context / MEBI, found.context / MEBI
        yield "cuBLAS, a stream", "MiB", tabled.libraries / 2 / MEBI, found.libraries / MEBI
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    kind = "expandable segments" if "expandable_segments:True" in settings else "segments"
    config = QWEN_32B if is_gpu(device) else shape_of(device)
    model, cache = hollow(config, device, lambda m: CACHES["fp16"](m, 4096), weights="int4")
    (ledger,) = model.plan.ledgers
    taken = torch.accelerator.memory_reserved(device)
    yield f"{kind}, loaded", "MiB", ledger.total / MEBI, taken / MEBI
    model.forward(torch.full((1, 1024), 5), cache, last_id_only=True)
    taken = torch.accelerator.max_memory_reserved(device)
    yield f"{kind}, after a prompt", "MiB", ledger.total / MEBI, taken / MEBI


@part
def offloaded(device: torch.device) -> Iterator[Row]:
    """What is reserved while an offloaded cache decodes; predicted: the plan's total."""
    length = 4096 if is_gpu(device) else 64
    model, cache = hollow(
        shape_of(device), device, lambda m: CACHES["offloaded_static"](m, length, 4)
    )
    model.forward(torch.full((4, length // 2), 5), cache, last_id_only=True)
    predicted = model.plan.ledgers[0].total / MEBI
    for step in range(9):
        model.forward(torch.full((4, 1), 5), cache, last_id_only=True)
        if step in (0, 8):
            taken = torch.accelerator.memory_reserved(device) / MEBI
            yield f"after {step + 1} steps", "MiB", predicted, taken


# What goes wrong ---------------------------------------------------------------------------------


@part
def full(device: torch.device) -> Iterator[Row]:
    """The card filled from outside torch to 20 MiB: every error that comes, whether exkv knows it
    for out of memory (1), or a call that finds room all the same (2)."""
    if not is_gpu(device):
        return
    small = torch.zeros(256, 256, device=device)
    torch.cuda.synchronize()
    cudart = ctypes.CDLL(_library("libcudart"))
    _fill(cudart, 20 * MEBI)
    for name, call in _calls_on_a_full_card(small).items():
        try:
            call()
            torch.cuda.synchronize()
            verdict = 2
        except Exception as error:  # noqa: BLE001 # whatever it is, it is what we are here for
            verdict = int(is_out_of_memory(error))
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            if not verdict:
                wrong(f"{name}: {type(error).__name__}: {error}")
        yield name, "1: known as out of memory, 2: found room", None, verdict


def _library(name: str) -> str:
    """The file of a CUDA library that torch has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in lines if name in line)


def _fill(cudart: ctypes.CDLL, left: int) -> None:
    size = 1 << 30
    while size >= MEBI:
        pointer = ctypes.c_void_p()
        free = torch.cuda.mem_get_info()[0]
        if free - size < left or cudart.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)):
            cudart.cudaGetLastError()
            size //= 2


def _calls_on_a_full_card(small: torch.Tensor) -> dict[str, Callable[[], object]]:
    def in_new_stream() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            small.bfloat16() @ small.bfloat16()

    def captured() -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            torch.zeros(64 * MEBI, device=small.device)

    def local_memory() -> None:
        torch.linalg.svd(small)

    q = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16, device=small.device)
    past = torch.zeros(1, dtype=torch.int32, device=small.device)
    return {
        "an allocation": lambda: torch.empty(64 * MEBI, device=small.device),
        "cuBLAS": lambda: small.bfloat16() @ small.bfloat16(),
        "cuBLAS in another stream": in_new_stream,
        "cuSOLVER": local_memory,
        "cuDNN": lambda: F.conv2d(small[None, None], small[None, None, :3, :3]),
        "exkv's kernel": lambda: torch.ops.exkv.attention(q, q, q, past, 1, True, 0.1),
        "pinned memory": lambda: torch.empty(1 << 40, dtype=torch.uint8, pin_memory=True),
        "a capture": captured,
    }


@part
def capture(device: torch.device) -> Iterator[Row]:
    """Captures that fail on purpose: what is reserved once the allocator's cache is emptied, beside
    what was before; and whether another capture works."""
    if not is_gpu(device):
        return
    x = torch.ones(4 * MEBI, device=device)
    owner = SimpleNamespace(device=device, pool=None)
    graph_run._capture_stream(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    for name, step in {
        "asks the host": lambda: x * float((x + 1).sum()),
        "runs out of memory": lambda: x + torch.empty(1 << 45, device=device)[0],
        "works": lambda: x * 2,
    }.items():
        try:
            graph_run.capture(step, owner).replay()
            failed = 0
        except RuntimeError as error:
            failed = 1
            print(f"{name}: {error}", flush=True)
        yield f"a step that {name}", "1: failed", float(name != "works"), failed
        torch.cuda.empty_cache()
        after = torch.cuda.memory_reserved(device)
        if after != before:
            wrong(f"a step that {name}: {after:,} bytes are reserved, {before:,} before")
        yield f"after a step that {name}", "MiB reserved", before / MEBI, after / MEBI


# Prompts -----------------------------------------------------------------------------------------


@part
def prompts(device: torch.device) -> Iterator[Row]:
    """Prompts of 64 to 8,192 rows: products beside cuBLAS's of bf16, attention beside torch's flash
    attention, which stand for the prediction."""
    outputs, inputs = (14336, 4096) if is_gpu(device) else (64, 512)
    lengths = (64, 256, 1024, 4096, 8192) if is_gpu(device) else (64,)
    products = list(_products(outputs, inputs, device))
    for rows in lengths:
        x = torch.randn(rows, inputs, device=device).bfloat16()
        (_, dense, _), *others = products
        peer = seconds(lambda x=x, c=dense: c(x), device, 5) * 1e6
        for name, call, _ in others:
            yield (
                f"{name}, {rows} rows",
                "us",
                peer,
                seconds(lambda x=x, c=call: c(x), device, 5) * 1e6,
            )
        yield _attention(rows, device)


def _attention(rows: int, device: torch.device) -> Row:
    q, k, v = (torch.randn(1, rows, heads, 128, device=device).bfloat16() for heads in (32, 8, 8))
    past = torch.zeros(1, dtype=torch.int32, device=device)
    own = seconds(lambda: torch.ops.exkv.attention(q, k, v, past, rows, False, 0.1), device, 5)
    across = [t.transpose(1, 2) for t in (q, k, v)]
    peer = seconds(
        lambda: F.scaled_dot_product_attention(*across, is_causal=True, enable_gqa=True), device, 5
    )
    return f"attention, {rows} rows", "us", peer * 1e6, own * 1e6


def main(name: str, device: torch.device, out: Path) -> int:
    torch.manual_seed(0)
    random.seed(0)
    rows = []
    with torch.no_grad():
        for row in PARTS[name](device):
            rows.append(dict(zip(("name", "unit", "predicted", "measured"), row, strict=True)))
            out.write_text(json.dumps(rows, indent=1) + "\n")
            print(*row, flush=True)
    for line in _wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return int(bool(_wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], torch.device(sys.argv[2]), Path(sys.argv[3])))
