"""Norms and gates: every kernel against float64, with torch's own error as the bound, and equal to
the reference to the bit where no order of summation is involved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from arithmetic import assert_same_on_threads, equal, error, normal, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st
from native import assert_right_on, each_isa, needs_kernels
from simproc import run_sim
from torch import Tensor

from exkv import ops
from exkv.layers import RMSNorm
from exkv.ops.activations import ACTIVATIONS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5
#: Activation by config.json's name -> torch's own.
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}
FUSED = ("silu", "gelu_pytorch_tanh")
#: What writes the gated product over its first argument; another backend's tests replace some.
GATES = {name: activation.gate for name, activation in ACTIVATIONS.items()}

SHAPES = {
    "leading": st.lists(st.integers(0, 4), max_size=3),
    "size": st.integers(0, 150),
    "dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 2**16),
}

rms_norm, add_rms_norm = torch.ops.exkv.rms_norm, torch.ops.exkv.add_rms_norm


def exact_norm(x: Tensor, weight: Tensor, offset: bool) -> Tensor:
    """torch's norm in float64."""
    return F.rms_norm(x.double(), weight.shape, weight.double() + offset, EPS)


def gated(act: str, gate: Tensor, up: Tensor) -> Tensor:
    """The op's result, written into a copy of the gate."""
    out = gate.clone()
    GATES[act](out, up)
    return out


def exact_gated(act: str, gate: Tensor, up: Tensor) -> Tensor:
    return ACTS[act](gate.double()) * up.double()


def strided(dtype: torch.dtype) -> list[Tensor]:
    """One shape, (4, 6, 40), in several layouts."""
    return [
        normal(4, 6, 90, dtype=dtype)[..., 5:45],
        normal(4, 12, 40, dtype=dtype)[:, ::2],
        normal(6, 4, 40, dtype=dtype).transpose(0, 1),
        normal(4, 6, 80, dtype=dtype)[..., ::2],
        normal(40, 6, 4, dtype=dtype).permute(2, 1, 0),
    ]


# Norms ----------------------------------------------------------------------------------------


