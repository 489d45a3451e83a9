"""Storing new keys and values in one op, against the ops it fuses and plain indexing: equal to the
bit where tokens go, and nothing else written."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from arithmetic import same
from cases import check_cases
from hypothesis import given
from hypothesis import strategies as st
from native import assert_right_on, each_isa, emulated
from test_attention import at_the_end_of_memory

from exkv.ops import REFERENCES, has_kernel
from exkv.ops.append_kv import _Places
from exkv.ops.kv_formats import FORMATS

SINGLE = [name for name, kind in FORMATS.items() if kind.group == 1]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEADS = 2


def random_stores(kinds, shape, dtype, generator):
    """Stores for keys and for values with earlier contents."""
    return [
        list(FORMATS[kind].encode(torch.randn(shape, generator=generator).to(dtype)).values())
        for kind in kinds
    ]


def prepared(x, factors, hadamard):
    """Rotated and transformed as the references do."""
    if factors is not None:
        x = REFERENCES["rope"](x, x[:, :, :0], *factors)[0]
    return REFERENCES["hadamard"](x) if hadamard else x


def encoded(kind, x):
    """The tensors that a format stores, by the references."""
    if kind == "float":
        return [x]
    if kind == "int8":
        return list(REFERENCES["quantize_kv"](x))
    return list(REFERENCES["quantize_groups"](x, int(kind[3:])))


def expected(k, v, factors, stores, kinds, past, new, table, ring, hadamard):
    """The result of storing token by token."""
    stores = [[x.clone() for x in store] for store in stores]
    for x, turn, store, kind in zip((k, v), (factors, None), stores, kinds, strict=True):
        tensors = encoded(kind, prepared(x, turn, hadamard))
        for row, count in enumerate(new):
            for token in range(max(count - ring, 0) if ring else 0, count):
                place = (past[row] + token) % ring if ring else past[row] + token
                at = (row, place)
                if table is not None:
                    page = store[0].shape[1]
                    at = (int(table[row, place // page]), place % page)
                for to, made in zip(store, tensors, strict=True):
                    to[at] = made[row, token]
    return stores


def numbers(values):
    return None if values is None else torch.tensor(values, dtype=torch.int32)


CASES = {
    "past": st.lists(st.integers(0, 40), min_size=1, max_size=3),
    "length": st.sampled_from([1, 2, 5, 19]),
    "head_dim": st.sampled_from([8, 33, 36, 64, 80, 128]),
    "width": st.sampled_from([None, 0, 2, 8, 1]),
    "kinds": st.lists(st.sampled_from(SINGLE), min_size=2, max_size=2),
    "dtype": st.sampled_from(DTYPES),
    "padded": st.booleans(),
    "page": st.sampled_from([None, 16, 48]),
    "ring": st.sampled_from([0, 1, 7, 30]),
    "hadamard": st.booleans(),
    "shared_factors": st.booleans(),
    "seed": st.integers(0, 2**16),
}


def check_append(
    op,
    past,
    length,
    head_dim,
    width,
    kinds,
    dtype,
    padded,
    page,
    ring,
    hadamard,
    shared_factors,
    seed,
    place=lambda x: x,
):
    """``width`` None is for no rotation, 1 for all of a head."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(past)
    # Strided, as parts of one projection are.
    made = torch.randn(rows, length, 2 * HEADS + 1, head_dim, generator=generator).to(dtype)
    k, v = made[:, :, :HEADS], made[:, :, HEADS : 2 * HEADS]
    factors = None
    if width is not None:
        width = head_dim // 2 * 2 if width == 1 else width
        size = (1 if shared_factors else rows, length, width)
        factors = [torch.randn(size, generator=generator).to(dtype) for _ in range(2)]
    new = [length] * rows
    if padded:
        new = torch.randint(0, length + 1, (rows,), generator=generator).tolist()
    room = max(ring, max(past) + length) if ring else max(past) + length
    table, shape = None, (rows + 1, room, HEADS, head_dim)
    if page is not None:
        entries = -(-room // page)
        order = torch.randperm(rows * entries + 1, generator=generator)
        table = order[: rows * entries].view(rows, entries).int()
        shape = (len(order), page, HEADS, head_dim)
    stores = random_stores(kinds, shape, dtype, generator)
    right = expected(k, v, factors, stores, kinds, past, new, table, ring, hadamard)
    mine = [[place(x.clone()) for x in store] for store in stores]
    lens = numbers(past), numbers(new) if padded else None
    op(k, v, *(factors or (None, None)), mine[0], kinds[0], mine[1], kinds[1], *lens, table, ring,
       hadamard)  # fmt: skip
    for found, wanted in zip(mine, right, strict=True):
        assert all(map(same, found, wanted))


def test_append_is_bit_identical_to_the_other_ops_and_writes_nothing_else(ops):
    check_cases(check_append, CASES, ops.append_kv, examples=60 if emulated(ops) else 200)


def test_the_reference_does_the_same():
    check_cases(check_append, CASES, REFERENCES["append_kv"], examples=60)


@given(past=CASES["past"], length=CASES["length"], ring=st.integers(1, 9), seed=CASES["seed"])
def test_no_place_is_written_twice_in_a_call(past, length, ring, seed):
    """On a GPU the order of the writes would be undefined."""
    k = torch.zeros(len(past), length, 1, 1)
    new = torch.randint(0, length + 1, (len(past),), generator=torch.Generator().manual_seed(seed))
    for lens in (None, new.int()):
        found = _Places.of(k, numbers(past), lens, ring)
        pairs = list(zip(found.row.flatten().tolist(), found.place.flatten().tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)


def test_special_values_are_stored_as_the_formats_say(ops):
    """Every float16: infinities, NaN, subnormals and both zeros."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    for dtype in DTYPES:
        x = every.view(1, 512, HEADS, 64).to(dtype)
        for kind in SINGLE:
            right = encoded(kind, x)
            mine = [[torch.zeros_like(y) for y in right] for _ in range(2)]
            ops.append_kv(x, x, None, None, mine[0], kind, mine[1], kind, numbers([0]))
            assert all(map(same, mine[0], right)) and all(map(same, mine[1], right))


def check_cpu(**case):
    """A write past a tensor's end crashes here: run it in a process of its own."""
    check_append(torch.ops.exkv.append_kv, **case, place=at_the_end_of_memory)


ISA_PROGRAM = """
import test_append_kv as t
from hypothesis import given, settings
settings(max_examples=60, deadline=None)(given(**t.CASES)(t.check_cpu))()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages")
@each_isa
def test_each_instruction_set_stores_the_same_bits_within_its_tensors(isa):
    assert_right_on(isa, ISA_PROGRAM)


def test_appended_keys_are_seen_by_torchs_attention():
    """Floats in pages, rotated by plain complex numbers: attention_part over them is SDPA."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, 21, HEADS, 16, generator=generator)
    q = torch.randn(2, 1, 4, 16, generator=generator)
    angles = torch.rand(2, 21, 8, generator=generator) * 6
    factors = [f(angles).repeat(1, 1, 2) for f in (torch.cos, torch.sin)]
    table = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32)
    pools = torch.full((2, 5, 16, HEADS, 16), torch.nan)
    past = torch.zeros(2, dtype=torch.int32)
    stores = ([pools[0]], "float", [pools[1]], "float")
    torch.ops.exkv.append_kv(k, v, *factors, *stores, past, None, table)
    lens = (past + 20, past, past + 21)
    found = torch.ops.exkv.attention_part(q, *stores, *lens, 21, 0.25, 0, 0.0, table)[0]
    rotated = torch.view_as_complex(torch.stack(k.chunk(2, dim=-1), -1).contiguous())
    rotated = rotated * torch.polar(torch.ones_like(angles), angles).unsqueeze(2)
    rotated = torch.cat((rotated.real, rotated.imag), -1)
    heads = [x.transpose(1, 2) for x in (q, rotated, v)]
    right = torch.nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True)
    torch.testing.assert_close(found, right.transpose(1, 2), rtol=1e-5, atol=1e-5)


