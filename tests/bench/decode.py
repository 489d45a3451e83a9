"""How much of the memory's speed greedy decoding reaches: ``python -m tests.bench decode``.

A step reads every weight and every key and value once, so the time of reading them is the limit.
Machines that are shared change that limit from minute to minute; so it is probed before and after
every sample, a sample whose probes differ is dropped, and what is compared between engines is the
share of the limit, never the speed. Samples of a slow and of a fast memory have a table each. Each
engine chooses tokens as it does when it generates. It runs its longest context once and is then cut
back, so that a sample is decoding and nothing else.

A batch is of rows that hold the same context, each a copy of its own, and then go their own ways. A
step is one token of every row: weights are read once for all of them, keys and values for each.

With ``--weights int4`` exkv also decodes from integers that were made of the same weights on
loading, beside its own bf16. With ``--files Q8_0 Q4_0 Q4_K_M`` exkv and llama.cpp decode from the
same GGUF files, which llama.cpp quantizes, and ``--prompts`` says how long the prompts are that
both read meanwhile.

``readme.py`` makes README.md's tables of the figures that ``--json`` writes.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from exkv import CACHES, Model, SamplingParams
from exkv.sampling import chain
from exkv.weights.on_load import BITS

from . import llamacpp
from .common import (
    DTYPES,
    SHAPES,
    MemoryProbe,
    Shape,
    Spread,
    add_outputs,
    machine,
    machine_line,
    markdown,
    overridden,
    rotated,
    write_checkpoint,
    write_outputs,
)

TRANSFORMERS = "transformers"
GREEDY = SamplingParams.greedy()
#: Probes around a sample may differ by so much of the faster one.
LIKE = 0.15
NO_FILES: dict[str, int] = {}
#: Where the fastest sample's memory is so many times the slowest's, the machine has two states.
STATES = 1.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    shapes: tuple[str, ...]
    batches: tuple[int, ...]
    caches: tuple[str, ...]
    contexts: tuple[int, ...]
    steps: int
    rounds: int
    alone: bool = False
    weights: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    prompts: tuple[int, ...] = ()


# Competitors ----------------------------------------------------------------------------------


class Engine(Protocol):
    """A fixed number of rows; tokens are numbers."""

    def prefill(self, ids: torch.Tensor) -> None:
        """Start over with these tokens, int64 (1, T), in every row."""

    def rewind(self, length: int) -> None:
        """Keep so many first tokens of each row."""

    def step(self, tokens: list[int]) -> list[int]:
        """Decode one token of each row, greedily."""

    def close(self) -> None:
        """Give the memory back."""


class Ours:
    """exkv with one kind of cache."""

    def __init__(self, model: Model, kind: str, context: int, rows: int) -> None:
        self.model = model
        self.cache = CACHES[kind](model, max_seq_len=context, batch_size=rows)

    def prefill(self, ids: torch.Tensor) -> None:
        self.cache.reset()
        self.model.forward(ids, self.cache, last_id_only=True)
        self.cache.repeat_interleave(self.cache.batch_size)

    def rewind(self, length: int) -> None:
        self.cache.crop(length)

    def step(self, tokens: list[int]) -> list[int]:
        logits = self.model.forward(torch.tensor(tokens)[:, None], self.cache, last_id_only=True)
        return chain.sample(logits[:, -1], GREEDY).tolist()

    def close(self) -> None:
        del self.model, self.cache


class Theirs:
    """transformers with sdpa and its dynamic cache."""

    def __init__(self, folder: Path, dtype: torch.dtype, rows: int) -> None:
        from transformers import LlamaForCausalLM

        self.rows = rows
        self.model = LlamaForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self.cache: Any = None

    def prefill(self, ids: torch.Tensor) -> None:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        for part in ids.split(512, dim=1):
            self._run(part)
        self.cache.batch_repeat_interleave(self.rows)

    def rewind(self, length: int) -> None:
        beyond = self.cache.get_seq_length() - length
        if beyond:
            self.cache.crop(-beyond)

    def step(self, tokens: list[int]) -> list[int]:
        logits = self._run(torch.tensor(tokens)[:, None]).logits
        return logits[:, -1].float().argmax(-1).tolist()  # as its generate does

    @torch.no_grad()
    def _run(self, ids: torch.Tensor) -> Any:
        return self.model(ids, cache=self.cache, use_cache=True, logits_to_keep=1)

    def close(self) -> None:
        del self.model, self.cache


def engines(folder: Path, rows: int, settings: Settings) -> dict[str, Engine]:
    """exkv with each cache over one loaded model, and unless it is alone transformers, and
    llama.cpp where it is: the weights are held once by each of the three."""
    room = max(settings.contexts) + settings.steps + 1
    model = Model(folder, dtype=torch.bfloat16)
    ours = {f"exkv {kind}": Ours(model, kind, room, rows) for kind in settings.caches}
    first = next(iter(ours.values())).cache
    model.load_autosplit(first, devices=["cpu"], last_id_only=True)
    for weights in settings.weights:
        fewer = Model(folder, dtype=torch.bfloat16, weights=weights)
        kind = settings.caches[0]
        ours[f"exkv {kind}, {weights}"] = of_fewer = Ours(fewer, kind, room, rows)
        fewer.load_autosplit(of_fewer.cache, devices=["cpu"], last_id_only=True)
    if settings.alone:
        return {**ours}
    found: dict[str, Engine] = {**ours, TRANSFORMERS: Theirs(folder, torch.bfloat16, rows)}
    if llamacpp.is_installed():
        for kind in llamacpp.KV_TYPES:
            file, threads = folder / llamacpp.FILE, torch.get_num_threads()
            found[f"llama.cpp {kind}"] = llamacpp.LlamaCpp(file, room, rows, threads, kind)
    return found


def engines_of_files(files: Mapping[str, Path], rows: int, settings: Settings) -> dict[str, Engine]:
    """exkv and llama.cpp, each with the same quantized files."""
    room = max((*settings.contexts, *settings.prompts)) + settings.steps + 1
    found: dict[str, Engine] = {}
    for kind, file in files.items():
        model = Model(file, dtype=torch.bfloat16)
        found[f"exkv fp16, {kind}"] = ours = Ours(model, "fp16", room, rows)
        model.load_autosplit(ours.cache, devices=["cpu"], last_id_only=True)
        threads = torch.get_num_threads()
        found[f"llama.cpp f16, {kind}"] = llamacpp.LlamaCpp(file, room, rows, threads, "f16")
    return found


#: Bytes that a step reads of files' weights, by their kind.
Sizes = Mapping[str, int]


def bytes_read(shape: Shape, name: str, context: int, rows: int, files: Sizes = NO_FILES) -> int:
    """By a step: all weights but the embedding table, and every row's keys and values."""
    engine, _, weights = name.partition(", ")
    bits = {"exkv 8bit": 8.5, "llama.cpp q8_0": 8.5, "exkv 4bit": 5}.get(engine, 16)
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * bits / 8
    read = files[weights] if weights in files else weight_bytes(shape, weights)
    return read + int(rows * context * token)


