"""Native ops for tests and for ``tests/gpu/check_kernels.py``, without pytest: setup.py's functions
and flags, the emulated CUDA ops, and the ops on a GPU for tensors in the host's memory."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


@cache
def _version(compiler: str | Path) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


def _digest(command: Sequence[str | Path], inputs: Iterable[Path]) -> str:
    """What tells a run of a compiler from others: its version, the command, and the files."""
    parts = [*map(str, command), _version(command[0]), torch.__version__]
    digest = hashlib.sha256("\0".join(parts).encode())
    for file in inputs:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _sources(*patterns: str) -> list[Path]:
    return [file for pattern in patterns for file in sorted((ROOT / "exkv_ext").glob(pattern))]


def cuda_headers() -> list[Path]:
    """Everything that a CUDA source may include."""
    return _sources("params/*.h", "bindings/*.h", "cuda/*.cuh", "cpu/half.inc", "cpu/rows.h")


def cpu_headers() -> list[Path]:
    """Everything that a CPU source may include."""
    return _sources("**/*.h", "**/*.inc")


def checked_once(
    command: Sequence[str | Path], inputs: Sequence[Path], output: Sequence[str | Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a compiler for its messages. Where the same compiler had nothing to say of the same
    command over the same files, it has nothing to say again, and isn't run."""
    stamp = ROOT / "build" / "checked" / _digest(command, inputs)
    if stamp.exists():
        return subprocess.CompletedProcess(command, 0, "", "")
    result = subprocess.run([*command, *output], cwd=ROOT, capture_output=True, text=True)
    if result.returncode == 0 and not result.stdout + result.stderr:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    return result


@contextlib.contextmanager
def _lock(file: Path, wait: bool) -> Iterator[bool]:
    """Whether this process alone may make the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield True
        except BlockingIOError:
            yield False


def build_once(folder: str, commands: Mapping[str, tuple[list[str], Sequence[Path]]]) -> list[Path]:
    """Run the compiler for each of these files, by their names, unless what the same command makes
    of the same inputs exists. Processes that need them at the same time share the work."""
    made = {}
    for name, (command, inputs) in commands.items():
        file = ROOT / "build" / folder / name
        made[file.with_stem(f"{file.stem}-{_digest(command, inputs)}")] = command
    for wait in (False, True):  # first what no other process is making
        for file, command in made.items():
            with _lock(file, wait) as ours:
                if ours and not file.exists():
                    draft = file.with_stem(f"{file.stem}.draft")  # an interrupted one is no file
                    subprocess.run([*command, "-o", str(draft)], check=True, cwd=ROOT)
                    draft.replace(file)
    return list(made)


@cache
def load_emulated_ops() -> Path:
    """Compile the CUDA sources for the CPU and register them as ``torch.ops.exkv_emulated.*``."""
    setup = setup_script()
    installed = Path(torch.__file__).parent
    compiler = [
        *(setup.find_cxx(), "-fPIC", "-DEXKV_CUDA_EMULATION", *setup.STABLE_ABI),
        *(setup.CXX_FLAGS + ["-O2", "-Werror", "-Wno-unknown-pragmas"]),
        "-U_FORTIFY_SOURCE",  # fibers jump between stacks, which it takes for a mistake
        *("-isystem", str(installed / "include"), f"-I{EMULATION}", "-x", "c++", "-c"),
    ]
    sources = [ROOT / file for file in setup.sources("cuda", ".cu")]
    sources.append(EMULATION / "emulated_ops.cpp")
    headers = [*cuda_headers(), *sorted(EMULATION.glob("*.*h"))]
    objects = build_once(
        "cuda_emulation",
        {f"{s.stem}.o": ([*compiler, str(s)], [s, *headers]) for s in sources},
    )
    libraries = [f"-L{installed / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    link = [setup.find_cxx(), "-shared", *map(str, objects), *libraries]
    (library,) = build_once("cuda_emulation", {"emulated.so": (link, [])})
    torch.ops.load_library(str(library))
    return library


#: Ops that write to their arguments, beside those whose names end in "_".
WRITERS = {"append_kv", "decode_attention", "causal_conv", "gated_delta", "ssd", "selective_scan"}


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
