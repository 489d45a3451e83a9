"""How much of the memory's speed greedy decoding reaches: ``python -m tests.bench decode``.

A step reads every weight and every key and value once, so the time of reading them is the limit.
Machines that are shared change that limit from minute to minute; so it is probed before and after
every sample, a sample whose probes differ is dropped, and what is compared between engines is the
share of the limit, never the speed. Samples of a slow and of a fast memory have a table each. Each
engine runs its longest context once and is then cut back, so that a sample is decoding alone.

A batch is of rows that hold the same context, each a copy of its own, and then go their own ways. A
step is one token of every row: weights are read once for all of them, keys and values for each.

Beside exkv stand transformers (sdpa, its dynamic cache) and, where it is installed and the weights
are bf16 on the CPU, llama.cpp. In float32 all must choose the same tokens. ``--weights int4`` adds
exkv with integers made of the same weights on loading. With ``--files Q8_0 Q4_0 Q4_K_M`` exkv and
llama.cpp decode from GGUF files that llama.cpp quantizes. ``--adapter-rank 16`` adds exkv with one
random adapter for all rows, and with one of its own for each. ``--prompts`` says how long the
prompts are that are read meanwhile. ``pages.py`` makes the docs' tables of the JSON.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from exkv import CACHES, Model, SamplingParams
from exkv.sampling import chain
from exkv.weights.on_load import BITS

from . import llamacpp
from .harness import MemoryProbe, in_turns, markdown, setting, show, spread
from .shapes import DTYPES, SHAPES, Shape, write_checkpoint

TRANSFORMERS = "transformers"
GREEDY = SamplingParams.greedy()
#: Probes around a sample may differ by so much of the faster one.
LIKE = 0.15
#: Where the fastest sample's memory is so many times the slowest's, the machine has two states.
STATES = 1.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    shapes: tuple[str, ...] = setting(("150M",), "models, one after the other", SHAPES)
    dtype: str = setting("bf16", choices=DTYPES)
    device: str = "cpu"
    batches: tuple[int, ...] = setting((1,), "rows that go together")
    caches: tuple[str, ...] = setting(("fp16", "8bit"), choices=CACHES)
    contexts: tuple[int, ...] = setting((16, 2048, 8192), "tokens behind which is decoded")
    prompts: tuple[int, ...] = setting((), "tokens of prompts that are read")
    steps: int = setting(24, "tokens of a sample")
    rounds: int = 7
    alone: bool = setting(False, "exkv without the others: its shares")
    weights: tuple[str, ...] = setting((), "exkv with these, too", BITS)
    adapter_rank: int = setting(0, "of random adapters on all linear layers; 0 for none")
    files: tuple[str, ...] = setting((), "kinds of GGUF files; beside llama.cpp only")

    def __post_init__(self) -> None:
        if self.files and not llamacpp.is_installed():
            raise ValueError("--files needs llama-cpp-python and gguf, see llamacpp.py")


# Competitors ----------------------------------------------------------------------------------


class Engine(Protocol):
    """A fixed number of rows; tokens are numbers."""

    def prefill(self, ids: Tensor) -> None:
        """Start over with these tokens, int64 (1, T), in every row."""

    def rewind(self, length: int) -> None:
        """Truncate each row to its first ``length`` tokens."""

    def step(self, tokens: list[int]) -> list[int]:
        """Decode one token of each row, greedily."""

    def close(self) -> None:
        """Release the memory."""


class Ours:
    """exkv with one kind of cache."""

    def __init__(self, model: Model, kind: str, room: int, rows: int, adapter: Any = None) -> None:
        self.model, self.adapter = model, adapter
        self.cache = CACHES[kind](model, max_seq_len=room, batch_size=rows)

    def load(self, device: str) -> Ours:
        self.model.load_autosplit(self.cache, devices=[device], last_id_only=True)
        return self

    def prefill(self, ids: Tensor) -> None:
        self.cache.reset()
        one = self.adapter[0] if isinstance(self.adapter, list) else self.adapter
        self.model.forward(ids, self.cache, last_id_only=True, adapter=one)
        self.cache.repeat_interleave(self.cache.batch_size)

    def rewind(self, length: int) -> None:
        self.cache.crop(length)

    def step(self, tokens: list[int]) -> list[int]:
        ids, adapter = torch.tensor(tokens)[:, None], self.adapter
        logits = self.model.forward(ids, self.cache, last_id_only=True, adapter=adapter)
        return chain.sample(logits[:, -1], GREEDY).tolist()

    def close(self) -> None:
        del self.model, self.cache


class Theirs:
    """transformers with sdpa and its dynamic cache."""

    def __init__(self, folder: Path, dtype: torch.dtype, rows: int, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.rows = rows
        how = {"dtype": dtype, "attn_implementation": "sdpa"}
        model = AutoModelForCausalLM.from_pretrained(folder, **how)
        self.model = model.to(torch.device(device)).eval()
        self.cache: Any = None

    def prefill(self, ids: Tensor) -> None:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        for part in ids.split(512 if self.model.device.type == "cpu" else ids.shape[1], dim=1):
            self._run(part)
        if self.rows > 1:  # which layers with states can't
            self.cache.batch_repeat_interleave(self.rows)

    def rewind(self, length: int) -> None:
        beyond = self.cache.get_seq_length() - length
        if beyond:
            self.cache.crop(-beyond)

    def step(self, tokens: list[int]) -> list[int]:
        logits = self._run(torch.tensor(tokens)[:, None]).logits
        return logits[:, -1].float().argmax(-1).tolist()  # as its generate does

    @torch.no_grad()
    def _run(self, ids: Tensor) -> Any:
        ids = ids.to(self.model.device)
        return self.model(ids, cache=self.cache, use_cache=True, logits_to_keep=1)

    def close(self) -> None:
        del self.model, self.cache


def engines(folder: Path, rows: int, settings: Settings) -> dict[str, Engine]:
    """exkv with each cache over one loaded model, and, unless it is alone, its competitors; each
    holds the weights once."""
    room, dtype = max((*settings.contexts, *settings.prompts)) + settings.steps + 1, settings.dtype
    model = Model(folder, dtype=DTYPES[dtype])
    ours = {f"exkv {kind}": Ours(model, kind, room, rows) for kind in settings.caches}
    kind, rank = settings.caches[0], settings.adapter_rank
    for number in range(rows if rank else 0):
        model.load_adapter(random_adapter(folder / f"adapter-{number}", model, rank, number))
    if rank:
        names = list(model.adapters)
        ours[f"exkv {kind} + an adapter"] = Ours(model, kind, room, rows, names[0])
        ours[f"exkv {kind} + one for each row"] = Ours(model, kind, room, rows, names)
    next(iter(ours.values())).load(settings.device)
    for weights in settings.weights:
        fewer = Ours(Model(folder, dtype=DTYPES[dtype], weights=weights), kind, room, rows)
        ours[f"exkv {kind}, {weights}"] = fewer.load(settings.device)
    if settings.alone:
        return {**ours}
    found: dict[str, Engine] = {**ours}
    found[TRANSFORMERS] = Theirs(folder, DTYPES[dtype], rows, settings.device)
    if with_llama_cpp(settings):
        for kind in llamacpp.KV_TYPES:
            found[f"llama.cpp {kind}"] = _llama_cpp(folder / llamacpp.FILE, room, rows, kind)
    return found


def random_adapter(folder: Path, model: Model, rank: int, seed: int) -> Path:
    """Random halves for every linear layer but the head."""
    from adapters import write_adapter

    linears = {
        name.removesuffix(".weight"): tuple(like.shape)
        for name, like in model.stored_tensors().items()
        if len(like.shape) == 2 and ".layers." in name
    }
    return write_adapter(folder, linears, rank=rank, seed=seed, dtype=torch.bfloat16)


def engines_of_files(files: Mapping[str, Path], rows: int, settings: Settings) -> dict[str, Engine]:
    """exkv and llama.cpp, each with the same quantized files."""
    room = max((*settings.contexts, *settings.prompts)) + settings.steps + 1
    found: dict[str, Engine] = {}
    for kind, file in files.items():
        ours = Ours(Model(file, dtype=torch.bfloat16), "fp16", room, rows)
        found[f"exkv fp16, {kind}"] = ours.load("cpu")
        found[f"llama.cpp f16, {kind}"] = _llama_cpp(file, room, rows, "f16")
    return found


def with_llama_cpp(settings: Settings) -> bool:
    plain = settings.dtype == "bf16" and settings.device == "cpu" and not settings.alone
    return plain and llamacpp.is_installed()


def _llama_cpp(file: Path, room: int, rows: int, kind: str) -> Engine:
    return llamacpp.LlamaCpp(file, room, rows, torch.get_num_threads(), kind)


#: Bytes that a step reads of files' weights, by their kind.
Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """The bytes that a step of a batch reads of one model."""

    shape: Shape
    rows: int = 1
    itemsize: int = 2
    files: Sizes = field(default_factory=dict)

    def nbytes(self, name: str, context: int) -> int:
        """All weights but the embedding table, and every row's keys and values."""
        engine, _, weights = name.partition(", ")
        bits = {"exkv 8bit": 8.5, "llama.cpp q8_0": 8.5, "exkv 4bit": 5}.get(engine)
        shape = self.shape
        values = 2 * shape.layers * shape.kv_heads * shape.head_dim
        of_weights = self.files[weights] if weights in self.files else self.weights(weights)
        return of_weights + int(self.rows * context * values * (bits or 8 * self.itemsize) / 8)

    def weights(self, kind: str = "") -> int:
        """As floats, or as ``exkv.weights.on_load`` keeps them, in groups of 64 with a scale of 16
        bits, the head in 8 bits."""
        if not kind:
            return self.shape.read_parameters * self.itemsize
        head = self.shape.vocab * self.shape.hidden
        rest = self.shape.read_parameters - head
        return int((head * (8 + 0.25) + rest * (BITS[kind] + 0.25)) / 8)


# Measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample of an engine: tokens a second of all rows, and the probe's bytes a second
    before and after."""

    engine: str
    context: int
    round: int
    speed: float
    before: float
    after: float

    @property
    def limit(self) -> float:
        return (self.before + self.after) / 2

    @property
    def like(self) -> bool:
        """Whether the machine was the same before and after."""
        return min(self.before, self.after) >= (1 - LIKE) * max(self.before, self.after)


def decode(
    engine: Engine, context: int, rows: int, steps: int, index: int
) -> tuple[float, list[int]]:
    """Tokens a second after a context, and the first row's tokens."""
    engine.rewind(context)
    # What is set up once a length is not the subject.
    tokens = [engine.step(list(range(3, 3 + rows)))]
    started = time.perf_counter()
    for _ in range(steps):
        tokens.append(engine.step(tokens[-1]))
    return rows * steps / (time.perf_counter() - started), [step[0] for step in tokens]


def measure_decode(
    competitors: dict[str, Engine],
    ids: Tensor,
    rows: int,
    settings: Settings,
    probe: Callable[[], float],
) -> tuple[list[Sample], dict[int, dict[str, list[int]]]]:
    """Samples of all contexts, and context -> engine -> tokens."""
    samples, tokens = [], {}
    for engine in competitors.values():
        engine.prefill(ids)
    for context in sorted(settings.contexts, reverse=True):
        how = (context, rows, settings.steps)
        ways = {name: partial(decode, each, *how) for name, each in competitors.items()}
        for each in in_turns(ways, settings.rounds, probe):
            speed, tokens.setdefault(context, {})[each.way] = each.value
            about = {"round": each.round, "before": each.before, "after": each.after}
            samples.append(Sample(engine=each.way, context=context, speed=speed, **about))
    return samples, tokens


