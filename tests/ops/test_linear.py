"""exkv::linear: every kernel against float64, with torch's own error as the bound, and batches
against single rows."""

from __future__ import annotations

import math
from copy import deepcopy as copy_of

import pytest
import torch
import torch.nn.functional as F
from arithmetic import assert_same_on_threads, equal, error, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st
from native import assert_right_on, each_isa, needs_kernels
from simproc import run_sim
from torch import Tensor, nn

import exkv_ext
from exkv.layers import Linear, PlainModule
from exkv.layers.linear import side_by_side

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

linear, linears = torch.ops.exkv.linear, torch.ops.exkv.linears
linear_heads = torch.ops.exkv.linear_heads


def case(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x (rows, inputs), weight (outputs, inputs) and perhaps a bias, all normal."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return normal(rows, inputs), normal(outputs, inputs), normal(outputs) if bias else None


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def assert_within_rounding(x, weight, bias, out):
    """The bound of a float32 sum of products in any order (Higham 2002, section 3.1), and one
    rounding to x's dtype; for shapes too small for errors to average out."""
    assert out.dtype == x.dtype and out.shape == (*x.shape[:-1], len(weight))
    expected = exact(x, weight, bias)
    magnitude = exact(x.abs(), weight.abs(), None if bias is None else bias.abs())
    info = torch.finfo(x.dtype)
    single = torch.finfo(torch.float32).eps
    bound = (x.shape[-1] + 2) * single * magnitude + info.eps * expected.abs() + info.tiny
    assert ((out.double() - expected).abs() <= bound).all()


@given(
    leading=st.lists(st.integers(0, 4), max_size=3),
    inputs=st.integers(0, 131),
    outputs=st.integers(0, 19),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150, deadline=None)
def test_any_shape_is_right_within_rounding(leading, inputs, outputs, dtype, bias, seed):
    x, weight, added = case(math.prod(leading), inputs, outputs, dtype, bias=bias, seed=seed)
    x = x.view(*leading, inputs)
    assert_within_rounding(x, weight, added, linear(x, weight, added))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [768, 2048, 5632, 1000])
def test_errors_are_at_most_twice_torchs_own(dtype, inputs):
    for rows in (1, 2, 3, 4, 7, 8, 12, 16):
        for bias in (False, True):
            given = case(rows, inputs, 331, dtype, bias=bias, seed=rows)
            expected = exact(*given)
            assert error(linear(*given), expected) <= 2 * error(F.linear(*given), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan_propagate(dtype):
    x, weight, _ = case(3, 70, 9, dtype)
    x[0, 3], x[1, 69] = torch.inf, torch.nan
    out = linear(x, weight, None)
    assert torch.equal(out[0], weight[:, 3].sign() * torch.inf)
    assert out[1].isnan().all()
    assert out[2].isfinite().all()
    huge = torch.full((1, 64), torch.finfo(dtype).max, dtype=dtype)
    assert torch.equal(linear(huge, huge.sign(), None).isinf(), torch.tensor([[True]]))


@needs_kernels
def test_no_read_outside_of_the_tensors():
    """The tensors are surrounded by NaN, and unaligned."""
    for dtype in DTYPES:
        sizes = [(1, 33, 5), (4, 7, 1), (3, 1, 9), (2, 95, 6)]
        if dtype is not torch.float32:  # of which so many rows may be torch's own
            sizes += [(7, 571, 5), (16, 47, 9)]
        for rows, inputs, outputs in sizes:
            given = case(rows, inputs, outputs, dtype, bias=True)
            assert torch.equal(linear(*map(poisoned, given)), linear(*given))


def test_strided_inputs_are_read_correctly():
    base = torch.randn(6, 4, 80).bfloat16()
    weight = torch.randn(10, 80).bfloat16()
    for x in (base[:, -1], base[::3].transpose(0, 1), base.permute(2, 1, 0)[:6].flip(0)):
        w = weight[:, : x.shape[-1]].contiguous()
        assert torch.equal(linear(x, w, None), linear(x.contiguous(), w, None))
    x, (wide, bias) = torch.randn(2, 40), torch.randn(2, 10, 80)
    for w in (wide[:, ::2], wide[:, 40:], wide.t()[:40].contiguous().t()):
        assert_within_rounding(x, w, bias[:, 0], linear(x, w, bias[:, 0]))


def test_other_dtypes_use_torch():
    x, weight, bias = case(3, 20, 7, torch.float64, bias=True)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_use_torch(dtype):
    if dtype is torch.bfloat16 and exkv_ext.cpu_isa() != "avx512_bf16":
        pytest.skip("here the kernel is faster than torch's for any number of rows")
    x, weight, bias = case(66, 200, 70, dtype, bias=True)
    x = x.view(2, 33, 200)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(777, 1003), (5637, 103)])
