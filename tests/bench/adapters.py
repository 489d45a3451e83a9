"""Decode steps with adapters beside the same steps without: ``python -m tests.bench adapters``.

Random adapters on all linear layers of a random model: none, one for all rows, and one of its own
for each row, in bound runs. Tokens a second over all rows; every round begins with another way.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from exkv import Cache, Model

from .common import (
    DTYPES,
    SHAPES,
    Shape,
    Spread,
    add_outputs,
    machine,
    machine_line,
    markdown,
    overridden,
    ratios,
    rotated,
    write_checkpoint,
    write_outputs,
)

WAYS = ("without", "one for all", "one for each row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; sizes in tokens."""

    shape: str = "150M"
    dtype: str = "bf16"
    rank: int = 16
    rows: tuple[int, ...] = (1, 8)
    context: int = 64
    steps: int = 32
    rounds: int = 9


def write_adapter(folder: Path, shape: Shape, rank: int, seed: int) -> Path:
    """Random halves for every linear layer but the head."""
    made = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in shape.tensors().items():
        if len(size) == 2 and ".layers." in name:
            path = f"base_model.model.{name.removesuffix('.weight')}"
            for half, (rows, columns) in {"A": (rank, size[1]), "B": (size[0], rank)}.items():
                values = torch.randn(rows, columns, generator=made) * columns**-0.5
                tensors[f"{path}.lora_{half}.weight"] = values.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def seconds_of(model: Model, rows: int, settings: Settings, adapter: object) -> float:
    """Of all steps, after a prompt and a step that binds the run."""
    cache = Cache(model, settings.context + settings.steps + 2, rows)
    ids = torch.arange(3, 3 + settings.context).repeat(rows, 1)
    model.forward(ids, cache, preprocess_only=True, adapter=adapter)
    for step in range(settings.steps + 1):
        if step == 1:
            started = time.perf_counter()
        model.forward(ids[:, :1], cache, last_id_only=True, adapter=adapter)
    return time.perf_counter() - started


def measured(settings: Settings) -> dict[int, dict[str, list[float]]]:
    """Rows -> way -> tokens a second, one a round."""
    shape = SHAPES[settings.shape]
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(Path(scratch) / "model", shape, DTYPES[settings.dtype])
        model = Model(folder)
        for number in range(max(settings.rows)):
            adapter = Path(scratch) / f"adapter-{number}"
            model.load_adapter(write_adapter(adapter, shape, settings.rank, number))
        model.load(devices=["cpu"])
        names = list(model.adapters)
        found: dict[int, dict[str, list[float]]] = {}
        for rows in settings.rows:
            given = dict(zip(WAYS, (None, names[0], names[:rows]), strict=True))
            found[rows] = {way: [] for way in WAYS}
            for index in range(settings.rounds + 1):
                for way in rotated(WAYS, index):
                    seconds = seconds_of(model, rows, settings, given[way])
                    found[rows][way].append(rows * settings.steps / seconds)
        model.unload()
    # The first round warms up.
    return {rows: {way: each[1:] for way, each in ways.items()} for rows, ways in found.items()}


def as_text(found: dict[int, dict[str, list[float]]], settings: Settings, line: str) -> str:
    rows = [
        [
            f"{count} rows, {way}",
            Spread.of(speeds).text(1),
            ratios(speeds, ways[WAYS[0]]).text(),
        ]
        for count, ways in found.items()
        for way, speeds in ways.items()
    ]
    about = (
        f"{settings.shape} in {settings.dtype}, adapters of rank {settings.rank} on all linear "
        f"layers, {settings.steps} steps after {settings.context} tokens:"
    )
    table = markdown(["", "tokens/s", "by without"], rows)
    return f"{line}.\n\n{about}\n\n{table}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench adapters", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--rows", type=int, nargs="+")
    for name in ("rank", "context", "steps", "rounds"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    add_outputs(parser)
    options = parser.parse_args(arguments)
    settings = Settings()
    if options.quick:
        settings = Settings(shape="tiny", rows=(2,), context=8, steps=2, rounds=1)
    settings = overridden(settings, options)
    found = measured(settings)
    about = machine(torch.device("cpu"))
    text = as_text(found, settings, machine_line(about)) + "\n"
    print(text)
    result = {"machine": about, "settings": asdict(settings), "tokens_per_second": found}
    write_outputs(options, result, text)
    return 0
