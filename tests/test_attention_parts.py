"""Attention over parts of a sequence, merged, against torch's own softmax over all of it: any
split, formats of any kind for keys and values, parts that all rows share."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from exkv.ops import REFERENCES, SHORTENED
from exkv.ops.attention_parts import merge_parts
from exkv.ops.kv_formats import FORMATS
from exkv.workspace import PeakTracker

HEAD_DIM = 32
KV_HEADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is stored, and the floats that are meant by it: that is the truth."""

    kinds: tuple[str, str]
    stored: tuple[list[torch.Tensor], list[torch.Tensor]]
    wide: tuple[torch.Tensor, torch.Tensor]  # k, v (B or 1, S, H_kv, D) float32
    starts: list[int]
    counts: list[int]

    def attend(self, q, pasts, window=0, softcap=0.0, op=None):
        (k_kind, v_kind), (k, v) = self.kinds, self.stored
        lens = [torch.tensor(x, dtype=torch.int32) for x in (pasts, self.starts, self.counts)]
        scale = q.shape[-1] ** -0.5
        op = op or torch.ops.exkv.attention_part
        return op(q, k, k_kind, v, v_kind, *lens, max(self.counts), scale, window, softcap)


def make_part(generator, kinds, starts, counts, *, shared=False, head_dim=HEAD_DIM, spare=5):
    """Storage with room for more than is counted, filled to its end."""
    capacity = -(-(max(counts) + spare) // 32) * 32
    shape = (1 if shared else len(counts), capacity, KV_HEADS, head_dim)
    stored, wide = [], []
    for kind in kinds:
        encoded = FORMATS[kind].encode(torch.randn(shape, generator=generator))
        stored.append(list(encoded.values()))
        wide.append(FORMATS[kind].widen(encoded, torch.float32, head_dim))
    return Part(kinds=tuple(kinds), stored=tuple(stored), wide=tuple(wide),
                starts=list(starts), counts=list(counts))  # fmt: skip


def row_of(parts, row):
    """k, v (S, H_kv, D) and positions (S) of one row, over all parts."""
    keys, values, positions = [], [], []
    for part in parts:
        count, start = part.counts[row], part.starts[row]
        k, v = (x[min(row, len(x) - 1), :count] for x in part.wide)
        keys.append(k)
        values.append(v)
        positions.append(torch.arange(start, start + count))
    return torch.cat(keys), torch.cat(values), torch.cat(positions)


def dense(q, parts, row, past, window, softcap, dtype=torch.float32):
    """One row in the plain way: out (T, H, D), lse (T, H); out is 0 where nothing is seen."""
    k, v, positions = row_of(parts, row)
    own = (past + torch.arange(len(q))).unsqueeze(-1)
    mask = positions <= own
    if window:
        mask &= own - positions < window
    groups = q.shape[1] // KV_HEADS
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, dim=0) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
        out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask)
    lse = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
    out = torch.where(mask.any(-1).unsqueeze(-1), out, 0)
    return out.transpose(0, 1), lse.transpose(0, 1)


def cut(rng, pasts, length, pieces, shared):
    """For each piece its start and count in every row, in any order; with `shared`, the first is
    one that all rows have in common."""
    prefix = rng.randint(0, min(pasts)) if shared else 0
    ends = []
    for past in pasts:
        points = sorted(rng.randint(prefix, past + length) for _ in range(pieces - 1 - shared))
        ends.append([prefix] * (1 + shared) + points + [past + length])
    cuts = [
        ([row[i] for row in ends], [row[i + 1] - row[i] for row in ends])
        for i in range(shared, len(ends[0]) - 1)
    ]
    rng.shuffle(cuts)
    return ([([0] * len(pasts), [prefix] * len(pasts))] if shared else []) + cuts


