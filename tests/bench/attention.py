"""The attention kernels on the CPU alone: ``python -m tests.bench attention``.

Decoding one token over a long cache is reading memory, so its figure is the bytes of keys and
values read a second as a share of what the memory probe reads around the same sample. Competitors
are torch's SDPA as its users call it (``enable_gqa=True``) and with the query viewed as groups,
both on a cache that is contiguous head by head, as they want it. A second table is prefill of an
empty cache, a third is storing one token in one op and by the ops that it is made of.

Every competitor reads several layers in turn, more than any cache holds. Samples alternate, ratios
are of figures of one round, and rounds around which the probe was slow are left out where enough
others remain: medians are of states that are alike.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from exkv.ops.kv_formats import FORMATS

from .common import (
    MemoryProbe,
    Spread,
    add_outputs,
    disturbed,
    machine,
    machine_line,
    markdown,
    overridden,
    ratios,
    rotated,
    write_outputs,
)

CPU = torch.device("cpu")
OURS, OURS_INT8, OURS_PAGED = "exkv bf16", "exkv int8", "exkv bf16 in pages"
SDPA, SDPA_GROUPS = "SDPA enable_gqa", "SDPA on groups"
#: Tokens of a page.
PAGE = 16
#: Formats in which a token is stored; heads of the last are transformed first.
STORED = ("float", "int8", "int4")
#: Layers whose stores take a token in turn, tokens that each has room for.
STORES, ROOM = 32, 64
#: Fewer undisturbed rounds than this, and all are kept.
ENOUGH = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Query heads, key heads, values of each."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads} heads over {self.kv_heads} x {self.head_dim}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure; ``bytes`` of float keys and values that one sample at least reads."""

    shapes: tuple[Heads, ...]
    tokens: int
    prefill: int
    bytes: int
    rounds: int


FULL = Settings(
    shapes=(
        Heads(heads=32, kv_heads=32, head_dim=64),
        Heads(heads=32, kv_heads=8, head_dim=128),
        Heads(heads=32, kv_heads=4, head_dim=64),
    ),
    tokens=8192,
    prefill=2048,
    bytes=256 << 20,
    rounds=9,
)
QUICK = Settings(
    shapes=(Heads(heads=4, kv_heads=2, head_dim=32),), tokens=96, prefill=32, bytes=1, rounds=2
)


# Competitors ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Competitor:
    """Name, one call over all layers, and the bytes of keys and values that each layer reads."""

    name: str
    run: Callable[[], None]
    nbytes: int


