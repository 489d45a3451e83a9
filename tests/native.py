"""What tests of native code share: the backends that the same tests run on, instruction sets, and
programs that run with one. What needs no pytest is in ``native_ops.py``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from apart import run_apart
from native_ops import ROOT, OnCuda, load_emulated_ops, setup_script, tensors_of

import exkv_ext

__all__ = [
    "BACKENDS",
    "ISAS",
    "ROOT",
    "OnCuda",
    "assert_right_on",
    "each_isa",
    "emulated",
    "load_emulated_ops",
    "needs_cxx",
    "needs_kernels",
    "ops_of",
    "run_apart",
    "setup_script",
    "tensors_of",
]

#: For what only the CPU kernels promise.
needs_kernels = pytest.mark.skipif(
    not exkv_ext.loaded()["_C"], reason="exkv_ext._C isn't built (EXKV_BUILD=cpu builds it)"
)

#: Instruction sets of the CPU kernels; a processor that has one has those before it.
ISAS = ("portable", "avx2", "avx512", "avx512_bf16")


def each_isa(test: Callable[[str], None]) -> Callable[[str], None]:
    """Run a test with each of them, with one where `make test` takes samples."""
    return pytest.mark.sweep(1)(needs_kernels(pytest.mark.parametrize("isa", ISAS)(test)))


needs_cxx = pytest.mark.skipif(setup_script().find_cxx() is None, reason="no C++ compiler")


# Processes of their own -------------------------------------------------------------------------


def assert_right_on(isa: str, program: str) -> None:
    """Run a program of checks with the CPU kernels capped to an instruction set; skips the test
    where this processor has none such."""
    if ISAS.index(isa) > ISAS.index(best := exkv_ext.cpu_isa()):
        pytest.skip(f"this processor has no {isa}: its best is {best}")
    result = run_apart(f"{program}\nimport exkv_ext; print(exkv_ext.cpu_isa())", EXKV_CPU_ISA=isa)
    assert result.returncode == 0, (result.returncode, result.stderr)
    assert result.stdout.split() == [isa]


# Backends ---------------------------------------------------------------------------------------

#: The ways in which an op's kernels run. A test gets one of them by name, and its ops, which take
#: and give tensors in the host's memory, from :func:`ops_of`.
BACKENDS = ("cpu", "emulated", pytest.param("cuda", marks=pytest.mark.cuda))


def ops_of(backend: str, *, compiled: bool = True):
    """The ops of a backend; skips the test where it isn't built, or there is no such device.

    Args:
        compiled: whether the test is of kernels only; if not, references stand in on the CPU.
    """
    if backend == "cpu":
        if compiled and not exkv_ext.loaded()["_C"]:
            pytest.skip("exkv_ext._C isn't built (EXKV_BUILD=cpu builds it)")
        return torch.ops.exkv
    if backend == "emulated":
        if setup_script().find_cxx() is None:
            pytest.skip("no C++ compiler")
        load_emulated_ops()
        return torch.ops.exkv_emulated
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if not exkv_ext.loaded()["_cuda"]:
        pytest.skip("exkv_ext._cuda isn't built (EXKV_BUILD=cuda builds it)")
    return OnCuda()


def emulated(ops) -> bool:
    """Whether these are the emulated ops. Their threads take their time: a smaller case will do."""
    return ops is torch.ops.exkv_emulated
