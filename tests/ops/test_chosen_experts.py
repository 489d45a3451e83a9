"""Products with experts in few bits that kernels choose on the device, on tensor cores."""

from __future__ import annotations

from itertools import product

import pytest
import tiny
import torch
from hostile_calls import random_packed
from native import ops_of
from on_cpu import on_cpu
from torch import Tensor

from exkv.layers import mlp
from exkv.planning.kernel_uses import kernel_use
from exkv.weights.fp8 import Fp8Format
from exkv.weights.gguf import FORMATS as GGUF
from exkv.weights.groups import GroupFormat
from exkv.weights.mxfp4 import MXFP4

#: Every kind of matrix that kernels choose among.
CHOSEN = [
    GroupFormat(bits=4, group=32, scale=torch.float16, shift="zero"),
    GroupFormat(bits=4, group=128, scale=torch.bfloat16),
    GroupFormat(bits=8, group=0, scale=torch.float32, shift="offset"),
    GroupFormat(bits=3, group=64, scale=torch.float16, ordered=True),
    GroupFormat(bits=4, group=64, scale=torch.float16, ordered=True),
    *(GGUF[name] for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")),
    Fp8Format(block=(8, 64), scale_dtype=torch.float32),
    Fp8Format(block=None, scale_dtype=torch.float32),
    MXFP4,
]


def chosen_matrices(format, size: tuple[int, int], count: int) -> list[list[Tensor]]:
    if not isinstance(format, GroupFormat):
        return [random_packed(format, size) for _ in range(count)]
    made = []
    for _ in range(count):
        groups = format.groups.count(size[1])
        scale, shift = torch.rand(size[0], groups) / 8, torch.randn(size[0], groups)
        if format.shift == "zero":
            shift = torch.randint(0, 1 << format.bits, shift.shape)
        codes = torch.randint(0, 1 << format.bits, size)
        order = torch.randperm(size[1]) if format.ordered else None
        made.append(list(format.pack(codes, scale, shift, order).values()))
    return made


#: ggml's random scales are beyond float16.
CASES = [
    *((format, torch.bfloat16) for format in CHOSEN),
    *((format, torch.float16) for format in CHOSEN if isinstance(format, GroupFormat)),
]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("format", "dtype"), CASES, ids=[f"{format.name}-{dtype}" for format, dtype in CASES]
)
@pytest.mark.parametrize("where", ["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_chosen_matrices_of_few_bits_multiply_as_one_does_alone(where, format, dtype):
    """Outputs that fill no tile, an expert that more tokens choose than one reading serves, and a
    number of no expert."""
    size, experts, ops = (37, 512), 4, ops_of(where)
    tensors = chosen_matrices(format, size, experts)
    biases = [torch.randn(size[0]).to(dtype) for _ in range(experts)]
    chosen = torch.tensor([[2, row % 2] for row in range(11)])
    layout = format.choice_layout(size)
    flat = [part for each in tensors for part in each]
    for shape in ((11, 512), (11, 2, 512)):
        x = torch.randn(shape).to(dtype)
        found = ops.chosen_products(x, chosen, flat, format.name, layout, size[0], biases)
        wide = x if x.dim() == 3 else x.unsqueeze(1).expand(11, 2, -1)
        for row, choice in product(range(11), range(2)):
            expert = int(chosen[row, choice])
            alone = wide[row, choice][None].contiguous(), tensors[expert]
            if isinstance(format, GroupFormat):
                one = ops.linear_groups(*alone, layout, biases[expert])
            else:
                one = ops.linear_packed(*alone, format.name, layout, size[0], biases[expert])
            assert torch.equal(found[row, choice], one[0])
    held = [dict(zip(format.names, each, strict=True)) for each in tensors]
    whole = torch.stack([format.dequantize(each, torch.float32).double() for each in held])
    expected = (whole[chosen] @ wide.double().unsqueeze(-1)).squeeze(-1)
    expected += torch.stack(biases).double()[chosen]
    bound = 2 * torch.finfo(dtype).eps * (whole[chosen].abs() @ wide.double().abs().unsqueeze(-1))
    assert (found.double() - expected).abs().le(bound.squeeze(-1) + 1e-3).all()
    found = ops.chosen_products(x, chosen + 2, flat, format.name, layout, size[0], [])
    assert found[:, 0].isnan().all() and found[:, 1].isfinite().all()


def test_plans_know_which_choices_kernels_take():
    """As the binding does, which leaves the others to the reference; and what it allocates."""
    chosen, nested = torch.zeros(3, 2).long(), [-3, 64, 1, 0]
    for dtype, layout, takes in [
        *((torch.bfloat16, format.choice_layout((64, 256)), True) for format in CHOSEN),
        (torch.float32, CHOSEN[0].choice_layout((64, 256)), False),
        (torch.bfloat16, nested, False),
    ]:
        call = {"x": torch.zeros(3, 256, dtype=dtype), "chosen": chosen, "layout": layout}
        use = kernel_use("chosen_products", "cuda", call)
        assert use.takes == takes and use.scratch == 6 * 80


def test_a_chosen_matrix_is_found_anew_in_every_replay():
    """What a graph holds is where choices lie, not which they are."""
    ops, (format, *_), size = ops_of("emulated"), CHOSEN, (16, 64)
    flat = [part for each in chosen_matrices(format, size, 3) for part in each]
    rest = (flat, format.name, format.choice_layout(size), size[0], [])
    x, chosen = torch.randn(4, 64).half(), torch.tensor([[0, 1], [1, 2], [0, 2], [1, 0]])
    ops.capture_graph()
    out = ops.chosen_products(x, chosen, *rest)
    chosen.copy_(chosen.flip(0) % 3)
    x.mul_(2)
    expected = out.clone()
    ops.replay_graph()
    assert not torch.equal(out, expected)
    assert torch.equal(out, ops.chosen_products(x, chosen, *rest))


@pytest.fixture
def choosing(monkeypatch):
    """A CPU that counts as a device whose kernels choose, which their references stand in for."""
    monkeypatch.setattr(mlp, "chooses_on", lambda device, tokens, codes=False: tokens <= 16)


@pytest.mark.parametrize("weights", [None, "int4"])
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_a_few_tokens_choices_give_the_same_sum_on_a_device(tmp_path, choosing, name, weights):
    """By expert, and by choice."""
    folder = tiny.save(tiny.reference(tiny.TINY[name]()), tmp_path)
    experts = on_cpu(folder, dtype=torch.bfloat16, weights=weights).units[1].module.mlp
    assert experts.chooses_on_device
    x = torch.randn(6, 1, experts.gate.size[1]).bfloat16()
    found = experts(x)
    experts.experts[0].w1.register_forward_hook(lambda *args: None)
    assert not experts.chooses_on_device
    torch.testing.assert_close(found, experts(x), rtol=0.02, atol=0.02 * found.abs().max().item())
