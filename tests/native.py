"""What tests of native code share: setup.py's functions and flags, and the emulated CUDA ops."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

import exkv_ext

ROOT = Path(__file__).resolve().parents[1]
EMULATION = ROOT / "tests" / "cuda_emulation"
#: For what only the CPU kernels promise.
needs_kernels = pytest.mark.skipif(
    not exkv_ext.loaded()["_C"], reason="exkv_ext._C isn't built (EXKV_BUILD=cpu builds it)"
)


@cache
def setup_script() -> ModuleType:
    """setup.py, imported: running it is guarded by ``__main__``."""
    spec = importlib.util.spec_from_file_location("exkv_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
        *(setup.CXX_FLAGS + ["-O1", "-Werror"]),
        *("-isystem", str(installed / "include"), f"-I{EMULATION}"),
        *("-x", "c++", *map(str, kernels), str(EMULATION / "emulated_ops.cpp"), "-x", "none"),
        *(f"-L{installed / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"),
    ]
    headers = ("*.h", "cuda/*.cu*", "cpu/half.inc")
    inputs = [file for pattern in headers for file in sorted((ROOT / "exkv_ext").glob(pattern))]
    library = _build(command, inputs + sorted(EMULATION.glob("*.[ch]*")), "cuda_emulation")
    torch.ops.load_library(str(library))
    return library