def weight_bytes(shape: Shape, weights: str) -> int:
    """That a step reads: in bf16, or as ``exkv.weights.on_load`` keeps them, in groups of 64 with a
    scale of 16 bits, the head in 8 bits."""
    if not weights:
        return shape.read_parameters * 2
    head = shape.vocab * shape.hidden
    return int((head * (8 + 0.25) + (shape.read_parameters - head) * (BITS[weights] + 0.25)) / 8)


# Measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One engine, once: tokens a second of all rows, and what the probe read before and after,
    bytes a second."""

    engine: str
    context: int
    round: int
    speed: float
    before: float
    after: float

    @property
    def limit(self) -> float:
        """What the probes read, bytes a second."""
        return (self.before + self.after) / 2

    @property
    def like(self) -> bool:
        """Whether the machine was the same before and after."""
        return min(self.before, self.after) >= (1 - LIKE) * max(self.before, self.after)


def measure(
    competitors: dict[str, Engine],
    vocab: int,
    rows: int,
    settings: Settings,
    probe: Callable[[], float],
) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocab, (1, max(settings.contexts)), generator=generator)
    for engine in competitors.values():
        engine.prefill(ids)
    for context in sorted(settings.contexts, reverse=True):
        for engine in competitors.values():
            engine.rewind(context)
        for index in range(settings.rounds):
            for name in rotated(list(competitors), index):
                engine, before = competitors[name], probe()
                engine.rewind(context)
                # What is set up once a length is not the subject.
                tokens = engine.step(list(range(3, 3 + rows)))
                started = time.perf_counter()
                for _ in range(settings.steps):
                    tokens = engine.step(tokens)
                seconds = time.perf_counter() - started
                yield Sample(
                    engine=name,
                    context=context,
                    round=index,
                    speed=rows * settings.steps / seconds,
                    before=before,
                    after=probe(),
                )


def measure_prompts(
    competitors: dict[str, Engine], vocab: int, settings: Settings
) -> Iterator[dict[str, Any]]:
    """Tokens a second of reading a prompt, a result for each length and engine."""
    generator = torch.Generator().manual_seed(2)
    for length in settings.prompts:
        ids = torch.randint(3, vocab, (1, length), generator=generator)
        speeds: dict[str, list[float]] = {name: [] for name in competitors}
        for index in range(settings.rounds):
            for name in rotated(list(competitors), index):
                started = time.perf_counter()
                competitors[name].prefill(ids)
                speeds[name].append(length / (time.perf_counter() - started))
        for name, values in speeds.items():
            yield {"tokens": length, "engine": name, "tokens_per_second": asdict(Spread.of(values))}


def measure_shape(name: str, settings: Settings, probe: MemoryProbe) -> Iterator[dict[str, Any]]:
    """One result for each batch. The files of weights are gone when the last one is taken."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), shape, DTYPES["bf16"])
        if llamacpp.is_installed() and not settings.alone:
            llamacpp.write_gguf(Path(folder), shape)
        files = {kind: llamacpp.quantize(Path(folder), kind) for kind in settings.files}
        sizes = {kind: llamacpp.bytes_read(file) for kind, file in files.items()}
        for batch in settings.batches:
            print(f"measuring {name}, batch {batch}", flush=True)
            if files:
                competitors = engines_of_files(files, batch, settings)
            else:
                competitors = engines(Path(folder), batch, settings)
            prompts = list(measure_prompts(competitors, shape.vocab, settings))
            samples = list(measure(competitors, shape.vocab, batch, settings, probe))
            for engine in competitors.values():
                engine.close()
            del competitors, engine
            gc.collect()
            yield {
                **{"shape": name, "batch": batch, "prompts": prompts},
                "rows": rows_of(shape, samples, batch, sizes),
                "states": [
                    {"memory": asdict(memory), "rows": rows_of(shape, those, batch, sizes)}
                    for memory, those in by_state(samples)
                ],
                "samples": list(map(asdict, samples)),
            }


