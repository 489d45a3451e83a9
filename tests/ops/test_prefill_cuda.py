"""CUDA attention of many queries over quantized caches and parts, emulated or on a GPU, against
torch's attention on the stored values."""

from __future__ import annotations

import itertools
import sys

import pytest
import test_attention
import test_attention_parts
import torch
from native import needs_cxx, ops_of, run_apart
from test_attention_parts import KV_HEADS, make_part

from exkv.ops.kv_formats import FORMATS, hadamard

DTYPES = test_attention.DTYPES
#: Of every format, and the other types with some: emulated threads take their time.
PARTS = [(kinds, torch.bfloat16) for kinds in test_attention_parts.PAIRS]
PARTS += [
    (kinds, dtype)
    for kinds in [("int8", "int2"), ("int4c", "int4")]
    for dtype in (torch.float32, torch.float16)
]


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def kernels(request):
    return ops_of(request.param)


# 64 rows of queries fill a block, 16 in large heads of float32; tiles of 32 or 64 keys.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [20, 64, 80, 96, 128, 256])
def test_error_is_at_most_twice_plain_precision(kernels, dtype, head_dim):
    """One query head for each key head and several; blocks filled wholly and partly."""
    cases = [
        ((33, 70, 2, 2), ({}, {"window": 50})),
        ((24, 5, 6, 2), ({"softcap": 3.0}, {"window": 9, "softcap": 20.0})),
    ]
    for (length, past, *heads), some in cases:
        case = test_attention.random_case(length, dtype, 1, length, past, *heads, head_dim)
        for params, storage in itertools.product(some, ("int8", "float")):
            test_attention.assert_as_good_as_plain(
                storage, dtype, *case, past, **params, ops=kernels
            )


@pytest.mark.parametrize(("kinds", "dtype"), PARTS)
def test_parts_in_any_format_are_as_exact_as_the_queries_type(kernels, kinds, dtype):
    """In rows of unlike length, and where all rows share the keys: some rows see few of them."""
    generator = torch.Generator().manual_seed(0)
    for shared, head_dim, heads, window, softcap in [
        (False, 36, 6, 0, 0.0),
        (True, 64, 4, 40, 3.0),
    ]:
        starts, counts = ([0, 0], [130, 130]) if shared else ([0, 7], [130, 61])
        part = make_part(generator, kinds, starts, counts, shared=shared, head_dim=head_dim,
                         dtype=dtype)  # fmt: skip
        q = torch.randn(2, 21, heads, head_dim, generator=generator).to(dtype)
        test_attention_parts.assert_as_good_as_plain(
            part, q, [115, 50], window, softcap, dtype, kernels
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_rows_see_only_their_own_keys(kernels, dtype):
    pasts, length = [0, 1, 31, 64, 130], 19
    q, k, v = test_attention.random_case(0, dtype, len(pasts), length, max(pasts), 4, 1, 64)
    for window in (0, 17):
        out = test_attention.run("int8", q, k, v, pasts, window, ops=kernels)
        truth = test_attention.stored("int8", k, v)
        for row, past in enumerate(pasts):
            kv = [x[row, : past + length] for x in truth]
            exact = test_attention.dense(
                q[row].double(), *(x.double() for x in kv), past, window, 0.0
            )
            plain = test_attention.dense(q[row], *(x.to(dtype) for x in kv), past, window, 0.0)
            step = torch.finfo(dtype).eps / 2 * test_attention.rms(exact)
            allowed = 2 * test_attention.rms(plain - exact) + step
            assert test_attention.rms(out[row] - exact) <= allowed


@pytest.mark.parametrize("kind", ["int4", "int2"])
def test_rotated_keys_and_queries_give_what_unrotated_ones_do(kernels, kind):
    """A Hadamard rotation leaves products as they are: torch gets keys that are rotated back."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = test_attention.random_case(0, torch.float32, 1, 20, 60, 4, KV_HEADS, 64)
    part = make_part(generator, [kind, "int8"], [0], [80], head_dim=64)
    encoded = FORMATS[kind].encode(hadamard(k))
    part.stored[0][:] = [torch.cat((x, x[:, :16]), 1) for x in encoded.values()]
    out, _ = part.attend(hadamard(q), [60], ops=kernels)
    turned_back = hadamard(FORMATS[kind].widen(encoded, torch.float32, 64))
    expected = test_attention.dense(q[0], turned_back[0], part.wide[1][0, :80], 60, 0, 0.0)
    torch.testing.assert_close(out[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", FORMATS)
def test_queries_that_see_nothing_get_zeros(kernels, kind):
    """In a block with others, in one of their own, and without any key."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 40, 4, 32, generator=generator).bfloat16()
    part = make_part(generator, [kind] * 2, [20, 0], [30, 0])
    out, lse = part.attend(q, [0, 500], ops=kernels)
    assert not out[0, :20].any() and (lse[0, :20] == -torch.inf).all()
    assert out[0, 20:].any(-1).all() and lse[0, 20:].isfinite().all()
    assert not out[1].any() and (lse[1] == -torch.inf).all()
    empty = make_part(generator, [kind] * 2, [0, 0], [0, 0])
    out, lse = empty.attend(q, [60, 20], ops=kernels)
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_visible_nan_propagates(kernels, dtype):
    test_attention.check_nan(kernels, "int8", dtype, 20, 80)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FORMATS)
def test_keys_past_a_rows_end_are_invisible(kernels, kind, dtype):
    test_attention_parts.check_poison(kernels, kind, length=20, dtype=dtype)


def test_strided_and_misaligned_inputs_give_the_same_bits(kernels):
    test_attention.check_strides(kernels, length=9)
    test_attention_parts.check_strides(kernels, length=9)


EMULATED_PROGRAM = """
import native, test_attention_parts as t
t.check_ends(counts=(1, 63), ops=native.ops_of("emulated"), length=9, dims=(36, 80, 99))
"""


@needs_cxx
@pytest.mark.skipif(sys.platform != "linux", reason="protects pages")
def test_the_emulated_kernels_stay_within_their_tensors():
    result = run_apart(EMULATED_PROGRAM)
    assert result.returncode == 0, (result.returncode, result.stderr)
