"""exkv beside transformers on random Llamas: load, prefill, decode, memory; `make bench`.

Each round runs every competitor in turn, and each ratio is of two figures of one round, so that a
machine that speeds up or slows down meets all of them. ``load.py`` measures loading, in processes
of its own; ``common.py`` holds what both share. What transformers gets is its own best manual
loop: sdpa, its dynamic cache, logits of the last token only.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from exkv import CACHES, KVCache, Model

from . import load
from .common import (
    DTYPES,
    SHAPES,
    MemoryProbe,
    Shape,
    Spread,
    add_outputs,
    disturbed,
    machine,
    machine_line,
    markdown,
    overridden,
    ratios,
    rotated,
    synchronize,
    write_checkpoint,
    write_outputs,
)

PEER = "transformers"

#: Kinds of cache that differ on a Llama, whose layers have no windows.
KINDS = ("fp16", "8bit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]
    contexts: tuple[int, ...]
    steps: int
    rounds: int
    load_rounds: int
    device: str


# Competitors ----------------------------------------------------------------------------------


class Engine(Protocol):
    """One competitor: both calls give the next token, as a tensor (1, 1)."""

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """Start over with this prompt, int64 (1, T) on the host."""

    def step(self, token: torch.Tensor) -> torch.Tensor:
        """Decode one token."""


class Ours:
    """exkv with one kind of cache."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self.model = model
        self.cache = cache

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        self.cache.reset()
        return self.step(ids)

    def step(self, token: torch.Tensor) -> torch.Tensor:
        logits = self.model.forward(token, self.cache, last_id_only=True)
        return logits[:, -1].argmax(-1, keepdim=True).cpu()


class Theirs:
    """transformers with its dynamic cache."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self.model = model.to(device).eval()
        self.cache: Any = None

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        return self.step(ids.to(self.model.device))

    @torch.no_grad()
    def step(self, token: torch.Tensor) -> torch.Tensor:
        out = self.model(token, cache=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)


def engines(folder: Path, dtype: torch.dtype, settings: Settings) -> dict[str, Engine]:
    """exkv with every kind of cache over one loaded model, and transformers."""
    model = Model(folder, dtype=dtype)
    longest = max(settings.contexts) + settings.steps + 1
    caches = {name: CACHES[name](model, max_seq_len=longest) for name in KINDS}
    model.load_autosplit(next(iter(caches.values())), devices=[settings.device], last_id_only=True)
    ours = {f"exkv {type(cache).__name__}": Ours(model, cache) for cache in caches.values()}
    return {**ours, PEER: Theirs(folder, dtype, torch.device(settings.device))}


# Measuring ------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Figures:
    """One competitor at one context: tokens a second, a value for each round."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def run_once(engine: Engine, ids: torch.Tensor, steps: int, device: torch.device, into: Figures):
    """Prefill and greedy decoding; tokens a second into the figures."""
    synchronize(device)
    started = time.perf_counter()
    token = engine.prefill(ids)
    synchronize(device)
    prefilled = time.perf_counter()
    tokens = [token]
    for _ in range(steps):
        tokens.append(engine.step(tokens[-1]))
    synchronize(device)
    done = time.perf_counter()
    into.prefill.append(ids.shape[1] / (prefilled - started))
    into.decode.append(steps / (done - prefilled))
    into.tokens = [int(token) for token in tokens]


def measure(
    competitors: dict[str, Engine], vocab: int, settings: Settings, probe: MemoryProbe
) -> tuple[dict[tuple[int, str], Figures], list[tuple[float, float]]]:
    """``(context, engine)`` -> figures, and the memory probe before and after each round."""
    device = torch.device(settings.device)
    generator = torch.Generator().manual_seed(1)
    prompts = {n: torch.randint(3, vocab, (1, n), generator=generator) for n in settings.contexts}
    for ids in prompts.values():  # set-up that happens once a shape is not the subject
        for engine in competitors.values():
            run_once(engine, ids, 2, device, Figures())
    figures = {(n, name): Figures() for n in prompts for name in competitors}
    probes = []
    for round_index in range(settings.rounds):
        before = probe()
        for context, ids in prompts.items():
            for name in rotated(list(competitors), round_index):
                run_once(competitors[name], ids, settings.steps, device, figures[context, name])
        probes.append((before, probe()))
    return figures, probes