# What is refused --------------------------------------------------------------------------------

NAMES = ("k", "v", "cos", "sin", "k_stored", "k_format", "v_stored", "v_format", "past_lens",
         "new_lens", "block_table", "ring", "hadamard")  # fmt: skip


def arguments(kinds=("int4", "int8"), *, paged=False):
    """Two rows of three tokens behind five, with room for 32."""
    shape = (3, 16, HEADS, 8) if paged else (2, 32, HEADS, 8)
    stores = random_stores(kinds, shape, torch.float32, torch.Generator().manual_seed(0))
    k, v = torch.randn(2, 2, 3, HEADS, 8)
    cos, sin = torch.randn(2, 2, 3, 8)
    table = torch.tensor([[0, 2], [1, 1]], dtype=torch.int32) if paged else None
    return dict(zip(NAMES, (k, v, cos, sin, stores[0], kinds[0], stores[1], kinds[1],
                            numbers([5, 5]), None, table, 0, False), strict=True))  # fmt: skip


@pytest.mark.parametrize("way", ["op", "reference"])
def test_mismatched_arguments_are_refused_and_write_nothing(way):
    op = torch.ops.exkv.append_kv if way == "op" else REFERENCES["append_kv"]
    compiled = way == "op" and has_kernel("append_kv", "cpu")
    error = RuntimeError if compiled else ValueError

    def refused(message, *, paged=False, **changes):
        given = arguments(paged=paged)
        given |= {name: change(given[name]) for name, change in changes.items()}
        before = [x.clone() for name in ("k_stored", "v_stored") for x in given[name]]
        with pytest.raises(error) as e:
            op(*given.values())
        assert re.search(message, str(e.value)), str(e.value)
        after = [x for name in ("k_stored", "v_stored") for x in given[name]]
        assert all(map(torch.equal, after, before))

    refused("k_format is 'int4c'; .* float, int8, int4, int2, which encode every token",
            k_format=lambda _: "int4c")  # fmt: skip
    refused(r"k and v must both be \(B, T, heads, D\).*\(2, 3, 2, 8\).*\(2, 3, 2, 7\)",
            v=lambda x: x[..., :7])  # fmt: skip
    refused("k is .*Float.*v .*Half" if compiled else "float32 .*float16", v=torch.Tensor.half)
    refused("cos and sin go together", sin=lambda _: None)
    refused(r"cos must be \(2, 3, R\)", cos=lambda x: x[:, :2], sin=lambda x: x[:, :2])
    refused("cos .* must rotate an even number .* it rotates 7", cos=lambda x: x[..., :7],
            sin=lambda x: x[..., :7])  # fmt: skip
    refused("k_stored must be 3 tensors", k_stored=lambda x: x[:2])
    refused("v_stored has 1 rows, and k has 2", v_stored=lambda x: [y[:1] for y in x])
    refused(f"v_stored's scale must be .*{'Half' if compiled else 'float16'}",
            v_stored=lambda x: [x[0], x[1].float()])  # fmt: skip
    refused("k_stored has 2 rows of 32 tokens, and v_stored 2 of 31",
            v_stored=lambda x: [y[:, :31] for y in x])  # fmt: skip
    refused(r"past_lens must be int32 \(2,\)", past_lens=torch.Tensor.long)
    refused(r"new_lens must be int32 \(2,\)", new_lens=lambda _: numbers([1]))
    refused("ring 33 must be at most the 32", ring=lambda _: 33)
    refused("ring -1", ring=lambda _: -1)
    refused("row 1 has 30 tokens and room for 32; there is no place 32 for token 2",
            past_lens=lambda _: numbers([5, 30]))  # fmt: skip
    refused("row 0 has -1 tokens", past_lens=lambda _: numbers([-1, 0]))
    refused("row 0 has 2 as entry 1; k and v have 2 pages, 0 to 1", paged=True,
            past_lens=lambda _: numbers([15, 0]), k_stored=lambda x: [y[:2] for y in x],
            v_stored=lambda x: [y[:2] for y in x])  # fmt: skip
    refused("k_stored has pages of 8 tokens", paged=True, k_stored=lambda x: [y[:, :8] for y in x])
    refused(r"block_table must be int32 \(2, pages\)", paged=True, block_table=lambda x: x[:1])


def test_no_rows_and_no_tokens_write_nothing(ops):
    for shape in ((0, 3), (2, 0)):
        given = arguments()
        before = [x.clone() for x in given["k_stored"]]
        for name in ("k", "v", "cos", "sin"):
            given[name] = given[name][: shape[0], : shape[1]]
        given["past_lens"] = given["past_lens"][: shape[0]]
        ops.append_kv(*given.values())
        assert all(map(torch.equal, given["k_stored"], before))
