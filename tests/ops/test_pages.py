"""Attention over paged rows against torch's softmax over the same keys and values: pages in any
order, shared pages, and no read of keys that no query sees."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import torch
from cases import check_cases
from hypothesis import strategies as st
from native import assert_right_on, each_isa, emulated, needs_cxx, run_apart
from test_attention import at_the_end_of_memory
from test_attention_parts import HEAD_DIM, KV_HEADS, Part, dense, make_part, peak

from exkv.ops import REFERENCES
from exkv.ops.kv_formats import FORMATS

#: What is in a table where no page is read.
NO_PAGE = 2**31 - 1
GROUPED = [kind for kind in FORMATS if FORMATS[kind].group > 1]


def poisoned(shape, dtype):
    """A pool without stored tokens: NaN, or the largest number."""
    nothing = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full(shape, nothing, dtype=dtype)


def seen_keys(part: Part, pasts, length, window):
    """For each row, the keys [begin, end) that any of its queries sees."""
    for past, start, count in zip(pasts, part.starts, part.counts, strict=True):
        end = max(min(count, past - start + length), 0)
        begin = max(past - start - window + 1, 0) if window else 0
        yield min(begin, end), end


def in_pages(part: Part, spans, page: int, generator, common: int = 0):
    """The stores of a part as pools of pages in any order, and the table. Only what ``spans`` of
    the rows hold is there, whole groups of tokens; the rest is poison. The first ``common`` pages
    are those of row 0 in all rows."""
    rows, pages = len(spans), -(-max(part.counts, default=0) // page)
    order = torch.randperm(rows * pages + 2, generator=generator).view(-1).tolist()
    table = torch.full((rows, pages + 1), NO_PAGE, dtype=torch.int32)
    pools = [
        [poisoned((len(order), page // group_of(kind, i), *x.shape[2:]), x.dtype)
         for i, x in enumerate(store)]
        for kind, store in zip(part.kinds, part.stored, strict=True)
    ]  # fmt: skip
    for row, (begin, end) in enumerate(spans):
        for at in range(begin // page, -(-end // page)):
            table[row, at] = order[(0 if at < common else row) * pages + at]
            for kind, pool, store in zip(part.kinds, pools, part.stored, strict=True):
                for i, (to, x) in enumerate(zip(pool, store, strict=True)):
                    group = group_of(kind, i)
                    first = max(begin, at * page) // group
                    last = -(-min(end, (at + 1) * page) // group)
                    base = at * page // group
                    to[table[row, at], first - base : last - base] = x[row, first:last]
    return pools, table


def group_of(kind, index):
    return FORMATS[kind].group if index else 1


def share_first(part: Part, tokens: int) -> None:
    """Let all rows begin with the tokens of row 0."""
    for kind, store, wide in zip(part.kinds, part.stored, part.wide, strict=True):
        for i, x in enumerate(store):
            x[:, : tokens // group_of(kind, i)] = x[:1, : tokens // group_of(kind, i)].clone()
        wide[:, :tokens] = wide[:1, :tokens].clone()


def attend(part: Part, pools, table, q, pasts, window=0, softcap=0.0, op=None):
    stored = tuple(pools)
    op = op or torch.ops.exkv.attention_part
    return replace(part, stored=stored).attend(
        q, pasts, window, softcap, op=lambda *args: op(*args, table)
    )


CASES = {
    "pasts": st.lists(st.integers(0, 150), min_size=1, max_size=3),
    "length": st.sampled_from([1, 2, 7, 40]),
    "groups": st.sampled_from([1, 2, 4]),
    "page": st.sampled_from([16, 32, 48, 64, 96, 256]),
    "starts": st.lists(st.integers(0, 20), min_size=3, max_size=3),
    "common": st.integers(0, 2),
    "window": st.sampled_from([0, 1, 16, 21, 1000]),
    "softcap": st.sampled_from([0.0, 2.0]),
    "kinds": st.lists(st.sampled_from(sorted(FORMATS)), min_size=2, max_size=2),
    "seed": st.integers(0, 2**16),
}


def check_rows(op, pasts, length, groups, page, starts, common, window, softcap, kinds, seed):
    generator = torch.Generator().manual_seed(seed)
    if page % max(FORMATS[kind].group for kind in kinds):
        page *= 2
    starts = [min(start, past) for start, past in zip(starts, pasts, strict=False)]
    counts = [past + length - start for past, start in zip(pasts, starts, strict=True)]
    part = make_part(generator, kinds, starts, counts)
    common = min(common, min(counts) // page) if not window else 0
    share_first(part, common * page)
    spans = list(seen_keys(part, pasts, length, window))
    pools, table = in_pages(part, spans, page, generator, common)
    q = torch.randn(len(pasts), length, KV_HEADS * groups, HEAD_DIM, generator=generator)
    out, lse = attend(part, pools, table, q, pasts, window, softcap, op)
    for row, past in enumerate(pasts):
        expected, expected_lse = dense(q[row], [part], row, past, window, softcap)
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[row], expected_lse, rtol=1e-4, atol=1e-5)


def test_rows_in_pages_are_the_softmax_over_their_keys_and_read_nothing_else(ops):
    check_cases(check_rows, CASES, ops.attention_part, examples=40 if emulated(ops) else 150)


def test_the_reference_does_the_same():
    check_cases(check_rows, CASES, REFERENCES["attention_part"], examples=40)


def check_bits(ops=torch.ops.exkv, pages=(16, 48, 64, 160), most=12):
    """Without a window, the kernels cut pages as they cut rows: no bit differs. Reading past a
    tensor's end is deadly here: run it in a process of its own."""
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for index, kind in enumerate([*FORMATS, *FORMATS][:most]):
        for head_dim, page in zip((8, 36, 64, 99), pages, strict=True):
            dtype, page = dtypes[(index + page) % 3], page * (2 if kind in GROUPED else 1)
            counts = [page * 2 - 1, 1, 3 * page]
            part = make_part(generator, [kind] * 2, [0] * 3, counts, head_dim=head_dim,
                             dtype=dtype)  # fmt: skip
            q = torch.randn(3, 1 + index, 6, head_dim, generator=generator).to(dtype)
            expected = part.attend(q, counts, ops=ops)
            pools, table = in_pages(part, [(0, n) for n in counts], page, generator)
            pools = [[at_the_end_of_memory(x) for x in pool] for pool in pools]
            table = at_the_end_of_memory(table[:, :3].contiguous())
            found = attend(part, pools, table, q, counts, op=ops.attention_part)
            assert all(map(torch.equal, found, expected)), (kind, dtype, head_dim, page)


