"""What only a GPU can show of the attention kernels: graphs, memory, and the way from there on to
the references. What they compute is tested in tests/ops/test_attention.py and its neighbours, many
queries in tests/ops/test_prefill_cuda.py."""

from __future__ import annotations

import pytest
import torch
from native import ops_of

from exkv.devices import rounded
from exkv.ops import REFERENCES
from exkv.planning.kernel_uses import kernel_use
from exkv.planning.op_calls import named_arguments

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _kernels():
    ops_of("cuda")


def arguments(length: int, past: list[int], kv_len: int):
    """bfloat16 rows of unlike length, for torch.ops.exkv.attention."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(past), length, 8, 128, generator=generator)
    k, v = torch.randn(2, len(past), kv_len, 2, 128, generator=generator)
    lens = torch.tensor(past, dtype=torch.int32)
    return (*(x.bfloat16().cuda() for x in (q, k, v)), lens.cuda(), kv_len, True, 128**-0.5)


def test_a_graph_follows_the_lengths_on_the_device():
    """The split is decided once, for the longest row that there may be."""
    args = arguments(1, [10, 4000], 4096)
    lens = args[3]
    torch.ops.exkv.attention(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.exkv.attention(*args)
    for past in ([0, 1], [4095, 77], [2048, 2047]):
        lens.copy_(torch.tensor(past, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, torch.ops.exkv.attention(*args))


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("kv_len", [100, 4096, 40000])
def test_a_call_allocates_no_more_than_a_plan_counts(length, kv_len):
    args = arguments(length, [kv_len - length] * 2, kv_len)
    use = kernel_use("attention", "cuda", named_arguments("attention", args))
    assert use.takes
    torch.ops.exkv.attention(*args)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = torch.ops.exkv.attention(*args)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= rounded(out.nbytes) + rounded(use.scratch)


def test_a_fresh_prompt_over_floats_goes_on_to_the_reference():
    """And so to torch's flash kernels."""
    q, k, v, lens, kv_len, _, scale = arguments(100, [0, 0], 100)
    found = torch.ops.exkv.attention(q, k, v, lens, kv_len, False, scale)
    assert torch.equal(found, REFERENCES["attention"](q, k, v, lens, kv_len, False, scale))


def many_queries(storage: str, length: int, past: list[int], kv_len: int):
    """A call over a cache: the op's name and its arguments."""
    if storage == "float":
        return "attention", arguments(length, past, kv_len)
    q, k, v, lens, kv_len, _, scale = arguments(length, past, kv_len)
    if storage == "int8":
        kv = [y for x in (k, v) for y in torch.ops.exkv.quantize_kv(x)]
        return "attention_int8", (q, *kv, lens, kv_len, scale)
    kv = [list(torch.ops.exkv.quantize_groups(x, 4)) for x in (k, v)]
    places = (lens, torch.zeros_like(lens), lens + length)
    return "attention_part", (q, kv[0], "int4", kv[1], "int4", *places, kv_len, scale)


@pytest.mark.parametrize("storage", ["float", "int8", "int4"])
def test_many_queries_over_a_cache_take_no_memory_but_the_results(storage):
    name, args = many_queries(storage, 100, [3, 3900], 4000)
    assert kernel_use(name, "cuda", named_arguments(name, args)).takes
    op = getattr(torch.ops.exkv, name)
    op(*args)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = op(*args)
    taken = torch.cuda.max_memory_allocated() - before
    outs = (out,) if torch.is_tensor(out) else out
    assert taken == sum(rounded(x.nbytes) for x in outs)
    expected = REFERENCES[name](*args)
    for a, b in zip(outs, (expected,) if torch.is_tensor(expected) else expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_a_graph_of_many_queries_follows_the_lengths_on_the_device():
    _, args = many_queries("int8", 64, [10, 900], 1000)
    lens = args[5]
    torch.ops.exkv.attention_int8(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.exkv.attention_int8(*args)
    for past in ([0, 1], [936, 77]):
        lens.copy_(torch.tensor(past, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, torch.ops.exkv.attention_int8(*args))


@pytest.mark.parametrize("past", [0, 900])
def test_long_chunks_over_16_bits_go_to_torchs_flash_kernels(past):
    """And take the memory that a plan counts: results, and a sum for each query and head."""
    args = arguments(1536, [past] * 2, 1536 + past)
    uniform = (*args[:5], False, *args[6:])
    assert not kernel_use("attention", "cuda", named_arguments("attention", uniform)).takes
    torch.ops.exkv.attention(*uniform)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = torch.ops.exkv.attention(*uniform)
    taken = torch.cuda.max_memory_allocated() - before
    sums = 4 * 2 * 8 * 1536
    assert taken <= rounded(out.nbytes) + rounded(sums) + 2 * rounded(16)
    own = torch.ops.exkv.attention(*args)  # rows of unlike lengths go to the prefill kernel
    torch.testing.assert_close(out, own, rtol=2e-2, atol=2e-2)