def measure_prompts(
    competitors: dict[str, Engine], vocab: int, settings: Settings
) -> Iterator[dict[str, Any]]:
    """Tokens a second of prefill, a result for each length and engine."""
    generator = torch.Generator().manual_seed(2)
    for length in settings.prompts:
        ids = torch.randint(3, vocab, (1, length), generator=generator)
        speeds: dict[str, list[float]] = {name: [] for name in competitors}
        ways = {name: partial(_prefill, each, ids) for name, each in competitors.items()}
        for sample in in_turns(ways, settings.rounds, warm=settings.device != "cpu"):
            speeds[sample.way].append(sample.value)
        for name, values in speeds.items():
            yield {"tokens": length, "engine": name, "tokens_per_second": spread(values)}


def _prefill(engine: Engine, ids: Tensor, index: int) -> float:
    started = time.perf_counter()
    engine.prefill(ids)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return ids.shape[1] / (time.perf_counter() - started)


def measure_shape(name: str, settings: Settings, probe: MemoryProbe) -> Iterator[dict[str, Any]]:
    """One result for each batch. The weight files are deleted after the last one."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(Path(scratch), shape, DTYPES[settings.dtype])
        if with_llama_cpp(settings) or settings.files:
            llamacpp.write_gguf(folder, shape)
        files = {kind: llamacpp.quantize(folder, kind) for kind in settings.files}
        sizes = {kind: llamacpp.bytes_read(file) for kind, file in files.items()}
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, shape.vocab, (1, max(settings.contexts)), generator=generator)
        for batch in settings.batches:
            print(f"measuring {name}, batch {batch}", flush=True)
            competitors = (
                engines_of_files(files, batch, settings)
                if files
                else engines(folder, batch, settings)
            )
            prompts = list(measure_prompts(competitors, shape.vocab, settings))
            samples, tokens = measure_decode(competitors, ids, batch, settings, probe)
            for engine in competitors.values():
                engine.close()
            del competitors, engine
            gc.collect()
            itemsize = DTYPES[settings.dtype].itemsize
            reads = Reads(shape=shape, rows=batch, itemsize=itemsize, files=sizes)
            yield {
                **{"shape": name, "batch": batch, "prompts": prompts, "tokens": tokens},
                "rows": rows_of(reads, samples),
                "states": [
                    {"memory": memory, "rows": rows_of(reads, those)}
                    for memory, those in by_state(samples)
                ],
                "samples": list(map(asdict, samples)),
            }


def by_state(samples: Sequence[Sample]) -> list[tuple[dict[str, float], list[Sample]]]:
    """The samples that count by the memory's speed around them, slow before fast: one state of the
    machine, or two where it changed, each with what the probes read."""
    those = sorted((sample for sample in samples if sample.like), key=lambda s: s.limit)
    if not those:
        return []
    lowest, highest = those[0].limit, those[-1].limit
    border = (lowest * highest) ** 0.5 if highest >= STATES * lowest else 0.0
    states = [[s for s in those if s.limit < border], [s for s in those if s.limit >= border]]
    return [(spread([s.limit for s in state]), state) for state in states if state]


def rows_of(reads: Reads, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The table's rows: for each context and engine the share of the memory's speed, and how many
    times those of the others it is; of samples that count, by medians."""
    shares: dict[int, dict[str, list[float]]] = {}
    speeds: dict[tuple[int, str], list[float]] = {}
    for sample in samples:
        share = sample.speed / reads.rows * reads.nbytes(sample.engine, sample.context)
        of_engine = shares.setdefault(sample.context, {}).setdefault(sample.engine, [])
        if sample.like:
            of_engine.append(share / sample.limit)
            speeds.setdefault((sample.context, sample.engine), []).append(sample.speed)
    rows = []
    for context, of_engines in sorted(shares.items()):
        spreads = {name: spread(values) for name, values in of_engines.items() if values}
        at_one_speed = {n: s["median"] / reads.nbytes(n, context) for n, s in spreads.items()}
        for name, own in spreads.items():
            times = {other: at_one_speed[name] / its for other, its in at_one_speed.items()}
            row = {"context": context, "engine": name, "share": own, "times": times}
            rows.append({**row, "tokens_per_second": spread(speeds[context, name])})
    return rows


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield all results so far after each model."""
    probe, models = MemoryProbe(torch.device(settings.device)), []
    for shape in settings.shapes:
        for measured in measure_shape(shape, settings, probe):
            models.append(measured)
            yield {"llama_cpp": llamacpp.version(), "models": models}


def wrong(result: dict[str, Any]) -> list[str]:
    """In float32, with float caches, all engines choose the same tokens."""
    if result["settings"].get("dtype") != "fp32":
        return []
    return [
        f"{model['shape']} after {context}: {name} chooses other tokens than {TRANSFORMERS}"
        for model in result["models"]
        for context, found in model["tokens"].items()
        for name, tokens in found.items()
        if name == "exkv fp16" and tokens != found.get(TRANSFORMERS, tokens)
    ]


# Reporting ------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> list[str]:
    version = result.get("llama_cpp") or result["machine"].get("llama_cpp")
    version = f" (llama-cpp-python {version})" if version else ""
    parts = [
        "Greedy decoding with the weights named. Share: (bytes of weights, keys and "
        "values) x steps a second, of what the memory probe reads a second just before and after; "
        "median (min..max; samples that count). A step is one token of every row; tokens/s counts "
        "all rows'. Times: how many times as fast as another at the same speed of memory, above 1 "
        f"is faster. llama.cpp{version}: flash attention, bf16 weights."
    ]
    for model in result["models"]:
        parts += [table(model, state) for state in model["states"]]
        parts += [prompt_table(model)] if model.get("prompts") else []
    return parts


def prompt_table(model: dict[str, Any]) -> str:
    """Tokens a second of prompts, and how many times those of each other engine."""
    rows = model["prompts"]
    others = list(dict.fromkeys(row["engine"] for row in rows if "exkv" not in row["engine"]))
    speed = {(row["tokens"], row["engine"]): row["tokens_per_second"]["median"] for row in rows}
    headings = (f"{model['shape']}, prompts", "tokens", "tokens/s", *(f"× {o}" for o in others))
    cells = []
    for row in rows:
        own, length = row["tokens_per_second"], row["tokens"]
        times = [f"{own['median'] / speed[length, other]:.2f}" for other in others]
        cells.append((row["engine"], f"{length:,}", show(own, 1), *times))
    return markdown(headings, cells)


def table(model: dict[str, Any], state: dict[str, Any]) -> str:
    """The rows of one state of the machine, under its memory bandwidth."""
    rows = state["rows"]
    names = dict.fromkeys(row["engine"] for row in rows)
    others = [name for name in names if not name.startswith("exkv")]
    own = next(iter(names))
    more = any(mark in name for name in names for mark in (", ", " + ") if mark not in own)
    others += [own] * more  # beside our own floats
    title = f"{model['shape']}, batch {model['batch']}"
    headings = (title, "context", "share", "tokens/s", *(f"× {o}" for o in others))
    cells = [
        (
            *(row["engine"], f"{row['context']:,}"),
            f"{show(row['share'])[:-1]}; {row['share']['n']})",
            show(row["tokens_per_second"], 1),
            *(f"{row['times'].get(other, float('nan')):.2f}" for other in others),
        )
        for row in rows
    ]
    memory = show(state["memory"], 0, 1e-9)
    return f"Where memory gave {memory} GB/s:\n\n{markdown(headings, cells)}"


QUICK = {
    **{"shapes": ("tiny",), "dtype": "fp32", "batches": (1, 3), "caches": ("fp16", "4bit")},
    **{"contexts": (4, 24), "prompts": (24,), "steps": 3, "rounds": 2, "weights": ("int4",)},
    "adapter_rank": 4,
}
