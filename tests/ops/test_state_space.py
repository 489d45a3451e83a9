"""Ops of state space models, kernels and references: the selective scan against transformers' Jamba
and state space duality against its Bamba, over all tokens and step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from native import BACKENDS, ops_of
from torch import Tensor
from transformers.models.bamba.modeling_bamba import (
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)
from transformers.models.jamba.modeling_jamba import (
    mamba_selective_scan,
    mamba_selective_state_update,
)

import exkv  # noqa: F401 # defines the ops
from exkv.ops import REFERENCES


def scan_inputs(tokens: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, rows=2):
    """x, dt, a, b, c, d, and a state."""
    generator = torch.Generator().manual_seed(tokens)
    channels, size = sizes

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    dt, a = random(rows, tokens, channels).abs(), -2 * random(size, channels).abs()
    x, b, c = (random(rows, tokens, n).to(dtype) for n in (channels, size, size))
    return x, dt, a, b, c, random(channels), random(rows, size, channels)


def ssd_inputs(tokens: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, rows=2):
    """x, dt, a, b, c, d, and a state."""
    generator = torch.Generator().manual_seed(tokens)
    heads, dim, groups, size = sizes

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    both = random(rows, tokens, 2 * groups, size).to(dtype)
    b, c = both.chunk(2, dim=2)  # views, whose tokens are apart
    dt, a = random(rows, tokens, heads).abs(), -4 * random(heads).abs()
    x = random(rows, tokens, heads, dim).to(dtype)
    return x, dt, a, b, c, random(heads), random(rows, heads, size, dim)


def jamba(x, dt, a, b, c, d, state):
    """Step by step from the state."""
    state, outs = state.mT.contiguous(), []
    for t in range(x.shape[1]):
        step = mamba_selective_state_update(state, x[:, t], dt[:, t], a.T, b[:, t], c[:, t], d)
        outs.append(step)
    return torch.stack(outs, dim=1), state.mT


def bamba(x, dt, a, b, c, d, state):
    out, after = mamba2_chunk_scan(
        *(x, dt, a, b, c, 32), D=d, initial_states=state.mT, return_final_states=True
    )
    return out, after.mT


def ssd_in_double(x, dt, a, b, c, d, state):
    """By the definition, token by token."""
    groups = x.shape[2] // b.shape[2]
    b, c = (each.repeat_interleave(groups, dim=2) for each in (b, c))
    outs = []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        added = b[:, t, :, :, None] * x[:, t, :, None] * step
        state = state * (step * a.view(-1, 1, 1)).exp() + added
        outs.append((c[:, t, :, None] @ state)[:, :, 0] + d[:, None] * x[:, t])
    return torch.stack(outs, dim=1), state


@dataclass(frozen=True, kw_only=True)
class StateSpace:
    """An op with its oracle. ``sizes``: of vectors and blocks that are full, and that are not;
    ``tokens``: up to several of the reference's blocks; ``tolerance``: relative, and absolute."""

    name: str
    sizes: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    inputs: Callable[..., tuple[Tensor, ...]]
    theirs: Callable[..., tuple[Tensor, Tensor]]
    tolerance: tuple[float, float]

    def assert_close(self, found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=self.tolerance[0], atol=self.tolerance[1])


SCAN = StateSpace(
    name="selective_scan",
    sizes=((128, 16), (75, 5), (9, 35)),  # channels, and size of a channel's state
    tokens=(1, 3, 16, 50),
    inputs=scan_inputs,
    theirs=jamba,
    tolerance=(1e-4, 1e-5),
)
SSD = StateSpace(
    name="ssd",
    sizes=((4, 64, 2, 128), (3, 40, 1, 16), (4, 5, 2, 6)),  # heads and their size, groups, state
    tokens=(1, 3, 64, 150),
    inputs=ssd_inputs,
    theirs=bamba,
    tolerance=(2e-4, 2e-4),
)
BOTH = {each.name: each for each in (SCAN, SSD)}


def op_on(backend: str, name: str) -> Any:
    return REFERENCES[name] if backend == "reference" else getattr(ops_of(backend), name)


@pytest.fixture(params=["reference", *BACKENDS])
def backend(request):
    return request.param


@pytest.fixture(params=BOTH)
def kind(request):
    return BOTH[request.param]


@pytest.fixture
def op(kind, backend):
    """The op's reference, and its kernels."""
    return op_on(backend, kind.name)


@pytest.mark.parametrize(("size", "length"), itertools.product(range(3), range(4)))
def test_outputs_and_states_are_transformers(kind, op, size, length):
    *given, state = kind.inputs(kind.tokens[length], kind.sizes[size])
    expected, after = kind.theirs(*given, state)
    kind.assert_close(op(*given, state, None), expected)
    kind.assert_close(state, after)


def test_scan_from_an_empty_state_is_transformers(backend):
    x, dt, a, b, c, d, state = scan_inputs(20, SCAN.sizes[0])
    wide = (x.mT, dt.mT, a.T, b.mT, c.mT)
    expected, after = mamba_selective_scan(*wide, D=d, return_last_state=True)
    out = op_on(backend, SCAN.name)(x, dt, a, b, c, d, state.zero_(), None)
    SCAN.assert_close(out, expected.mT)
    SCAN.assert_close(state, after.mT)


