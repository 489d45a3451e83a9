"""Invalid calls of exkv's ops, beside unreadable memory: a program that ``test_hostile_calls.py``
runs in a process of its own, since a fault ends it.

Each call starts out valid, with every tensor's memory up against a guard page; up to two of its
arguments are then changed. It must return a result or raise an error written for users; a crash or
any other error is a defect.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import exkv.weights.awq  # noqa: F401  (defines pack_awq)
from exkv.ops.attention_parts import chunk_starts
from exkv.weights import register
from exkv.weights.bitsandbytes import Bnb4Format
from exkv.weights.exl2 import Exl2Format, Section
from exkv.weights.exl3 import TrellisFormat
from exkv.weights.fp8 import Fp8Format
from exkv.weights.gguf import FORMATS
from exkv.weights.mxfp4 import MXFP4

#: What a refusal may be.
REFUSALS = (RuntimeError, ValueError, TypeError)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OTHER_DTYPES = (torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool)
NUMBERS = (-1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, -(2**63), 2**63 - 1)
FRACTIONS = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e-320, 1e308, 0.5)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Guarded:
    """Memory for one call's tensors, each between two pages that can't be touched."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._mapped: list[tuple[int, int]] = []

    def copy(self, x: Tensor) -> Tensor:
        """The same values, whose first or last byte borders on a guard page."""
        flat = x.contiguous().flatten()
        size, page = flat.numel() * flat.element_size(), mmap.PAGESIZE
        if size == 0:
            return x
        room = -(-size // page) * page
        start = _libc.mmap(None, room + 2 * page, mmap.PROT_READ | mmap.PROT_WRITE,
                           mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)  # fmt: skip
        self._mapped.append((start, room + 2 * page))
        for guard in (start, start + page + room):
            assert _libc.mprotect(guard, page, 0) == 0
        first = start + page + (room - size if self._rng.random() < 0.7 else 0)
        memory = (ctypes.c_char * size).from_address(first)
        tensor = torch.frombuffer(memory, dtype=x.dtype)
        return tensor.copy_(flat).view(x.shape)

    def release(self) -> None:
        for start, size in self._mapped:
            _libc.munmap(start, size)


@dataclass(frozen=True, slots=True)
class Maker:
    """Random sizes and tensors for one valid call."""

    rng: random.Random

    def size(self, most: int = 5) -> int:
        return self.rng.randint(1, most)

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape).to(dtype)

    def counts(self, rows: int, most: int) -> Tensor:
        return torch.tensor([self.rng.randint(0, most) for _ in range(rows)], dtype=torch.int32)

    def dtype(self) -> torch.dtype:
        return self.rng.choice(DTYPES)


def _norm(m: Maker) -> list:
    dtype, features = m.dtype(), m.size(70)
    return [m.floats(m.size(), m.size(), features, dtype=dtype), m.floats(features, dtype=dtype),
            1e-5, m.rng.random() < 0.5]  # fmt: skip


def _layer_norm(m: Maker) -> list:
    x, weight, *rest = _norm(m)
    return [x, weight, weight.clone() if m.rng.random() < 0.5 else None, *rest]


def _add_norm(m: Maker) -> list:
    x, *rest = _norm(m)
    return [x, x.clone(), *rest]


def _gate(m: Maker) -> list:
    x = m.floats(m.size(), m.size(70), dtype=m.dtype())
    return [x, x.clone()]


def _sinks(m: Maker) -> list:
    shape = m.size(), m.size(), m.size()
    out, lse = m.floats(*shape, m.size(20)), m.floats(*shape)
    return [out, lse, m.floats(shape[-1], dtype=m.dtype())]


