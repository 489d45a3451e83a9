"""Invalid calls of the ops are refused or served: no crash, no read past a tensor's memory, no
uninitialized result. See ``hostile_calls.py``."""

from __future__ import annotations

import random

import pytest
import torch
from hostile_calls import MAKERS, WITHOUT_CUDA, Maker
from native import needs_cxx, needs_kernels, run_apart

from exkv.ops import REFERENCES

#: The ops with CUDA kernels, whose checks and loads the emulation runs.
EMULATED = sorted(set(MAKERS) - WITHOUT_CUDA)


def run_calls(
    names: list[str], calls: int, ops: str = "torch.ops.exkv", load: str = "", **env: str
) -> None:
    program = (
        f"import torch, hostile_calls\n{load}\nhostile_calls.run({names!r}, range({calls}), {ops})"
    )
    result = run_apart(program, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", **env)
    told = (result.stdout.split("\r")[-1], result.stderr[-2000:])
    assert result.returncode == 0 and "all came back" in result.stdout, told


def test_every_op_with_a_kernel_is_called():
    """Those of exkv.weights have none: they call the formats' own ops, and these."""
    assert set(MAKERS) == set(REFERENCES) - {"experts_of_formats", "linear_tiles"}


@needs_kernels
def test_cpu_kernels_serve_or_refuse_hostile_calls():
    run_calls(list(MAKERS), 80)


def test_references_serve_or_refuse_hostile_calls():
    run_calls(list(MAKERS), 25, EXKV_DISABLE_EXT="1")


@needs_cxx
def test_cuda_kernels_serve_or_refuse_hostile_calls():
    load = "import native; native.load_emulated_ops()"
    run_calls(EMULATED, 25, "torch.ops.exkv_emulated", load)


def test_a_read_past_a_tensor_ends_the_process():
    """Shows that the guard pages of the calls above work."""
    program = (
        "import ctypes, random, torch, hostile_calls as h\n"
        "x = h.Guarded(random.Random(0)).copy(torch.zeros(7))\n"
        "print(h.Guarded(random.Random(0)).copy(torch.arange(7)).tolist(), flush=True)\n"
        "ctypes.string_at(x.data_ptr() - 4096, 8192)"
    )
    result = run_apart(program)
    assert result.stdout.split("\n")[0] == "[0, 1, 2, 3, 4, 5, 6]"
    assert result.returncode < 0


#: Ops of one tensor, or perhaps of one.
ALONE = {"quantize_kv", "quantize_groups", "hadamard", "read_tally", "dequantize_packed"}
ALONE |= {"pack_codes", "pack_words", "pack_awq", "split_blocks", "sigmoid_", "activate_"}


@pytest.mark.parametrize("name", sorted(set(MAKERS) - ALONE))
def test_tensors_on_meta_beside_others_are_refused(name):
    """The dispatcher runs the fake as soon as one is there: its result was never computed."""
    torch.manual_seed(0)
    arguments = MAKERS[name](Maker(random.Random(0)))
    first = arguments[0]
    several = isinstance(first, list)
    arguments[0] = [first[0].to("meta"), *first[1:]] if several else first.to("meta")
    with pytest.raises((ValueError, RuntimeError), match="meta"):
        getattr(torch.ops.exkv, name)(*arguments)