@given(
    pasts=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    length=st.sampled_from([1, 2, 7, 300]),
    groups=st.sampled_from([1, 2, 4]),
    pieces=st.integers(1, 4),
    shared=st.booleans(),
    window=st.sampled_from([0, 1, 3, 16, 1000]),
    softcap=st.sampled_from([0.0, 2.0, 50.0]),
    kinds=st.lists(st.sampled_from(sorted(FORMATS)), min_size=8, max_size=8),
    seed=st.integers(0, 2**16),
)
def test_any_split_merged_is_the_softmax_over_all(
    pasts, length, groups, pieces, shared, window, softcap, kinds, seed
):
    generator = torch.Generator().manual_seed(seed)
    shared &= pieces > 1
    parts = [
        make_part(generator, kinds[2 * i : 2 * i + 2], *piece, shared=shared and i == 0)
        for i, piece in enumerate(cut(random.Random(seed), pasts, length, pieces, shared))
    ]
    q = torch.randn(len(pasts), length, KV_HEADS * groups, HEAD_DIM, generator=generator)
    found = [part.attend(q, pasts, window, softcap) for part in parts]
    merged = merge_parts(found, torch.float32)
    for row, past in enumerate(pasts):
        expected, _ = dense(q[row], parts, row, past, window, softcap)
        torch.testing.assert_close(merged[row], expected, rtol=1e-4, atol=1e-5)
        for part, (out, lse) in zip(parts, found, strict=True):
            expected, expected_lse = dense(q[row], [part], row, past, window, softcap)
            torch.testing.assert_close(lse[row], expected_lse, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-5)


def rms(x):
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_error_is_at_most_twice_that_of_float32(kind, shared, dtype):
    """To float64 on what is stored; queries of 16 bits are exact in float32."""
    generator = torch.Generator().manual_seed(0)
    for head_dim, length, window, softcap in [(32, 1, 0, 0.0), (80, 5, 0, 3.0), (100, 300, 50, 0)]:
        starts, counts = ([0, 0], [700, 700]) if shared else ([0, 3], [700, 411])
        part = make_part(generator, [kind] * 2, starts, counts, shared=shared, head_dim=head_dim)
        q = torch.randn(2, length, 6, head_dim, generator=generator).to(dtype)
        pasts = [700 - length, 650]
        out, lse = part.attend(q, pasts, window, softcap)
        ours, plain, size = [], [], []
        for row, past in enumerate(pasts):
            exact, exact_lse = dense(q[row], [part], row, past, window, softcap, torch.float64)
            narrow, narrow_lse = dense(q[row], [part], row, past, window, softcap)
            some = exact_lse.isfinite()
            assert torch.equal(lse[row].isfinite(), some)
            ours += [out[row] - exact, (lse[row] - exact_lse)[some]]
            plain += [narrow - exact, (narrow_lse - exact_lse)[some]]
            size += [exact, exact_lse[some]]
        allowed = [
            2 * rms(torch.cat([x.flatten() for x in plain[i::2]]))
            + torch.finfo(torch.float32).eps / 2 * rms(torch.cat([x.flatten() for x in size[i::2]]))
            for i in range(2)
        ]
        for i in range(2):
            assert rms(torch.cat([x.flatten() for x in ours[i::2]])) <= allowed[i]


@pytest.mark.parametrize("kind", FORMATS)
def test_parts_in_which_nothing_is_seen_weigh_nothing(kind):
    generator = torch.Generator().manual_seed(0)
    q, pasts = torch.randn(2, 3, 4, HEAD_DIM), [60, 20]
    some = make_part(generator, [kind] * 2, [0, 0], [63, 23])
    empty = make_part(generator, [kind] * 2, [0, 0], [0, 0])  # kv_len 0
    one_row = make_part(generator, [kind] * 2, [0, 0], [63, 0])
    future = make_part(generator, [kind] * 2, [63, 23], [10, 10])
    whole = some.attend(q, pasts)
    for part in (empty, future):
        out, lse = part.attend(q, pasts)
        assert not out.any() and (lse == -torch.inf).all()
        assert torch.equal(merge_parts([part.attend(q, pasts), whole], torch.float32), whole[0])
    out, lse = one_row.attend(q, pasts)
    assert not out[1].any() and (lse[1] == -torch.inf).all()
    assert out[0].any() and lse[0].isfinite().all()
    nowhere = [part.attend(q, pasts) for part in (empty, future)]
    assert torch.equal(merge_parts(nowhere, torch.bfloat16), torch.zeros_like(q).bfloat16())