ISA_PROGRAM = """
import torch, test_pages as t
from hypothesis import given, settings
torch.set_num_threads(1)
t.check_bits()
settings(max_examples=40, deadline=None)(given(**t.CASES)(t.check_rows_here))()
"""


EMULATED_PROGRAM = """
import torch, native, test_pages as t
t.check_bits(native.ops_of("emulated"), most=6)
"""


@needs_cxx
@pytest.mark.skipif(sys.platform != "linux", reason="protects pages")
def test_the_emulated_kernels_stay_within_pools_and_tables():
    result = run_apart(EMULATED_PROGRAM)
    assert result.returncode == 0, (result.returncode, result.stderr)


def check_rows_here(**case):
    check_rows(torch.ops.exkv.attention_part, **case)


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages")
@each_isa
def test_each_instruction_set_finds_its_pages(isa):
    assert_right_on(isa, ISA_PROGRAM)


# What is refused --------------------------------------------------------------------------------


def arguments(kinds=("int4", "int8"), *, pages=5, page=32, entries=2, kv_len=40):
    """Three rows of two pages, all zeros, for tests of shapes only."""
    stores = [
        [torch.zeros(size, dtype=dtype) for size, dtype in layout.values()]
        for layout in (FORMATS[kind].layout((pages, page, KV_HEADS, 8), torch.float32)
                       for kind in kinds)
    ]  # fmt: skip
    lens = [torch.full((3,), n, dtype=torch.int32) for n in (kv_len - 2, 0, kv_len)]
    table = torch.arange(3 * entries, dtype=torch.int32).view(3, entries) % pages
    q = torch.zeros(3, 2, 4, 8)
    return [q, stores[0], kinds[0], stores[1], kinds[1], *lens, kv_len, 0.1, 0, 0.0, table]


@pytest.mark.parametrize("way", ["op", "reference"])
def test_an_entry_that_is_read_and_names_no_page_is_refused_by_name_and_number(way):
    op = torch.ops.exkv.attention_part if way == "op" else REFERENCES["attention_part"]
    error = ValueError if way == "reference" else (ValueError, RuntimeError)
    for wrong in (5, -1, NO_PAGE):
        args = arguments()
        args[-1][2, 1] = wrong
        with pytest.raises(error, match=rf"row 2 has {wrong} as entry 1; .* 5 pages, 0 to 4"):
            op(*args)
        args[7][2] = 32  # its second page holds nothing
        op(*args)


