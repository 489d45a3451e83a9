"""The attention ops against torch's SDPA and plain arithmetic: lengths, windows, soft caps and
ragged rows, for float and 8-bit storage; and the native kernels of each instruction set and of
CUDA, whose error may be at most twice that of plain computation in the same dtype."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from arithmetic import assert_same_on_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from native import (
    OnCuda,
    assert_right_on,
    each_isa,
    emulated,
    needs_cxx,
    needs_kernels,
    ops_of,
    run_apart,
)
from simproc import run_sim
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from exkv.devices import rounded
from exkv.ops import REFERENCES, has_kernel
from exkv.planning.dry_run import DryRun
from exkv.planning.kernel_uses import kernel_use
from exkv.planning.op_calls import named_arguments

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (8, 32, 36, 64, 80, 96, 100, 128, 256)

HEAD_DIM = 32
quantize_kv = torch.ops.exkv.quantize_kv


def dense(q, k, v, past, window, softcap):
    """One row, q (T, H, D) over k, v (S, H_kv, D), keys up to each query's own position."""
    length, heads = q.shape[0], q.shape[1]
    positions = past + torch.arange(length).unsqueeze(-1)
    keys = torch.arange(k.shape[0])
    mask = (keys <= positions) & ((keys > positions - window) if window else keys >= 0)
    q = q.transpose(0, 1)
    k, v = (x.transpose(0, 1).repeat_interleave(heads // x.shape[1], dim=0) for x in (k, v))
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(0, 1)
    scores = softcap * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / softcap)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def encoded(storage, k, v) -> list[Tensor]:
    """The tensors of a store of keys and values."""
    return [k, v] if storage == "float" else [x for y in (k, v) for x in quantize_kv(y)]


def attend(storage, q, kv, lens, kv_len, ragged, *params, ops=torch.ops.exkv) -> Tensor:
    """The op of a storage, over encoded keys and values."""
    if storage == "float":
        return ops.attention(q, *kv, lens, kv_len, ragged, *params)
    return ops.attention_int8(q, *kv, lens, kv_len, *params)


def run(storage, q, k, v, pasts, window=0, softcap=0.0, ops=torch.ops.exkv):
    lens = torch.tensor(pasts, dtype=torch.int32)
    how = max(pasts) + q.shape[1], len(set(pasts)) > 1, q.shape[-1] ** -0.5, window, softcap
    return attend(storage, q, encoded(storage, k, v), lens, *how, ops=ops)


def stored(storage, k, v):
    """Keys and values as float32 after storage: the expected inputs."""
    if storage == "float":
        return k.float(), v.float()
    return tuple(torch.ops.exkv.dequantize_kv(*quantize_kv(x), torch.float32) for x in (k, v))


CASES = {
    "pasts": st.lists(st.integers(0, 20), min_size=1, max_size=3),
    "length": st.sampled_from([1, 2, 7, 300]),
    "groups": st.sampled_from([1, 2, 4]),
    "window": st.sampled_from([0, 1, 3, 16, 1000]),
    "softcap": st.sampled_from([0.0, 2.0, 50.0]),
    "seed": st.integers(0, 9),
}


@pytest.mark.parametrize("storage", ["float", "int8"])
def test_any_lengths_window_and_softcap(ops, storage):
    @settings(max_examples=30 if emulated(ops) else 100)
    @given(**CASES)
    def check(pasts, length, groups, window, softcap, seed):
        torch.manual_seed(seed)
        rows, capacity = len(pasts), max(pasts) + length + 5
        q = torch.randn(rows, length, 2 * groups, HEAD_DIM)
        k, v = torch.randn(2, rows, capacity, 2, HEAD_DIM)
        out = run(storage, q, k, v, pasts, window, softcap, ops)
        k, v = stored(storage, k, v)
        for row, past in enumerate(pasts):
            end = past + length
            expected = dense(q[row], k[row, :end], v[row, :end], past, window, softcap)
            torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-5)

    check()


