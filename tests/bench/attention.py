"""The attention kernels on the CPU alone: ``python -m tests.bench attention``.

Decoding one token over a long cache is reading memory, so its figure is the bytes of keys and
values read a second as a share of what the memory probe reads around the same sample. Competitors
are torch's SDPA as its users call it (``enable_gqa=True``) and with the query viewed as groups,
both on a cache that is contiguous head by head, as they want it. A second table is prefill of an
empty cache, a third is storing one token in one op and by the ops that it is made of.

Every competitor reads several layers in turn, more than any cache holds. Rounds around which the
probe was slow are left out where enough others remain: medians are of states that are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from exkv.ops.kv_formats import FORMATS

from .harness import (
    MemoryProbe,
    Sample,
    disturbed,
    in_turns,
    markdown,
    ratios,
    seconds,
    setting,
    show,
    spread,
)

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
TABLES = {
    "decode": "One token over {tokens:,}; `read` is bytes of keys and values a second by what the "
    "probe reads around the sample. Above 1 exkv is faster.",
    "prefill": "Prefill of {prefill:,} tokens of an empty cache.",
    "store": "Storing one token's keys, rotated, and values.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure."""

    shapes: tuple[str, ...] = setting(("32x32x64", "32x8x128", "32x4x64"), "heads x key heads x D")
    tokens: int = setting(8192, "keys that one token is decoded over")
    prefill: int = setting(2048, "tokens of a prompt")
    bytes: int = setting(256 << 20, "of keys and values that a sample of decoding reads at least")
    rounds: int = 9


# Competitors ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Competitor:
    """What it does with a layer, the layers, and the bytes of keys and values of each; ``base``
    names the competitors whose time it is set beside."""

    attend: Callable[..., Any]
    layers: Sequence[tuple[Any, ...]]
    nbytes: int
    base: tuple[str, ...] = (OURS, OURS_INT8)

    def time(self, index: int) -> float:
        """Seconds a layer."""
        return seconds(self.run) / len(self.layers)

    def run(self) -> None:
        for layer in self.layers:
            self.attend(*layer)


def competitors(heads: Sequence[int], length: int, tokens: int, layers: int) -> dict[str, Any]:
    """Queries of ``length`` tokens, the last of ``tokens``, over ``layers`` caches of their own."""
    generator = torch.Generator().manual_seed(0)
    query_heads, kv_heads, head_dim = heads

    def normal(count: int, heads: int) -> Tensor:
        return torch.randn((1, count, heads, head_dim), generator=generator).bfloat16()

    kv = [(normal(tokens, kv_heads), normal(tokens, kv_heads)) for _ in range(layers)]
    ops = torch.ops.exkv
    int8 = [(*ops.quantize_kv(k), *ops.quantize_kv(v)) for k, v in kv]
    q = normal(length, query_heads)
    past, scale = torch.tensor([tokens - length], dtype=torch.int32), head_dim**-0.5
    found = {
        OURS: (lambda k, v: ops.attention(q, k, v, past, tokens, False, scale), kv),
        OURS_INT8: (lambda *x: ops.attention_int8(q, *x, past, tokens, scale), int8),
        OURS_PAGED: _paged(q, kv, past, scale),
        **_sdpa(q, kv_heads, [tuple(x.transpose(1, 2).contiguous() for x in p) for p in kv]),
    }
    return {n: Competitor(f, of, sum(x.nbytes for x in of[0])) for n, (f, of) in found.items()}


