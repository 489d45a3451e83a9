"""The attention ops against torch's own SDPA in float32 and plain arithmetic: lengths, windows,
soft caps, rows of unlike length, for the float and the 8-bit storage."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import exkv.ops  # noqa: F401  (registers them)

HEAD_DIM = 32


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
    scores = softcap * torch.tanh(q @ k.mT * HEAD_DIM**-0.5 / softcap)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def run(storage, q, k, v, pasts, window, softcap):
    lens = torch.tensor(pasts, dtype=torch.int32)
    kv_len, ragged = max(pasts) + q.shape[1], len(set(pasts)) > 1
    params = (HEAD_DIM**-0.5, window, softcap)
    if storage == "float":
        return torch.ops.exkv.attention(q, k, v, lens, kv_len, ragged, *params)
    stored = (*torch.ops.exkv.quantize_kv(k), *torch.ops.exkv.quantize_kv(v))
    return torch.ops.exkv.attention_int8(q, *stored, lens, kv_len, *params)


@pytest.mark.parametrize("storage", ["float", "int8"])
@given(
    pasts=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    length=st.sampled_from([1, 2, 7, 300]),
    groups=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([0, 1, 3, 16, 1000]),
    softcap=st.sampled_from([0.0, 2.0, 50.0]),
    seed=st.integers(0, 9),
)
def test_any_lengths_window_and_softcap(storage, pasts, length, groups, window, softcap, seed):
    torch.manual_seed(seed)
    rows, capacity = len(pasts), max(pasts) + length + 5
    q = torch.randn(rows, length, 2 * groups, HEAD_DIM)
    k, v = torch.randn(2, rows, capacity, 2, HEAD_DIM)
    out = run(storage, q, k, v, pasts, window, softcap)
    if storage == "int8":  # what was stored is the truth there
        k, v = (
            torch.ops.exkv.dequantize_kv(*torch.ops.exkv.quantize_kv(x), torch.float32)
            for x in (k, v)
        )
    for row, past in enumerate(pasts):
        end = past + length
        expected = dense(q[row], k[row, :end], v[row, :end], past, window, softcap)
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("storage", ["float", "int8"])
def test_a_window_leaves_padding_finite(storage):
    """A short row's padding stands behind its last key by more than the window."""
    q = torch.randn(2, 9, 4, HEAD_DIM)
    k, v = torch.randn(2, 2, 40, 2, HEAD_DIM)
    assert run(storage, q, k, v, [30, 2], 2, 0.0).isfinite().all()


@pytest.mark.parametrize("storage", ["float", "int8"])
def test_keys_outside_the_window_are_not_read(storage):
    q = torch.randn(1, 1, 4, HEAD_DIM)
    k, v = torch.randn(2, 1, 64, 2, HEAD_DIM)
    expected = run(storage, q, k, v, [60], 8, 0.0)
    k[:, :53], v[:, :53] = 7.0, -7.0
    k[:, 61:], v[:, 61:] = 7.0, -7.0
    assert torch.equal(run(storage, q, k, v, [60], 8, 0.0), expected)
