"""How the CUDA kernels for decoding are launched, under the emulation: a launch made once serves
any lengths, fills the device once, and never reads a page outside its pool."""

from __future__ import annotations

import random

import pytest
import torch
from hostile_calls import Guarded
from hypothesis import given
from hypothesis import strategies as st
from native import needs_cxx, ops_of
from torch import Tensor

from exkv.ops import REFERENCES
from exkv.ops.kv_formats import FORMATS
from exkv.ops.kv_quant import quantize_kv

pytestmark = needs_cxx

ROWS, HEADS, KV_HEADS, DIM, ROOM = 2, 4, 2, 40, 320


@pytest.fixture
def ops():
    return ops_of("emulated")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def lengths(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def assert_a_graph_follows(ops, name: str, arguments: list, past: Tensor, to: list) -> None:
    """Capture a call, change the lengths in memory, replay it, and compare with the reference."""
    ops.capture_graph()
    results = getattr(ops, name)(*arguments)
    for numbers in to:
        past.copy_(lengths(*numbers))
        ops.replay_graph()
        expected = REFERENCES[name](*arguments)
        torch.testing.assert_close(results, expected)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_captured_attention_reads_lengths_from_memory(ops, ragged):
    """Also rows of one length: the graph's kv_len no longer equals any row's."""
    past = lengths(9, 9)
    q, k, v = randn(ROWS, 1, HEADS, DIM), *randn(2, ROWS, ROOM, KV_HEADS, DIM)
    ops.capture_graph()
    out = ops.attention(q, k, v, past, ROOM, ragged, 0.1)
    for number in (0, 130, ROOM - 1):
        past.fill_(number)
        ops.replay_graph()
        expected = REFERENCES["attention"](q, k, v, past, number + 1, False, 0.1)
        torch.testing.assert_close(out, expected)


def test_captured_attention_over_8_bits_reads_lengths_from_memory(ops):
    past = lengths(9, 3)
    q, kv = (
        randn(ROWS, 1, HEADS, DIM),
        [quantize_kv(x) for x in randn(2, ROWS, ROOM, KV_HEADS, DIM)],
    )
    arguments = [q, *kv[0], *kv[1], past, ROOM, 0.1]
    assert_a_graph_follows(ops, "attention_int8", arguments, past, [(0, 200), (ROOM - 1, 77)])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_captured_attention_over_parts_reads_lengths_from_memory(ops, form, paged):
    past, count = lengths(9, 3), lengths(ROOM, ROOM)
    q, kv = randn(ROWS, 1, HEADS, DIM), randn(2, ROWS, ROOM, KV_HEADS, DIM)
    stores = [list(FORMATS[form].encode(x).values()) for x in kv]
    table = None
    if paged:
        pages = ROOM // 32  # of 32 tokens, which formats by channel encode together
        table = torch.randperm(ROWS * pages).view(ROWS, pages).int()
        stores = [[pool_of(x, table, ROOM) for x in store] for store in stores]
    arguments = [q, stores[0], form, stores[1], form, past, lengths(0, 0), count, ROOM, 0.1, 0, 0.0,
                 table]  # fmt: skip
    assert_a_graph_follows(ops, "attention_part", arguments, past, [(0, 200), (ROOM - 1, 77)])


def pool_of(x: Tensor, table: Tensor, tokens: int) -> Tensor:
    """Entries (B, n, ...) of some tokens each, as pages that the table (B, pages) names."""
    pages = x.reshape(table.numel(), x.shape[1] // table.shape[1], *x.shape[2:])
    pool = torch.empty_like(pages)
    pool[table.long().flatten()] = pages
    return pool


def test_captured_append_writes_after_the_lengths_in_memory(ops):
    past = lengths(9, 3)
    k, v = randn(2, ROWS, 1, KV_HEADS, DIM)
    stored = [[torch.zeros(ROWS, ROOM, KV_HEADS, DIM)] for _ in range(2)]
    arguments = [k, v, None, None, stored[0], "float", stored[1], "float", past]
    ops.capture_graph()
    ops.append_kv(*arguments)
    past.copy_(lengths(200, 77))
    ops.replay_graph()
    for x, (store,) in zip((k, v), stored, strict=True):
        for row, places in enumerate([(9, 200), (3, 77)]):
            expected = torch.zeros(ROOM, KV_HEADS, DIM)
            expected[list(places)] = x[row]
            assert torch.equal(store[row], expected)


@given(
    rows=st.integers(1, 40),
    kv_heads=st.integers(1, 16),
    group=st.integers(1, 40),
    kv_len=st.integers(1, 100_000),
    processors=st.sampled_from([1, 8, 84, 132, 148]),
    at_once=st.integers(1, 8),
)
def test_splits_fill_the_device_once(rows, kv_heads, group, kv_len, processors, at_once):
    """As many blocks as run at once by the registers of the kernel, or fewer; a wave that is part
    full takes as long as a full one."""
    ops = ops_of("emulated")
    shape = (rows, kv_heads * group, kv_heads, 128, kv_len)
    splits = ops.decode_splits(*shape, processors, at_once)
    tiles = -(-group // (4 if group > 2 else group))
    row_blocks = -(-tiles // 3)
    warps = 4 * -(-tiles // row_blocks)
    room = processors * min(at_once, max(1, 16 // warps))
    blocks = rows * kv_heads * row_blocks
    assert splits == 1 or splits * blocks <= room
    if kv_len >= 64 * 128 and splits < 64:
        assert (splits + 1) * blocks > room


@pytest.mark.parametrize("wrong", [-1, 10**6, 2**31 - 1])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("length", [1, 40])
def test_missing_page_is_not_read_and_yields_nan(ops, form, length, wrong):
    """The host can't check a table on a device. Decoding, and many queries."""
    rng, tokens = random.Random(0), 96
    memory = Guarded(rng)
    q, kv = randn(ROWS, length, HEADS, DIM), randn(2, ROWS, tokens, KV_HEADS, DIM)
    table = torch.randperm(ROWS * 3).view(ROWS, 3).int()
    stores = [[memory.copy(pool_of(x, table, tokens)) for x in FORMATS[form].encode(each).values()]
              for each in kv]  # fmt: skip
    past = lengths(*[tokens - length] * ROWS)
    rest = (past, lengths(0, 0), lengths(tokens, tokens), tokens, 0.1, 0, 0.0)
    right, _ = REFERENCES["attention_part"](q, stores[0], form, stores[1], form, *rest, table)
    table[1, 1] = wrong
    out, _ = ops.attention_part(q, stores[0], form, stores[1], form, *rest, table)
    torch.testing.assert_close(out[0], right[0], rtol=1e-3, atol=1e-3)
    assert out[1, -1].isnan().all()
    memory.release()
