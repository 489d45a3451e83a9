"""Result shapes that exkv computes itself, compared with torch's own rules."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
import torch
from tiny import TINY

from exkv.planning import shapes
from exkv.planning.dry_run import DryRun, ShapeTensor

aten = torch.ops.aten
#: Architectures whose layers route tokens, each in a different way.
ROUTED = ("Qwen3Moe", "GptOss", "Glm4Moe", "DeepseekV3", "MiniMaxM2", "Mixtral")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


def drawn(rng: random.Random, shape, dtype=torch.float32) -> torch.Tensor:
    """A tensor on meta with this shape, in some memory order: whole, permuted, cut, or expanded."""
    shape, kind = list(shape), rng.choice(["whole", "permuted", "cut", "expanded"])
    order = rng.sample(range(len(shape)), len(shape)) if kind == "permuted" else None
    sizes = [shape[i] for i in order] if order else list(shape)
    if kind == "cut" and sizes:
        sizes[-1] += 3
    if kind == "expanded" and sizes:
        sizes[0] = 1
    x = torch.empty(sizes, dtype=dtype, device="meta")
    if order:
        return x.permute([order.index(i) for i in range(len(order))])
    if kind == "cut" and sizes:
        return x[..., 1:-2]
    return x.expand(shape) if kind == "expanded" else x


def broadcastable(rng: random.Random, shape) -> list[int]:
    kept = rng.randrange(len(shape) + 1)
    return [rng.choice([1, size]) for size in shape[len(shape) - kept :]]


def pointwise(rng: random.Random):
    shape = [rng.choice([1, 2, 5, 8]) for _ in range(rng.randrange(5))]
    one, two = rng.choice(DTYPES), rng.choice(DTYPES)
    x, y = drawn(rng, shape, one), drawn(rng, broadcastable(rng, shape), two)
    mask = drawn(rng, broadcastable(rng, shape), torch.bool)
    floating = drawn(rng, shape, rng.choice(DTYPES[:3]))
    return rng.choice(
        [
            (aten.add.Tensor, (x, y)),
            (aten.add.Tensor, (y, x), {"alpha": 1}),
            (aten.mul.Tensor, (x, rng.choice([2, 0.5]))),
            (aten.div.Tensor, (x, y)),
            (aten.lt.Tensor, (y, x)),
            (aten.ge.Scalar, (x, 3)),
            (aten.where.self, (mask, x, y)),
            (aten.masked_fill.Scalar, (floating, mask, -1.0)),
            (aten.rsqrt.default, (x,)),
            (aten.silu.default, (floating,)),
            (aten.clamp.default, (drawn(rng, shape, DTYPES[3]), 0, 9)),
            (aten.pow.Tensor_Scalar, (floating, 2)),
            (aten.maximum.default, (floating, floating)),
        ]
    )


def other(rng: random.Random):
    a, b, c = (rng.choice([1, 3, 4, 7]) for _ in range(3))
    x, dtype = drawn(rng, (a, b, c, 4)), rng.choice(DTYPES)
    ids = torch.empty(rng.choice([(2, 3), (5,), (1,)]), dtype=torch.int64, device="meta")
    line = torch.empty((a, b, c, 4), device="meta")
    return rng.choice(
        [
            (aten.empty.memory_format, ([a, b],), {"dtype": dtype}),
            (aten.zeros.default, ([a, b],)),
            (aten.full.default, ([a], rng.choice([1, 0.5, True]))),
            (aten.new_empty.default, (x, [b, c])),
            (aten.empty_like.default, (x,)),
            (aten.zeros_like.default, (x,), {"dtype": dtype}),
            (aten.clone.default, (x,), {"memory_format": torch.contiguous_format}),
            (aten.clone.default, (x,)),
            (aten._to_copy.default, (x,), {"dtype": dtype}),
            (aten.arange.default, (a,)),
            (aten.arange.start, (1, a + 1)),
            (aten.arange.start_step, (0, a, 2), {"dtype": torch.int32}),
            (aten.scalar_tensor.default, (1.5,)),
            (aten.mm.default, (drawn(rng, (a, b)), drawn(rng, (b, c)))),
            (aten.bmm.default, (drawn(rng, (2, a, b)), drawn(rng, (2, b, c)))),
            (aten.addmm.default, (drawn(rng, (c,)), drawn(rng, (a, b)), drawn(rng, (b, c)))),
            (aten.embedding.default, (drawn(rng, (a, b)), ids)),
            (aten._softmax.default, (x, -1, False)),
            (aten.cat.default, ([x, drawn(rng, (a, b, 2, 4))], 2)),
            (aten.stack.default, ([x[0], line[0]], rng.choice([0, 1, -1]))),
            (aten.repeat.default, (x, [2, 1, 3, 1, 1])),
            (aten.sum.dim_IntList, (x, [rng.choice([0, -1])], rng.random() < 0.5)),
            (aten.sum.dim_IntList, (line.to(dtype), [1, 2])),
            (aten.mean.dim, (x, [-1], True)),
            (aten.amax.default, (x, [-1])),
            (aten.index.Tensor, (x, [ids])),
            (aten.index.Tensor, (line, [None, ids])),
            (aten.index.Tensor, (line, [ids, ids])),
            (aten.index.Tensor, (x, [None, ids[:1].expand(ids.shape), ids])),
            (aten._unsafe_view.default, (line, [a * b, c * 4])),
            (aten._reshape_alias.default, (line, [a * b, c * 4], [c * 4, 1])),
            (aten._scaled_dot_product_flash_attention_for_cpu.default, (x, x, x)),
            (aten.add_.Tensor, (x, 1)),
            (aten.topk.default, (x, 2)),
            (aten.gather.default, (x, 2, drawn(rng, (a, b, 2, 4), torch.int64))),
            (aten.sort.default, (x,)),
            (aten.sort.stable, (x,), {"stable": True, "dim": -1}),
            (aten.sub.out, (line, line[..., :1]), {"out": line.clone()}),
        ]
    )


def told(x: object) -> object:
    """What can be observed of tensors; strides of size-one dimensions can't."""
    if isinstance(x, tuple | list):
        return [told(each) for each in x]
    if not isinstance(x, torch.Tensor):
        return x
    strides = tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1)
    return tuple(x.shape), strides, x.dtype


