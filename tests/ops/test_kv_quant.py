"""8-bit storage: every kernel equals the reference in exkv/ops/kv_quant.py to the bit."""

from __future__ import annotations

import pytest
import torch
from arithmetic import same
from hypothesis import given, settings
from hypothesis import strategies as st
from native import assert_right_on, each_isa, needs_kernels, ops_of, run_apart
from torch import Tensor

import exkv_ext
from exkv import ops
from exkv.ops.kv_quant import dequantize_kv, num_groups, quantize_kv

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=["cpu", "emulated"])
def kernels(request):
    """The namespace of compiled kernels that take CPU tensors."""
    return ops_of(request.param)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, spread: float) -> Tensor:
    """Normal values whose size differs by group and row, over ``spread`` decimal orders."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    orders = torch.rand(*shape[:-1], 1, generator=generator, dtype=torch.float64) - 0.5
    return (x * 10 ** (orders * spread)).to(dtype)


def assert_like_reference(namespace, x: Tensor, out: torch.dtype) -> None:
    q, scale = namespace.quantize_kv(x)
    q_expected, scale_expected = quantize_kv(x)
    assert same(scale, scale_expected)
    assert same(q, q_expected)
    assert same(namespace.dequantize_kv(q, scale, out), dequantize_kv(q, scale, out))


@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    dim=st.integers(1, 161),
    dtype=st.sampled_from(DTYPES),
    out=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
    spread=st.sampled_from([0.0, 4.0, 16.0, 60.0]),
)
@settings(max_examples=60, deadline=None)
def check_any_shape(namespace, shape, dim, dtype, out, seed, spread):
    assert_like_reference(namespace, values((*shape, dim), dtype, seed, spread), out)


def test_any_shape_type_and_magnitude_gives_the_reference_bits(kernels):
    check_any_shape(kernels)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float16_pattern_gives_the_reference_bits(kernels, dtype):
    """Infinities, NaN, subnormals and both zeros included, alone in a group and in company."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    company = every.view(-1, 32).clone()
    sample = every[:: 1 if kernels is torch.ops.exkv else 7]  # emulated threads take their time
    alone = torch.zeros(len(sample), 3, dtype=torch.float16)
    alone[:, 1] = sample
    for x in (company, alone):
        assert_like_reference(kernels, x.to(dtype), dtype)


def test_every_scale_and_level_dequantizes_to_the_reference_bits(kernels):
    scale = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    q = torch.tensor([-128, -127, -1, 0, 1, 127], dtype=torch.int8).expand(65536, -1)
    for out in DTYPES:
        expected = dequantize_kv(q, scale.unsqueeze(-1), out)
        assert same(kernels.dequantize_kv(q, scale.unsqueeze(-1), out), expected)


def test_halves_round_to_even(kernels):
    """A group with scale 1 (its peak is 127) shows the rounding of every half."""
    x = torch.cat([torch.arange(-15, 16) + 0.5, torch.tensor([127.0])])
    q, scale = kernels.quantize_kv(x)
    assert scale.tolist() == [1.0]
    assert q.tolist() == [round(v) for v in x.tolist()]


