"""CUDA attention of few queries with heads wider than 256, emulated or on a GPU, against torch's
attention on the stored values."""

from __future__ import annotations

import ctypes
import sys

import pytest
import test_attention
import test_attention_parts
import test_pages
import torch
from native import load_emulated_ops, needs_cxx, ops_of, run_apart
from test_attention_parts import KV_HEADS, make_part

from exkv.ops.kv_formats import FORMATS

DTYPES = test_attention.DTYPES
#: Of every format in bfloat16, and some in the other types: emulated threads take their time.
PARTS = [(kinds, torch.bfloat16) for kinds in test_attention_parts.PAIRS]
PARTS += [(("int4", "float"), torch.float16), (("int4c", "int8"), torch.float32)]
KEYS = 150  # two splits, of which the second ends amid a tile


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def kernels(request):
    return ops_of(request.param)


@needs_cxx
def test_which_calls_the_kernel_takes():
    scratch = ops_of("emulated").decode_scratch

    def takes(queries, dim):
        return scratch(2, queries, 128, 1, dim, KEYS, 8, False, True) >= 0

    assert all(takes(queries, dim) for queries in (1, 16) for dim in (264, 320, 512, 576))
    assert not any(takes(*call) for call in [(17, 576), (1, 584), (1, 260), (2, 256)])


@needs_cxx
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 2])
def test_a_plan_counts_the_largest_states_to_the_byte(dtype, queries):
    """DeepSeek-V3's, on the largest GPU; behind many tokens all its multiprocessors have blocks, or
    the keys are in as many splits as there may be."""
    shape = (1, queries, 128, 1, 576, 1 << 20)
    allocated = ops_of("emulated").decode_scratch(*shape, 256, False, dtype != torch.float32)
    use = test_attention.predicted_use("attention", *shape, dtype=dtype)
    assert use.takes and use.scratch == allocated > 0


# Sixteen rows of queries fill a block, eight in float32; tiles have 32 keys, and 16.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [264, 320, 512, 576])
def test_error_is_at_most_twice_plain_precision(kernels, dtype, head_dim):
    """Heads of queries that share one of keys, fewer than a block's rows and more, in one token and
    in several."""
    cases = [
        ((1, KEYS, 20, 1), {}),
        ((3, 45, 12, 2), {"window": 20}),
        ((16, 5, 1, 1), {"softcap": 3.0}),
    ]
    for (length, past, *heads), params in cases:
        case = test_attention.random_case(length, dtype, 2, length, past, *heads, head_dim)
        for storage in ("float", "int8"):
            test_attention.assert_as_good_as_plain(
                storage, dtype, *case, past, **params, ops=kernels
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_rows_see_only_their_own_keys(kernels, dtype):
    """Behind a row's end is NaN, and in memory that is handed out."""
    pasts, length = [0, 31, KEYS], 2
    q, k, v = test_attention.random_case(0, dtype, len(pasts), length, max(pasts), 5, 1, 320)
    truth = [x.clone() for x in (k, v)]
    for row, past in enumerate(pasts):
        k[row, past + length :] = v[row, past + length :] = torch.nan
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        outs = [test_attention.run("float", q, k, v, pasts, w, ops=kernels) for w in (0, 17)]
    finally:
        torch.use_deterministic_algorithms(False)
    for out, window in zip(outs, (0, 17), strict=True):
        for row, past in enumerate(pasts):
            kv = [x[row, : past + length] for x in truth]
            wide = [x.double() for x in (q[row], *kv)]
            exact = test_attention.dense(*wide, past, window, 0.0)
            plain = test_attention.dense(q[row], *kv, past, window, 0.0)
            step = torch.finfo(dtype).eps / 2 * test_attention.rms(exact)
            allowed = 2 * test_attention.rms(plain - exact) + step
            assert test_attention.rms(out[row] - exact) <= allowed


@pytest.mark.parametrize(("kinds", "dtype"), PARTS)
def test_parts_in_any_format_are_as_exact_as_the_queries_type(kernels, kinds, dtype):
    """In rows of unlike length, and where all rows share the keys: some rows see few of them, and
    the log-sum-exp is right, too."""
    generator = torch.Generator().manual_seed(0)
    for shared, head_dim, window, softcap in [(False, 264, 0, 0.0), (True, 320, 40, 3.0)]:
        starts, counts = ([0, 0], [130, 130]) if shared else ([0, 7], [KEYS, 61])
        part = make_part(generator, kinds, starts, counts, shared=shared, head_dim=head_dim,
                         dtype=dtype)  # fmt: skip
        q = torch.randn(2, 3, 6, head_dim, generator=generator).to(dtype)
        test_attention_parts.assert_as_good_as_plain(
            part, q, [128, 50], window, softcap, dtype, kernels
        )


@pytest.mark.parametrize("kind", FORMATS)
def test_pages_and_values_that_are_the_keys_give_the_same_bits(kernels, kind):
    """As rows, and as a copy of the keys."""
    generator, pasts, window = torch.Generator().manual_seed(0), [KEYS - 2, 60], 100
    for dtype, head_dim in ((torch.bfloat16, 576), (torch.float32, 264)):
        part = make_part(generator, [kind] * 2, [0, 0], [KEYS, 61], head_dim=head_dim, dtype=dtype)
        q = torch.randn(2, 2, 9 * KV_HEADS, head_dim, generator=generator).to(dtype)
        spans = list(test_pages.seen_keys(part, pasts, 2, window))
        (keys, values), table = test_pages.in_pages(part, spans, 32, generator)
        rows = part.attend(q, pasts, window, ops=kernels)
        op = kernels.attention_part
        paged = test_pages.attend(part, (keys, values), table, q, pasts, window, op=op)
        assert all(map(torch.equal, paged, rows))
        copy = [x.clone() for x in keys]
        found, expected = (
            test_pages.attend(part, (keys, values), table, q, pasts, window, op=op)
            for values in (keys, copy)
        )
        assert all(map(torch.equal, found, expected))
        assert not torch.equal(found[0], rows[0])


@needs_cxx
@pytest.mark.parametrize("dtype", DTYPES)
def test_either_order_of_threads_gives_the_same_bits(dtype):
    """Heads of queries that fill two blocks and begin another; two splits; values that are the
    keys, as DeepSeek's are, and values that aren't."""
    library = ctypes.CDLL(str(load_emulated_ops()))
    q, k, v = test_attention.random_case(0, dtype, 1, 1, KEYS, 40, 1, 576)
    for values in (k, v):
        outs = []
        for backward in (0, 1):
            library.exkv_emulation_set_backward(backward)
            outs.append(
                test_attention.run("float", q, k, values, [KEYS], ops=torch.ops.exkv_emulated)
            )
        library.exkv_emulation_set_backward(0)
        assert torch.equal(*outs)


EMULATED_PROGRAM = """
import native, test_attention_parts as t
t.check_ends(counts=(1, 33), ops=native.ops_of("emulated"), dims=(264,))
"""


@needs_cxx
@pytest.mark.skipif(sys.platform != "linux", reason="protects pages")
def test_the_emulated_kernel_stays_within_its_tensors():
    result = run_apart(EMULATED_PROGRAM)
    assert result.returncode == 0, (result.returncode, result.stderr)
