"""Kernels on the CPU alone, beside what they replace: ``python -m tests.bench kernels``.

* ``decode``, ``prefill``: attention of one token over a long cache, and of a prompt, beside torch's
  SDPA as its users call it (``enable_gqa=True``) and, for one token, with the query viewed as
  groups, both on a cache that is contiguous head by head, as they want it.
* ``store``: one token's rotated keys and values in one op, beside the ops that it is made of.
* ``linear``: floats, integers in groups and blocks as GGUF files have them, beside ``F.linear``.
* ``heads``: each head of latent attention by a matrix of its own, beside ``torch.bmm``.
* ``sample``: the choice of a token, beside the op's reference and transformers' warpers with
  ``torch.multinomial``.

``read`` is the rate at which weights, keys and values are read, as a share of what the memory probe
reads before and after. Each way goes over several layers or matrices in turn, more than any cache
holds. With ``--threads 1`` time is the thread's own, so that neighbours who take the processor
count for nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from exkv import ops
from exkv.ops.kv_formats import FORMATS as KV_FORMATS
from exkv.weights.exl3 import Exl3Format, TrellisFormat
from exkv.weights.floats import FLOATS
from exkv.weights.format import Tensors
from exkv.weights.gguf import FORMATS
from exkv.weights.methods import register
from exkv.weights.on_load import BITS, OnLoad

from .harness import (
    MemoryProbe,
    by_way,
    disturbed,
    in_turns,
    markdown,
    ratios,
    seconds,
    setting,
    show,
    spread,
)
from .shapes import DTYPES, SHAPES, Shape

TABLES = ("decode", "prefill", "store", "linear", "heads", "sample")
#: EXL3 of 4 bits, with the codebook that is its default.
EXL3 = "exl3"
SDPA, TORCH, WARPERS = "SDPA enable_gqa", "torch", "transformers"
KINDS = (*DTYPES, *BITS, *FORMATS, EXL3)
#: Tokens of a page; stores that take a token in turn, and tokens that each has room for.
PAGE, STORES, ROOM = 16, 32, 64
#: Formats in which a token is stored; heads of the last are transformed first.
STORED = ("float", "int8", "int4")
#: Heads, outputs and inputs: what makes keys and values in DeepSeek-V2-Lite and V3.
LATENT_HEADS = ((16, 512, 128), (16, 128, 512), (128, 512, 128), (128, 128, 512))
#: Name -> the op's temperature, top_k, top_p, min_p.
CHAINS: dict[str, tuple[float, int, float, float]] = {
    "top-k 50": (0.8, 50, 1.0, 0.0),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9, 0.0),
    "top-p 0.9": (0.8, 0, 0.9, 0.0),
    "min-p 0.05": (0.8, 0, 1.0, 0.05),
    "none": (0.8, 0, 1.0, 0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    only: tuple[str, ...] = setting(TABLES, "kernels", TABLES)
    heads: tuple[str, ...] = setting(("32x32x64", "32x8x128", "32x4x64"), "heads x key heads x D")
    tokens: int = setting(8192, "keys that one token is decoded over")
    prefill: int = setting(2048, "tokens of a prompt")
    shapes: tuple[str, ...] = setting(("150M", "1.1B"), "models of linear layers", SHAPES)
    sizes: int = setting(9, "of a model's matrices, the largest")
    kinds: tuple[str, ...] = setting(
        ("bf16", "int8", "int4", "Q8_0", "Q4_0", "Q4_K", "Q6_K"), "of weights", KINDS
    )
    rows: tuple[int, ...] = setting((1, 2, 4, 8, 12, 16), "of a linear layer's input, of logits")
    vocabularies: tuple[int, ...] = setting((32_000, 128_256), "tokens to choose from")
    dtype: str = setting("bf16", "of inputs", DTYPES)
    megabytes: int = setting(128, "of weights, keys or values that a sample reads at least")
    threads: int = setting(0, "0 for torch's own number")
    rounds: int = 7


@dataclass(frozen=True, slots=True)
class Way:
    """A function, the arguments of one call after another, and bytes that each call reads."""

    call: Callable[..., Any]
    items: Sequence[tuple[Any, ...]] = ((),)
    nbytes: int = 0

    @torch.no_grad()
    def run(self) -> None:
        for item in self.items:
            self.call(*item)

    def time(self, timer: Callable[[], float], index: int) -> float:
        """Seconds of one call."""
        return seconds(self.run, 3, timer) / len(self.items)


#: Ways by name, the first of which is what the others are set beside.
Ways = dict[str, Way]


def cases(settings: Settings) -> Iterator[tuple[str, str, Ways]]:
    """Kernel, case, and the ways that take turns."""
    wanted, dtype = settings.only, DTYPES[settings.dtype]
    for name in settings.heads:
        heads = tuple(map(int, name.split("x")))
        layers = -(-(settings.megabytes << 20) // (4 * settings.tokens * heads[1] * heads[2]))
        if "decode" in wanted:
            yield "decode", name, attention(heads, 1, settings.tokens, layers)
        if "prefill" in wanted:
            yield "prefill", name, attention(heads, settings.prefill, settings.prefill, 1)
        if "store" in wanted:
            yield from (("store", f"{name} {kind}", store(heads, kind)) for kind in STORED)
    if "linear" in wanted:
        each = (projections(SHAPES[shape])[: settings.sizes] for shape in settings.shapes)
        for size in dict.fromkeys(size for sizes in each for size in sizes):
            yield from linear(size, settings)
    if "heads" in wanted:
        for size in LATENT_HEADS:
            yield from head_by_head(size, settings)
    if "sample" in wanted:
        for vocabulary, rows, chain in product(settings.vocabularies, settings.rows, CHAINS):
            logits = (torch.randn(rows, vocabulary) * 3).to(dtype)
            yield "sample", f"{chain}, {rows} x {vocabulary}", sample(logits, CHAINS[chain])


# Attention ------------------------------------------------------------------------------------


def attention(heads: Sequence[int], length: int, tokens: int, layers: int) -> Ways:
    """Queries of ``length`` tokens, the last of ``tokens``, over ``layers`` caches of their own."""
    query_heads, kv_heads, head_dim = heads
    shape = (1, tokens, kv_heads, head_dim)
    kv = [tuple(torch.randn(2, *shape).bfloat16()) for _ in range(layers)]
    int8 = [tuple(x for each in pair for x in torch.ops.exkv.quantize_kv(each)) for pair in kv]
    q = torch.randn(1, length, query_heads, head_dim).bfloat16()
    past, scale = torch.tensor([tokens - length], dtype=torch.int32), head_dim**-0.5
    kernels = torch.ops.exkv
    found = {
        **_sdpa(q, kv_heads, [tuple(x.transpose(1, 2).contiguous() for x in p) for p in kv]),
        "exkv": (lambda k, v: kernels.attention(q, k, v, past, tokens, False, scale), kv),
        "exkv int8": (lambda *x: kernels.attention_int8(q, *x, past, tokens, scale), int8),
        "exkv in pages": _paged(q, kv, past, scale),
    }
    return {n: Way(call, of, sum(x.nbytes for x in of[0])) for n, (call, of) in found.items()}


def _sdpa(q: Tensor, kv_heads: int, layers: Sequence[tuple]) -> dict[str, tuple]:
    """torch's own; the view as groups has no causal mask for several tokens."""
    heads_first, decoding = q.transpose(1, 2), q.shape[1] == 1
    how = {"is_causal": not decoding, "enable_gqa": q.shape[2] > kv_heads}
    attend = F.scaled_dot_product_attention
    found = {SDPA: (lambda k, v: attend(heads_first, k, v, **how), layers)}
    if decoding:
        found["SDPA on groups"] = (partial(attend, q.view(1, kv_heads, -1, q.shape[-1])), layers)
    return found