def test_a_scale_between_two_float16_rounds_to_even(kernels):
    """127 * s is exact in float32 where s needs one bit more than float16 has, and so is s."""
    steps = torch.arange(2048, 4097, dtype=torch.float64) / 4096  # 12 significant bits
    for exponent in (-24, -20, -14, -3, 0, 9):
        x = (127 * steps * 2.0**exponent).float().unsqueeze(-1)
        assert torch.equal(x / 127, (steps * 2.0**exponent).float().unsqueeze(-1))
        assert_like_reference(kernels, x, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_other_dtypes_are_treated_as_float32(kernels, dtype):
    x = values((3, 40), torch.float64, 0, 4.0).mul(100).to(dtype)
    assert_like_reference(kernels, x, torch.float32)
    q, scale = kernels.quantize_kv(x)
    expected = dequantize_kv(q, scale, torch.float64)
    assert same(kernels.dequantize_kv(q, scale, torch.float64), expected)


def test_strided_and_misaligned_inputs_give_the_reference_bits(kernels):
    base = values((4, 6, 3, 97), torch.bfloat16, 0, 4.0)
    for x in (base.transpose(1, 2), base[..., 1:], base[:, ::2], base.flatten()[1:65].view(2, 32)):
        assert_like_reference(kernels, x, torch.bfloat16)
    q, scale = quantize_kv(base)
    q, scale = q.transpose(0, 2), scale.transpose(0, 2)
    expected = dequantize_kv(q, scale, torch.float16)
    assert same(kernels.dequantize_kv(q, scale, torch.float16), expected)


def test_empty_inputs_give_empty_outputs(kernels):
    for shape in ((0, 64), (3, 0, 5), (2, 0)):
        q, scale = kernels.quantize_kv(torch.empty(shape))
        assert q.shape == shape
        assert scale.shape == (*shape[:-1], num_groups(shape[-1]))
        assert kernels.dequantize_kv(q, scale, torch.float32).shape == shape


def test_wrong_tensors_are_refused_by_name_and_number(kernels):
    q, scale = quantize_kv(torch.randn(2, 64))
    with pytest.raises(
        RuntimeError, match=r"one entry for each 32.*q is \(2, 64\), scale \(2, 1\)"
    ):
        kernels.dequantize_kv(q, scale[:, :1], torch.float32)
    with pytest.raises(RuntimeError, match="scale must be float16, not Float"):
        kernels.dequantize_kv(q, scale.float(), torch.float32)
    with pytest.raises(RuntimeError, match="q must be int8, not Int"):
        kernels.dequantize_kv(q.int(), scale, torch.float32)
    with pytest.raises(RuntimeError, match="needs a dimension"):
        kernels.quantize_kv(torch.tensor(1.0))


ISA_PROGRAM = """
import torch, test_kv_quant as t
for dtype in t.DTYPES:
    t.test_every_float16_pattern_gives_the_reference_bits(torch.ops.exkv, dtype)
t.test_every_scale_and_level_dequantizes_to_the_reference_bits(torch.ops.exkv)
t.test_a_scale_between_two_float16_rounds_to_even(torch.ops.exkv)
"""


@each_isa
def test_each_instruction_set_gives_the_reference_bits(isa):
    assert_right_on(isa, ISA_PROGRAM)


@needs_kernels
def test_an_unknown_instruction_set_is_refused_with_the_known_ones():
    result = run_apart(ISA_PROGRAM, EXKV_CPU_ISA="sse9")
    assert result.returncode != 0
    expected = "EXKV_CPU_ISA='sse9' is unknown; say portable, avx2, avx512 or avx512_bf16"
    assert expected in result.stderr


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif(not exkv_ext.loaded()["_cuda"], reason="exkv_ext._cuda isn't built")
class TestOnCuda:
    """The same checks on a GPU. The reference runs on the CPU: the GPU's division by a constant
    is a multiplication by its inverse, which is not the same rounding."""

    def check(self, x: Tensor, out: torch.dtype) -> None:
        q, scale = torch.ops.exkv.quantize_kv(x.cuda())
        q_expected, scale_expected = quantize_kv(x)
        assert same(scale.cpu(), scale_expected)
        assert same(q.cpu(), q_expected)
        expected = dequantize_kv(q_expected, scale_expected, out)
        assert same(torch.ops.exkv.dequantize_kv(q, scale, out).cpu(), expected)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_kernels_give_the_reference_bits(self, dtype):
        assert ops.has_kernel("quantize_kv", "cuda")
        for dim in (1, 3, 32, 33, 64, 100, 128, 161):
            self.check(values((3, 17, dim), dtype, dim, 16.0), dtype)
        every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
        self.check(every.view(-1, 32).to(dtype), dtype)

    def test_tensors_on_two_devices_are_refused_by_name(self):
        q, scale = quantize_kv(torch.randn(2, 64))
        with pytest.raises(RuntimeError, match="q is on cuda:0 and scale on cpu"):
            torch.ops.exkv.dequantize_kv(q.cuda(), scale, torch.float32)