def test_rows_are_independent_of_others_and_of_threads(dtype, inputs, outputs):
    """Inputs of all rows that exceed the first-level cache are read in pieces."""
    x, weight, bias = case(16, inputs, outputs, dtype, bias=True)
    if exkv_ext.cpu_isa() == "portable":
        x = x[:4]
    out = linear(x, weight, bias)
    for rows in range(1, len(x)):
        assert torch.equal(linear(x[:rows], weight, bias), out[:rows])
        assert torch.equal(linear(x[rows:], weight, bias), out[rows:])
    assert_same_on_threads(lambda: linear(x, weight, bias))


# Several of one input --------------------------------------------------------------------------


@needs_kernels
def test_hundreds_of_rows_equal_single_rows():
    """Values that are widened before they are multiplied are processed in tiles."""
    if exkv_ext.cpu_isa() == "avx512_bf16":
        pytest.skip("here so many rows are torch's own")
    x, weight, bias = case(131, 1093, 37, torch.bfloat16, bias=True, seed=8)
    found = linear(x, weight, bias)
    expected = F.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(found.float(), expected, atol=0.3, rtol=0.01)
    for first, last in ((0, 1), (3, 7), (50, 66), (40, 57), (10, 110)):
        assert torch.equal(linear(x[first:last], weight, bias), found[first:last])


@given(
    heads=st.integers(0, 5),
    rows=st.integers(0, 20),
    inputs=st.integers(0, 131),
    outputs=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=100, deadline=None)
def test_each_head_is_a_linear_layer_within_rounding(heads, rows, inputs, outputs, dtype):
    x, weight, _ = case(heads * rows, inputs, heads * outputs, dtype)
    x, weight = x.view(heads, rows, inputs), weight.view(heads, outputs, inputs)
    out = linear_heads(x, weight)
    assert out.shape == (heads, rows, outputs)
    for each in zip(x, weight, out, strict=True):
        assert_within_rounding(*each[:2], None, each[2])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_bit_identical_to_linear_layers(dtype):
    x, weight, _ = case(3 * 16, 70, 3 * 37, dtype)
    x, weight = x.view(3, 16, 70), weight.view(3, 37, 70)
    if exkv_ext.cpu_isa() == "portable":
        x = x[:, :4].contiguous()
    out = linear_heads(x, weight)
    each = [linear(*pair, None) for pair in zip(x, weight, strict=True)]
    assert torch.equal(out, torch.stack(each))
    for rows in (1, 3):
        assert torch.equal(linear_heads(x[:, :rows].contiguous(), weight), out[:, :rows])
    assert_same_on_threads(lambda: linear_heads(x, weight))
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(linear_heads(strided, weight), out, atol=0.2, rtol=0.01)


def several(rows: int, inputs: int, outputs: list[int], dtype: torch.dtype, *, bias: bool):
    """x (rows, inputs), weights and biases of so many outputs each; no biases, or one for each."""
    x, weight, added = case(rows, inputs, sum(outputs), dtype, bias=bias, seed=sum(outputs))
    return x, list(weight.split(outputs)), list(added.split(outputs)) if bias else []


def one_by_one(x, weights, biases):
    return [linear(x, *pair) for pair in zip(weights, biases or [None] * len(weights), strict=True)]