def measure_shape(
    name: str, dtype_name: str, folder: Path, settings: Settings, probe: MemoryProbe
) -> dict[str, Any]:
    """Everything about one model in one dtype."""
    shape, dtype = SHAPES[name], DTYPES[dtype_name]
    write_checkpoint(folder, shape, dtype)
    loads = load.compare(folder, settings.device, settings.load_rounds)
    competitors = engines(folder, dtype, settings)
    figures, probes = measure(competitors, shape.vocab, settings, probe)
    competitors.clear()
    gc.collect()
    return {
        "shape": name,
        "dtype": dtype_name,
        "parameters": shape.parameters,
        "weight_bytes": shape.parameters * dtype.itemsize,
        "generate": _generate_rows(shape, dtype, figures, probe_best(probes)),
        "load": _load_rows(loads),
        "probes_gb_per_second": [[a / 1e9, b / 1e9] for a, b in probes],
        "disturbed_rounds": disturbed(probes),
    }


def probe_best(probes: Sequence[tuple[float, float]]) -> float:
    return max(max(pair) for pair in probes)


def _generate_rows(
    shape: Shape, dtype: torch.dtype, figures: dict[tuple[int, str], Figures], bandwidth: float
) -> list[dict[str, Any]]:
    rows = []
    for (context, engine), own in figures.items():
        peer = figures[context, PEER]
        decode = Spread.of(own.decode)
        read = decode.median * shape.read_parameters * dtype.itemsize
        rows.append(
            {
                "context": context,
                "engine": engine,
                "decode_ratio": asdict(ratios(own.decode, peer.decode)),
                "prefill_ratio": asdict(ratios(own.prefill, peer.prefill)),
                "decode_tokens_per_second": asdict(decode),
                "prefill_tokens_per_second": asdict(Spread.of(own.prefill)),
                "decode_weight_bandwidth_share": read / bandwidth,
                "same_tokens": _common_prefix(own.tokens, peer.tokens),
                "tokens": len(own.tokens),
            }
        )
    return rows


def _common_prefix(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(first))