def _paged(
    q: Tensor, layers: Sequence[tuple], past: Tensor, scale: float
) -> tuple[Callable[..., Any], list[tuple]]:
    """The same keys and values in pages that lie in any order, and what reads them."""
    tokens = layers[0][0].shape[1]
    order = torch.randperm(-(-tokens // PAGE), generator=torch.Generator().manual_seed(1))
    table, places = order.int().view(1, -1), order.argsort()

    def pool(x: Tensor) -> Tensor:
        padded = F.pad(x[0], (0, 0, 0, 0, 0, -tokens % PAGE))
        return padded.unflatten(0, (-1, PAGE))[places].contiguous()

    start, count = torch.zeros_like(past), torch.full_like(past, tokens)

    def attend(k: Tensor, v: Tensor) -> Any:
        kv, where = ([k], "float", [v], "float"), (past, start, count, tokens, scale)
        return torch.ops.exkv.attention_part(q, *kv, *where, 0, 0.0, table)

    return attend, [(pool(k), pool(v)) for k, v in layers]


def _sdpa(q: Tensor, kv_heads: int, layers: Sequence[tuple]) -> dict[str, tuple]:
    """torch's own; the view as groups has no causal mask for several tokens."""
    heads_first, decoding = q.transpose(1, 2), q.shape[1] == 1
    how = {"is_causal": not decoding, "enable_gqa": q.shape[2] > kv_heads}
    attend = F.scaled_dot_product_attention
    found = {SDPA: (lambda k, v: attend(heads_first, k, v, **how), layers)}
    if decoding:
        groups = q.view(1, kv_heads, -1, q.shape[-1])
        found[SDPA_GROUPS] = (partial(attend, groups), layers)
    return found


def storers(heads: Sequence[int]) -> dict[str, Competitor]:
    """One new token of rotated keys into 32 stores, for each format in one op and in several."""
    generator = torch.Generator().manual_seed(0)
    _, kv_heads, head_dim = heads
    k, v = torch.randn((2, 1, 1, kv_heads, head_dim), generator=generator).bfloat16()
    cos, sin = torch.randn(2, 1, 1, head_dim, generator=generator).bfloat16()
    past, ops = torch.tensor([ROOM // 2], dtype=torch.int32), torch.ops.exkv

    def at_once(kind: str, to_k: list, to_v: list) -> None:
        how = (past, None, None, 0, kind == "int4")
        ops.append_kv(k, v, cos, sin, to_k, kind, to_v, kind, *how)

    def by_parts(kind: str, to_k: list, to_v: list) -> None:
        for x, to in ((ops.rope(k, k[:, :, :0], cos, sin)[0], to_k), (v, to_v)):
            x = ops.hadamard(x) if kind == "int4" else x
            for tensor, new in zip(to, FORMATS[kind].encode(x).values(), strict=True):
                tensor[:, ROOM // 2 : ROOM // 2 + 1] = new

    found = {}
    for kind in STORED:
        layout = FORMATS[kind].layout((1, ROOM, kv_heads, head_dim), k.dtype).values()
        stores = [
            tuple([torch.zeros(x, dtype=dtype) for x, dtype in layout] for _ in "kv")
            for _ in range(STORES)
        ]
        nbytes, base = (
            sum(x[:, 0].nbytes for store in stores[0] for x in store),
            f"{kind} by append_kv",
        )
        for name, way in ((base, at_once), (f"{kind} by its parts", by_parts)):
            found[name] = Competitor(partial(way, kind), stores, nbytes, (base,))
    return found


# Measuring ------------------------------------------------------------------------------------


def kept(samples: Sequence[Sample]) -> list[int]:
    """The rounds that were undisturbed, if there are enough; else all."""
    slow, rounds = disturbed(samples), sorted({sample.round for sample in samples})
    calm = [index for index in rounds if index not in slow]
    return calm if len(calm) >= ENOUGH else rounds


def rows_of(
    shape: str, entries: dict[str, Competitor], samples: Sequence[Sample]
) -> list[dict[str, Any]]:
    """One row for each competitor; ratios are its time by those of its base."""
    rounds = kept(samples)
    times = {n: [s.value for s in samples if s.way == n and s.round in rounds] for n in entries}
    rows = []
    for name, entry in entries.items():
        own = [s for s in samples if s.way == name and s.round in rounds]
        rows.append(
            {
                **{"shape": shape, "engine": name, "seconds": spread(times[name])},
                "bandwidth_share": spread([entry.nbytes / s.value / s.limit for s in own]),
                "by": {base: ratios(times[name], times[base]) for base in entry.base},
            }
        )
    return rows


def measure(settings: Settings) -> dict[str, Any]:
    """Every figure."""
    probe, noisy = MemoryProbe(), 0
    result: dict[str, Any] = {table: [] for table in TABLES}
    for shape in settings.shapes:
        heads = tuple(map(int, shape.split("x")))
        layers = -(-settings.bytes // (4 * settings.tokens * heads[1] * heads[2]))
        entered = {
            "decode": competitors(heads, 1, settings.tokens, layers),
            "prefill": competitors(heads, settings.prefill, settings.prefill, 1),
            "store": storers(heads),
        }
        for table, entries in entered.items():
            print(f"measuring {table}, {shape}", flush=True)
            ways = {name: entry.time for name, entry in entries.items()}
            samples = list(in_turns(ways, settings.rounds, probe, warm=1))
            result[table] += rows_of(shape, entries, samples)
            noisy += len(disturbed(samples))
    rounds = settings.rounds * len(settings.shapes) * len(TABLES)
    return {**result, "disturbed_rounds": noisy, "all_rounds": rounds}


def report(result: dict[str, Any]) -> list[str]:
    """Median (min..max) over the rounds that count."""
    parts = []
    for table, words in TABLES.items():
        bases = ("append_kv",) if table == "store" else (OURS, OURS_INT8)
        headings = ["heads", "engine", "µs", *(f"time / {base}" for base in bases), "read"]
        rows = [
            [
                row["shape"],
                row["engine"],
                show(row["seconds"], 1, 1e6),
                *map(show, row["by"].values()),
            ]
            + [show(row["bandwidth_share"])]
            for row in result[table]
        ]
        parts += [words.format(**result["settings"]), markdown(headings, rows)]
    noisy = f"{result['disturbed_rounds']} of {result['all_rounds']}"
    return [*parts, f"Rounds with a slow probe: {noisy}."]


QUICK = {"shapes": ("4x2x32",), "tokens": 96, "prefill": 32, "bytes": 1, "rounds": 2}
