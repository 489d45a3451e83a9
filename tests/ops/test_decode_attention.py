"""One token a row, stored and attended in one op, against the ops it fuses (equal to the bit) and
torch's SDPA."""

from __future__ import annotations

import pytest
import torch
from arithmetic import same
from cases import check_cases
from hypothesis import strategies as st
from native import needs_kernels
from test_append_kv import DTYPES, SINGLE, random_stores

from exkv.ops import REFERENCES

CASES = {
    "past": st.lists(st.integers(0, 40), min_size=1, max_size=3),
    "groups": st.sampled_from([1, 3]),
    "head_dim": st.sampled_from([8, 33, 64]),
    "kinds": st.lists(st.sampled_from(SINGLE), min_size=2, max_size=2),
    "dtype": st.sampled_from(DTYPES),
    "window": st.sampled_from([0, 5]),
    "ring": st.sampled_from([0, 1, 7, 30]),
    "hadamard": st.booleans(),
    "seed": st.integers(0, 2**16),
}


def drawn(past, groups, head_dim, dtype, seed):
    """q, k, v of one token a row, and the number of tokens before it in each."""
    generator = torch.Generator().manual_seed(seed)
    heads = torch.randn(len(past), 1, 2 * groups + 4, head_dim, generator=generator).to(dtype)
    q, k, v = heads.split((2 * groups, 2, 2), dim=2)
    return generator, q, k, v, torch.tensor(past, dtype=torch.int32)


def in_parts(q, k, v, stores, kinds, lens, kv_len, window, ring, hadamard):
    ops = torch.ops.exkv
    ops.append_kv(k, v, None, None, stores[0], kinds[0], stores[1], kinds[1], lens, None, None,
                  ring, hadamard)  # fmt: skip
    seen = lens.clamp(max=ring - 1) if ring else lens
    start = torch.zeros_like(lens)
    queries = ops.hadamard(q) if hadamard else q
    out, _ = ops.attention_part(queries, stores[0], kinds[0], stores[1], kinds[1], seen, start,
                                start + kv_len, kv_len, 0.2, window, 0.0)  # fmt: skip
    return (ops.hadamard(out) if hadamard else out).to(q.dtype)


def check_decode(
    op, past, groups, head_dim, kinds, dtype, window, ring, hadamard, seed, like=in_parts
):
    generator, q, k, v, lens = drawn(past, groups, head_dim, dtype, seed)
    room = max(ring, max(past) + 1)
    mine = random_stores(kinds, (len(past), room, 2, head_dim), dtype, generator)
    theirs = [[x.clone() for x in store] for store in mine]
    kv_len, window = min(max(past) + 1, ring or room), 0 if ring else window
    found = op(q, k, v, mine[0], kinds[0], mine[1], kinds[1], lens, kv_len, 0.2, window, 0.0, ring,
               hadamard)  # fmt: skip
    right = like(q, k, v, theirs, kinds, lens, kv_len, window, ring, hadamard)
    assert same(found, right) and found.dtype == q.dtype
    for store, other in zip(mine, theirs, strict=True):
        assert all(map(same, store, other))


@needs_kernels
def test_op_is_bit_identical_to_its_parts():
    check_cases(check_decode, CASES, torch.ops.exkv.decode_attention, examples=100)


def test_reference_is_bit_identical_to_its_parts():
    check_cases(check_decode, CASES, REFERENCES["decode_attention"], examples=30)


def test_floats_are_attended_to_as_sdpa_does():
    generator, q, k, v, lens = drawn([12, 12], 3, 32, torch.float32, 0)
    stores = random_stores(["float"] * 2, (2, 20, 2, 32), torch.float32, generator)
    before = [store[0][:, :12].clone() for store in stores]
    found = torch.ops.exkv.decode_attention(
        q, k, v, stores[0], "float", stores[1], "float", lens, 13, 32**-0.5
    )
    keys, values = (
        torch.cat((old, new), 1).transpose(1, 2) for old, new in zip(before, (k, v), strict=True)
    )
    right = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, enable_gqa=True
    )
    torch.testing.assert_close(found, right.transpose(1, 2))


@pytest.mark.parametrize("op", ["kernel", "reference"])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"past": 20}, "room"),
        ({"scale": float("nan")}, "scale"),
        ({"kv_len": 21}, "21|entries"),
        ({"kind": "int9"}, "int9"),
        ({"tokens": 2}, "one token a row"),
    ],
    ids=str,
)
def test_refused_calls_write_nothing(op, changes, says):
    _, q, k, v, lens = drawn([12, changes.get("past", 3)], 1, 32, torch.float32, 0)
    stores = [[torch.full((2, 20, 2, 32), 7.0)] for _ in "kv"]
    tokens = changes.get("tokens", 1)
    q, k, v = (x.repeat(1, tokens, 1, 1) for x in (q, k, v))
    run = torch.ops.exkv.decode_attention if op == "kernel" else REFERENCES["decode_attention"]
    kind = changes.get("kind", "float")
    with pytest.raises((ValueError, RuntimeError), match=says):
        run(q, k, v, stores[0], kind, stores[1], kind, lens, changes.get("kv_len", 13),
            changes.get("scale", 0.2))  # fmt: skip
    assert all((store[0] == 7).all() for store in stores)
