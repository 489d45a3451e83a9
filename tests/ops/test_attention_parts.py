"""Attention over parts of a sequence, merged, against torch's softmax over the whole: any split,
any format of keys and values, and parts shared by all rows."""

from __future__ import annotations

import ctypes
import itertools
import random
import re
import sys
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from arithmetic import assert_same_on_threads
from cases import check_cases
from hypothesis import strategies as st
from native import assert_right_on, each_isa, emulated, needs_cxx, needs_kernels, ops_of, run_apart
from test_attention import at_the_end_of_memory, rms
from torch import Tensor

from exkv.ops import REFERENCES
from exkv.ops.attention_parts import merge_parts
from exkv.ops.kv_formats import FORMATS
from exkv.planning.dry_run import DryRun
from exkv.planning.op_calls import SHORTER

HEAD_DIM = 32
KV_HEADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is stored, and the floats that are meant by it: that is the truth."""

    kinds: tuple[str, str]
    stored: tuple[list[Tensor], list[Tensor]]
    wide: tuple[Tensor, Tensor]  # k, v (B or 1, S, H_kv, D) float32
    starts: list[int]
    counts: list[int]

    def attend(self, q, pasts, window=0, softcap=0.0, ops=torch.ops.exkv, op=None):
        (k_kind, v_kind), (k, v) = self.kinds, self.stored
        lens = [torch.tensor(x, dtype=torch.int32) for x in (pasts, self.starts, self.counts)]
        scale = q.shape[-1] ** -0.5
        op = op or ops.attention_part
        return op(q, k, k_kind, v, v_kind, *lens, max(self.counts), scale, window, softcap)


def make_part(
    generator,
    kinds,
    starts,
    counts,
    *,
    shared=False,
    head_dim=HEAD_DIM,
    dtype=torch.float32,
    spare=5,
):
    """Storage with room for more than is counted, filled to its end.

    Args:
        dtype: of keys and values before they are stored.
    """
    capacity = -(-(max(counts) + spare) // 32) * 32
    shape = (1 if shared else len(counts), capacity, KV_HEADS, head_dim)
    stored, wide = [], []
    for kind in kinds:
        encoded = FORMATS[kind].encode(torch.randn(shape, generator=generator).to(dtype))
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
    """Plain attention of one row: out (T, H, D), lse (T, H); out is 0 where no key is visible."""
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


CASES = {
    "pasts": st.lists(st.integers(0, 40), min_size=1, max_size=3),
    "length": st.sampled_from([1, 2, 7, 300]),
    "groups": st.sampled_from([1, 2, 4]),
    "pieces": st.integers(1, 4),
    "shared": st.booleans(),
    "window": st.sampled_from([0, 1, 3, 16, 1000]),
    "softcap": st.sampled_from([0.0, 2.0, 50.0]),
    "kinds": st.lists(st.sampled_from(sorted(FORMATS)), min_size=8, max_size=8),
    "seed": st.integers(0, 2**16),
}


def check_split(ops, pasts, length, groups, pieces, shared, window, softcap, kinds, seed):
    generator = torch.Generator().manual_seed(seed)
    shared &= pieces > 1
    parts = [
        make_part(generator, kinds[2 * i : 2 * i + 2], *piece, shared=shared and i == 0)
        for i, piece in enumerate(cut(random.Random(seed), pasts, length, pieces, shared))
    ]
    q = torch.randn(len(pasts), length, KV_HEADS * groups, HEAD_DIM, generator=generator)
    found = [part.attend(q, pasts, window, softcap, ops) for part in parts]
    merged = merge_parts(found, torch.float32)
    for row, past in enumerate(pasts):
        expected, _ = dense(q[row], parts, row, past, window, softcap)
        torch.testing.assert_close(merged[row], expected, rtol=1e-4, atol=1e-5)
        for part, (out, lse) in zip(parts, found, strict=True):
            expected, expected_lse = dense(q[row], [part], row, past, window, softcap)
            torch.testing.assert_close(lse[row], expected_lse, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-5)


def test_any_split_merged_is_the_softmax_over_all(ops):
    check_cases(check_split, CASES, ops, examples=40 if emulated(ops) else 100)


def flat(tensors):
    return torch.cat([x.flatten().double() for x in tensors])


def assert_as_good_as_plain(part, q, pasts, window, softcap, plain_dtype, ops=torch.ops.exkv):
    """Errors are to float64 on what is stored. A result that needs no arithmetic may have no error
    in the plain way, so half of the type's own step is allowed too."""
    found = part.attend(q, pasts, window, softcap, ops)
    ours, plain, size = ([], []), ([], []), ([], [])
    for row, past in enumerate(pasts):
        args = (q[row], [part], row, past, window, softcap)
        exact, narrow = dense(*args, torch.float64), dense(*args, plain_dtype)
        some = exact[1].isfinite()
        assert torch.equal(found[1][row].isfinite(), some)
        for i in range(2):
            ours[i].append(found[i][row][some] - exact[i][some])
            plain[i].append(narrow[i][some] - exact[i][some])
            size[i].append(exact[i][some])
        assert not found[0][row][~some].any()
    for i in range(2):
        step = torch.finfo(plain_dtype).eps / 2
        assert rms(flat(ours[i])) <= 2 * rms(flat(plain[i])) + step * rms(flat(size[i]))


