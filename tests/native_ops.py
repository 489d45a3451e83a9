"""Native ops for tests and for ``tests/gpu/kernels.py``, without pytest: setup.py's functions and
flags, the emulated CUDA ops, and the ops on a GPU for tensors in the host's memory."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

ROOT = Path(__file__).resolve().parents[1]
EMULATION = ROOT / "tests" / "cuda_emulation"


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