@pytest.mark.parametrize("draw", [pointwise, other])
def test_shapes_strides_and_dtypes_are_torchs(draw):
    rng, wrong, said = random.Random(5), [], set()
    for _ in range(1500):
        func, args, *more = draw(rng)
        kwargs = more[0] if more else {}
        if func.namespace == "aten" and not any(isinstance(arg, torch.Tensor) for arg in args):
            kwargs = {**kwargs, "device": torch.device("meta")}
        if func in (aten.cat.default, aten.stack.default):
            kwargs = {}
        expected, got = told(func(*args, **kwargs)), told(shapes.result_of(func, args, kwargs))
        said.add(func)
        if expected != got:
            wrong.append((str(func), told(args), kwargs, expected, got))
    assert wrong == []
    assert len(said) >= 12


def test_dry_run_tensors_have_a_device_and_no_memory():
    with DryRun("cpu") as run:
        x = torch.zeros(1 << 20, 1 << 20)
        y = x + 1
        assert y.device.type == "cpu" and y.shape == x.shape
        assert run.current == run.peak == 2 << 42
        del y
        assert run.current == 1 << 42
        made = torch.tensor([1, 2])
        assert isinstance(made, ShapeTensor) and run.current == (1 << 42) + 512
    with pytest.raises(RuntimeError, match="dry run that has ended"):
        x + 1


def test_plans_and_loads_import_no_compiler():
    """Such imports take seconds if Python has to compile them first."""
    program = """
import json
import sys
import torch
from exkv import Cache8bit, Cache, Model, ModelConfig, place
model = Model("examples/demo-model")
place(model, [Cache(model, 64), Cache8bit(model, 64, 3)], devices="1G")
place(model, Cache(model, 64, 2), devices=["cpu"])
for values in json.loads(sys.argv[1]):
    routed = Model(ModelConfig.from_dict(values), dtype="bfloat16")
    place(routed, Cache(routed, 64), devices="1G")
cache = Cache(model, 64)
model.load_autosplit(cache, devices=["sim:0"])
model.forward(torch.tensor([[1]]), cache)
print([name for name in ("sympy", "torch._dynamo", "transformers") if name in sys.modules])
"""
    environment = {**os.environ, "EXKV_SIM_DEVICES": "1G"}
    routed = [TINY[f"{name}ForCausalLM"]().to_dict() for name in ROUTED]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(routed)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_torchs_flash_kernels_on_cuda_are_known_by_shapes():
    """Except the counter of their dropout, which torch reports without dimensions."""
    q, k = (
        torch.empty(2, n, h, 64, dtype=torch.bfloat16, device="meta") for n, h in ((9, 4), (20, 2))
    )
    call = (q, k, k, None, None, 9, 20, 0.0, True, False)
    func = aten._flash_attention_forward.default
    expected, found = func(*call, scale=0.1), shapes.result_of(func, call, {"scale": 0.1})
    assert told(found[:3]) == told(expected[:3]) and told(found[4]) == told(expected[4])