@pytest.mark.parametrize("storage", ["float", "int8"])
def test_a_window_leaves_padding_finite(ops, storage):
    """A short row's padding comes after its last key by more than the window."""
    q = torch.randn(2, 9, 4, HEAD_DIM)
    k, v = torch.randn(2, 2, 40, 2, HEAD_DIM)
    assert run(storage, q, k, v, [30, 2], 2, 0.0, ops).isfinite().all()


@pytest.mark.parametrize("storage", ["float", "int8"])
def test_keys_outside_the_window_are_not_read(ops, storage):
    q = torch.randn(1, 1, 4, HEAD_DIM)
    k, v = torch.randn(2, 1, 64, 2, HEAD_DIM)
    expected = run(storage, q, k, v, [60], 8, 0.0, ops)
    k[:, :53], v[:, :53] = 7.0, -7.0
    k[:, 61:], v[:, 61:] = 7.0, -7.0
    assert torch.equal(run(storage, q, k, v, [60], 8, 0.0, ops), expected)


# The kernels ----------------------------------------------------------------------------------


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def random_case(seed, dtype, rows, length, past, heads, kv_heads, head_dim):
    """q (B, T, H, D) and k, v (B, S, H_kv, D), rounded to the type."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    keys = (rows, past + length, kv_heads, head_dim)
    return normal(rows, length, heads, head_dim), normal(*keys), normal(*keys)


def assert_as_good_as_plain(
    storage, dtype, q, k, v, past, window=0, softcap=0.0, ops=torch.ops.exkv
):
    """Errors are to float64 on what is stored. A result that needs no arithmetic may have no error
    in the plain way, so half of the type's own step is allowed too."""
    out = run(storage, q, k, v, [past] * len(q), window, softcap, ops)
    assert out.dtype == dtype
    truth = stored(storage, k, v)
    ours, plain, size = [], [], []
    for row in range(len(q)):
        kv = [x[row] for x in truth]
        exact = dense(q[row].double(), *(x.double() for x in kv), past, window, softcap)
        narrow = dense(q[row], *(x.to(dtype) for x in kv), past, window, softcap)
        ours.append(out[row] - exact)
        plain.append(narrow - exact)
        size.append(exact)
    allowed = 2 * rms(torch.stack(plain)) + torch.finfo(dtype).eps / 2 * rms(torch.stack(size))
    assert rms(torch.stack(ours)) <= allowed


LENGTHS = ((1, 0), (1, 1), (1, 700), (3, 130), (16, 64), (40, 75))


def check_error(dtypes=DTYPES, head_dims=HEAD_DIMS, lengths=LENGTHS, ops=torch.ops.exkv):
    """Run for each instruction set: every dtype, head size and ratio of heads."""
    ratios = [(1, 1), (3, 3), (4, 2), (7, 1), (8, 2), (16, 2)]
    for storage in ("float", "int8"):
        for index, head_dim in enumerate(head_dims):
            for dtype in dtypes:
                for length, past in lengths:
                    heads = ratios[(index + length) % len(ratios)]
                    case = random_case(index, dtype, 2, length, past, *heads, head_dim)
                    for params in ({}, {"window": 50}, {"softcap": 3.0}):
                        assert_as_good_as_plain(storage, dtype, *case, past, **params, ops=ops)


def test_error_is_at_most_twice_plain_precision(ops):
    if isinstance(ops, OnCuda):  # with many queries this would test torch's own kernels
        return check_error(lengths=((1, 0), (1, 1), (1, 700), (2, 130)), ops=ops)
    if not emulated(ops):
        return check_error(ops=ops)
    check_error(head_dims=(36, 128), lengths=((1, 1), (1, 300), (3, 130)), ops=ops)
    dims = set(HEAD_DIMS) - {36, 128}
    check_error(dtypes=(torch.bfloat16,), head_dims=sorted(dims), lengths=((2, 140),), ops=ops)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 12, 16, 40])