def by_state(samples: Sequence[Sample]) -> list[tuple[Spread, list[Sample]]]:
    """The samples that count by the memory's speed around them, slow before fast: one state of the
    machine, or two where it changed, each with what the probes read."""
    those = sorted((sample for sample in samples if sample.like), key=lambda s: s.limit)
    if not those:
        return []
    lowest, highest = those[0].limit, those[-1].limit
    border = (lowest * highest) ** 0.5 if highest >= STATES * lowest else 0.0
    states = [[s for s in those if s.limit < border], [s for s in those if s.limit >= border]]
    return [(Spread.of([s.limit for s in state]), state) for state in states if state]


def rows_of(
    shape: Shape, samples: Sequence[Sample], batch: int, files: Sizes = NO_FILES
) -> list[dict[str, Any]]:
    """The table's rows: for each context and engine the share of the memory's speed, and how many
    times those of the others it is; of samples that count, by medians."""
    shares: dict[int, dict[str, list[float]]] = {}
    for sample in samples:
        size = bytes_read(shape, sample.engine, sample.context, batch, files)
        share = sample.speed / batch * size / sample.limit
        of_engine = shares.setdefault(sample.context, {}).setdefault(sample.engine, [])
        of_engine += [share] if sample.like else []
    rows = []
    for context, of_engines in sorted(shares.items()):
        spreads = {name: Spread.of(values) for name, values in of_engines.items() if values}
        for name, own in spreads.items():
            per_byte = own.median / bytes_read(shape, name, context, batch, files)
            ratios = {
                other: per_byte / (its.median / bytes_read(shape, other, context, batch, files))
                for other, its in spreads.items()
            }
            kept = [s.speed for s in samples if (s.engine, s.context) == (name, context) and s.like]
            row = {"context": context, "engine": name, "share": asdict(own), "times": ratios}
            rows.append({**row, "tokens_per_second": asdict(Spread.of(kept))})
    return rows


