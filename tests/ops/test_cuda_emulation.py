"""The CUDA emulation itself: it computes what a GPU would, and detects errors that a GPU doesn't
report."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch
from native import load_emulated_ops, run_apart, setup_script

from exkv.ops import REFERENCES
from exkv.ops.kv_formats import hadamard
from exkv.ops.kv_quant import quantize_kv

pytestmark = pytest.mark.skipif(setup_script().find_cxx() is None, reason="no C++ compiler")

NO_MISTAKE, NO_BARRIER, PAST_SHARED, BARRIER_IN_BRANCH, MISSING_LANE, PAST_MATRIX = range(6)


@pytest.fixture(scope="module", autouse=True)
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(load_emulated_ops()))


@pytest.fixture(params=["forward", "backward"])
def order(request, library):
    """Each order in which the emulation runs a block's threads."""
    library.exkv_emulation_set_backward(int(request.param == "backward"))
    yield request.param
    library.exkv_emulation_set_backward(0)


def total(mistake: int) -> float:
    return torch.ops.exkv_emulated.selftest(torch.arange(96.0), mistake).item()


def test_a_correct_kernel_gives_its_result_in_either_order(order):
    assert total(NO_MISTAKE) == sum(range(96))


def test_a_missing_barrier_shows_in_one_of_the_orders(library):
    results = []
    for backward in (0, 1):
        library.exkv_emulation_set_backward(backward)
        results.append(total(NO_BARRIER) == sum(range(96)))
    library.exkv_emulation_set_backward(0)
    assert not all(results)


def test_a_write_past_shared_memory_is_reported(order):
    with pytest.raises(RuntimeError, match="wrote past its shared memory of 384 bytes"):
        total(PAST_SHARED)


@pytest.mark.parametrize("mistake", [BARRIER_IN_BRANCH, MISSING_LANE])
def test_a_barrier_or_shuffle_that_some_threads_miss_is_reported(order, mistake):
    with pytest.raises(RuntimeError, match="threads wait at a barrier or shuffle that others"):
        total(mistake)


def test_kernels_give_the_same_bits_in_either_order(order):
    x = torch.randn(7, 100, generator=torch.Generator().manual_seed(0))
    q, scale = torch.ops.exkv_emulated.quantize_kv(x)
    q_expected, scale_expected = quantize_kv(x)
    assert torch.equal(q, q_expected)
    assert torch.equal(scale, scale_expected)


def test_attention_gives_the_same_bits_in_either_order(library):
    """Five rows that share a head fill one tile and begin another; 300 keys take several splits."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 10, 64, generator=generator)
    k, v = torch.randn(2, 1, 300, 2, 64, generator=generator)
    args = (q, k, v, torch.tensor([299], dtype=torch.int32), 300, False, 0.125)
    outs = []
    for backward in (0, 1):
        library.exkv_emulation_set_backward(backward)
        outs.append(torch.ops.exkv_emulated.attention(*args))
    library.exkv_emulation_set_backward(0)
    assert torch.equal(*outs)
    torch.testing.assert_close(outs[0], REFERENCES["attention"](*args))


@pytest.mark.parametrize("ring", [1, 3])
def test_a_ring_holds_the_last_tokens_in_either_order(order, ring):
    """A block has two tokens, for which a ring of one place is too small."""
    k = torch.arange(48.0).view(1, 6, 1, 8)
    past = torch.tensor([1], dtype=torch.int32)
    for new in (None, torch.tensor([5], dtype=torch.int32)):
        stores = [[torch.zeros(1, ring, 1, 8)] for _ in range(2)]
        torch.ops.exkv_emulated.append_kv(
            k, k, None, None, stores[0], "float", stores[1], "float", past, new, None, ring, True
        )
        last = 6 if new is None else 5
        for token in range(last - ring, last):
            for store in stores:
                assert torch.equal(store[0][0, (1 + token) % ring], hadamard(k)[0, token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_many_queries_gives_the_same_bits_in_either_order(library, dtype):
    """Two tiles of queries, five of keys in float32 and three in 16 bits."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 33, 4, 40, generator=generator).to(dtype)
    k, v = torch.randn(2, 1, 150, 2, 40, generator=generator)
    kv = (*quantize_kv(k), *quantize_kv(v))
    args = (q, *kv, torch.tensor([117], dtype=torch.int32), 150, 0.125)
    outs = []
    for backward in (0, 1):
        library.exkv_emulation_set_backward(backward)
        outs.append(torch.ops.exkv_emulated.attention_int8(*args))
    library.exkv_emulation_set_backward(0)
    assert torch.equal(*outs)
    step = torch.finfo(dtype).eps * 4
    torch.testing.assert_close(outs[0], REFERENCES["attention_int8"](*args), rtol=step, atol=step)


def test_matrices_that_reach_past_shared_memory_are_reported():
    with pytest.raises(RuntimeError, match="lane 24 loads .* misaligned, or outside of shared"):
        total(PAST_MATRIX)


@pytest.mark.parametrize("plain", [False, True], ids=["tensor cores", "without"])
def test_products_of_matrices_are_those_of_floats(order, plain):
    """Through shared memory and fragments, of either type, the second factor's rows or columns
    in line."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(16, 16, generator=generator), torch.randn(16, 16, generator=generator)
    for dtype in (torch.float16, torch.bfloat16):
        x, y = a.to(dtype), b.to(dtype)
        for transposed in (False, True):
            out = torch.ops.exkv_emulated.matrix_product(x, y, transposed, plain)
            expected = x.float() @ (y.float().T if transposed else y.float())
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_norms_give_the_same_bits_in_either_order(order):
    x, residual, weight = torch.randn(3, 1, 700, generator=torch.Generator().manual_seed(0))
    total, normed = torch.ops.exkv_emulated.add_rms_norm(x, residual, weight[0], 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(total, (700,), weight[0], 1e-5))


PACKING_PROGRAM = """
import native, test_kv_formats as t
t.kernels = native.ops_of("emulated")
t.check_strides_and_ends()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages")
def test_the_kernels_that_pack_stay_within_their_tensors():
    result = run_apart(PACKING_PROGRAM)
    assert result.returncode == 0, (result.returncode, result.stderr)