def _paged(q: Tensor, layers: Sequence[tuple], past: Tensor, scale: float) -> tuple:
    """The same keys and values in pages that lie in any order, and what reads them."""
    tokens = layers[0][0].shape[1]
    order = torch.randperm(-(-tokens // PAGE))
    table, places = order.int().view(1, -1), order.argsort()
    start, count = torch.zeros_like(past), torch.full_like(past, tokens)

    def pool(x: Tensor) -> Tensor:
        padded = F.pad(x[0], (0, 0, 0, 0, 0, -tokens % PAGE))
        return padded.unflatten(0, (-1, PAGE))[places].contiguous()

    def attend(k: Tensor, v: Tensor) -> Any:
        kv, where = ([k], "float", [v], "float"), (past, start, count, tokens, scale)
        return torch.ops.exkv.attention_part(q, *kv, *where, 0, 0.0, table)

    return attend, [(pool(k), pool(v)) for k, v in layers]


def store(heads: Sequence[int], kind: str) -> Ways:
    """One new token of rotated keys into several stores."""
    _, kv_heads, head_dim = heads
    k, v = torch.randn(2, 1, 1, kv_heads, head_dim).bfloat16()
    cos, sin = torch.randn(2, 1, 1, head_dim).bfloat16()
    past, kernels = torch.tensor([ROOM // 2], dtype=torch.int32), torch.ops.exkv
    format, rotated = KV_FORMATS[kind], kind == "int4"

    def at_once(to_k: list, to_v: list) -> None:
        kernels.append_kv(k, v, cos, sin, to_k, kind, to_v, kind, past, None, None, 0, rotated)

    def by_parts(to_k: list, to_v: list) -> None:
        for x, to in ((kernels.rope(k, k[:, :, :0], cos, sin)[0], to_k), (v, to_v)):
            x = kernels.hadamard(x) if rotated else x
            for tensor, new in zip(to, format.encode(x).values(), strict=True):
                tensor[:, ROOM // 2 : ROOM // 2 + 1] = new

    layout = format.layout((1, ROOM, kv_heads, head_dim), k.dtype).values()
    stores = [
        tuple([torch.zeros(size, dtype=dtype) for size, dtype in layout] for _ in "kv")
        for _ in range(STORES)
    ]
    return {"its parts": Way(by_parts, stores), "append_kv": Way(at_once, stores)}


# Linear layers and sampling -------------------------------------------------------------------


def projections(shape: Shape) -> list[tuple[int, int]]:
    """(out, in) of a model's linear layers, each once, the largest first."""
    tensors = {name: size for name, size in shape.tensors().items() if "embed" not in name}
    return sorted({size for size in tensors.values() if len(size) == 2}, reverse=True)


def linear(size: tuple[int, int], settings: Settings) -> Iterator[tuple[str, str, Ways]]:
    """Every kind of weights, for each number of rows."""
    dtype = DTYPES[settings.dtype]
    held = {TORCH: _matrices(size, settings.megabytes, lambda: _floats(size, dtype))}
    held |= {
        kind: _matrices(size, settings.megabytes, partial(_matrix, kind, size))
        for kind in settings.kinds
    }
    for rows in settings.rows:
        x = torch.randn(rows, size[1]).to(dtype)
        calls = {TORCH: lambda tensors, x=x: F.linear(x, tensors["weight"])}
        calls |= {kind: partial(_multiply, _format(kind, size), x) for kind in settings.kinds}
        ways = {kind: Way(calls[kind], *held[kind]) for kind in held}
        yield "linear", f"{size[0]} x {size[1]}, {rows} rows", ways


def head_by_head(size: tuple[int, int, int], settings: Settings) -> Iterator[tuple[str, str, Ways]]:
    """Heads' rows by matrices (heads, out, in), for each number of rows."""
    dtype = DTYPES[settings.dtype]
    count = max(1, (settings.megabytes << 20) // (math.prod(size) * dtype.itemsize))
    matrices = (
        [(torch.randn(size).to(dtype),) for _ in range(count)],
        math.prod(size) * dtype.itemsize,
    )
    for rows in settings.rows:
        x = torch.randn(size[0], rows, size[2]).to(dtype)
        ways = {
            TORCH: Way(lambda weight, x=x: torch.bmm(x, weight.transpose(1, 2)), *matrices),
            "linear_heads": Way(partial(torch.ops.exkv.linear_heads, x), *matrices),
        }
        yield "heads", f"{size[0]} of {size[1]} x {size[2]}, {rows} rows", ways


def _matrices(size: tuple[int, int], megabytes: int, make: Callable[[], Tensors]) -> tuple:
    """As many matrices as take so many megabytes, and the bytes of each."""
    first = make()
    nbytes = sum(part.nbytes for part in first.values())
    return [(first,), *((make(),) for _ in range(1, -(-(megabytes << 20) // nbytes)))], nbytes


def _floats(size: tuple[int, int], dtype: torch.dtype) -> Tensors:
    return {"weight": torch.randn(size).to(dtype)}


def _format(kind: str, size: tuple[int, int]) -> Any:
    if kind in DTYPES:
        return FLOATS[DTYPES[kind]]
    if kind in FORMATS:
        return FORMATS[kind]
    if kind == EXL3:
        tiles = TrellisFormat(words=64, codebook="mcg")
        return register(Exl3Format(tiles=tiles, size=size))
    return register(OnLoad(bits=BITS[kind], group=64, scale=torch.float16))


def _multiply(format: Any, x: Tensor, tensors: Tensors) -> Tensor:
    return format.linear(x, tensors, None)


def _matrix(kind: str, size: tuple[int, int]) -> Tensors:
    """A random matrix of a kind."""
    if kind in DTYPES:
        return _floats(size, DTYPES[kind])
    if kind in FORMATS:
        from packers.blocks import random_blocks

        blocks = random_blocks(kind, size, 1e-3, torch.default_generator)
        return FORMATS[kind].convert({"weight": blocks})
    layout = _format(kind, size).layout(size)
    if kind == EXL3:
        (shape, dtype), *ends = layout.values()
        codes = torch.randint(-(2**15), 2**15, shape).to(dtype)
        return dict(
            zip(layout, (codes, *(torch.rand(end).to(of) for end, of in ends)), strict=True)
        )
    codes, scale = layout.values()
    return {
        "codes": torch.randint(256, codes[0], dtype=torch.uint8),
        "scale": torch.rand(scale[0]).to(scale[1]),
    }


def sample(logits: Tensor, chain: tuple[float, int, float, float]) -> Ways:
    """transformers' way, the op's reference, and the op."""
    uniforms = torch.rand(len(logits), dtype=torch.float64)
    rest = (logits, uniforms, *chain, 0.0, False)
    return {
        WARPERS: Way(warped(logits, chain)),
        "reference": Way(partial(ops.REFERENCES["sample"], *rest)),
        "exkv": Way(partial(torch.ops.exkv.sample.default, *rest)),
    }


def warped(logits: Tensor, chain: tuple[float, int, float, float]) -> Callable[[], Tensor]:
    """Float32 scores, a warper for each step that does something, a draw."""
    import transformers as hf

    temperature, top_k, top_p, min_p = chain
    warpers = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(hf.TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(hf.TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(hf.MinPLogitsWarper(min_p))
    return lambda: torch.multinomial(warpers(None, logits.float()).softmax(-1), 1)


# Measuring ------------------------------------------------------------------------------------


def measure(settings: Settings) -> dict[str, Any]:
    """A row for each kernel, case and way."""
    before, rows, noisy, rounds = torch.get_num_threads(), [], 0, 0
    torch.set_num_threads(settings.threads or before)
    timer = time.thread_time if settings.threads == 1 else time.perf_counter
    torch.manual_seed(0)
    try:
        probe = MemoryProbe()
        for kernel, case, ways in cases(settings):
            print(f"measuring {kernel}, {case}", flush=True)
            timed = {name: partial(way.time, timer) for name, way in ways.items()}
            samples = list(in_turns(timed, settings.rounds, probe, warm=1))
            noisy, rounds = noisy + len(disturbed(samples)), rounds + settings.rounds
            times = by_way(samples)
            base, *_ = times.values()
            for name, way in ways.items():
                own = [each for each in samples if each.way == name]
                read = spread([way.nbytes / each.value / each.limit for each in own])
                figures = {"seconds": spread(times[name]), "faster": ratios(base, times[name])}
                rows.append({"kernel": kernel, "case": case, "way": name, "read": read, **figures})
    finally:
        torch.set_num_threads(before)
    return {"rows": rows, "disturbed_rounds": noisy, "all_rounds": rounds}


def report(result: dict[str, Any]) -> list[str]:
    """A table for each kernel, median (min..max)."""
    parts = []
    for kernel in result["settings"]["only"]:
        rows = [row for row in result["rows"] if row["kernel"] == kernel]
        cells = [
            (row["case"], row["way"], show(row["seconds"], 1, 1e6), show(row["faster"]))
            + (show(row["read"]) if row["read"]["max"] else "-",)
            for row in rows
        ]
        beside = f"times as fast as {rows[0]['way']}"
        parts += [f"{kernel}:", markdown(("case", "way", "us", beside, "read"), cells)]
    noisy = f"{result['disturbed_rounds']} of {result['all_rounds']}"
    return [*parts, f"Rounds with a slow probe: {noisy}."]


QUICK = {
    **{"heads": ("4x2x32",), "tokens": 96, "prefill": 32, "shapes": ("tiny",), "sizes": 2},
    **{"kinds": ("bf16", "int4", "Q4_0"), "rows": (1, 5), "vocabularies": (512,), "rounds": 2},
    "megabytes": 1,
}
