"""The halves of a layer: beside torch in float64, and beside the ops that they are made of to the
bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from native import needs_kernels
from simproc import run_sim

from exkv import ops
from exkv.planning.dry_run import DryRun

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HIDDEN, HEADS, KV_HEADS, DIM, INNER, EPS = 48, 4, 2, 16, 80, 1e-5
attention_heads, add_network = torch.ops.exkv.attention_heads, torch.ops.exkv.add_network


class Case:
    """Arguments of both ops for x (B, T, hidden); ``turned`` features of a head are turned."""

    def __init__(self, rows: int, tokens: int, dtype: torch.dtype, biased: bool, turned: int = DIM):
        self.generator = torch.Generator().manual_seed(rows * 100 + tokens)
        self.dtype = dtype
        self.x, self.read = (
            self.normal(rows, tokens, HIDDEN),
            self.normal(rows, tokens, HEADS * DIM),
        )
        self.norm = self.normal(HIDDEN)
        sizes = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
        self.maps = [self.normal(size, HIDDEN, scale=HIDDEN**-0.5) for size in sizes]
        self.biases = [self.normal(size) for size in sizes] if biased else []
        angle = torch.rand(rows, tokens, turned // 2, generator=self.generator).repeat(1, 1, 2)
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)
        self.out = self.normal(HIDDEN, HEADS * DIM, scale=0.1)
        self.out_bias = self.normal(HIDDEN) if biased else None
        shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        self.network = [self.normal(*shape, scale=shape[1] ** -0.5) for shape in shapes]
        self.added = [self.normal(shape[0]) for shape in shapes] if biased else []

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.dtype)

    @property
    def heads(self) -> tuple:
        return self.x, self.norm, EPS, self.maps, self.biases, self.cos, self.sin, DIM

    def rest(self, act: str = "silu") -> tuple:
        out = (self.out, self.out_bias)
        return self.x, self.read, *out, self.norm, EPS, self.network, self.added, act


CASES = pytest.mark.parametrize(
    ("rows", "tokens", "biased", "turned"),
    [(1, 1, False, 16), (1, 1, True, 8), (3, 1, False, 16), (2, 5, True, 16), (1, 70, False, 4)],
)


@needs_kernels
@CASES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_give_what_the_ops_give_that_they_are_made_of(rows, tokens, biased, turned, dtype):
    case = Case(rows, tokens, dtype, biased, turned)
    kept = case.x.clone()
    for found, expected in zip(
        attention_heads(*case.heads), ops.REFERENCES["attention_heads"](*case.heads), strict=True
    ):
        assert torch.equal(found, expected)
    for act in ("silu", "gelu_pytorch_tanh"):
        found = add_network(*case.rest(act))
        assert torch.equal(found, ops.REFERENCES["add_network"](*case.rest(act)))
    assert torch.equal(case.x, kept)


@CASES
def test_beside_torch_in_float64(rows, tokens, biased, turned):
    case = Case(rows, tokens, torch.float32, biased, turned)
    wide = lambda tensors: [tensor.double() for tensor in tensors]  # noqa: E731
    biases = wide(case.biases) or [None] * 3
    normed = F.rms_norm(case.x.double(), (HIDDEN,), case.norm.double(), EPS)
    q, k, v = (
        F.linear(normed, weight, bias).unflatten(-1, (-1, DIM))
        for weight, bias in zip(wide(case.maps), biases, strict=True)
    )
    cos, sin = case.cos.double().unsqueeze(2), case.sin.double().unsqueeze(2)
    for found, x in zip(attention_heads(*case.heads), (q, k, v), strict=True):
        if x is not v:
            first, second = x[..., :turned].chunk(2, dim=-1)
            turned_x = x[..., :turned] * cos + torch.cat((-second, first), dim=-1) * sin
            x = torch.cat((turned_x, x[..., turned:]), dim=-1)
        torch.testing.assert_close(found.double(), x, rtol=1e-5, atol=1e-5)
    out_bias = case.out_bias.double() if biased else None
    x = case.x.double() + F.linear(case.read.double(), case.out.double(), out_bias)
    normed = F.rms_norm(x, (HIDDEN,), case.norm.double(), EPS)
    (gate, up, down), added = wide(case.network), wide(case.added) or [None] * 3
    inner = F.silu(F.linear(normed, gate, added[0])) * F.linear(normed, up, added[1])
    expected = x + F.linear(inner, down, added[2])
    torch.testing.assert_close(add_network(*case.rest()).double(), expected, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_what_does_not_fit_is_refused():
    case = Case(1, 2, torch.float32, True)
    x, norm, eps, maps, biases, cos, sin, dim = case.heads
    with pytest.raises(RuntimeError, match="weights are 2, and must be those of queries, keys and"):
        attention_heads(x, norm, eps, maps[:2], biases, cos, sin, dim)
    with pytest.raises(RuntimeError, match="not of heads of 15"):
        attention_heads(x, norm, eps, maps, biases, cos, sin, 15)
    with pytest.raises(RuntimeError, match="2 biases for 3 weights"):
        attention_heads(x, norm, eps, maps, biases[:2], cos, sin, dim)
    with pytest.raises(RuntimeError, match=r"attention_heads: x must be \(B, T, hidden\)"):
        attention_heads(x[0], norm, eps, maps, biases, cos, sin, dim)
    rest = case.rest()
    with pytest.raises(RuntimeError, match="act is relu; it must be silu or gelu_pytorch_tanh"):
        add_network(*case.rest("relu"))
    with pytest.raises(RuntimeError, match="weights are 2, and must be those of gate, up and down"):
        add_network(*rest[:6], case.network[:2], case.added, "silu")
    with pytest.raises(RuntimeError, match="1 biases for 3 weights"):
        add_network(*rest[:6], case.network, case.added[:1], "silu")


def test_opcheck_finds_nothing():
    case = Case(2, 3, torch.float32, True)
    torch.library.opcheck(attention_heads.default, case.heads)
    torch.library.opcheck(add_network.default, case.rest())


#: Of the network: x's sum and norm, gate and up, all at once; not only the result.
BETWEEN = 2 * 40 * (2 * HIDDEN + 2 * INNER) * 4


def test_a_plan_counts_what_lies_between_the_parts():
    case = Case(2, 40, torch.float32, False)
    tracker = DryRun("cpu")
    with tracker:
        add_network(*case.rest())
    assert tracker.peak >= BETWEEN


def on_a_simulated_device() -> int:
    """Bytes that it takes at most."""
    arguments = [
        [tensor.to("sim:0") for tensor in argument]
        if isinstance(argument, list)
        else argument.to("sim:0")
        if isinstance(argument, torch.Tensor)
        else argument
        for argument in Case(2, 40, torch.float32, False).rest()
    ]
    before = torch.accelerator.memory_allocated(0)
    torch.accelerator.reset_peak_memory_stats(0)
    add_network(*arguments)
    return torch.accelerator.max_memory_allocated(0) - before


def test_a_simulated_device_holds_it_too():
    assert run_sim(on_a_simulated_device, "64M") >= BETWEEN


# Storing and reading --------------------------------------------------------------------------

ROOM, PAST = 40, 23


def attend_case(rows: int, tokens: int, dtype: torch.dtype, spare: int = 1) -> dict:
    """New tokens behind 23 others, in stores of more rows; strided as heads of one projection."""
    generator = torch.Generator().manual_seed(rows + tokens)
    heads = HEADS + 2 * KV_HEADS
    made = torch.randn(rows, tokens, heads, DIM, generator=generator).to(dtype)
    q, k, v = made.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
    stores = torch.randn(2, rows + spare, ROOM, KV_HEADS, DIM, generator=generator).to(dtype)
    past = torch.full((rows,), PAST, dtype=torch.int32)
    rest = (past, PAST + tokens, DIM**-0.5, 0, 0.0)
    return {"new": (q, k, v), "stores": tuple(stores), "rest": rest}


def stores_of(case: dict, name: str) -> list[torch.Tensor]:
    if name == "attend":
        return [store.clone() for store in case["stores"]]
    quantized = (torch.ops.exkv.quantize_kv(store) for store in case["stores"])
    return [tensor for pair in quantized for tensor in pair]


@needs_kernels
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 1), (2, 7), (1, 17)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["attend", "attend_int8"])
def test_stores_and_results_are_the_parts_to_the_bit(name, rows, tokens, dtype):
    case = attend_case(rows, tokens, dtype)
    mine, theirs = stores_of(case, name), stores_of(case, name)
    found = getattr(torch.ops.exkv, name)(*case["new"], *mine, *case["rest"])
    expected = ops.REFERENCES[name](*case["new"], *theirs, *case["rest"])
    assert torch.equal(found, expected)
    assert all(map(torch.equal, mine, theirs))
    assert not torch.equal(mine[0], stores_of(case, name)[0])  # something was written


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (2, 7)])
def test_beside_torchs_attention_and_nothing_else_is_touched(rows, tokens):
    case = attend_case(rows, tokens, torch.float32)
    q, k, v = case["new"]
    stores = stores_of(case, "attend")
    found = torch.ops.exkv.attend(q, k, v, *stores, *case["rest"])
    whole = [
        torch.cat((old[:rows, :PAST], new), dim=1).transpose(1, 2)
        for old, new in zip(case["stores"], (k, v), strict=True)
    ]
    seen = torch.ones(tokens, PAST + tokens, dtype=torch.bool).tril(PAST)
    expected = F.scaled_dot_product_attention(q.transpose(1, 2), *whole, seen, enable_gqa=True)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
    for store, before, new in zip(stores, case["stores"], (k, v), strict=True):
        assert torch.equal(store[:rows, PAST : PAST + tokens], new)
        store[:rows, PAST : PAST + tokens] = before[:rows, PAST : PAST + tokens]
        assert torch.equal(store, before)


@needs_kernels
def test_a_store_without_room_is_refused_and_not_written():
    case = attend_case(2, 5, torch.float32)
    q, k, v = case["new"]
    stores, rest = stores_of(case, "attend"), list(case["rest"])

    def refused(message: str, keys, values, kv_len=rest[1]) -> None:
        with pytest.raises(RuntimeError, match=message):
            torch.ops.exkv.attend(q, k, v, keys, values, rest[0], kv_len, *rest[2:])

    short = [x[:, :PAST] for x in stores]
    refused(f"row 0 has {PAST} tokens and room for {PAST}", *short)
    refused(r"k_stored has 3 rows of 40 tokens, and v_stored 3 of \d+", stores[0], short[1])
    refused("k_stored has 1 rows, and k has 2", *(x[:1] for x in stores))
    refused(f"attend: row 0 has {PAST} tokens and gets 5, but kv_len is 4", *stores, kv_len=4)
    refused("k_stored must be Float", stores[0].half(), stores[1])
    refused("v_stored must be Float", stores[0], stores[1].half())
    assert all(map(torch.equal, stores, case["stores"]))


def test_opcheck_finds_nothing_in_what_writes():
    case = attend_case(2, 3, torch.float32)
    for name in ("attend", "attend_int8"):
        arguments = (*case["new"], *stores_of(case, name), *case["rest"])
        torch.library.opcheck(getattr(torch.ops.exkv, name).default, arguments)