@given(
    rows=st.integers(0, 20),
    inputs=st.integers(0, 131),
    outputs=st.lists(st.integers(0, 40), max_size=5),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_linears_are_bit_identical_to_linear(rows, inputs, outputs, dtype, bias):
    x, weights, biases = several(rows, inputs, outputs, dtype, bias=bias)
    outs = linears(x, weights, biases)
    assert equal(outs, one_by_one(x, weights, biases))
    for out, weight, added in zip(outs, weights, biases or [None] * len(weights), strict=True):
        assert_within_rounding(x, weight, added, out)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_all_the_outputs_and_change_none(dtype):
    """Large enough that every thread gets a share, which may end in the middle of a map."""
    given = several(2, 777, [403, 1, 7, 601, 202], dtype, bias=True)
    assert equal(linears(*given), one_by_one(*given))
    assert_same_on_threads(lambda: linears(*given), (1, 2, 3, 5))


@pytest.mark.parametrize("rows", [1, 66])
def test_torchs_layers_may_be_among_others(rows):
    """A weight that isn't contiguous, too many rows for the kernels, strided inputs."""
    x, weights, _ = several(rows, 48, [5, 16, 9], torch.float32, bias=False)
    weights[1] = weights[1].t().contiguous().t()
    x = x.t().contiguous().t()
    assert equal(linears(x, weights, []), one_by_one(x, weights, []))


@needs_kernels
def test_nothing_beside_several_weights_is_read():
    for dtype in DTYPES:
        x, weights, biases = several(3, 33, [5, 1, 9], dtype, bias=True)
        outs = linears(poisoned(x), [*map(poisoned, weights)], [*map(poisoned, biases)])
        assert equal(outs, one_by_one(x, weights, biases))


# What is refused ------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize(
    ("x", "weight", "bias", "complaint"),
    [
        ((2, 5), (3, 4), None, r"x \(2, 5\) ends in 5 and weight \(3, 4\) takes 4"),
        ((), (3, 4), None, "x needs a dimension"),
        ((4,), (4,), None, r"weight must be \(out, in\), and it is \(4\)"),
        ((4,), (2, 3, 4), None, r"weight must be \(out, in\), and it is \(2, 3, 4\)"),
        ((2, 4), (3, 4), (4,), r"bias \(4\) must have one entry for each of weight's 3 outputs"),
        ((2, 4), (3, 4), (1, 3), r"bias \(1, 3\) must have one entry"),
    ],
)
def test_mismatched_shapes_are_refused_by_name_and_number(x, weight, bias, complaint):
    tensors = [None if shape is None else torch.ones(shape) for shape in (x, weight, bias)]
    with pytest.raises(RuntimeError, match=complaint):
        linear(*tensors)


@needs_kernels
def test_mixed_dtypes_are_refused_by_name():
    x, weight, bias = case(2, 8, 4, torch.bfloat16, bias=True)
    with pytest.raises(RuntimeError, match="x is Float and weight BFloat16; convert one"):
        linear(x.float(), weight, bias)
    with pytest.raises(RuntimeError, match="x is BFloat16 and bias Half; convert one"):
        linear(x, weight, bias.half())


@needs_kernels
def test_mismatched_linears_are_refused_by_name_and_number():
    x, weights, biases = several(2, 8, [4, 3], torch.float32, bias=True)
    for call, complaint in [
        ((x, weights, biases[:1]), "1 biases for 2 weights; give one for each, or none"),
        ((x, [weights[0], weights[1][:, :5]], []), r"linears: x \(2, 8\) ends in 8 and weight"),
        ((x, weights, biases[::-1]), r"linears: bias \(3\) must have one entry .* 4 outputs"),
        ((x, [weights[0], weights[1].half()], []), "linears: x is Float and weight Half; convert"),
    ]:
        with pytest.raises(RuntimeError, match=complaint):
            linears(*call)


# Through torch --------------------------------------------------------------------------------