GROUPED = {"int8", "int4", "int2"}
PAIRS = [(kind, kind) for kind in FORMATS]
PAIRS += [
    ("int8", "int2"),
    ("int4", "int8"),
    ("int4c", "int4"),
    ("float", "int2"),
    ("int2", "float"),
]


def check_error(head_dims, keys=700, ops=torch.ops.exkv, ways=3):
    """What is run for each instruction set, there with one of the three ways to mask and cap in
    turn: they are cut from one source. Floats of the queries' own type, and groups along the
    head dimension, may be as far off as the plain way in that type, as in the ops for float and 8
    bits alone; all others as in float32: queries of 16 bits are exact there."""
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    cases = list(itertools.product(PAIRS, dtypes, (False, True)))
    fewer = keys * 3 // 5
    for index, head_dim in enumerate(head_dims):
        for number, (kinds, dtype, shared) in enumerate(cases, index):
            narrow = set(kinds) <= GROUPED or kinds == ("float", "float")
            length, heads = [(1, 2), (2, 6), (5, 14), (40, 8)][index % 4]
            starts, counts = ([0, 0], [keys, keys]) if shared else ([0, 3], [keys, fewer])
            part = make_part(generator, kinds, starts, counts, shared=shared, head_dim=head_dim,
                             dtype=dtype)  # fmt: skip
            q = torch.randn(2, length, heads, head_dim, generator=generator).to(dtype)
            pasts, plain = [keys - length, keys - 50], dtype if narrow else torch.float32
            windows = [(0, 0.0), (keys * 3 // 7, 0.0), (0, 3.0)] * 2
            for window, softcap in windows[number % 3 :][:ways]:
                assert_as_good_as_plain(part, q, pasts, window, softcap, plain, ops)


def test_error_is_at_most_twice_plain_precision(ops):
    check_error(head_dims=(8, 100), keys=150 if emulated(ops) else 700, ops=ops)


@needs_kernels
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_keys_and_values_of_any_bits_are_read_together(groups):
    generator = torch.Generator().manual_seed(groups)
    for kinds in itertools.product(("int8", "int4", "int2"), repeat=2):
        part = make_part(generator, kinds, [0, 0], [75, 40], head_dim=96)
        q = torch.randn(2, 1, KV_HEADS * groups, 96, generator=generator)
        out, lse = part.attend(q, [74, 39])
        for row, past in enumerate((74, 39)):
            right = dense(q[row], [part], row, past, 0, 0.0)
            torch.testing.assert_close((out[row], lse[row]), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", FORMATS)
def test_invisible_parts_have_no_weight(ops, kind):
    generator = torch.Generator().manual_seed(0)
    q, pasts = torch.randn(2, 3, 4, HEAD_DIM), [60, 20]
    some = make_part(generator, [kind] * 2, [0, 0], [63, 23])
    empty = make_part(generator, [kind] * 2, [0, 0], [0, 0])  # kv_len 0
    one_row = make_part(generator, [kind] * 2, [0, 0], [63, 0])
    future = make_part(generator, [kind] * 2, [63, 23], [10, 10])
    whole = some.attend(q, pasts, ops=ops)
    for part in (empty, future):
        out, lse = part.attend(q, pasts, ops=ops)
        assert not out.any() and (lse == -torch.inf).all()
        assert torch.equal(merge_parts([(out, lse), whole], torch.float32), whole[0])
    out, lse = one_row.attend(q, pasts, ops=ops)
    assert not out[1].any() and (lse[1] == -torch.inf).all()
    assert out[0].any() and lse[0].isfinite().all()
    nowhere = [part.attend(q, pasts, ops=ops) for part in (empty, future)]
    assert torch.equal(merge_parts(nowhere, torch.bfloat16), torch.zeros_like(q).bfloat16())


def test_part_outside_the_window_has_no_weight(ops):
    """Its last key is 16 before the first query."""
    part = make_part(torch.Generator().manual_seed(0), ["float"] * 2, [0], [85])
    q = torch.randn(1, 3, 4, HEAD_DIM)
    assert (part.attend(q, [100], 16, ops=ops)[1] == -torch.inf).all()
    lse = part.attend(q, [100], 17, ops=ops)[1]
    assert lse[0, 0].isfinite().all() and (lse[0, 1:] == -torch.inf).all()


def test_merge_returns_the_given_dtype():
    parts = [(torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)) for _ in range(3)]
    for count in (1, 3):
        wide = merge_parts(parts[:count], torch.float32)
        assert torch.equal(merge_parts(parts[:count], torch.bfloat16), wide.bfloat16())
    with pytest.raises(ValueError, match="at least one part"):
        merge_parts([], torch.float32)


def test_merging_survives_scores_of_any_size():
    """exp of these scores would be infinite or zero."""
    outs = torch.randn(2, 1, 1, 1, 8)
    for size in (1e4, -1e4, 3e38, -3e38):
        lse = torch.full((1, 1, 1), size)
        merged = merge_parts([(outs[0], lse), (outs[1], lse)], torch.float32)
        torch.testing.assert_close(merged, outs.mean(0))


def test_a_shared_part_is_the_same_as_a_copy_for_each_row(ops):
    part = make_part(torch.Generator().manual_seed(0), ["int4c", "int2"], [0] * 3, [70] * 3,
                     shared=True)  # fmt: skip
    q, pasts = torch.randn(3, 5, 4, HEAD_DIM), [70, 66, 90]
    k, v = ([x.expand(3, *x.shape[1:]) for x in store] for store in part.stored)
    lens = [torch.tensor(x, dtype=torch.int32) for x in (pasts, part.starts, part.counts)]
    for window, softcap in [(0, 0.0), (20, 3.0)]:
        params = (70, HEAD_DIM**-0.5, window, softcap)
        copied = ops.attention_part(q, k, "int4c", v, "int2", *lens, *params)
        torch.testing.assert_close(part.attend(q, pasts, window, softcap, ops), copied)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_rows_or_no_queries(ops, shape):
    part = make_part(torch.Generator().manual_seed(0), ["int8", "int4"], [0], [40], shared=True)
    q = torch.randn(*shape, 4, HEAD_DIM)
    k, v = part.stored
    lens = [torch.full(shape[:1], 9, dtype=torch.int32)] * 3
    out, lse = ops.attention_part(q, k, "int8", v, "int4", *lens, 40, 0.1)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)


def arguments(kinds, rows, length, kv_len, *, shared=False, heads=4, head_dim=HEAD_DIM):
    """Zeros, for tests of shapes only."""
    shape = (1 if shared else rows, -(-kv_len // 32) * 32, KV_HEADS, head_dim)
    stores = [
        [torch.zeros(size, dtype=dtype) for size, dtype in layout.values()]
        for layout in (FORMATS[kind].layout(shape, torch.bfloat16) for kind in kinds)
    ]
    q = torch.zeros(rows, length, heads, head_dim, dtype=torch.bfloat16)
    lens = [torch.zeros(rows, dtype=torch.int32) for _ in range(3)]
    return (q, stores[0], kinds[0], stores[1], kinds[1], *lens, kv_len, 0.1)


def test_wrong_arguments_are_refused_by_name_and_number_by_the_op(ops):
    # Kernels raise nothing else.
    check_refusals(ops.attention_part, (ValueError, RuntimeError))


def test_wrong_arguments_are_refused_by_name_and_number_by_the_reference():
    check_refusals(REFERENCES["attention_part"], ValueError)


def check_refusals(op, errors):

    def refused(message, **changes):
        names = ("q", "k", "k_format", "v", "v_format", "past_lens", "key_start", "key_count")
        names += ("kv_len", "scale", "window", "softcap")
        args = (*arguments(("int4", "int8"), 2, 3, 40), 0, 0.0)
        given = dict(zip(names, args, strict=True))
        given |= {name: change(given[name]) for name, change in changes.items()}
        with pytest.raises(errors) as e:
            op(*given.values())
        assert re.search(message, str(e.value)), str(e.value)

    refused("k_format is 'int5'.*float, int8, int4, int2", k_format=lambda _: "int5")
    refused(r"q must be \(B, tokens, heads, D\)", q=lambda x: x[0])
    refused("k must be 3 tensors .* to be int4", k=lambda x: x[:2])
    refused("v has 3 rows; it needs q's 2, or 1", v=lambda x: [torch.cat((y, y))[:3] for y in x])
    refused("k has 1 rows and 2 heads, and v has 2 and 2", k=lambda x: [y[:1] for y in x])
    refused("q's 4 heads must be a multiple of k's 3", k=lambda x: [torch.zeros(2, 64, 3, 16)] * 3)
    refused("k must be (torch.uint8|Byte)", k=lambda x: [x[0].char(), *x[1:]])
    refused("k's scale must be (torch.float16|Half)", k=lambda x: [x[0], x[1].float(), x[2]])
    refused(r"v's scale must be .*\(2, 40, 2, 1\).*more than 40.*\(2, 39, 2, 1\)",
            v=lambda x: [x[0], x[1][:, :39]])  # fmt: skip
    refused("kv_len -1 must be 0 or more", kv_len=lambda _: -1)
    refused(r"key_count must be int32 \(2,\)", key_count=lambda x: x.long())
    refused(r"past_lens must be int32 \(2,\)", past_lens=lambda x: x[:1])
    refused("scale nan must be finite", scale=lambda _: float("nan"))
    refused("window -1", window=lambda _: -1)
    refused("softcap inf", softcap=lambda _: float("inf"))


# The kernels ------------------------------------------------------------------------------------


def check_strides(ops=torch.ops.exkv, length=3):
    """Strided tensors, parts of larger ones or heads first, give equal bits."""
    generator = torch.Generator().manual_seed(0)
    layouts = {
        "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "of more rows": lambda x: torch.cat((x, x, x))[len(x) : 2 * len(x)],
        "misaligned": lambda x: F.pad(x, (1, 2))[..., 1:-2],
    }
    for kind in FORMATS:
        for shared in (False, True):
            part = make_part(generator, [kind] * 2, [0, 0], [150, 150], shared=shared, head_dim=40)
            q = torch.randn(2, length, 6, 40, generator=generator).bfloat16()
            expected = part.attend(q, [157, 157], ops=ops)
            wide = torch.randn(2, length + 2, 10, 40).bfloat16()
            wide[:, 1:-1, 2:8] = q
            found = part.attend(wide[:, 1:-1, 2:8], [157, 157], ops=ops)
            assert all(map(torch.equal, found, expected)), (kind, "queries")
            for name, layout in layouts.items():
                stored = tuple([layout(x) for x in store] for store in part.stored)
                found = replace(part, stored=stored).attend(q, [157, 157], ops=ops)
                assert all(map(torch.equal, found, expected)), (kind, name)


def check_ends(counts=(1, 63, 130), ops=torch.ops.exkv, length=2, dims=(8, 36, 64, 80, 99)):
    """Reads past a tensor's end crash here: run it in a process of its own."""
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16)
    for kind, dtype, dim, count in itertools.product(FORMATS, dtypes, dims, counts):
        part = make_part(generator, [kind] * 2, [0], [count], head_dim=dim, dtype=dtype, spare=0)
        by_token = FORMATS[kind].group == 1
        stored = tuple(
            [x[:, :count] if by_token or not i else x for i, x in enumerate(store)]
            for store in part.stored
        )
        q = torch.randn(1, length, 4, dim, generator=generator).to(dtype)
        expected = replace(part, stored=stored).attend(q, [count], ops=ops)
        stored = tuple([at_the_end_of_memory(x) for x in store] for store in stored)
        found = replace(part, stored=stored).attend(at_the_end_of_memory(q), [count], ops=ops)
        assert all(map(torch.equal, found, expected)), (kind, dtype, dim, count)


ISA_PROGRAM = """
import torch, test_attention_parts as t
torch.set_num_threads(1)
t.check_error(head_dims=(36, 64, 80, 128), ways=1)
t.check_strides()
t.check_ends()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages")
@each_isa
def test_each_instruction_set_is_as_good_as_plain_and_stays_within_its_tensors(isa):
    assert_right_on(isa, ISA_PROGRAM)


EMULATED_PROGRAM = """
import native, test_attention_parts as t
t.check_ends(counts=(1, 63), ops=native.ops_of("emulated"))
"""


@needs_cxx
@pytest.mark.skipif(sys.platform != "linux", reason="protects pages")
def test_the_emulated_kernels_stay_within_their_tensors():
    result = run_apart(EMULATED_PROGRAM)
    assert result.returncode == 0, (result.returncode, result.stderr)


def test_strided_and_misaligned_inputs_give_the_same_bits(kernels):
    check_strides(kernels)


@needs_kernels
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("length", [1, 40])
def test_threads_make_no_difference(kind, shared, length):
    generator = torch.Generator().manual_seed(0)
    counts = [3000, 3000] if shared else [3000, 1234]
    part = make_part(generator, [kind] * 2, [0, 0], counts, shared=shared, dtype=torch.bfloat16)
    q = torch.randn(2, length, 4, HEAD_DIM, generator=generator).bfloat16()
    assert_same_on_threads(lambda: part.attend(q, [3000, 3000]))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("window", [0, 100])
def test_long_part_in_ragged_rows(kernels, shared, window):
    """Long enough to be cut into ranges of keys, of which some rows see a few and one none."""
    pasts = [500, 0, 1, 63, 64, 209] if emulated(kernels) else [5000, 0, 1, 63, 64, 2049]
    counts = [pasts[0] + 2] * 6 if shared else [past + 2 for past in pasts]
    generator, starts = torch.Generator().manual_seed(0), [0, 100, 0, 0, 0, 0]
    part = make_part(generator, ["int4", "float"], starts, counts, shared=shared)
    q = torch.randn(6, 2, 8, HEAD_DIM)
    assert_as_good_as_plain(part, q, pasts, window, 0.0, torch.float32, kernels)


def check_poison(kernels, kind, length=3, dtype=torch.float32):
    """NaN past a row's end must not be seen."""
    part = make_part(torch.Generator().manual_seed(0), [kind] * 2, [0, 0], [32, 96], spare=32)
    q = torch.randn(2, length, 4, HEAD_DIM).to(dtype)
    expected = part.attend(q, [90, 96], ops=kernels)
    assert all(x.isfinite().all() for x in expected)
    entry = FORMATS[kind].group
    for store in part.stored:
        for x in store:
            if x.is_floating_point():
                ends = [count // (1 if x is store[0] else entry) for count in part.counts]
                x[0, ends[0] :], x[1, ends[1] :] = torch.nan, torch.nan
    assert all(map(torch.equal, part.attend(q, [90, 96], ops=kernels), expected))


@pytest.mark.parametrize("kind", FORMATS)
def test_keys_past_a_rows_end_are_invisible(kernels, kind):
    check_poison(kernels, kind)


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
def test_format_names_leak_nothing():
    """10,000 calls: torch's own conversion would keep some 64 bytes of each name."""
    args = arguments(("int4", "int8"), 1, 1, 32)
    grown(torch.ops.exkv.attention_part, args, 2000)
    assert grown(torch.ops.exkv.attention_part, args, 10000) < 300_000


@needs_cxx
@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
def test_fallbacks_to_the_reference_leak_nothing():
    args = arguments(("int4", "int8"), 1, 17, 32, head_dim=608)  # more than kernels take
    op = ops_of("emulated").attention_part
    grown(op, args, 500)
    assert grown(op, args, 3000) < 100_000


@needs_cxx
@pytest.mark.parametrize("kinds", [*itertools.product(FORMATS, FORMATS)], ids="-".join)
def test_fallbacks_to_the_reference_keep_each_format(kinds):
    generator = torch.Generator().manual_seed(0)
    part = make_part(generator, list(kinds), [0, 0], [32, 64], head_dim=608)
    q = torch.randn(2, 3, 4, 608)
    found = part.attend(q, [30, 61], ops=ops_of("emulated"))
    expected = part.attend(q, [30, 61], op=REFERENCES["attention_part"])
    assert all(map(torch.equal, found, expected))


def grown(op, args, calls: int) -> int:
    """Bytes that the calls leave allocated: what the process has resident may grow by fragments."""
    before = allocated_bytes()
    for _ in range(calls):
        op(*args)
    return allocated_bytes() - before


def allocated_bytes() -> int:
    """By malloc(3), blocks of mmap(2) included."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("asks mallinfo2, which glibc has from 2.33 on")
    library.mallinfo2.restype = MallocUse
    use = library.mallinfo2()
    return use.uordblks + use.hblkhd


class MallocUse(ctypes.Structure):
    """mallinfo2(3)"""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


# Memory -----------------------------------------------------------------------------------------


def peak(monkeypatch, args, *, shorten):
    """Peak bytes of the reference's temporaries and results."""
    monkeypatch.setattr("exkv.planning.dry_run.has_kernel", lambda name, device_type: False)
    with monkeypatch.context() as patch, DryRun("cpu") as run:
        if not shorten:
            patch.delitem(SHORTER, "attention_part")
        torch.ops.exkv.attention_part(*args)
    return run.peak


@pytest.mark.parametrize("kinds", [("float", "int8"), ("int4", "int2"), ("int4c", "float")])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("kv_len", "length"),
    [(0, 300), (100, 1), (512, 256), (512, 600), (700, 1), (700, 1000), (1300, 300), (1300, 600)],
)
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
    """The tests above use the kernel if there is one; this one is for the reference."""
    part = make_part(torch.Generator().manual_seed(0), ["int4", "int2"], [0, 3, 0], [70, 30, 0])
    q = torch.randn(3, 5, 4, HEAD_DIM)
    args = (q, [68, 40, 2], 20, 5.0)
    expected = part.attend(*args, op=REFERENCES["attention_part"])
    torch.testing.assert_close(part.attend(*args), expected)


def test_a_sink_is_a_key_without_a_value():
    """Compared with torch's softmax over the keys' scores and the sink's."""
    scores, values = torch.randn(2, 3, 4, 9).mul_(4), torch.randn(2, 3, 4, 9, 5)
    sinks = torch.tensor([-3.0, 0.0, 5.0, 40.0])
    out = (scores.softmax(-1).unsqueeze(-1) * values).sum(-2)
    both = torch.cat((scores, sinks.expand(2, 3, 4).unsqueeze(-1)), dim=-1).double()
    expected = (both.softmax(-1)[..., :-1].unsqueeze(-1) * values).sum(-2)
    for op in (torch.ops.exkv.share_with_sinks_, REFERENCES["share_with_sinks_"]):
        found = out.clone()
        op(found, scores.logsumexp(-1), sinks)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    nothing = torch.zeros(1, 1, 4, 5)
    torch.ops.exkv.share_with_sinks_(nothing, torch.full((1, 1, 4), -torch.inf), sinks)
    assert torch.equal(nothing, torch.zeros_like(nothing))  # of a query that sees no key
    for wrong in (scores.logsumexp(-1)[:1], torch.zeros(2, 3, 5)):
        with pytest.raises((RuntimeError, ValueError), match="share_with_sinks_: out .*2, 3, 4, 5"):
            torch.ops.exkv.share_with_sinks_(out, wrong, sinks)