def test_a_part_behind_the_window_weighs_nothing():
    """Its last key stands 16 before the first query."""
    part = make_part(torch.Generator().manual_seed(0), ["float"] * 2, [0], [85])
    q = torch.randn(1, 3, 4, HEAD_DIM)
    assert (part.attend(q, [100], 16)[1] == -torch.inf).all()
    lse = part.attend(q, [100], 17)[1]
    assert lse[0, 0].isfinite().all() and (lse[0, 1:] == -torch.inf).all()


def test_merging_gives_the_type_that_is_asked_for():
    parts = [(torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)) for _ in range(3)]
    for count in (1, 3):
        wide = merge_parts(parts[:count], torch.float32)
        assert torch.equal(merge_parts(parts[:count], torch.bfloat16), wide.bfloat16())
    with pytest.raises(ValueError, match="one part at least"):
        merge_parts([], torch.float32)


def test_merging_survives_scores_of_any_size():
    """exp of either would be infinite or zero."""
    outs = torch.randn(2, 1, 1, 1, 8)
    for size in (1e4, -1e4, 3e38, -3e38):
        lse = torch.full((1, 1, 1), size)
        merged = merge_parts([(outs[0], lse), (outs[1], lse)], torch.float32)
        torch.testing.assert_close(merged, outs.mean(0))


def test_a_shared_part_is_the_same_as_a_copy_for_each_row():
    part = make_part(torch.Generator().manual_seed(0), ["int4c", "int2"], [0] * 3, [70] * 3,
                     shared=True)  # fmt: skip
    q, pasts = torch.randn(3, 5, 4, HEAD_DIM), [70, 66, 90]
    k, v = ([x.expand(3, *x.shape[1:]) for x in store] for store in part.stored)
    lens = [torch.tensor(x, dtype=torch.int32) for x in (pasts, part.starts, part.counts)]
    for window, softcap in [(0, 0.0), (20, 3.0)]:
        params = (70, HEAD_DIM**-0.5, window, softcap)
        copied = torch.ops.exkv.attention_part(q, k, "int4c", v, "int2", *lens, *params)
        torch.testing.assert_close(part.attend(q, pasts, window, softcap), copied)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_rows_or_no_queries(shape):
    part = make_part(torch.Generator().manual_seed(0), ["int8", "int4"], [0], [40], shared=True)
    q = torch.randn(*shape, 4, HEAD_DIM)
    k, v = part.stored
    lens = [torch.full(shape[:1], 9, dtype=torch.int32)] * 3
    out, lse = torch.ops.exkv.attention_part(q, k, "int8", v, "int4", *lens, 40, 0.1)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)