@given(**SHAPES, offset=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_shapes_norm_is_right_within_rounding(leading, size, dtype, offset, seed):
    """A float32 sum of squares in any order (Higham 2002, section 3.1), of which the root halves
    the error; some float32 steps; and a rounding to the dtype before the weight and one after."""
    x = normal(*leading, size, dtype=dtype, seed=seed)
    weight = normal(size, dtype=dtype, seed=seed + 1)
    out = rms_norm(x, weight, EPS, offset)
    assert out.dtype == dtype and out.shape == x.shape
    expected = exact_norm(x, weight, offset)
    # Rounding a float16 below 2^-14 loses up to half of 2^-24, which the weight then multiplies.
    least = (
        torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * (1 + weight.double().abs())
    )
    relative = (size / 2 + 6) * torch.finfo(torch.float32).eps + 2 * torch.finfo(dtype).eps
    assert ((out.double() - expected).abs() <= relative * expected.abs() + least).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
def test_a_norms_errors_are_at_most_twice_torchs_own(dtype, offset):
    for size in (64, 768, 1000, 4096, 8191):
        x = normal(32, size, dtype=dtype, seed=size, scale=3)
        weight = normal(size, dtype=dtype, seed=1)
        expected = exact_norm(x, weight, offset)
        torchs = F.rms_norm(x, weight.shape, weight + offset, EPS)
        assert error(rms_norm(x, weight, EPS, offset), expected) <= 2 * error(torchs, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_norms_errors_are_at_most_twice_torchs_own(dtype, offset, biased):
    for size in (1, 7, 64, 1000, 4099):
        x = normal(8, size, dtype=dtype, seed=size, scale=3) + 5
        weight = normal(size, dtype=dtype, seed=1)
        bias = normal(size, dtype=dtype, seed=2) if biased else None
        factor, added = weight + offset, None if bias is None else bias.double()
        expected = F.layer_norm(x.double(), factor.shape, factor.double(), added, EPS)
        torchs = F.layer_norm(x, factor.shape, factor, bias, EPS)
        ours = torch.ops.exkv.layer_norm(x, weight, bias, EPS, offset)
        assert error(ours, expected) <= 2 * error(torchs, expected)


@given(
    rows=st.integers(1, 5),
    size=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    offset=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=100, deadline=None)
def test_norm_with_an_exact_sum_is_bit_identical_to_the_reference(rows, size, dtype, offset, seed):
    """Small whole numbers' squares sum to the same in every order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-60, 61, (rows, size), generator=generator).to(dtype)
    weight = normal(size, dtype=dtype, seed=seed)
    expected = ops.REFERENCES["rms_norm"](x, weight, EPS, offset)
    assert torch.equal(rms_norm(x, weight, EPS, offset), expected)


@given(**SHAPES, offset=st.booleans())
@settings(max_examples=100, deadline=None)
def test_adding_first_is_torchs_sum_and_the_norm_of_it(leading, size, dtype, offset, seed):
    x, residual = (normal(*leading, size, dtype=dtype, seed=seed + i) for i in range(2))
    weight = normal(size, dtype=dtype, seed=seed + 2)
    total, normed = add_rms_norm(x, residual, weight, EPS, offset)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, EPS, offset))


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_nan_and_zeros_propagate_through_norms(dtype):
    x, weight = normal(5, 70, dtype=dtype), normal(70, dtype=dtype)
    x[0, 3], x[1, 69], x[3] = torch.inf, torch.nan, 0
    out = rms_norm(x, weight, EPS, False)
    expected = ops.REFERENCES["rms_norm"](x, weight, EPS, False)
    assert torch.equal(out.isnan(), expected.isnan())
    assert out[0, 3].isnan() and not out[0, :3].any() and out[1].isnan().all()
    assert not out[3].any() and out[2].isfinite().all() and out[4].isfinite().all()
    huge = torch.full((1, 40), torch.finfo(dtype).max, dtype=dtype)
    total, _ = add_rms_norm(huge, huge, weight[:40], EPS, False)
    assert total.isinf().all()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs_of_norms_are_read_correctly(dtype):
    weight = normal(80, dtype=dtype)[::2]
    for x in strided(dtype):
        expected = rms_norm(x.contiguous(), weight.contiguous(), EPS, True)
        assert torch.equal(rms_norm(x, weight, EPS, True), expected)
        for residual in strided(dtype):
            total, normed = add_rms_norm(x, residual, weight, EPS, True)
            assert torch.equal(total, x + residual)
            assert torch.equal(normed, rms_norm(x + residual, weight, EPS, True))
    one = normal(1, dtype=dtype).expand(3, 40)
    assert torch.equal(rms_norm(one, weight, EPS), rms_norm(one.contiguous(), weight, EPS))


# Gates ----------------------------------------------------------------------------------------


@given(**SHAPES, act=st.sampled_from(sorted(ACTS)), scale=st.sampled_from([0.01, 1.0, 8.0]))
@settings(max_examples=150, deadline=None)
def test_any_shapes_gate_is_right_within_rounding(leading, size, dtype, act, scale, seed):
    gate = normal(*leading, size, dtype=dtype, seed=seed, scale=scale)
    up = normal(*leading, size, dtype=dtype, seed=seed + 1)
    out = gated(act, gate, up)
    assert out.dtype == dtype and out.shape == gate.shape
    expected = exact_gated(act, gate, up)
    single, info = torch.finfo(torch.float32).eps, torch.finfo(dtype)
    # torch's own gelu loses digits where it is close to 0, so that the gate's size is in the bound.
    lost = 8 * single * (gate.double() * up.double()).abs()
    least = info.smallest_normal * info.eps * (1 + up.double().abs())
    bound = lost + (8 * single + 2 * info.eps) * expected.abs() + least
    assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", FUSED)
def test_a_gates_errors_are_at_most_twice_torchs_own(dtype, act):
    for scale in (0.1, 1.0, 5.0, 30.0):
        gate = normal(16, 1001, dtype=dtype, scale=scale)
        up = normal(16, 1001, dtype=dtype, seed=1)
        expected = exact_gated(act, gate, up)
        torchs = ACTS[act](gate) * up
        assert error(gated(act, gate, up), expected) <= 2 * error(torchs, expected)


def every_number(dtype: torch.dtype) -> Tensor:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    return numbers[numbers.isfinite()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_silu_of_every_16_bit_number_is_torchs_to_the_bit(dtype):
    gate = every_number(dtype)
    for up in (torch.ones_like(gate), normal(len(gate), dtype=dtype)):
        assert torch.equal(gated("silu", gate, up), F.silu(gate) * up)


def test_silu_of_float32_is_right_to_two_units_of_the_last_place():
    gate = torch.linspace(-80, 80, 300_001)
    exact = F.silu(gate.double())
    off = (gated("silu", gate, torch.ones_like(gate)).double() - exact).abs()
    assert (off <= 2 * torch.finfo(torch.float32).eps * exact.abs()).all()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_of_every_16_bit_number_is_rounded_right(dtype):
    """x / (1 + e^-2u), where torch's own 1 + tanh(u) loses digits below -2, in float64 below -6."""
    gate = every_number(dtype)
    out = gated("gelu_pytorch_tanh", gate, torch.ones_like(gate))
    wide = gate.double()
    exact = wide * torch.sigmoid((8 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    info = torch.finfo(dtype)
    # The exponential of -2u is right to 2u times float32's last place; it ends at 3.4e38.
    bound = (info.eps / 2 + 2e-5) * exact.abs() + info.smallest_normal * info.eps + 1e-36
    assert ((out.double() - exact).abs() <= bound).all()
    assert (out != ACTS["gelu_pytorch_tanh"](gate)).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", FUSED)
def test_extreme_values_propagate_through_gates(dtype, act):
    most = torch.finfo(dtype).max
    ends = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, most, -most, 88.0, -88.0, 104.0, -104.0]
    gate = torch.tensor(ends, dtype=dtype).repeat(5)
    up = torch.ones_like(gate)
    out, expected = gated(act, gate, up), ACTS[act](gate)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-30, equal_nan=True)
    assert gated(act, up, gate)[:: len(ends)].eq(0).all()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", FUSED)
def test_strided_gates_are_written_in_place(dtype, act):
    for gate in strided(dtype):
        for up in strided(dtype):
            expected = gated(act, gate.contiguous(), up.contiguous())
            whole = gate._base.clone()
            written = whole.as_strided(gate.shape, gate.stride(), gate.storage_offset())
            GATES[act](written, up)
            assert torch.equal(written, expected)
            written.copy_(gate)
            assert torch.equal(whole, gate._base)


@needs_kernels
def test_no_access_outside_of_the_tensors():
    for dtype in DTYPES:
        for rows, size in [(1, 33), (4, 7), (3, 1), (2, 95)]:
            x, residual = (normal(rows, size, dtype=dtype, seed=i) for i in range(2))
            weight = normal(size, dtype=dtype, seed=2)
            expected = add_rms_norm(x, residual, weight, EPS)
            given = map(poisoned, (x, residual, weight))
            for out, right in zip(add_rms_norm(*given, EPS), expected, strict=True):
                assert torch.equal(out, right)
            for act in FUSED:
                gate = poisoned(x)
                GATES[act](gate, poisoned(residual))
                assert torch.equal(gate, gated(act, x, residual))
                assert int((~gate._base.isnan()).sum()) == gate.numel()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_independent_of_others_and_of_threads(dtype):
    x, residual = (normal(50, 3001, dtype=dtype, seed=i) for i in range(2))
    weight = normal(3001, dtype=dtype, seed=2)

    def run(some: slice) -> list[Tensor]:
        pair = x[some], residual[some]
        return [*add_rms_norm(*pair, weight, EPS), gated("silu", *pair)]

    outs = run(slice(None))
    for some in (slice(0, 1), slice(3, 40), slice(None)):
        assert equal(run(some), [out[some] for out in outs])
        assert_same_on_threads(partial(run, some))


# What is refused ------------------------------------------------------------------------------


@needs_kernels
def test_mismatched_arguments_are_refused_by_name_and_number():
    x, weight = torch.ones(2, 4), torch.ones(4)
    for call, complaint in [
        (lambda: rms_norm(x, torch.ones(3), EPS), r"weight \(3\) must have .* 4 features of x"),
        (lambda: rms_norm(x, torch.ones(1, 4), EPS), r"weight \(1, 4\) must have one entry"),
        (lambda: rms_norm(torch.ones(()), weight, EPS), "x needs a dimension"),
        (lambda: rms_norm(x, weight.half(), EPS), "x is Float and weight Half; convert one"),
        (lambda: rms_norm(x.double(), weight, EPS), "float32, float16 or bfloat16, not Double"),
        (lambda: add_rms_norm(x, x[:1], weight, EPS), r"x is \(2, 4\) and residual \(1, 4\)"),
        (lambda: add_rms_norm(x, x.half(), weight, EPS), "x is Float and residual Half"),
        (lambda: GATES["silu"](x, torch.ones(2, 5)), r"gate is \(2, 4\) and up \(2, 5\)"),
        (lambda: GATES["silu"](x, x.bfloat16()), "gate is Float and up BFloat16"),
        (lambda: GATES["silu"](x, x), "one tensor"),
        (lambda: GATES["silu"](weight.expand(3, 4), torch.ones(3, 4)), "overlap"),
    ]:
        with pytest.raises(RuntimeError, match=complaint):
            call()


# Through torch --------------------------------------------------------------------------------


def test_torch_compile_traces_layers_whole():
    layer = RMSNorm(40, EPS, dtype=torch.bfloat16)
    layer.load_state_dict({"weight": normal(40, dtype=torch.bfloat16)})
    x, residual = (normal(3, 40, dtype=torch.bfloat16, seed=i) for i in range(2))

    def run(x, residual):
        total, normed = layer.of_sum(x, residual)
        torch.ops.exkv.silu_mul_(total, normed)
        return layer(total)

    assert torch.equal(
        torch.compile(run, fullgraph=True, backend="aot_eager")(x, residual), run(x, residual)
    )


# Simulated devices ----------------------------------------------------------------------------


def on_simulated_devices():
    """Whether bits equal the CPU's, and each call's bytes beyond its outputs'."""
    rows = []
    for dtype in DTYPES:
        x, residual = (normal(6, 200, dtype=dtype, seed=i) for i in range(2))
        weight = normal(200, dtype=dtype, seed=2)
        there = [tensor.to("sim:0") for tensor in (x, residual, weight)]
        torch.accelerator.reset_peak_memory_stats(0)
        before = torch.accelerator.memory_allocated(0)
        outs = [*add_rms_norm(*there, EPS), rms_norm(there[0], there[2], EPS)]
        taken = torch.accelerator.max_memory_allocated(0) - before
        taken -= sum(-(-out.nbytes // 512) * 512 for out in outs)
        expected = [*add_rms_norm(x, residual, weight, EPS), rms_norm(x, weight, EPS)]
        same = all(torch.equal(a.cpu(), b) for a, b in zip(outs, expected, strict=True))
        torch.accelerator.reset_peak_memory_stats(0)
        before = torch.accelerator.memory_allocated(0)
        torch.ops.exkv.silu_mul_(*there[:2])
        taken += torch.accelerator.max_memory_allocated(0) - before
        rows.append([same, torch.equal(there[0].cpu(), gated("silu", x, residual)), taken])
    try:
        add_rms_norm(there[0], there[1].to("sim:1"), there[2], EPS)
    except RuntimeError as reason:
        rows.append(str(reason))
    return rows


@needs_kernels
def test_simulated_devices_give_the_cpus_bits_and_hold_only_the_outputs():
    *rows, complaint = run_sim(on_simulated_devices)
    assert rows == [[True, True, 0]] * 3
    assert "sim:0" in complaint and "sim:1" in complaint


# Every instruction set ------------------------------------------------------------------------

ISA_PROGRAM = """
import torch, test_norms as t
t.test_any_shapes_norm_is_right_within_rounding()
t.test_norm_with_an_exact_sum_is_bit_identical_to_the_reference()
t.test_adding_first_is_torchs_sum_and_the_norm_of_it()
t.test_any_shapes_gate_is_right_within_rounding()
t.test_silu_of_float32_is_right_to_two_units_of_the_last_place()
for dtype in t.DTYPES:
    t.test_a_norms_errors_are_at_most_twice_torchs_own(dtype, False)
    t.test_infinities_nan_and_zeros_propagate_through_norms(dtype)
    for act in t.FUSED:
        t.test_a_gates_errors_are_at_most_twice_torchs_own(dtype, act)
        t.test_extreme_values_propagate_through_gates(dtype, act)
        t.test_strided_gates_are_written_in_place(dtype, act)
    if dtype is not torch.float32:
        t.test_silu_of_every_16_bit_number_is_torchs_to_the_bit(dtype)
        t.test_gelu_of_every_16_bit_number_is_rounded_right(dtype)
    t.test_rows_are_independent_of_others_and_of_threads(dtype)
t.test_no_access_outside_of_the_tensors()
"""


@each_isa
def test_each_instruction_set_is_right(isa):
    assert_right_on(isa, ISA_PROGRAM)
