"""Rotary positions: equal to transformers' to the bit, and to a complex rotation in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from arithmetic import assert_same_on_threads, equal, normal, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st
from native import assert_right_on, each_isa, needs_kernels
from simproc import run_sim

from exkv import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

rope = torch.ops.exkv.rope


def factors(rows: int, length: int, width: int, dtype: torch.dtype, seed: int = 0):
    """cos, sin (B, T, R) of angles as tables have them: those of a pair are equal."""
    generator = torch.Generator().manual_seed(seed + 77)
    angles = torch.rand((rows, length, width // 2), generator=generator) * 300
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def unlike(rows: int, length: int, width: int, dtype: torch.dtype):
    """cos, sin whose halves differ, so that a kernel that reads the wrong half fails."""
    return normal(rows, length, width, dtype=dtype, seed=8), normal(
        rows, length, width, dtype=dtype, seed=9
    )


def transformers_rope(q, k, cos, sin):
    """transformers' function, on the rotated features."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    width = cos.shape[-1]
    rotated = apply_rotary_pos_emb(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim=2)
    return [torch.cat((x, y[..., width:]), -1) for x, y in zip(rotated, (q, k), strict=True)]


shapes = {
    "rows": st.integers(0, 3),
    "length": st.integers(0, 4),
    "heads": st.tuples(st.integers(0, 4), st.integers(0, 3)),
    "dim": st.integers(0, 80),
    "part": st.floats(0, 1),
    "dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 2**16),
}


@given(**shapes)
@settings(max_examples=200, deadline=None)
def test_any_shapes_turn_is_transformers_own_to_the_bit(
    rows, length, heads, dim, part, dtype, seed
):
    """The reference and the kernels alike: tokens must not differ between them."""
    width = int(part * dim) // 2 * 2
    q, k = (normal(rows, length, n, dim, dtype=dtype, seed=seed + n) for n in heads)
    for cos, sin in (factors(rows, length, width, dtype, seed), unlike(rows, length, width, dtype)):
        expected = transformers_rope(q, k, cos, sin)
        assert equal(rope(q, k, cos, sin), expected)
        if width and q.numel() and k.numel():
            assert equal(ops.REFERENCES["rope"](q, k, cos, sin), expected)