@pytest.mark.parametrize("way", ["op", "reference"])
def test_mismatched_pools_and_tables_are_refused(way):
    op = torch.ops.exkv.attention_part if way == "op" else REFERENCES["attention_part"]
    error = ValueError if way == "reference" else (ValueError, RuntimeError)

    def refused(message, *, change=None, **shape):
        args = arguments(**shape)
        if change is not None:
            index, make = change
            args[index] = make(args[index])
        with pytest.raises(error) as e:
            op(*args)
        assert re.search(message, str(e.value)), str(e.value)

    refused("k has pages of 24 tokens; they must be a multiple of 16", page=24)
    refused("k has pages of 0 tokens", page=0)
    refused("k has pages of 48 tokens, and int4c encodes 32", kinds=("int4c", "int8"), page=48)
    refused("kv_len 65 must be at most the 64 tokens of block_table's 2 pages of 32", kv_len=65)
    refused(r"block_table must be int32 \(3, pages\)", change=(12, torch.Tensor.long))
    refused(r"block_table must be int32 \(3, pages\)", change=(12, lambda x: x[:2]))
    refused(r"block_table must be int32 \(3, pages\)", change=(12, lambda x: x[0]))
    refused("k has 5 pages .*and v has 4", change=(3, lambda x: [y[:4] for y in x]))
    refused("k has pages of 32 tokens, and v of 16", change=(3, lambda x: [y[:, :16] for y in x]))
    refused("v's scale must be .*\\(5, 32, 2, 1\\) to be int8",
            change=(3, lambda x: [x[0], x[1][:, :31]]))  # fmt: skip


def test_one_row_of_one_page_and_no_rows_at_all(ops):
    args = arguments(("float", "float"), pages=1, page=64, entries=1)
    for rows in (1, 0):
        given = [x[:rows] if isinstance(x, torch.Tensor) else x for x in args]
        out, lse = ops.attention_part(*given)
        assert (out.shape, lse.shape) == ((rows, 2, 4, 8), (rows, 2, 4))
        torch.testing.assert_close(lse, torch.tensor([39.0, 40.0]).log().view(1, 2, 1)
                                   .expand(rows, 2, 4))  # fmt: skip


# The memory of the reference --------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("float", "int8"), ("int4c", "int2")])
@pytest.mark.parametrize("kv_len", [100, 700, 1300])
@pytest.mark.parametrize("page", [32, 96])
def test_prediction_covers_pages(monkeypatch, kinds, kv_len, page):
    args = arguments(kinds, page=page, entries=-(-kv_len // page), kv_len=kv_len)
    whole = peak(monkeypatch, args, shorten=False)
    assert peak(monkeypatch, args, shorten=True) == whole > 0


def test_no_copy_of_the_pool_is_made(monkeypatch):
    """Neither of the pool nor of a row: except for the table, the peak does not grow."""
    few = arguments(("int4", "float"), pages=40, entries=40, kv_len=1280)
    many = arguments(("int4", "float"), pages=400, entries=160, kv_len=5120)
    grown = peak(monkeypatch, many, shorten=False) - peak(monkeypatch, few, shorten=False)
    assert grown <= 3 * 120 * 8 * 6  # tables of a few kinds


def test_rows_without_tokens_are_neither_stored_nor_read(ops):
    """Padding rows of a captured step's batch: their pages are never read."""
    draw = torch.Generator().manual_seed(1)
    drawn = lambda *shape: torch.randn(*shape, KV_HEADS, HEAD_DIM, generator=draw)  # noqa: E731
    pool, new, q = [drawn(9, 16), drawn(9, 16)], (drawn(4, 1), drawn(4, 1)), drawn(4, 1)
    table = torch.full((4, 4), -1, dtype=torch.int32)
    table[0, :3], table[1, :1] = torch.tensor([3, 1, 7]), 5
    found = []
    for rows, kv_len, news in ((2, 41, None), (4, 64, [1, 1, 0, 0])):
        k, v = (x.clone() for x in pool)
        pasts = torch.tensor([40, 3, 0, 0][:rows], dtype=torch.int32)
        brought = None if news is None else torch.tensor(news, dtype=torch.int32)
        stores = [k], "float", [v], "float"
        given = (x[:rows] for x in new)
        ops.append_kv(*given, None, None, *stores, pasts, brought, table[:rows], 0, False)
        counts = pasts + (1 if brought is None else brought)
        keys = pasts, torch.zeros_like(pasts), counts, kv_len
        how = HEAD_DIM**-0.5, 0, 0.0, table[:rows]
        found.append((k, v, *ops.attention_part(q[:rows], *stores, *keys, *how)))
    (k, v, out, lse), padded = found
    assert torch.equal(k, padded[0]) and torch.equal(v, padded[1])
    torch.testing.assert_close((out, lse), (padded[2][:2], padded[3][:2]))
    assert not padded[2][2:].any() and (padded[3][2:] == -torch.inf).all()