def test_any_number_of_heads_shares_keys(ops, group):
    """Rows of queries fill tiles and blocks partly or wholly."""
    for length in (1, max(16 // group, 1)):
        case = random_case(group, torch.float32, 1, length, 70, group, 1, 32)
        for storage in ("float", "int8"):
            assert_as_good_as_plain(storage, torch.float32, *case, 70, ops=ops)


@pytest.mark.parametrize("storage", ["float", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_latent_attention(ops, storage, dtype):
    """576 features of keys that 16 heads share. CUDA leaves many tokens to PyTorch."""
    for length in (1, 40):
        case = random_case(length, dtype, 2, length, 300, 16, 1, 576)
        assert_as_good_as_plain(storage, dtype, *case, 300, ops=ops)


@pytest.mark.parametrize("window", [0, 20])
def test_masks_are_bounded_with_many_heads_a_key_head(window):
    """Latent attention has 128, and keys of 576 features; the reference, which serves more than 16
    queries on CUDA."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 90, 128, 40, generator=generator)
    k = torch.randn(2, 120, 1, 40, generator=generator)
    masks = []

    class Masks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            if func is torch.ops.aten.repeat.default:
                masks.append(out.shape[-2])
            return out

    past = torch.tensor([30, 7], dtype=torch.int32)
    with Masks():
        out = REFERENCES["attention"](q, k, k, past, 120, True, 0.2, window)
    assert set(masks) == {4096, 90 % 32 * 128}
    for row, length in enumerate(past.tolist()):
        at, keys = torch.arange(90).unsqueeze(-1) + length, torch.arange(120)
        seen = (keys <= at) & ((keys > at - window) if window else True)
        wide = k[row].double().transpose(0, 1).expand(128, -1, -1)
        expected = F.scaled_dot_product_attention(
            q[row].double().transpose(0, 1), wide, wide, seen, scale=0.2
        )
        close = {"atol": 1e-5, "rtol": 1e-5}
        torch.testing.assert_close(out[row].double(), expected.transpose(0, 1), **close)


def at_the_end_of_memory(x: Tensor) -> Tensor:
    """A copy whose last byte is followed by a page that can't be read."""
    size = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    area = mmap.mmap(-1, size + mmap.PAGESIZE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    protect, no_access = ctypes.CDLL(None).mprotect, 0
    assert protect(ctypes.c_void_p(base + size), mmap.PAGESIZE, no_access) == 0
    flat = torch.frombuffer(area, dtype=x.dtype, count=x.numel(), offset=size - x.nbytes)
    return flat.copy_(x.flatten()).view(x.shape)


def check_ends(ops=torch.ops.exkv):
    """Reads past a tensor's end crash here: run it in a process of its own."""
    for dtype in DTYPES:
        for head_dim in (8, 36, 64, 80, 100):
            for length, past in [(1, 0), (1, 62), (2, 129), (20, 45)]:
                q, k, v = random_case(0, dtype, 1, length, past, 4, 2, head_dim)
                how = torch.tensor([past], dtype=torch.int32), past + length, False, 0.1
                for storage in ("float", "int8"):
                    expected = attend(storage, q, encoded(storage, k, v), *how, ops=ops)
                    q1, *kv = map(at_the_end_of_memory, (q, *encoded(storage, k, v)))
                    assert torch.equal(attend(storage, q1, kv, *how, ops=ops), expected)


ISA_PROGRAM = """
import torch, test_attention as t
torch.set_num_threads(1)
t.check_error(head_dims=(8, 36, 64, 80, 128))
t.check_poison()
t.check_strides()
t.check_ends()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages")
@each_isa
def test_each_instruction_set_is_as_good_as_plain_and_stays_within_its_tensors(isa):
    assert_right_on(isa, ISA_PROGRAM)


@pytest.mark.parametrize("storage", ["float", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_context_in_ragged_rows(ops, storage, dtype):
    """Long enough to be split into ranges of keys, some of them only for some rows."""
    pasts = [400, 0, 1, 63, 64, 140] if emulated(ops) else [5000, 0, 1, 63, 64, 2049]
    q, k, v = random_case(0, dtype, len(pasts), 2, max(pasts), 8, 2, 64)
    out = run(storage, q, k, v, pasts, ops=ops)
    truth = stored(storage, k, v)
    for row, past in enumerate(pasts):
        kv = [x[row, : past + 2].to(dtype) for x in truth]
        exact = dense(q[row].double(), *(x[row, : past + 2].double() for x in truth), past, 0, 0.0)
        plain = rms(dense(q[row], *kv, past, 0, 0.0) - exact)
        assert rms(out[row] - exact) <= 2 * plain + torch.finfo(dtype).eps / 2 * rms(exact)


@pytest.mark.parametrize("storage", ["float", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_dominant_key(ops, storage, dtype):
    """Thousands of weights of a millionth still count, as with attention sinks."""
    past = 2047 if emulated(ops) else 8191
    q, k, v = random_case(0, dtype, 1, 1, past, 4, 1, 64)
    k *= 0.1
    k[:, 0] = q[:, 0, :1] * 2
    v[:, 1:] = v[:, 1:].abs()
    assert_as_good_as_plain(storage, dtype, q, k, v, past, ops=ops)


def check_poison(ops=torch.ops.exkv):
    """NaN in keys past a row's end, and in allocated memory, must not be visible."""
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        for storage in ("float", "int8"):
            for dtype in DTYPES:
                q, k, v = random_case(0, dtype, 2, 3, 100, 4, 2, 64)
                lens = torch.tensor([40, 97], dtype=torch.int32)
                k[0, 43:], v[0, 43:], k[1, 100:], v[1, 100:] = [float("nan")] * 4
                kv = encoded(storage, k, v)
                out = attend(storage, q, kv, lens, 100, True, 0.1, ops=ops)
                assert out[1].isfinite().all()
                reference = ops is torch.ops.exkv and not has_kernel("attention", "cpu")
                assert out[0].isfinite().all() or reference
    finally:
        torch.use_deterministic_algorithms(False)


def test_keys_past_a_rows_end_are_invisible(kernels):
    check_poison(kernels)


@pytest.mark.parametrize("storage", ["float", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_visible_nan_propagates(kernels, storage, dtype):
    check_nan(kernels, storage, dtype, 2, 200)


def check_nan(kernels, storage, dtype, tokens, past):
    """NaN appears only in the heads that see it."""
    for tensor in range(3):
        q, k, v = random_case(0, dtype, 2, tokens, past, 4, 2, 64)
        (q, k, v)[tensor][0, 1, 1, 3] = float("nan")
        bad = run(storage, q, k, v, [past, past], ops=kernels).isnan().any(-1)
        expected = torch.zeros_like(bad)
        if tensor == 0:
            expected[0, 1, 1] = True
        else:
            expected[0, :, 2:] = True
        assert torch.equal(bad, expected)


def check_strides(ops=torch.ops.exkv, length=3):
    """Rows and tokens of larger tensors, heads first, parts of a projection."""
    past = 160 - length
    for storage in ("float", "int8"):
        q, k, v = random_case(0, torch.bfloat16, 2, length, past, 6, 2, 40)
        expected = run(storage, q, k, v, [past, past], ops=ops)
        wide = torch.randn(2, length, 10, 40).bfloat16()
        wide[:, :, 2:8] = q
        assert torch.equal(run(storage, wide[:, :, 2:8], k, v, [past, past], ops=ops), expected)
        layouts = {
            "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
            "of more rows": lambda x: torch.cat((x, x, x))[2:4],
            "every other token": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
            "misaligned": lambda x: F.pad(x, (1, 2))[..., 1:-2],
        }
        lens = torch.tensor([past, past], dtype=torch.int32)
        for name, layout in layouts.items():
            kv = [layout(x) for x in encoded(storage, k, v)]
            out = attend(storage, q, kv, lens, 160, False, 40**-0.5, ops=ops)
            assert torch.equal(out, expected), (storage, name)


def test_strided_and_misaligned_inputs_give_the_same_bits(kernels):
    check_strides(kernels)


EMULATED_PROGRAM = """
import native, test_attention as t
t.check_ends(native.ops_of("emulated"))
"""


@needs_cxx
@pytest.mark.skipif(sys.platform != "linux", reason="protects pages")
def test_the_emulated_kernels_stay_within_their_tensors():
    result = run_apart(EMULATED_PROGRAM)
    assert result.returncode == 0, (result.returncode, result.stderr)


@needs_kernels
@pytest.mark.parametrize("length", [1, 40])
def test_threads_make_no_difference(length):
    q, k, v = random_case(0, torch.bfloat16, 2, length, 3000, 8, 2, 64)
    for storage in ("float", "int8"):
        assert_same_on_threads(partial(run, storage, q, k, v, [3000, 3000]))


def test_empty_batches_and_chunks_give_empty_outputs(ops):
    for rows, length in ((0, 3), (2, 0)):
        q, k, v = random_case(0, torch.float32, rows, length, 5, 4, 2, 32)
        how = torch.full((rows,), 5, dtype=torch.int32), 5 + length, False, 0.1
        for storage in ("float", "int8"):
            out = attend(storage, q, encoded(storage, k, v), *how, ops=ops)
            assert out.shape == q.shape


def test_wrong_tensors_are_refused_by_name_and_number(kernels):
    q, k, v = random_case(0, torch.float32, 2, 3, 7, 4, 2, 32)
    lens = torch.full((2,), 7, dtype=torch.int32)

    def refused(message, *args):
        quantized = isinstance(args[5], Tensor)
        op = kernels.attention_int8 if quantized else kernels.attention
        with pytest.raises(RuntimeError, match=message):
            op(*args)

    refused("k must be Float, not BFloat16", q, k.bfloat16(), v, lens, 10, False, 0.1)
    refused("q must be float32, float16 or bfloat16", q.double(), k, v, lens, 10, False, 0.1)
    refused(r"v must be \(2, S, H_kv, 32\).*it is \(2, 10, 2, 16\)",
            q, k, v[..., :16], lens, 10, False, 0.1)  # fmt: skip
    refused("q's 4 heads must be a multiple of k's 3",
            q, k.repeat(1, 1, 2, 1)[:, :, :3], v, lens, 10, False, 0.1)  # fmt: skip
    refused("v must have k's tokens and heads", q, k, v[:, :9], lens, 9, False, 0.1)
    refused("kv_len 11 must be at most the 10 tokens", q, k, v, lens, 11, False, 0.1)
    refused("kv_len 2 must count the keys of q's own 3", q, k, v, lens, 2, False, 0.1)
    refused(r"past_lens must be int32 \(2,\)", q, k, v, lens.long(), 10, True, 0.1)
    if kernels is torch.ops.exkv:  # on a GPU they are not checked
        refused(
            "past_lens is -1 in row 1", q, k, v, lens - torch.tensor([0, 8]).int(), 10, True, 0.1
        )
    refused("window -1", q, k, v, lens, 10, False, 0.1, -1)
    refused("softcap inf", q, k, v, lens, 10, False, 0.1, 0, float("inf"))
    refused("last dimension of k must be contiguous",
            q, k.mT.contiguous().mT, v, lens, 10, False, 0.1)  # fmt: skip
    kv = encoded("int8", k, v)
    refused("k_scale must be Half, not Float", q, kv[0], kv[1].float(), *kv[2:], lens, 10, 0.1, 0)
    refused("k must be Char, not Float", q, k, *kv[1:], lens, 10, 0.1, 0, 0.0)


def on_two_devices():
    q, k, v = random_case(0, torch.float32, 1, 1, 7, 4, 2, 32)
    lens = torch.tensor([7], dtype=torch.int32)
    try:
        torch.ops.exkv.attention(q, k.to("sim:0"), v, lens, 8, False, 0.1)
    except RuntimeError as error:
        return [str(error)]


def test_tensors_on_two_devices_are_refused_by_name():
    (message,) = run_sim(on_two_devices, "64M")
    assert "sim:0" in message and "cpu" in message


MEMORY_PROGRAM = """
import torch, exkv.ops
def kib(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
k = torch.ones(1, 65536, 8, 64, dtype=torch.int8)
scale = torch.ones(1, 65536, 8, 2, dtype=torch.float16)
for length in (1, 16, 64):
    q = torch.ones(1, length, 32, 64, dtype=torch.bfloat16)
    past = torch.tensor([65536 - length], dtype=torch.int32)
    before = kib("VmRSS")
    torch.ops.exkv.attention_int8(q, k, scale, k, scale, past, 65536, 0.1)
    print(kib("VmHWM") - before)
"""


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_copy_of_the_cache_is_made():
    """32 MiB of keys would be 64 MiB in bfloat16."""
    result = run_apart(MEMORY_PROGRAM)
    assert result.returncode == 0, result.stderr
    assert max(map(int, result.stdout.split())) < 16 << 10


@pytest.mark.parametrize("storage", ["float", "int8"])
def test_the_reference_agrees_with_the_kernel(storage):
    """The tests above use the kernel if there is one; this one is for the reference."""
    q, k, v = random_case(0, torch.float32, 3, 5, 60, 4, 2, 64)
    lens = torch.tensor([60, 3, 0], dtype=torch.int32)
    args = (storage, q, encoded(storage, k, v), lens, 65, True, 0.1, 20, 5.0)
    found = attend(*args, ops=SimpleNamespace(**REFERENCES))
    torch.testing.assert_close(found, attend(*args))


@pytest.mark.parametrize("length", [2, 256, 700])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (6, 1)])
@pytest.mark.parametrize("window", [0, 900])
def test_a_fresh_prompt_is_read_without_a_mask(length, heads, window):
    """This keeps SDPA on its flash kernels, in the reference that CUDA uses."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(2, length, count, 32, generator=generator)
        for count in (heads[0], heads[1], heads[1])
    )
    with Dtypes() as made:
        out = REFERENCES["attention"](
            q, k, v, torch.zeros(2, dtype=torch.int32), length, False, 32**-0.5, window
        )
    expected = torch.stack([dense(q[row], k[row], v[row], 0, window, 0.0) for row in range(2)])
    torch.testing.assert_close(out, expected)
    assert torch.bool not in made.seen


class Dtypes(TorchDispatchMode):
    """Collects the dtypes of all tensors made while it is active."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {out.dtype} if isinstance(out, Tensor) else set()
        return out


# The memory of kernels for few queries ----------------------------------------------------------

KERNEL_ARGUMENTS = {
    "attention": ("q", "k", "k", "lens", "kv_len", True, 0.1),
    "attention_int8": ("q", "k", "k", "k", "k", "lens", "kv_len", 0.1),
    "attention_part": ("q", ["k"], "float", ["k"], "float", "lens", "lens", "lens", "kv_len", 0.1),
}


def predicted_use(name, rows, queries, heads, kv_heads, head_dim, kv_len, dtype=torch.float32):
    """A CUDA plan's prediction for a call of this shape."""
    tensors = {
        "q": torch.empty(rows, queries, heads, head_dim, dtype=dtype, device="meta"),
        "k": torch.empty(rows, kv_len, kv_heads, head_dim, device="meta"),
        "lens": torch.empty(rows, dtype=torch.int32, device="meta"),
        "kv_len": kv_len,
    }

    def filled(x):
        if isinstance(x, list):
            return [filled(y) for y in x]
        return tensors.get(x, x) if isinstance(x, str) else x

    args = tuple(map(filled, KERNEL_ARGUMENTS[name]))
    return kernel_use(name, "cuda", named_arguments(name, args))


@needs_cxx
@pytest.mark.parametrize("name", KERNEL_ARGUMENTS)
def test_a_prediction_is_not_below_what_the_kernel_allocates(name):
    """For this call, or one with fewer queries; on small GPUs and on large ones."""
    scratch = ops_of("emulated").decode_scratch
    taken_by_another = ops_of("emulated").prefill_taken

    @given(
        rows=st.one_of(st.integers(1, 8), st.sampled_from([100, 65535, 65536])),
        queries=st.sampled_from([1, 2, 3, 4, 5, 8, 16, 17, 100, 2048, 1 << 16]),
        group=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 71, 128]),
        kv_heads=st.sampled_from([1, 2, 8, 40]),
        head_dim=st.sampled_from([1, 64, 80, 128, 256, 257, 264, 576, 584]),
        kv_len=st.sampled_from([1, 128, 129, 1000, 8192, 8193, 1 << 20]),
        processors=st.sampled_from([1, 8, 46, 84, 108, 128, 132, 188, 256, 1000]),
        shared=st.booleans(),
        narrow=st.booleans(),
    )
    def check(rows, queries, group, kv_heads, head_dim, kv_len, processors, shared, narrow):
        rest = (group * kv_heads, kv_heads, head_dim, kv_len)
        dtype = torch.bfloat16 if narrow else torch.float32
        use = predicted_use(name, rows, queries, *rest, dtype=dtype)
        for fewer in {1, 2, 3, 16, queries - 1, queries} & set(range(1, queries + 1)):
            allocated = scratch(rows, fewer, *rest, processors, shared, narrow)
            assert use.scratch >= allocated
            if fewer == queries:
                another = head_dim % 8 == 0 and taken_by_another(rows, queries, *rest)
                assert use.takes == (allocated >= 0 or another)

    check()


@pytest.mark.parametrize(("length", "past"), [(2, 998), (40, 960), (40, 0)])
def test_a_plan_for_kernels_over_floats_counts_their_scratch_or_the_reference(
    monkeypatch, length, past
):
    """Fresh prompts use the reference, with torch's flash kernels."""

    def peak(kernels):
        monkeypatch.setattr("exkv.planning.dry_run.has_kernel", lambda *_: kernels)
        with DryRun("cpu", kernels="cuda") as tracker:
            q = torch.empty(1, length, 8, 64)
            k = torch.empty(1, 1000, 2, 64)
            lens = torch.empty(1, dtype=torch.int32)
            given = tracker.current
            torch.ops.exkv.attention(q, k, k, lens, past + length, False, 0.1)
        return tracker.peak - given

    out = rounded(length * 8 * 64 * 4)
    scratch = rounded(predicted_use("attention", 1, length, 8, 2, 64, past + length).scratch)
    expected = out + scratch if past else max(out + scratch, peak(kernels=False))
    assert peak(kernels=True) == expected


@pytest.mark.parametrize("length", [1, 2, 40, 2000])
def test_a_plan_for_a_quantized_cache_counts_no_widened_tile(monkeypatch, length):
    """A kernel serves any number of queries: it takes the results, and scratch for few queries."""
    monkeypatch.setattr("exkv.planning.dry_run.has_kernel", lambda *_: True)
    with DryRun("cpu", kernels="cuda") as tracker:
        q = torch.empty(2, length, 8, 64)
        k = torch.empty(2, 3000, 2, 64, dtype=torch.int8)
        scale = torch.empty(2, 3000, 2, 2, dtype=torch.float16)
        lens = torch.empty(2, dtype=torch.int32)
        given = tracker.current
        torch.ops.exkv.attention_int8(q, k, scale, k, scale, lens, 3000, 0.1)
    use = predicted_use("attention_int8", 2, length, 8, 2, 64, 3000)
    assert use.takes
    assert tracker.peak - given == rounded(q.nbytes) + rounded(use.scratch)
