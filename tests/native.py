"""What tests of native code share: setup.py's functions and flags, the emulated CUDA ops, and the
backends that the same tests run on."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import exkv_ext

ROOT = Path(__file__).resolve().parents[1]
EMULATION = ROOT / "tests" / "cuda_emulation"
#: For what only the CPU kernels promise.
needs_kernels = pytest.mark.skipif(
    not exkv_ext.loaded()["_C"], reason="exkv_ext._C isn't built (EXKV_BUILD=cpu builds it)"
)

#: Instruction sets of the CPU kernels; a processor that has one has those before it.
ISAS = ("portable", "avx2", "avx512", "avx512_bf16")
each_isa = pytest.mark.parametrize("isa", ISAS)


@cache
def setup_script() -> ModuleType:
    """setup.py, imported: running it is guarded by ``__main__``."""
    spec = importlib.util.spec_from_file_location("exkv_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


needs_cxx = pytest.mark.skipif(setup_script().find_cxx() is None, reason="no C++ compiler")


def _build(command: list[str], inputs: list[Path], stem: str) -> Path:
    """Run the compiler unless a library of the same command and input files stands already."""
    digest = hashlib.sha256(" ".join([*command, torch.__version__]).encode())
    for file in inputs:
        digest.update(file.read_bytes())
    library = ROOT / "build" / stem / f"{digest.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Under a name of our own first: another process may be building or loading the same.
        draft = library.with_suffix(f".{os.getpid()}.so")
        subprocess.run([*command, "-o", str(draft)], check=True, cwd=ROOT)
        draft.replace(library)
    return library


@cache
def load_emulated_ops() -> Path:
    """Compile the CUDA sources for the CPU and register them as ``torch.ops.exkv_emulated.*``."""
    setup = setup_script()
    installed = Path(torch.__file__).parent
    kernels = [ROOT / file for file in setup.sources("cuda", ".cu")]
    command = [
        *(setup.find_cxx(), "-shared", "-fPIC", "-DEXKV_CUDA_EMULATION", *setup.STABLE_ABI),
        *(setup.CXX_FLAGS + ["-O2", "-Werror", "-Wno-unknown-pragmas"]),
        "-U_FORTIFY_SOURCE",  # fibers jump between stacks, which it takes for a mistake
        *("-isystem", str(installed / "include"), f"-I{EMULATION}"),
        *("-x", "c++", *map(str, kernels), str(EMULATION / "emulated_ops.cpp"), "-x", "none"),
        *(f"-L{installed / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"),
    ]
    headers = ("params/*.h", "bindings/*.h", "cuda/*.cu*", "cpu/half.inc", "cpu/rows.h")
    inputs = [file for pattern in headers for file in sorted((ROOT / "exkv_ext").glob(pattern))]
    library = _build(command, inputs + sorted(EMULATION.glob("*.[ch]*")), "cuda_emulation")
    torch.ops.load_library(str(library))
    return library


# Processes of their own -------------------------------------------------------------------------


def run_apart(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python text, which finds exkv and the tests' modules, with these environment variables
    beside this process's own."""
    found = f"import sys\nsys.path[:0] = {[str(ROOT / 'tests'), str(ROOT)]!r}\n"
    return subprocess.run(
        [sys.executable, "-c", found + program],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


def assert_right_on(isa: str, program: str) -> None:
    """Run a program of checks with the CPU kernels capped to an instruction set: the best that this
    process has, where that is less."""
    isa = min(isa, exkv_ext.cpu_isa(), key=ISAS.index)
    result = run_apart(f"{program}\nimport exkv_ext; print(exkv_ext.cpu_isa())", EXKV_CPU_ISA=isa)
    assert result.returncode == 0, (result.returncode, result.stderr)
    assert result.stdout.split() == [isa]


# Backends ---------------------------------------------------------------------------------------

#: The ways in which an op's kernels run. A test gets one of them by name, and its ops, which take
#: and give tensors in the host's memory, from :func:`ops_of`.
BACKENDS = ("cpu", "emulated", pytest.param("cuda", marks=pytest.mark.cuda))


#: Ops that write to their arguments, beside those whose names end in "_".
WRITERS = {"append_kv"}


def tensors_of(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class OnCuda:
    """The ops of exkv on a GPU. Tensors keep their strides, their place in their storage, and the
    storage that they share with others."""

    def __getattr__(self, name: str):
        op = getattr(torch.ops.exkv, name)

        def call(*args):
            storages: dict[int, torch.UntypedStorage] = {}
            there = tree_map_only(torch.Tensor, lambda x: self._there(x, storages), args)
            out = tree_map_only(torch.Tensor, torch.Tensor.cpu, op(*there))
            if name.endswith("_") or name in WRITERS:  # back with all that it may have touched
                for here, moved in zip(tensors_of(args), tensors_of(there), strict=True):
                    here.untyped_storage().copy_(moved.untyped_storage())
            return out

        return call

    @staticmethod
    def _there(x: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        here = x.untyped_storage()
        if here._cdata not in storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(here)
            storages[here._cdata] = whole.to("cuda").untyped_storage()
        there = torch.empty(0, dtype=x.dtype, device="cuda")
        return there.set_(storages[here._cdata], x.storage_offset(), x.shape, x.stride())


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