def arguments(kinds, rows, length, kv_len, *, shared=False, heads=4, head_dim=HEAD_DIM):
    """Zeros, for what looks at shapes only."""
    shape = (1 if shared else rows, -(-kv_len // 32) * 32, KV_HEADS, head_dim)
    stores = [
        [torch.zeros(size, dtype=dtype) for size, dtype in layout.values()]
        for layout in (FORMATS[kind].layout(shape, torch.bfloat16) for kind in kinds)
    ]
    q = torch.zeros(rows, length, heads, head_dim, dtype=torch.bfloat16)
    lens = [torch.zeros(rows, dtype=torch.int32) for _ in range(3)]
    return (q, stores[0], kinds[0], stores[1], kinds[1], *lens, kv_len, 0.1)


@pytest.mark.parametrize("kinds", [("float", "int8"), ("int4", "int2"), ("int4c", "float")])
@pytest.mark.parametrize("shared", [False, True])
def test_opcheck_finds_nothing(kinds, shared):
    args = (*arguments(kinds, 2, 3, 40, shared=shared), 7, 2.0)
    torch.library.opcheck(torch.ops.exkv.attention_part.default, args)


def test_the_op_traces_into_one_graph():
    args = arguments(("int4", "int8"), 2, 3, 40)
    op = torch.ops.exkv.attention_part
    traced = torch.compile(lambda *a: merge_parts([op(*a)], torch.bfloat16), fullgraph=True,
                           backend="eager")  # fmt: skip
    assert torch.equal(traced(*args), op(*args)[0].bfloat16())


def test_wrong_arguments_are_refused_by_name_and_number():
    def refused(message, **changes):
        names = ("q", "k", "k_format", "v", "v_format", "past_lens", "key_start", "key_count")
        names += ("kv_len", "scale", "window", "softcap")
        args = (*arguments(("int4", "int8"), 2, 3, 40), 0, 0.0)
        given = dict(zip(names, args, strict=True))
        given |= {name: change(given[name]) for name, change in changes.items()}
        with pytest.raises((ValueError, RuntimeError), match=message):
            torch.ops.exkv.attention_part(*given.values())

    refused("k_format is 'int5'.*float, int8, int4, int2", k_format=lambda _: "int5")
    refused(r"q must be \(B, T, H, D\)", q=lambda x: x[0])
    refused("k must be 3 tensors .* to be int4", k=lambda x: x[:2])
    refused("v has 3 rows; it needs q's 2, or 1", v=lambda x: [torch.cat((y, y))[:3] for y in x])
    refused("k has 1 rows and 2 heads, and v has 2 and 2", k=lambda x: [y[:1] for y in x])
    refused("q's 4 heads must be a multiple of k's 3", k=lambda x: [torch.zeros(2, 64, 3, 16)] * 3)
    refused("k must be torch.uint8", k=lambda x: [x[0].char(), *x[1:]])
    refused("k's scale must be torch.float16", k=lambda x: [x[0], x[1].float(), x[2]])
    refused(r"v's scale must be .*\(2, 40, 2, 1\).*more than 40.*\(2, 39, 2, 1\)",
            v=lambda x: [x[0], x[1][:, :39]])  # fmt: skip
    refused("kv_len -1 must be 0 or more", kv_len=lambda _: -1)
    refused(r"key_count must be int32 \(2,\)", key_count=lambda x: x.long())
    refused(r"past_lens must be int32 \(2,\)", past_lens=lambda x: x[:1])
    refused("scale nan must be finite", scale=lambda _: float("nan"))
    refused("window -1", window=lambda _: -1)
    refused("softcap inf", softcap=lambda _: float("inf"))


# Memory -----------------------------------------------------------------------------------------


def peak(monkeypatch, args, *, shorten):
    """Bytes of temporaries and results of the reference, at most."""
    monkeypatch.setattr("exkv.workspace.has_kernel", lambda name, device_type: False)
    with monkeypatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        if not shorten:
            patch.delitem(SHORTENED, "attention_part")
        args = [
            [mode.from_tensor(y) for y in x] if isinstance(x, list)
            else mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for x in args
        ]  # fmt: skip
        with PeakTracker("cpu") as tracker:
            torch.ops.exkv.attention_part(*args)
    return tracker.peak


@pytest.mark.parametrize("kinds", [("float", "int8"), ("int4", "int2"), ("int4c", "float")])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kv_len", [0, 100, 512, 700, 1300])
@pytest.mark.parametrize("length", [1, 256, 300, 600, 1000])
def test_a_prediction_that_leaves_out_what_repeats_is_the_same(
    monkeypatch, kinds, shared, kv_len, length
):
    args = (*arguments(kinds, 2, length, kv_len, shared=shared), 9, 3.0)
    whole = peak(monkeypatch, args, shorten=False)
    assert peak(monkeypatch, args, shorten=True) == whole > 0


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shared", [False, True])
def test_no_copy_of_the_part_is_made(monkeypatch, kind, shared):
    """The peak does not grow with the keys, nor with rows that share them."""
    rows = 16
    args = [arguments((kind, kind), rows, 1, n, shared=shared) for n in (1024, 4096)]
    short, long = (peak(monkeypatch, a, shorten=False) for a in args)
    assert short == long
    if shared:
        widened = 256 * KV_HEADS * HEAD_DIM * 4  # of one row's tile
        assert long < 8 * widened


def test_the_reference_agrees_with_the_op():
    """The tests above look at the kernel where there is one: this is for the other."""
    part = make_part(torch.Generator().manual_seed(0), ["int4", "int2"], [0, 3, 0], [70, 30, 0])
    q = torch.randn(3, 5, 4, HEAD_DIM)
    args = (q, [68, 40, 2], 20, 5.0)
    expected = part.attend(*args, op=REFERENCES["attention_part"])
    torch.testing.assert_close(part.attend(*args), expected)