@given(**shapes)
@settings(max_examples=100, deadline=None)
def test_rope_is_a_complex_rotation(rows, length, heads, dim, part, dtype, seed):
    """Two products and a sum of values up to |x|, each rounded to the dtype, and the factors."""
    width = int(part * dim) // 2 * 2
    half, (count, _) = width // 2, heads
    q = normal(rows, length, count, dim, dtype=dtype, seed=seed)
    cos, sin = factors(rows, length, width, dtype, seed)
    rotated, _ = rope(q, q[:, :, :0], cos, sin)
    pairs = torch.complex(q[..., :half].double(), q[..., half:width].double())
    angles = torch.complex(cos[..., :half].double(), sin[..., :half].double())
    exact = pairs * angles.unsqueeze(2)
    expected = torch.cat((exact.real, exact.imag, q[..., width:].double()), -1)
    size = torch.cat((pairs.abs(), pairs.abs(), q[..., width:].double().abs()), -1)
    info = torch.finfo(dtype)
    assert ((rotated.double() - expected).abs() <= 2 * info.eps * size + info.tiny).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan_propagate(dtype):
    q = normal(1, 5, 2, 40, dtype=dtype)
    q[0, 0, 0, 3], q[0, 1, 1, 39], q[0, 2] = torch.inf, torch.nan, torch.finfo(dtype).max
    cos, sin = factors(1, 5, 40, dtype)
    expected = transformers_rope(q, q, cos, sin)
    for out, right in zip(rope(q, q, cos, sin), expected, strict=True):
        torch.testing.assert_close(out, right, rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_heads_are_read_correctly(dtype):
    """Also those of Phi-3, where queries and keys are cut from one tensor."""
    joint = normal(2, 3, 6 * 40 + 5, dtype=dtype)
    cut = joint[..., :160].view(2, 3, 4, 40), joint[..., 160:240].view(2, 3, 2, 40)
    odd = (
        normal(2, 3, 4, 80, dtype=dtype)[..., ::2],
        normal(40, 2, 3, 2, dtype=dtype).permute(2, 1, 3, 0).transpose(0, 1),
    )
    cos, sin = unlike(2, 3, 60, dtype)
    for q, k in (cut, odd):
        for c, s in (
            (cos[..., :30], sin[..., 30:]),
            (cos[..., ::2], sin[..., ::2]),
            (cos.transpose(1, 2).contiguous().transpose(1, 2)[..., :30], sin[..., :30]),
        ):
            assert equal(rope(q, k, c, s), transformers_rope(q, k, c, s))
        assert equal(
            rope(q, k, cos[:1, :, :30], sin[:1, :, :30]),
            transformers_rope(q, k, cos[:1, :, :30], sin[:1, :, :30]),
        )


@needs_kernels
def test_no_access_outside_of_the_tensors():
    for dtype in DTYPES:
        for heads, dim, width in [(3, 7, 2), (1, 66, 66), (2, 40, 24), (1, 2, 2)]:
            q, k = (normal(1, 2, n, dim, dtype=dtype, seed=n) for n in (heads, 1))
            cos, sin = unlike(1, 2, width, dtype)
            outs = rope(*map(poisoned, (q, k, cos, sin)))
            assert equal(outs, transformers_rope(q, k, cos, sin))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_independent_of_others_and_of_threads(dtype):
    q, k = (normal(3, 50, n, 64, dtype=dtype, seed=n) for n in (8, 2))
    cos, sin = factors(3, 50, 64, dtype)
    expected = transformers_rope(q, k, cos, sin)
    for some in (slice(0, 1), slice(7, 40), slice(None)):
        given = [x[:, some] for x in (q, k, cos, sin)]
        assert equal(rope(*given), [x[:, some] for x in expected])
        assert_same_on_threads(partial(rope, *given))


# What is refused ------------------------------------------------------------------------------


@needs_kernels
def test_mismatched_arguments_are_refused_by_name_and_number():
    q, k, c = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 1, 8), torch.ones(2, 3, 8)
    for call, complaint in [
        ((q[0], k, c, c), r"q must be \(B, T, heads, D\); it is \(3, 4, 8\)"),
        ((q, k[:1], c, c), r"k must have q's .* q is \(2, 3, 4, 8\), k \(1, 3, 1, 8\)"),
        ((q, k[..., :6], c, c), "k must have q's"),
        ((q, k.half(), c, c), "q is Float and k Half; convert one"),
        ((q, k, c[:, :2], c), r"cos must be \(2, 3, R\).* it is \(2, 2, 8\)"),
        ((q, k, c, c[0]), r"sin must be \(2, 3, R\).* it is \(3, 8\)"),
        ((q, k, c[..., :3], c), "an even number of features, .* it rotates 3"),
        ((q, k, torch.ones(2, 3, 10), c), "at most the 8 of a head; it rotates 10"),
        ((q, k, c[..., :4], c), r"cos is \(2, 3, 4\) and sin \(2, 3, 8\)"),
        ((q, k, c.bfloat16(), c), "q is Float and cos BFloat16"),
        ((q.double(), k, c, c), "float32, float16 or bfloat16, not Double"),
    ]:
        with pytest.raises(RuntimeError, match=complaint):
            rope(*call)


# Through torch --------------------------------------------------------------------------------


def on_simulated_devices():
    """Whether bits equal the CPU's, and a call's bytes beyond its outputs'."""
    q, k = (normal(2, 3, n, 40, dtype=torch.bfloat16, seed=n) for n in (4, 2))
    cos, sin = factors(2, 3, 24, torch.bfloat16)
    there = [tensor.to("sim:0") for tensor in (q, k, cos, sin)]
    torch.accelerator.reset_peak_memory_stats(0)
    before = torch.accelerator.memory_allocated(0)
    outs = rope(*there)
    taken = torch.accelerator.max_memory_allocated(0) - before
    taken -= sum(-(-out.nbytes // 512) * 512 for out in outs)
    same = equal([out.cpu() for out in outs], rope(q, k, cos, sin))
    try:
        rope(*there[:3], there[3].to("sim:1"))
    except RuntimeError as reason:
        return [same, taken, str(reason)]


@needs_kernels
def test_simulated_devices_give_the_cpus_bits_and_hold_only_the_outputs():
    same, taken, complaint = run_sim(on_simulated_devices)
    assert same and taken == 0
    assert "sim:0" in complaint and "sim:1" in complaint


# Every instruction set ------------------------------------------------------------------------

ISA_PROGRAM = """
import test_rope as t
t.test_any_shapes_turn_is_transformers_own_to_the_bit()
t.test_rope_is_a_complex_rotation()
for dtype in t.DTYPES:
    t.test_infinities_and_nan_propagate(dtype)
    t.test_strided_heads_are_read_correctly(dtype)
    t.test_tokens_are_independent_of_others_and_of_threads(dtype)
t.test_no_access_outside_of_the_tensors()
"""


@each_isa
def test_each_instruction_set_is_right(isa):
    assert_right_on(isa, ISA_PROGRAM)