def test_ssd_step_is_transformers(backend):
    heads, dim, _, size = SSD.sizes[0]
    x, dt, a, b, c, d, state = ssd_inputs(1, SSD.sizes[0])
    theirs = state.mT.contiguous()
    expected = mamba2_selective_state_update(
        *(theirs, x[:, 0], dt[:, 0, :, None].expand(-1, -1, dim)),
        *(a.view(-1, 1, 1).expand(heads, dim, size), b[:, 0], c[:, 0], d[:, None].expand(-1, dim)),
    )
    out = op_on(backend, SSD.name)(x, dt, a, b, c, d, state, None)
    SSD.assert_close(out[:, 0], expected)
    SSD.assert_close(state, theirs.mT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_computed_in_float32(kind, op, dtype):
    x, dt, a, b, c, d, state = kind.inputs(5, kind.sizes[0], dtype)
    expected, after = kind.theirs(x.float(), dt, a, b.float(), c.float(), d, state)
    out = op(x, dt, a, b, c, d, state, None)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype))
    kind.assert_close(state, after)


def test_ssd_after_a_strong_decay_is_exact(backend):
    """Differences of sums over a block would lose the small steps after a large one."""
    x, dt, a, b, c, d, state = ssd_inputs(64, SSD.sizes[1])
    dt[:, 1:] *= 1e-3
    dt[:, 0], x[:, 0] = 1e4, 0
    wide = [each.double() for each in (x, dt, a, b, c, d, state)]
    expected, after = ssd_in_double(*wide)
    found = op_on(backend, SSD.name)(x, dt, a, b, c, torch.zeros_like(d), state, None).double()
    torch.testing.assert_close(found, expected - d.view(-1, 1) * wide[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(state.double(), after, rtol=1e-4, atol=1e-7)


def test_padding_leaves_the_state_unchanged(kind, op):
    length = kind.tokens[-1]
    x, dt, a, b, c, d, state = kind.inputs(length, kind.sizes[1], rows=3)
    lens = torch.tensor([length, 11, 0], dtype=torch.int32)
    before, padded = state.clone(), state.clone()
    out = op(x, dt, a, b, c, d, padded, lens)
    assert torch.equal(padded[2], before[2])
    for row, tokens in ((0, length), (1, 11)):
        x1, dt1, b1, c1 = (each[row : row + 1, :tokens] for each in (x, dt, b, c))
        expected, after = kind.theirs(x1, dt1, a, b1, c1, d, before[row : row + 1])
        kind.assert_close(out[row, :tokens], expected[0])
        kind.assert_close(padded[row], after[0])


def test_bits_do_not_depend_on_other_rows_or_later_tokens(kernels, kind):
    size = kind.sizes[1 if kind is SCAN else 0]
    x, dt, a, b, c, d, state = kind.inputs(9, size, torch.bfloat16, rows=4)
    own, run = state[2:3].clone(), getattr(kernels, kind.name)
    together = run(x, dt, a, b, c, d, state, None)

    def step(at: int) -> Tensor:
        x1, dt1, b1, c1 = (each[2:3, at : at + 1] for each in (x, dt, b, c))
        return run(x1, dt1, a, b1, c1, d, own, None)

    assert torch.equal(torch.cat([step(at) for at in range(9)], dim=1), together[2:3])
    assert torch.equal(own, state[2:3])


#: What is wrong with which argument of the op, and the error.
WRONG: dict[str, tuple[StateSpace, dict[str, Callable[[Tensor], Tensor]], str]] = {
    "scan state": (SCAN, {"state": lambda x: x[..., :-1]}, "state must be float32 with x's rows"),
    "scan tokens": (
        SCAN,
        {"b": lambda x: x[:, :1], "c": lambda x: x[:, :1]},
        "x must be .B, T, C. and b .B, T, N.",
    ),
    "scan rates": (SCAN, {"a": lambda x: x.T.contiguous()}, "a must be float32"),
    "ssd state": (SSD, {"state": lambda x: x[..., :-1]}, "state must be float32 with x's rows"),
    "ssd groups": (
        SSD,
        {
            **{"x": lambda x: x[:, :, :3], "dt": lambda x: x[..., :3], "a": lambda x: x[:3]},
            **{"d": lambda x: x[:3], "state": lambda x: x[:, :3]},
        },
        "groups that its heads are a multiple of",
    ),
    "ssd steps": (SSD, {"dt": lambda x: x.half()}, "dt must be float32"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_contradicting_tensors_are_refused_by_name(kernels, wrong):
    kind, changes, match = WRONG[wrong]
    names = ("x", "dt", "a", "b", "c", "d", "state")
    given = dict(zip(names, kind.inputs(2, kind.sizes[0]), strict=True))
    given |= {name: change(given[name]) for name, change in changes.items()}
    with pytest.raises(RuntimeError, match=match):
        getattr(kernels, kind.name)(*given.values(), None)


def test_lengths_of_another_dtype_are_refused(kernels, kind):
    with pytest.raises(RuntimeError, match="new_lens must be int32"):
        getattr(kernels, kind.name)(*kind.inputs(2, kind.sizes[0]), torch.tensor([1, 2]))