def _load_rows(loads: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    rows = []
    for engine, values in loads.items():
        totals, peer = _time_to_first_logits(values), _time_to_first_logits(loads[PEER])
        row: dict[str, Any] = {"engine": engine, "time_ratio": asdict(ratios(totals, peer))}
        row |= {name: asdict(Spread.of(values[name])) for name in load.FIGURES}
        rows.append(row)
    return rows


def _time_to_first_logits(values: dict[str, list[float]]) -> list[float]:
    """Load and first forward call together: some loaders leave the reading to the latter."""
    pairs = zip(values["load_seconds"], values["first_forward_seconds"], strict=True)
    return [sum(pair) for pair in pairs]


# Reporting ------------------------------------------------------------------------------------


def disagreements(models: list[dict[str, Any]]) -> list[str]:
    """In fp32 both must choose the same tokens; a lossy cache need not."""
    return [
        f"{model['shape']} fp32, context {row['context']}: {row['engine']} leaves {PEER} after "
        f"{row['same_tokens']} of {row['tokens']} tokens"
        for model in models
        for row in model["generate"]
        if model["dtype"] == "fp32"
        and "8bit" not in row["engine"]
        and row["same_tokens"] < row["tokens"]
    ]


def report(result: dict[str, Any]) -> str:
    """Markdown: ratios first, each as median (min..max) over the rounds."""
    parts = [
        machine_line(result["machine"]),
        f"Ratios are to {PEER} (sdpa, dynamic cache) in the same round, batch 1, median "
        "(min..max); above 1 exkv is faster. Read: weights read a second, as a share of what the "
        "memory probe reads.",
        _generate_table(result["models"]),
        "Load: from the call to the first logits, files in the page cache; below 1 exkv is "
        "faster. Peak: growth of the process at its highest, as a multiple of the weights "
        "(mapped file pages count); private: what no file backs, at the end.",
        _load_table(result["models"]),
    ]
    parts += [
        f"Disturbed rounds of {m['shape']} {m['dtype']} (the memory probe was slow): "
        f"{len(m['disturbed_rounds'])} of {len(m['probes_gb_per_second'])}; probes "
        f"{min(map(min, m['probes_gb_per_second'])):.1f} to "
        f"{max(map(max, m['probes_gb_per_second'])):.1f} GB/s."
        for m in result["models"]
        if m["disturbed_rounds"]
    ]
    return "\n\n".join(parts + disagreements(result["models"])) + "\n"


def _generate_table(models: list[dict[str, Any]]) -> str:
    headings = ("model", "context", "engine", "decode ×", "prefill ×")
    headings += ("decode tok/s", "prefill tok/s", "read", "same tokens")
    rows = [
        (
            f"{model['shape']} {model['dtype']}",
            str(row["context"]),
            row["engine"],
            Spread(**row["decode_ratio"]).text(),
            Spread(**row["prefill_ratio"]).text(),
            Spread(**row["decode_tokens_per_second"]).text(1),
            Spread(**row["prefill_tokens_per_second"]).text(0),
            f"{row['decode_weight_bandwidth_share']:.0%}",
            f"{row['same_tokens']}/{row['tokens']}",
        )
        for model in models
        for row in model["generate"]
    ]
    return markdown(headings, rows)


def _load_table(models: list[dict[str, Any]]) -> str:
    headings = ("model", "engine", "load + first ×", "load s", "first forward s", "import s")
    headings += ("peak / weights", "private / weights", "device peak / weights")
    rows = []
    for model in models:
        size = model["weight_bytes"]
        rows += [
            (
                f"{model['shape']} {model['dtype']}",
                row["engine"],
                Spread(**row["time_ratio"]).text(),
                *(
                    Spread(**row[name]).text(3)
                    for name in ("load_seconds", "first_forward_seconds", "import_seconds")
                ),
                *(
                    f"{row[name]['median'] / size:.2f}"
                    for name in ("peak_rss", "private", "device_peak")
                ),
            )
            for row in model["load"]
        ]
    return markdown(headings, rows)


# Command --------------------------------------------------------------------------------------

FULL = Settings(
    shapes=("25M", "150M"),
    dtypes=("bf16", "fp32"),
    contexts=(16, 512, 2048),
    steps=32,
    rounds=5,
    load_rounds=5,
    device="cpu",
)
QUICK = Settings(
    shapes=("tiny",),
    dtypes=("fp32",),
    contexts=(4, 24),
    steps=4,
    rounds=2,
    load_rounds=1,
    device="cpu",
)


def parse(arguments: Sequence[str] | None) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model: does the bench run?")
    add_outputs(parser)
    parser.add_argument("--device", help="cpu (the default), cuda:0, ...")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="models")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--contexts", nargs="+", type=int, metavar="TOKENS")
    parser.add_argument("--steps", type=int, help="tokens to decode in a round")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--load-rounds", type=int)
    options = parser.parse_args(arguments)
    return overridden(QUICK if options.quick else FULL, options), options


def run(settings: Settings, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Every figure, as it is written to JSON; ``keep`` gets what there is after each model, so
    that a run that is cut off leaves what it has measured."""
    device = torch.device(settings.device)
    probe = MemoryProbe(device)
    models: list[dict[str, Any]] = []
    result = {"machine": machine(device), "settings": asdict(settings), "models": models}
    with tempfile.TemporaryDirectory() as folder:
        for shape in settings.shapes:
            for dtype in settings.dtypes:
                print(f"measuring {shape} {dtype}", flush=True)
                models.append(measure_shape(shape, dtype, Path(folder), settings, probe))
                keep(result)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables; 1 if fp32 tokens differ."""
    settings, options = parse(arguments)

    def keep(result: dict[str, Any]) -> None:
        write_outputs(options, result, report(result))

    result = run(settings, keep)
    print(f"\n{report(result)}")
    return 1 if disagreements(result["models"]) else 0