def test_torch_compile_traces_the_layer_whole():
    layer = Linear(40, 9, bias=True, dtype=torch.bfloat16)
    x, weight, bias = case(3, 40, 9, torch.bfloat16, bias=True)
    layer.load_state_dict({"weight": weight, "bias": bias})
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    both = torch.compile(side_by_side, fullgraph=True, backend="aot_eager")
    assert equal(both(x, (layer, layer)), [layer(x)] * 2)


# Parts of a module -----------------------------------------------------------------------------


class Pair(PlainModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(4, 3, bias=False, dtype=torch.float32)
        nn.init.normal_(self.first.weight)  # what memory holds may be a NaN, which equals nothing
        self.second = nn.Identity()


def test_replaced_or_deleted_parts_take_effect_at_once():
    pair, other = Pair(), Linear(4, 3, bias=True, dtype=torch.float32)
    pair.first = other
    assert pair.first is other and dict(pair.named_children())["first"] is other
    assert list(pair.state_dict()) == ["first.weight", "first.bias"]
    del pair.second
    with pytest.raises(AttributeError, match="second"):
        pair.second  # noqa: B018


def test_a_copy_has_parts_of_its_own_and_a_moved_one_its_new_weights():
    pair = Pair()
    copy = copy_of(pair)
    assert copy.first is not pair.first and copy.first is copy._modules["first"]
    copy.to(torch.float64)
    x = torch.ones(1, 4, dtype=torch.float64)
    assert torch.equal(copy.first(x), F.linear(x, copy.first.weight))
    state = {"first.weight": torch.eye(3, 4)}
    pair.load_state_dict(state, assign=True)
    assert torch.equal(pair.first(torch.ones(1, 4)), torch.ones(1, 3))


# Simulated devices ----------------------------------------------------------------------------


def on_simulated_devices():
    """For few rows and for many: equal bits, and no memory beyond the output. Then a mixture."""
    rows = []
    for dtype in DTYPES:
        for count in (1, 4, 16, 17, 33, 80):
            given = case(count, 200, 70, dtype, bias=True)
            x, weight, bias = (tensor.to("sim:0") for tensor in given)
            torch.accelerator.reset_peak_memory_stats(0)
            before = torch.accelerator.memory_allocated(0)
            out = linear(x, weight, bias)
            taken = torch.accelerator.max_memory_allocated(0) - before
            rounded = -(-out.nbytes // 512) * 512
            rows.append([torch.equal(out.cpu(), linear(*given)), taken - rounded])
            torch.accelerator.reset_peak_memory_stats(0)
            before = torch.accelerator.memory_allocated(0)
            outs = linears(x, [weight, weight], [bias, bias])
            taken = torch.accelerator.max_memory_allocated(0) - before
            rows.append([all(torch.equal(o, out) for o in outs), taken - 2 * rounded])
    try:
        linear(x, weight.to("sim:1"), None)
    except RuntimeError as reason:
        rows.append(str(reason))
    return rows


def test_simulated_devices_give_the_cpus_bits_and_hold_only_the_output():
    *rows, complaint = run_sim(on_simulated_devices)
    assert rows == [[True, 0]] * (3 * 6 * 2)
    assert "sim:0" in complaint and "sim:1" in complaint


# Every instruction set ------------------------------------------------------------------------

ISA_PROGRAM = """
import test_linear as t
t.test_any_shape_is_right_within_rounding()
for dtype in t.DTYPES:
    for inputs in (768, 1000, 5632):
        t.test_errors_are_at_most_twice_torchs_own(dtype, inputs)
    t.test_infinities_and_nan_propagate(dtype)
    for inputs, outputs in ((777, 1003), (5637, 103)):
        t.test_rows_are_independent_of_others_and_of_threads(
            dtype, inputs, outputs)
    t.test_threads_share_all_the_outputs_and_change_none(dtype)
t.test_linears_are_bit_identical_to_linear()
t.test_no_read_outside_of_the_tensors()
"""


@each_isa
def test_each_instruction_set_is_right(isa):
    assert_right_on(isa, ISA_PROGRAM)
