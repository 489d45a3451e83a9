"""Checks of every op on the valid calls of ``hostile_calls.py``: it passes torch's opcheck rules,
traces into one graph, and has the kernels that are built for it."""

from __future__ import annotations

import random

import pytest
import torch
from arithmetic import same
from hostile_calls import MAKERS, Maker
from native import needs_kernels
from native_ops import WRITERS, tensors_of

from exkv.ops import has_kernel

#: Ops that read numbers of their tensors: a trace ends there.
READ = {"experts", "read_tally", "expert_products", "chosen_products", "chosen_experts"}
#: Ops of random bytes as floats, among which are NaN, which equal nothing.
BYTES = {"split_blocks"}
#: Ops that native code leaves to torch's own.
WITHOUT_KERNEL = {"experts", "expert_products", "read_tally", "linear_group_tiles"}
WITHOUT_KERNEL |= {"attention_part_since", "causal_conv", "chosen_products"}


def call_of(name: str, seed: int = 0) -> list:
    torch.manual_seed(seed)
    return MAKERS[name](Maker(random.Random(f"{name} {seed}")))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MAKERS)
def test_opcheck_finds_nothing(name, seed):
    op, call = getattr(torch.ops.exkv, name).default, call_of(name, seed)
    checks = ["test_autograd_registration", "test_faketensor"]
    if not any(x.dtype is torch.float8_e4m3fn for x in tensors_of(call)):  # it can't be compared
        checks.append("test_schema")
    if name not in READ | BYTES:
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(op, call, test_utils=checks)


@pytest.mark.parametrize("name", sorted(set(MAKERS) - READ))
def test_an_op_traces_into_one_graph(name):
    torch._dynamo.reset()  # else it counts these as recompilations of one function
    op = getattr(torch.ops.exkv, name)
    traced = torch.compile(lambda *a: op(*a), backend="eager", fullgraph=True)
    calls = call_of(name), call_of(name)
    outs = tensors_of([traced(*calls[0])]), tensors_of([op(*calls[1])])
    if name in WRITERS or name.endswith("_"):
        outs = tuple(out + tensors_of(call) for out, call in zip(outs, calls, strict=True))
    assert all(same(a, b) for a, b in zip(*outs, strict=True)) and outs[0]


@needs_kernels
@pytest.mark.parametrize("name", sorted(set(MAKERS) - WITHOUT_KERNEL))
def test_the_dispatcher_picks_the_kernel(name):
    assert has_kernel(name, "cpu")