def _over(layers: Sequence[tuple], attend: Callable[..., torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        for layer in layers:
            attend(*layer)

    return run


def competitors(shape: Heads, length: int, tokens: int, layers: int) -> list[Competitor]:
    """Queries of ``length`` tokens, the last of ``tokens``, over ``layers`` caches of their own."""
    generator = torch.Generator().manual_seed(0)

    def normal(count: int, heads: int) -> torch.Tensor:
        size = (1, count, heads, shape.head_dim)
        return torch.randn(size, generator=generator).bfloat16()

    kv = [(normal(tokens, shape.kv_heads), normal(tokens, shape.kv_heads)) for _ in range(layers)]
    quantize = torch.ops.exkv.quantize_kv
    int8 = [(*quantize(k), *quantize(v)) for k, v in kv]
    theirs = [tuple(x.transpose(1, 2).contiguous() for x in pair) for pair in kv]
    q = normal(length, shape.heads)
    past, scale = torch.tensor([tokens - length], dtype=torch.int32), shape.head_dim**-0.5
    ours = [
        (OURS, kv, lambda k, v: torch.ops.exkv.attention(q, k, v, past, tokens, False, scale)),
        (OURS_INT8, int8, lambda *x: torch.ops.exkv.attention_int8(q, *x, past, tokens, scale)),
    ]
    ours.append((OURS_PAGED, *_paged(q, kv, past, scale)))
    return [
        Competitor(name=name, run=_over(of, attend), nbytes=sum(x.nbytes for x in of[0]))
        for name, of, attend in (*ours, *_sdpa(q, shape, theirs))
    ]


def _paged(
    q: torch.Tensor, layers: Sequence[tuple], past: torch.Tensor, scale: float
) -> tuple[list[tuple], Callable[..., tuple]]:
    """The same keys and values in pages that lie in any order, and what reads them."""
    tokens = layers[0][0].shape[1]
    order = torch.randperm(-(-tokens // PAGE), generator=torch.Generator().manual_seed(1))
    table, places = order.int().view(1, -1), order.argsort()

    def pool(x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x[0], (0, 0, 0, 0, 0, -tokens % PAGE))
        return padded.unflatten(0, (-1, PAGE))[places].contiguous()

    start, count = torch.zeros_like(past), torch.full_like(past, tokens)

    def attend(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kv = ([k], "float", [v], "float")
        return torch.ops.exkv.attention_part(
            q, *kv, past, start, count, tokens, scale, 0, 0.0, table
        )

    return [(pool(k), pool(v)) for k, v in layers], attend


def _sdpa(q: torch.Tensor, shape: Heads, layers: Sequence[tuple]) -> list[tuple]:
    """torch's own; the view as groups has no causal mask for several tokens."""
    heads_first, decoding = q.transpose(1, 2), q.shape[1] == 1
    groups = q.view(1, shape.kv_heads, -1, shape.head_dim) if decoding else None

    def as_called(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            heads_first, k, v, is_causal=not decoding, enable_gqa=shape.heads > shape.kv_heads
        )

    def on_groups(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(groups, k, v)

    found = [(SDPA, layers, as_called)]
    return [*found, (SDPA_GROUPS, layers, on_groups)] if decoding else found


def storers(shape: Heads) -> list[Competitor]:
    """One new token of rotated keys into 32 stores, for each format in one op and in several."""
    generator = torch.Generator().manual_seed(0)
    size = (1, 1, shape.kv_heads, shape.head_dim)
    k, v = torch.randn((2, *size), generator=generator).bfloat16()
    cos, sin = torch.randn(2, 1, 1, shape.head_dim, generator=generator).bfloat16()
    past, place, ops = torch.tensor([ROOM // 2], dtype=torch.int32), ROOM // 2, torch.ops.exkv
    found = []
    for kind in STORED:
        transformed, layout = kind == "int4", FORMATS[kind].layout((1, ROOM, *size[2:]), k.dtype)
        stores = [
            tuple([torch.zeros(x, dtype=dtype) for x, dtype in layout.values()] for _ in "kv")
            for _ in range(STORES)
        ]

        def at_once(
            to_k: list, to_v: list, kind: str = kind, transformed: bool = transformed
        ) -> None:
            ops.append_kv(k, v, cos, sin, to_k, kind, to_v, kind, past, None, None, 0, transformed)

        def by_parts(
            to_k: list, to_v: list, kind: str = kind, transformed: bool = transformed
        ) -> None:
            for x, to in ((ops.rope(k, k[:, :, :0], cos, sin)[0], to_k), (v, to_v)):
                heads = ops.hadamard(x) if transformed else x
                for tensor, new in zip(to, FORMATS[kind].encode(heads).values(), strict=True):
                    tensor[:, place : place + 1] = new

        nbytes = sum(x[:, 0].nbytes for store in stores[0] for x in store)
        for name, way in ((f"{kind} by append_kv", at_once), (f"{kind} by its parts", by_parts)):
            found.append(Competitor(name=name, run=_over(stores, way), nbytes=nbytes))
    return found


# Measuring ------------------------------------------------------------------------------------


def measure(entries: Sequence[Competitor], layers: int, rounds: int, probe: MemoryProbe) -> dict:
    """Competitor -> seconds a layer and share of the bandwidth around it, for each round."""
    for entry in entries:
        entry.run()
    figures = {entry.name: {"seconds": [], "share": []} for entry in entries}
    probes = []
    for index in range(rounds):
        around = [probe()]
        for entry in rotated(entries, index):
            started = time.perf_counter()
            entry.run()
            seconds = (time.perf_counter() - started) / layers
            around.append(probe())
            bandwidth = (around[-2] + around[-1]) / 2
            figures[entry.name]["seconds"].append(seconds)
            figures[entry.name]["share"].append(entry.nbytes / seconds / bandwidth)
        probes.append((min(around), max(around)))
    return {"figures": figures, "probes": probes}


def kept(measured: dict[str, Any]) -> list[int]:
    """The rounds that were undisturbed, if there are enough; else all."""
    slow = set(disturbed(measured["probes"]))
    rounds = range(len(measured["probes"]))
    calm = [index for index in rounds if index not in slow]
    return calm if len(calm) >= ENOUGH else list(rounds)


def rows_of(shape: Heads, measured: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each competitor; ratios are its time by exkv's bf16 and by its int8."""
    rounds = kept(measured)

    def of(name: str, figure: str = "seconds") -> list[float]:
        return [measured["figures"][name][figure][index] for index in rounds]

    return [
        {
            "shape": str(shape),
            "engine": name,
            "seconds": asdict(Spread.of(of(name))),
            "bandwidth_share": asdict(Spread.of(of(name, "share"))),
            "by_bf16": asdict(ratios(of(name), of(OURS))),
            "by_int8": asdict(ratios(of(name), of(OURS_INT8))),
        }
        for name in measured["figures"]
    ]


def stored_rows(shape: Heads, measured: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each way to store; ratios are its time by that of ``append_kv``."""
    rounds, figures = kept(measured), measured["figures"]
    rows = []
    for name in figures:
        base = f"{name.split()[0]} by append_kv"
        mine, once = ([figures[key]["seconds"][i] for i in rounds] for key in (name, base))
        row = {"shape": str(shape), "engine": name, "seconds": asdict(Spread.of(mine))}
        rows.append(row | {"by_append": asdict(ratios(mine, once))})
    return rows


def run(settings: Settings) -> dict[str, Any]:
    """Every figure, as it is written to JSON."""
    probe = MemoryProbe(CPU)
    result: dict[str, Any] = {
        "machine": machine(CPU),
        "settings": asdict(settings),
        "decode": [],
        "prefill": [],
        "store": [],
        "probes_gb_per_second": [],
        "disturbed_rounds": 0,
    }
    for shape in settings.shapes:
        layer_bytes = 4 * settings.tokens * shape.kv_heads * shape.head_dim
        layers = -(-settings.bytes // layer_bytes)
        cases = {"decode": (1, settings.tokens, layers)}
        cases["prefill"] = (settings.prefill, settings.prefill, 1)
        entries = {
            kind: (rows_of, competitors(shape, length, tokens, count), count)
            for kind, (length, tokens, count) in cases.items()
        }
        entries["store"] = (stored_rows, storers(shape), STORES)
        for kind, (rows, entered, count) in entries.items():
            print(f"measuring {kind}, {shape}", flush=True)
            measured = measure(entered, count, settings.rounds, probe)
            result[kind] += rows(shape, measured)
            result["probes_gb_per_second"] += [[x / 1e9 for x in p] for p in measured["probes"]]
            result["disturbed_rounds"] += len(disturbed(measured["probes"]))
    return result


# Reporting ------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """Markdown: median (min..max) over the rounds that count."""
    settings, probes = result["settings"], result["probes_gb_per_second"]
    return "\n\n".join(
        [
            machine_line(result["machine"]),
            f"One token over {settings['tokens']:,}; `read` is bytes of keys and values a second "
            "by what the probe reads around the sample. Above 1 exkv is faster.",
            _table(result["decode"], bandwidth=True),
            f"Prefill of {settings['prefill']:,} tokens of an empty cache.",
            _table(result["prefill"], bandwidth=False),
            "Storing one token's keys, rotated, and values.",
            _store_table(result["store"]),
            f"Rounds with a slow probe: {result['disturbed_rounds']} of {len(probes)}; probes "
            f"{min(map(min, probes)):.1f} to {max(map(max, probes)):.1f} GB/s.",
        ]
    )


def _table(rows: Sequence[dict[str, Any]], *, bandwidth: bool) -> str:
    headings = ["shape", "engine", "µs", "time / exkv bf16", "time / exkv int8"]
    cells = []
    for row in rows:
        micro = {key: value * 1e6 for key, value in row["seconds"].items() if key != "n"}
        cell = [row["shape"], row["engine"], Spread(**micro, n=row["seconds"]["n"]).text(0)]
        cell += [Spread(**row["by_bf16"]).text(), Spread(**row["by_int8"]).text()]
        cells.append([*cell, Spread(**row["bandwidth_share"]).text()] if bandwidth else cell)
    return markdown([*headings, "read"] if bandwidth else headings, cells)


def _store_table(rows: Sequence[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        micro = {key: value * 1e6 for key, value in row["seconds"].items() if key != "n"}
        spread = Spread(**micro, n=row["seconds"]["n"]).text(1)
        cells.append([row["shape"], row["engine"], spread, Spread(**row["by_append"]).text()])
    return markdown(["shape", "stored", "µs", "time / append_kv"], cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench attention", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny: does the bench run?")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--tokens", type=int, help="keys that one token is decoded over")
    add_outputs(parser)
    options = parser.parse_args(arguments)
    result = run(overridden(QUICK if options.quick else FULL, options))
    write_outputs(options, result, report(result) + "\n")
    print(f"\n{report(result)}")
    return 0