def _rope(m: Maker) -> list:
    dtype, rows, length, dim = m.dtype(), m.size(3), m.size(), 2 * m.size(20)
    heads = [m.floats(rows, length, m.size(3), dim, dtype=dtype) for _ in range(2)]
    width = 2 * m.size(dim // 2)
    return [*heads, *(m.floats(rows, length, width, dtype=dtype) for _ in range(2))]


def _linear(m: Maker) -> list:
    dtype, inputs, outputs = m.dtype(), m.size(70), m.size(70)
    bias = m.floats(outputs, dtype=dtype) if m.rng.random() < 0.7 else None
    return [m.floats(m.size(), inputs, dtype=dtype), m.floats(outputs, inputs, dtype=dtype), bias]


def _linears(m: Maker) -> list:
    dtype, inputs, outputs = m.dtype(), m.size(70), [m.size(70) for _ in range(m.size(3))]
    weights = [m.floats(each, inputs, dtype=dtype) for each in outputs]
    biases = [m.floats(each, dtype=dtype) for each in outputs] if m.rng.random() < 0.7 else []
    return [m.floats(m.size(), inputs, dtype=dtype), weights, biases]


def _linear_heads(m: Maker) -> list:
    dtype, heads, inputs = m.dtype(), m.size(5), m.size(70)
    x = m.floats(heads, m.size(), inputs, dtype=dtype)
    return [x, m.floats(heads, m.size(70), inputs, dtype=dtype)]


def _groups(m: Maker, outputs: int, layout: list[int], inputs: int) -> list[Tensor]:
    """The tensors of a matrix of integers in groups."""
    bits, group, shift, ordered = layout
    groups = 1 if group == 0 else -(-inputs // group)
    scale = torch.rand(outputs, groups).to(m.dtype())
    zeros = -(-groups // 2) if bits <= 4 else groups
    beside = [scale / 2, torch.randint(0, 256, (outputs, zeros), dtype=torch.uint8)]
    shape = (-(-outputs // 8), inputs // 32, 32 * bits)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    order = torch.randperm(inputs).int()
    return [codes, scale, *([beside[shift - 1]] if shift else []), *([order] if ordered else [])]


def _layout(m: Maker) -> list[int]:
    bits, group = m.rng.choice((8, 6, 5, 4, 3, 2)), m.rng.choice((0, 32, 64))
    return [bits, group, m.rng.randrange(3), m.rng.randrange(2)]


def _linear_groups(m: Maker) -> list:
    dtype, inputs, outputs, layout = m.dtype(), 32 * m.size(4), m.size(30), _layout(m)
    bias = m.floats(outputs, dtype=dtype) if m.rng.random() < 0.7 else None
    x = m.floats(m.size(), inputs, dtype=dtype)
    return [x, _groups(m, outputs, layout, inputs), layout, bias]


def _linears_groups(m: Maker) -> list:
    dtype, inputs, layout = m.dtype(), 32 * m.size(4), _layout(m)
    outputs = [m.size(30) for _ in range(m.size(3))]
    tensors = [part for each in outputs for part in _groups(m, each, layout, inputs)]
    biases = [m.floats(each, dtype=dtype) for each in outputs] if m.rng.random() < 0.7 else []
    return [m.floats(m.size(), inputs, dtype=dtype), tensors, layout, biases]


def _dequantize_weight(m: Maker) -> list:
    outputs, layout = m.size(30), _layout(m)
    begin = m.rng.randrange(outputs) // 8 * 8
    tensors = _groups(m, outputs, layout, 32 * m.size(4))
    return [tensors, layout, begin, m.rng.randint(begin, outputs), m.dtype()]


def _packed(m: Maker, size: tuple[int, int]) -> tuple[list[Tensor], str, list[int]]:
    """The tensors of a matrix whose rows are packed, its format's name, and its layout."""
    format = register(
        m.rng.choice(
            (
                *(FORMATS[name] for name in ("Q2_K", "Q4_K", "Q6_K", "IQ4_XS")),
                *(Fp8Format(block=(8, 64), scale_dtype=dtype) for dtype in DTYPES),
                *(Bnb4Format(kind="nf4", block=64, nested=nested, state=0) for nested in (0, 1)),
                MXFP4,
                TrellisFormat(words=m.rng.choice((40, 64)), codebook="mul1"),
                _sections(*size),
            )
        )
    )
    return random_packed(format, size), format.name, list(format.native(size))


def random_packed(format: Any, size: tuple[int, int]) -> list[Tensor]:
    """Random tensors that are valid for a format; scales are small."""
    tensors = [
        torch.randint(0, 100, shape, dtype=torch.uint8).view(dtype)
        if dtype.itemsize == 1
        else torch.randint(-(2**15), 2**15, shape).short()
        if dtype == torch.int16
        else torch.rand(shape).to(dtype)
        for shape, dtype in format.layout(size).values()
    ]
    if isinstance(format, Exl2Format):
        tensors[1] = torch.randint(-(2**31), 2**31, tensors[1].shape).int()
        tensors[3] = torch.randperm(size[1]).int()
    return tensors


def _sections(outputs: int, inputs: int) -> Exl2Format:
    parts = (Section(8, 32, 64), Section(5, 64, 64), Section(4, 96, inputs - 128))
    return Exl2Format(sections=parts, outputs_of=outputs)


def _linear_packed(m: Maker) -> list:
    dtype, outputs, inputs = m.dtype(), m.size(30), 256 * m.size(2)
    bias = m.floats(outputs, dtype=dtype) if m.rng.random() < 0.7 else None
    return [m.floats(m.size(), inputs, dtype=dtype), *_packed(m, (outputs, inputs)), outputs, bias]


def _dequantize_packed(m: Maker) -> list:
    outputs, inputs = m.size(30), 256 * m.size(2)
    begin = m.rng.randrange(outputs)
    rows = (begin, m.rng.randint(begin, outputs))
    return [*_packed(m, (outputs, inputs)), inputs, *rows, m.dtype()]


def _pack_codes(m: Maker) -> list:
    bits = m.rng.choice((2, 3, 4, 5, 6, 8))
    codes = torch.randint(0, 1 << bits, (m.size(30), 32 * m.size(3)), dtype=torch.uint8)
    return [codes, bits]


def _pack_words(m: Maker) -> list:
    bits, outputs, inputs = m.rng.choice((2, 3, 4, 5, 6, 8)), m.size(30), 32 * m.size(3)
    shape = (inputs // 32 * bits, outputs)
    words = torch.randint(-(2**31), 2**31, shape if m.rng.random() < 0.5 else shape[::-1]).int()
    order = torch.randperm(inputs) if m.rng.random() < 0.5 else None
    return [words if len(words) == outputs else words.T, bits, inputs, order]


def _pack_awq(m: Maker) -> list:
    return [torch.randint(-(2**31), 2**31, (32 * m.size(3), m.size(30))).int()]


def _split_blocks(m: Maker) -> list:
    type, each = m.rng.choice(((2, 18), (3, 20), (6, 22), (7, 24), (8, 34)))
    return [torch.randint(0, 256, (m.size(30), each * m.size(3)), dtype=torch.uint8), type]


def _expert_products(m: Maker) -> list:
    dtype, tokens, taken, inputs = m.dtype(), m.size(), m.size(3), 8 * m.size(9)
    weights = [m.floats(outputs, inputs, dtype=dtype) for outputs in [m.size(30)] * m.size(4)]
    chosen = torch.randint(0, len(weights), (tokens, taken))
    shape = (tokens, taken, inputs) if m.rng.random() < 0.5 else (tokens, inputs)
    biases = [m.floats(len(weights[0]), dtype=dtype) for _ in weights]
    return [m.floats(*shape, dtype=dtype), chosen, weights, m.rng.choice((biases, []))]


def _chosen_products(m: Maker) -> list:
    dtype, tokens, taken, size = m.dtype(), m.size(), m.size(3), (m.size(30), 256 * m.size(2))
    chosen = torch.randint(0, experts := m.size(4), (tokens, taken))
    alike = m.rng.getstate()
    tensors = []
    for _ in range(experts):
        m.rng.setstate(alike)  # the same format
        made, name, layout = _packed(m, size)
        tensors += made
    biases = [m.floats(size[0], dtype=dtype) for _ in range(experts)]
    shape = (tokens, taken, size[1]) if m.rng.random() < 0.5 else (tokens, size[1])
    x = m.floats(*shape, dtype=dtype)
    return [x, chosen, tensors, name, layout, size[0], m.rng.choice((biases, []))]


def _sample(m: Maker) -> list:
    logits = m.floats(m.size(), m.size(300), dtype=m.dtype())
    uniforms = torch.rand(len(logits), dtype=torch.float64)
    top_p, min_p, typical = (m.rng.choice((default, m.rng.random())) for default in (1.0, 0.0, 1.0))
    return [logits, uniforms, m.rng.choice((0.0, 0.7, 1.0)), m.rng.choice((0, 1, 5, 400)), top_p,
            min_p, typical, m.rng.random() < 0.5]  # fmt: skip


def _experts(m: Maker) -> list:
    dtype, tokens, hidden, inner, count = m.dtype(), m.size(), m.size(9), m.size(9), m.size()
    taken = m.size(count)
    chosen = torch.stack([torch.randperm(count)[:taken] for _ in range(tokens)])
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    matrices = [[m.floats(*shape, dtype=dtype) for _ in range(count)] for shape in shapes]
    return [m.floats(tokens, hidden, dtype=dtype), chosen, m.floats(tokens, taken), *matrices,
            "silu"]  # fmt: skip


def _chosen_experts(m: Maker) -> list:
    dtype, tokens, hidden, inner, count = m.dtype(), m.size(), 256, 256, m.size(3)
    taken = m.size(count)
    chosen = torch.stack([torch.randperm(count)[:taken] for _ in range(tokens)])
    tensors, names, layouts = [], [], []
    for shape in ((inner, hidden), (inner, hidden), (hidden, inner)) * count:
        made, name, layout = _packed(m, shape)
        tensors, names, layouts = [*tensors, *made], [*names, name], [*layouts, *layout]
    return [m.floats(tokens, hidden, dtype=dtype), chosen, m.floats(tokens, taken), tensors,
            layouts, "\n".join(names), "silu"]  # fmt: skip


def _route(m: Maker) -> list:
    groups, each = m.size(3), m.size(30)
    taken, best, experts = m.size(groups), m.size(each), groups * each
    correction = m.floats(experts) if m.rng.random() < 0.5 else None
    return [m.floats(m.size(), experts, dtype=m.dtype()), correction, m.size(experts),
            *(m.rng.random() < 0.5 for _ in range(2)), 1e-20, groups, taken, best, 2.5]  # fmt: skip


def _sigmoid(m: Maker) -> list:
    return [m.floats(m.size(), m.size(), dtype=m.dtype())]


def _tally(m: Maker) -> list:
    tokens, experts = m.size(), m.size()
    taken = m.size(experts)
    chosen = torch.stack([torch.randperm(experts)[:taken] for _ in range(tokens)])
    return [torch.bincount(chosen.flatten(), minlength=experts), tokens, taken]


def _quantize(m: Maker) -> list:
    return [m.floats(m.size(), m.size(), m.size(70), dtype=m.dtype())]


def _dequantize(m: Maker) -> list:
    return [*torch.ops.exkv.quantize_kv(*_quantize(m)), m.dtype()]


def _quantize_groups(m: Maker) -> list:
    return [*_quantize(m), m.rng.choice((2, 4))]


def _dequantize_groups(m: Maker) -> list:
    x, bits = _quantize_groups(m)
    return [*torch.ops.exkv.quantize_groups(x, bits), bits, x.shape[-1], m.dtype()]


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of one attention call."""

    rows: int
    length: int
    heads: int
    kv_heads: int
    dim: int
    room: int

    @classmethod
    def of(cls, m: Maker) -> _Shape:
        kv_heads = m.size(2)
        length, room = m.size(4), m.size(70)
        return cls(m.size(3), length, kv_heads * m.size(3), kv_heads, m.size(40), room + length)


def _attention(m: Maker) -> list:
    s, dtype = _Shape.of(m), m.dtype()
    q = m.floats(s.rows, s.length, s.heads, s.dim, dtype=dtype)
    kv = [m.floats(s.rows, s.room, s.kv_heads, s.dim, dtype=dtype) for _ in range(2)]
    past = m.counts(s.rows, s.room - s.length)
    return [q, *kv, past, s.room, True, 0.1, m.rng.choice((0, 3)), m.rng.choice((0.0, 30.0))]


def _attention_int8(m: Maker) -> list:
    q, k, v, past, kv_len, _, *rest = _attention(m)
    stores = (*torch.ops.exkv.quantize_kv(k), *torch.ops.exkv.quantize_kv(v))
    return [q, *stores, past, kv_len, *rest]


def _stores(m: Maker, k: Tensor, v: Tensor) -> tuple[str, list, list]:
    """Keys and values as the op takes them, in a format of one token each."""
    kind = m.rng.choice(("float", "int8", "int4", "int2"))
    if kind == "float":
        return kind, [k], [v]
    if kind == "int8":
        return kind, *(list(torch.ops.exkv.quantize_kv(x)) for x in (k, v))
    return kind, *(list(torch.ops.exkv.quantize_groups(x, int(kind[-1]))) for x in (k, v))


def _paged(stored: list, pages: int) -> list:
    """The same, as that many pages of 16 tokens."""
    return [torch.zeros(pages, 16, *x.shape[2:], dtype=x.dtype) for x in stored]


def _attention_part(m: Maker) -> list:
    q, k, v, past, kv_len, _, *rest = _attention(m)
    kind, k, v = _stores(m, k, v)
    table = None
    if m.rng.random() < 0.5:
        entries, pages = -(-kv_len // 16), m.size()
        table = torch.randint(0, pages, (len(q), entries), dtype=torch.int32)
        k, v = _paged(k, pages), _paged(v, pages)
    start, count = m.counts(len(q), 3), m.counts(len(q), kv_len)
    return [q, k, kind, v, kind, past, start, count, kv_len, *rest, table]


def _attention_part_since(m: Maker) -> list:
    q, k, kind, v, same, past, start, count, kv_len, *rest = _attention_part(m)
    since = chunk_starts(past, q.shape[1], m.size())
    return [q, k, kind, v, same, past, start, count, since, kv_len, *rest]


def _append_kv(m: Maker) -> list:
    q, k, v, past, kv_len, *_ = _attention(m)
    length = q.shape[1]
    new = [x[:, :length].contiguous() for x in (k, v)]
    kind, k_stored, v_stored = _stores(m, k, v)
    table = None
    if m.rng.random() < 0.5:
        entries = -(-kv_len // 16)
        pages = entries * len(q)
        table = torch.randperm(pages).view(len(q), entries).int()
        k_stored, v_stored = _paged(k_stored, pages), _paged(v_stored, pages)
    width = k.shape[3] // 2 * 2
    rotated = m.rng.random() < 0.5 and width > 0
    cos, sin = (m.floats(len(q), length, width, dtype=q.dtype) if rotated else None for _ in "cs")
    new_lens = m.counts(len(q), length) if m.rng.random() < 0.5 else None
    return [*new, cos, sin, k_stored, kind, v_stored, kind, past, new_lens, table,
            0, m.rng.random() < 0.5]  # fmt: skip


def _decode_attention(m: Maker) -> list:
    q, k, v, past, kv_len, _, *rest = _attention(m)
    kind, k_stored, v_stored = _stores(m, k, v)
    new = [x[:, :1].contiguous() for x in (k, v)]
    ring = m.size() if m.rng.random() < 0.3 else 0
    return [q[:, :1].contiguous(), *new, k_stored, kind, v_stored, kind, past, kv_len, *rest,
            ring, m.rng.random() < 0.5]  # fmt: skip


def _causal_conv(m: Maker) -> list:
    dtype, rows, length, channels, size = m.dtype(), m.size(3), m.size(), m.size(20), 1 + m.size()
    bias = m.floats(channels, dtype=dtype) if m.rng.random() < 0.5 else None
    new_lens = m.counts(rows, length) if m.rng.random() < 0.5 else None
    return [m.floats(rows, length, channels, dtype=dtype),
            m.floats(channels, 1, size, dtype=dtype), bias,
            m.floats(rows, size - 1, channels, dtype=dtype), new_lens]  # fmt: skip


def _gated_delta(m: Maker) -> list:
    dtype, rows, length, keys, dim = m.dtype(), m.size(3), m.size(), m.size(40), m.size(40)
    groups, count = m.size(3), m.size(3)
    heads, channels = groups * count, keys if m.rng.random() < 0.5 else 1
    new_lens = m.counts(rows, length) if m.rng.random() < 0.5 else None
    return [*(m.floats(rows, length, count, keys, dtype=dtype) for _ in "qk"),
            m.floats(rows, length, heads, dim, dtype=dtype),
            -m.floats(rows, length, heads, channels).abs(), m.floats(rows, length, heads).sigmoid(),
            m.floats(rows, heads, keys, dim), new_lens]  # fmt: skip


def _ssd(m: Maker) -> list:
    dtype, rows, length, keys, dim = m.dtype(), m.size(3), m.size(), m.size(40), m.size(40)
    groups, count = m.size(3), m.size(3)
    heads = groups * count
    new_lens = m.counts(rows, length) if m.rng.random() < 0.5 else None
    return [m.floats(rows, length, heads, dim, dtype=dtype),
            m.floats(rows, length, heads).abs(), -m.floats(heads).abs(),
            *(m.floats(rows, length, count, keys, dtype=dtype) for _ in "bc"), m.floats(heads),
            m.floats(rows, heads, keys, dim), new_lens]  # fmt: skip


def _selective_scan(m: Maker) -> list:
    dtype, rows, length, channels, size = m.dtype(), m.size(3), m.size(), m.size(90), m.size(20)
    new_lens = m.counts(rows, length) if m.rng.random() < 0.5 else None
    return [m.floats(rows, length, channels, dtype=dtype), m.floats(rows, length, channels).abs(),
            -m.floats(size, channels).abs(),
            *(m.floats(rows, length, size, dtype=dtype) for _ in "bc"), m.floats(channels),
            m.floats(rows, size, channels), new_lens]  # fmt: skip


MAKERS: dict[str, Callable[[Maker], list]] = {
    "rms_norm": _norm,
    "add_rms_norm": _add_norm,
    "layer_norm": _layer_norm,
    "silu_mul_": _gate,
    "gelu_mul_": _gate,
    "rope": _rope,
    "linear": _linear,
    "linears": _linears,
    "linear_heads": _linear_heads,
    "linear_groups": _linear_groups,
    "linear_group_tiles": _linear_groups,
    "linear_groups_prompt": lambda m: [*_linear_groups(m), m.rng.choice((8, 16))],
    "linears_groups": _linears_groups,
    "dequantize_weight": _dequantize_weight,
    "pack_codes": _pack_codes,
    "pack_words": _pack_words,
    "pack_awq": _pack_awq,
    "split_blocks": _split_blocks,
    "linear_packed": _linear_packed,
    "linear_packed_prompt": lambda m: [*_linear_packed(m), m.rng.choice((8, 16))],
    "dequantize_packed": _dequantize_packed,
    "sample": _sample,
    "experts": _experts,
    "chosen_experts": _chosen_experts,
    "expert_products": _expert_products,
    "chosen_products": _chosen_products,
    "route_experts": _route,
    "sigmoid_": _sigmoid,
    "activate_": lambda m: [*_sigmoid(m), m.rng.randrange(6)],
    "clamped_swiglu_": lambda m: [*_gate(m), m.rng.random() + 1, m.rng.random() * 3],
    "share_with_sinks_": _sinks,
    "read_tally": _tally,
    "quantize_kv": _quantize,
    "dequantize_kv": _dequantize,
    "quantize_groups": _quantize_groups,
    "dequantize_groups": _dequantize_groups,
    "hadamard": _quantize,
    "attention": _attention,
    "attention_int8": _attention_int8,
    "attention_part": _attention_part,
    "attention_part_since": _attention_part_since,
    "append_kv": _append_kv,
    "decode_attention": _decode_attention,
    "causal_conv": _causal_conv,
    "gated_delta": _gated_delta,
    "ssd": _ssd,
    "selective_scan": _selective_scan,
}

#: Ops without kernels for CUDA, and linear layers, whose are held against cuBLAS elsewhere.
WITHOUT_CUDA = {"linear", "linears", "linear_heads", "linear_group_tiles", "sample", "experts",
                "linear_groups_prompt", "linear_packed_prompt",
                "read_tally", "layer_norm", "pack_codes", "pack_words", "pack_awq", "split_blocks",
                "chosen_experts", "route_experts", "sigmoid_", "activate_", "decode_attention",
                "clamped_swiglu_", "share_with_sinks_",
                "attention_part_since"}  # fmt: skip


# Changes ----------------------------------------------------------------------------------------


def _reshaped(x: Tensor, rng: random.Random) -> Tensor:
    shape = list(x.shape)
    kind = rng.randrange(4)
    if kind == 0 or not shape:
        shape.insert(rng.randint(0, len(shape)), rng.choice((0, 1, 2)))
    elif kind == 1:
        shape.pop(rng.randrange(len(shape)))
    else:
        at = rng.randrange(len(shape))
        shape[at] = max(0, shape[at] + rng.choice((-1, 1, 5, -shape[at])))
    count = torch.Size(shape).numel()
    return torch.arange(count).remainder(3).to(x.dtype).view(shape)


def _restrided(x: Tensor, rng: random.Random) -> Tensor:
    """The same shape with other strides: rows that overlap, columns apart, or one row for all."""
    if x.dim() == 0 or 0 in x.shape:
        return x
    kind = rng.randrange(3)
    if kind == 0:
        return x[:1].expand(x.shape)
    if kind == 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return torch.stack((x, x), -1)[..., 0]


def changed_tensor(x: Tensor, rng: random.Random) -> Any:
    kind = rng.randrange(6)
    if kind == 0:
        return x.to(rng.choice(OTHER_DTYPES + DTYPES))
    if kind == 1:
        return x.to("meta")
    if kind == 2 and not x.dtype.is_floating_point and x.numel():
        wild = x.flatten().clone()
        limits = torch.iinfo(x.dtype) if x.dtype != torch.bool else torch.iinfo(torch.uint8)
        number = max(limits.min, min(limits.max, rng.choice(NUMBERS)))
        wild[rng.randrange(len(wild))] = number
        return wild.view(x.shape)
    if kind == 3:
        return _restrided(x, rng)
    if kind == 4 and x.dtype.is_floating_point:
        return torch.full_like(x, rng.choice((float("nan"), float("inf"), float("-inf"))))
    return _reshaped(x, rng)


def changed(argument: Any, rng: random.Random) -> Any:
    match argument:
        case Tensor():
            return changed_tensor(argument, rng)
        case bool() | torch.dtype() | None:
            return argument
        case str():
            return rng.choice(("", "float", "int8", "int4c", "relu", "x" * 100))
        case int():
            return rng.choice(NUMBERS)
        case float():
            return rng.choice(FRACTIONS)
        case list():
            return changed_list(argument, rng)
    raise AssertionError(argument)


def changed_list(argument: list, rng: random.Random) -> list:
    kind = rng.randrange(4)
    if kind == 0 or not argument:
        return []
    if kind == 1:
        return argument[:-1]
    if kind == 2:
        return [*argument, argument[0]]
    at = rng.randrange(len(argument))
    return [changed(each, rng) if i == at else each for i, each in enumerate(argument)]


# A call -----------------------------------------------------------------------------------------


def tensors_in(arguments: list) -> list[Tensor]:
    flat = [each for one in arguments for each in (one if isinstance(one, list) else [one])]
    return [each for each in flat if isinstance(each, Tensor)]


def guard(arguments: list, memory: Guarded) -> list:
    def guarded(x: Any) -> Any:
        if isinstance(x, list):
            return [guarded(each) for each in x]
        return memory.copy(x) if isinstance(x, Tensor) else x

    return guarded(arguments)


def one_call(name: str, seed: int, ops: Any) -> str | None:
    """The defect in the outcome of one call; None if there is none."""
    rng = random.Random(f"{name} {seed}")
    torch.manual_seed(seed)
    arguments = MAKERS[name](Maker(rng))
    memory = Guarded(rng)
    arguments = guard(arguments, memory)
    for _ in range(rng.randint(0, 2)):
        at = rng.randrange(len(arguments))
        arguments[at] = changed(arguments[at], rng)
    kinds = {x.device.type for x in tensors_in(arguments)}
    try:
        getattr(ops, name)(*arguments)
    except REFUSALS:
        return None
    except Exception:  # noqa: BLE001  (whatever it is, it is what is looked for)
        return traceback.format_exc(limit=-3)
    finally:
        memory.release()
    return f"{kinds} went together" if len(kinds) > 1 else None


def run(names: list[str], seeds: range, ops: Any = torch.ops.exkv) -> None:
    """Make the calls; the last lines printed name the current one, or the defect."""
    faulthandler.enable()
    for name in names:
        for seed in seeds:
            print(f"\r{name} {seed}", end="", flush=True)
            if (wrong := one_call(name, seed, ops)) is not None:
                raise SystemExit(f"\n{name}, seed {seed}: {wrong}")
    print("\nall came back")
