"""What the measurements share: model shapes, the machine in words, the memory probe, medians.

``llama.py`` measures prefill and decoding with it, ``load.py`` loading, ``attention.py`` kernels.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file

S = TypeVar("S")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: A round is marked as disturbed if the memory probe around it falls below this share of the
#: best probe of the run: something else was using the machine.
UNDISTURBED = 0.8


# Models ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama's sizes; head_dim is 64 as in TinyLlama and Llama 3.2 1B."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    tied: bool = False

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, as Hugging Face's checkpoints have them."""
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (self.intermediate, hidden),
            "mlp.up_proj": (self.intermediate, hidden),
            "mlp.down_proj": (hidden, self.intermediate),
        }
        head = {} if self.tied else {"lm_head.weight": (self.vocab, hidden)}
        return {
            "model.embed_tokens.weight": (self.vocab, hidden),
            **{
                f"model.layers.{index}.{name}.weight": shape
                for index in range(self.layers)
                for name, shape in layer.items()
            },
            "model.norm.weight": (hidden,),
            **head,
        }

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.tensors().values())

    @property
    def read_parameters(self) -> int:
        """Parameters that a decode step reads: all but an embedding table that is no head."""
        return self.parameters - (0 if self.tied else self.vocab * self.hidden)

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": str(dtype).removeprefix("torch."),
        }


SHAPES = {
    "tiny": Shape(vocab=512, hidden=64, intermediate=192, layers=2, heads=2, kv_heads=1),
    "25M": Shape(vocab=16384, hidden=384, intermediate=1024, layers=8, heads=6, kv_heads=2),
    # SmolLM2-135M's own sizes.
    "135M": Shape(
        vocab=49152, hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, tied=True
    ),
    "150M": Shape(vocab=32000, hidden=768, intermediate=2048, layers=16, heads=12, kv_heads=4),
    # TinyLlama's own sizes.
    "1.1B": Shape(vocab=32000, hidden=2048, intermediate=5632, layers=22, heads=32, kv_heads=4),
}


def write_checkpoint(folder: Path, shape: Shape, dtype: torch.dtype, seed: int = 0) -> Path:
    """A random model whose activations neither fade nor grow, so that greedy tokens differ."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in shape.tensors().items():
        tensor = torch.ones(size, dtype=dtype)
        if len(size) == 2:
            spread = 1.0 if "embed" in name else size[1] ** -0.5
            tensor.normal_(0, spread, generator=generator)
        tensors[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config(dtype)))
    return folder


# The machine ----------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, Any]:
    """Everything that a reader of the figures asks first."""
    import transformers

    import exkv
    import exkv_ext

    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "exkv": exkv.__version__,
        "native_modules": [name for name, there in exkv_ext.loaded().items() if there],
        "cpu_kernels": exkv_ext.cpu_isa(),
    }


def cpu_name() -> str:
    """The model as the system tells it; with its family and number where the name says little."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    name = fields.get("model name", platform.machine())
    if "family" not in name and "cpu family" in fields:
        name += f" (family {fields['cpu family']} model {fields['model']})"
    return name


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def machine_line(about: dict[str, Any]) -> str:
    native = ", ".join(about["native_modules"]) or "none"
    isa = f" ({about['cpu_kernels']})" if about["cpu_kernels"] else ""
    where = "" if about["device"] == "cpu" else f"{about['device']}; "
    return (
        f"{where}{about['cpu']}, {about['cores']} cores, {about['threads']} threads; "
        f"torch {about['torch']}, transformers {about['transformers']}, exkv {about['exkv']} "
        f"with native modules {native}{isa}; {about['date']}"
    )


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class MemoryProbe:
    """Reads a buffer far larger than any cache: what decoding can reach, and whether something
    else is using the machine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = (256 << 20) if device.type == "cpu" else (1 << 30)
        self.buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
        self()

    def __call__(self) -> float:
        """Bytes a second, the best of three reads."""
        best = 0.0
        for _ in range(3):
            synchronize(self.device)
            started = time.perf_counter()
            self.buffer.sum()
            synchronize(self.device)
            best = max(best, self.buffer.nbytes / (time.perf_counter() - started))
        return best


# Numbers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One figure over all rounds."""

    median: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(
            median=statistics.median(values), min=min(values), max=max(values), n=len(values)
        )

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.min:.{digits}f}..{self.max:.{digits}f})"


def ratios(values: Sequence[float], base: Sequence[float]) -> Spread:
    """Each round's value by the same round's base."""
    return Spread.of([value / other for value, other in zip(values, base, strict=True)])


def rotated(items: Sequence[Any], by: int) -> list[Any]:
    """Every round starts with another competitor, so that none always runs on a warm machine."""
    by %= len(items)
    return [*items[by:], *items[:by]]


def disturbed(probes: Sequence[tuple[float, float]]) -> list[int]:
    """Rounds (from 0) around which the memory was slower than it can be."""
    best = max(max(pair) for pair in probes)
    return [index for index, pair in enumerate(probes) if min(pair) < UNDISTURBED * best]


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns: the first one left, the others right."""
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    return "\n".join([line(headings), line(rule), *map(line, rows)])


# Commands -------------------------------------------------------------------------------------


def svg_text(x: float, y: float, words: str, anchor: str, colour: str = "#888") -> str:
    """Words in a drawing, their ``anchor`` (start, middle or end) at x."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """The options that every bench has."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there too")


def write_outputs(options: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    """Where :func:`add_outputs`' options say."""
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(text)


def overridden(settings: S, options: argparse.Namespace) -> S:
    """The settings, a dataclass, with what the command line says instead, by the same names."""
    given = {name: getattr(options, name, None) for name in asdict(settings)}
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


# Processes ------------------------------------------------------------------------------------


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process of its own, as JSON can carry it; None where it
    failed, which is printed."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        status = 1
        try:
            found = json.dumps(function(*args))
            with os.fdopen(writing, "w") as file:
                file.write(found)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else None