# Reporting ------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    version = result["machine"].get("llama_cpp")
    version = f" (llama-cpp-python {version})" if version else ""
    parts = [
        machine_line(result["machine"]),
        "Greedy decoding with bf16 weights, or those named. Share: (bytes of weights, keys and "
        "values) x steps a second, of what the memory probe reads a second just before and after; "
        "median (min..max; samples that count). A step is one token of every row; tokens/s counts "
        "all rows'. Times: how many times as fast as another at the same speed of memory, above 1 "
        "is faster. "
        f"llama.cpp{version}: flash attention, bf16 weights.",
    ]
    for model in result["models"]:
        for state in model["states"]:
            parts.append(table(model, state))
        if model.get("prompts"):
            parts.append(prompt_table(model))
    return "\n\n".join(parts) + "\n"


def prompt_table(model: dict[str, Any]) -> str:
    """Tokens a second of prompts, and how many times those of each other engine."""
    rows = model["prompts"]
    others = list(dict.fromkeys(row["engine"] for row in rows if "exkv" not in row["engine"]))
    speed = {(row["tokens"], row["engine"]): row["tokens_per_second"]["median"] for row in rows}
    headings = (f"{model['shape']}, prompts", "tokens", "tokens/s", *(f"× {o}" for o in others))
    cells = [
        (
            row["engine"],
            f"{row['tokens']:,}",
            Spread(**row["tokens_per_second"]).text(1),
            *(
                f"{row['tokens_per_second']['median'] / speed[row['tokens'], other]:.2f}"
                for other in others
            ),
        )
        for row in rows
    ]
    return markdown(headings, cells)


def table(model: dict[str, Any], state: dict[str, Any]) -> str:
    """The rows of one state of the machine, under what its memory read."""
    rows = state["rows"]
    names = dict.fromkeys(row["engine"] for row in rows)
    others = [name for name in names if not name.startswith("exkv")]
    own = next(iter(names))
    others += [own] * any(", " in name for name in names if ", " not in own)  # beside our bf16
    title = f"{model['shape']}, batch {model['batch']}"
    headings = (title, "context", "share", "tokens/s", *(f"× {o}" for o in others))
    cells = [
        (
            row["engine"],
            f"{row['context']:,}",
            f"{Spread(**row['share']).text()[:-1]}; {row['share']['n']})",
            Spread(**row["tokens_per_second"]).text(1),
            *(f"{row['times'].get(other, float('nan')):.2f}" for other in others),
        )
        for row in rows
    ]
    memory = Spread(**{k: v if k == "n" else v / 1e9 for k, v in state["memory"].items()})
    return f"Where memory gave {memory.text(0)} GB/s:\n\n{markdown(headings, cells)}"


# Command --------------------------------------------------------------------------------------

FULL = Settings(
    shapes=("150M",),
    batches=(1,),
    caches=("fp16", "8bit"),
    contexts=(16, 2048, 8192),
    steps=24,
    rounds=7,
)
QUICK = Settings(
    shapes=("tiny",),
    batches=(1, 3),
    caches=("fp16", "4bit"),
    contexts=(4, 24),
    steps=3,
    rounds=2,
    weights=("int4",),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench decode", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model: does the bench run?")
    add_outputs(parser)
    parser.add_argument(
        "--shapes", "--shape", nargs="+", choices=SHAPES, help="one after the other"
    )
    parser.add_argument(
        "--batches", "--batch", nargs="+", type=int, metavar="ROWS", help="rows that go together"
    )
    parser.add_argument("--caches", nargs="+", choices=CACHES)
    parser.add_argument("--weights", nargs="+", choices=BITS, help="exkv with these, too")
    parser.add_argument("--files", nargs="+", metavar="KIND", help="of GGUF, and llama.cpp only")
    parser.add_argument("--prompts", nargs="+", type=int, metavar="TOKENS", help="to prefill")
    parser.add_argument("--contexts", nargs="+", type=int, metavar="TOKENS")
    parser.add_argument("--steps", type=int, help="tokens of a sample")
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--alone", action="store_true", default=None, help="exkv without the others: its shares"
    )
    options = parser.parse_args(arguments)
    settings = overridden(QUICK if options.quick else FULL, options)
    if settings.files and not llamacpp.is_installed():
        parser.error("--files needs llama-cpp-python and gguf, see tests/bench/llamacpp.py")
    device = torch.device("cpu")
    probe = MemoryProbe(device)
    models: list[dict[str, Any]] = []
    about = {**machine(device), "llama_cpp": llamacpp.version()}
    result = {"machine": about, "settings": asdict(settings), "models": models}
    for shape in settings.shapes:
        for measured in measure_shape(shape, settings, probe):
            models.append(measured)
            write_outputs(options, result, report(result))
    print(f"\n{report(result)}")
    return 0
