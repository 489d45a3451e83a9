"""Finds and loads exkv's native modules; the package works without any of them, slowly.

Loading ``_C`` (CPU kernels) or ``_cuda`` registers kernels for ops whose schemas are in
``exkv.ops``; ``_sim`` (the simulated accelerator) is ``exkv_ext/simulator.py``'s. Reading goes
on at ``bindings/cpu.cpp``, then ``cpu/``, and at ``bindings/cuda.cpp``, then ``cuda/``. How they
are built: ``setup.py``.

``EXKV_DISABLE_EXT=1`` leaves the kernels out; ``EXKV_CPU_ISA`` (portable, avx2, avx512,
avx512_bf16) caps the instruction set of the CPU kernels.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import warnings
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = [
    "Missing",
    "activations",
    "cpu_isa",
    "disabled",
    "find",
    "kv_formats",
    "load",
    "loaded",
    "missing",
]

_FOLDER = Path(__file__).resolve().parent
_MODULES = ("_C", "_cuda", "_sim")
#: What EXKV_BUILD insists on each with.
_BUILDS = {"_C": "cpu", "_cuda": "cuda"}
_handles: dict[str, ctypes.CDLL] = {}
#: Major versions of CUDA for which there is a package of kernels, by ``release/``.
_PACKAGED_CUDA = ("13",)
#: The compute capability that the CUDA kernels need, as ``setup.CUDA_CAPABILITIES`` begins.
OLDEST_GPU = (7, 5)


class Missing(NamedTuple):
    """Why a device has no kernels, and the line to type that mends it; "" where none does."""

    why: str
    remedy: str


def disabled() -> bool:
    """Whether EXKV_DISABLE_EXT asks to leave the native modules out."""
    return os.environ.get("EXKV_DISABLE_EXT", "0") not in ("", "0")


def find(name: str) -> Path | None:
    """The file of a compiled module such as ``_C``, or None where it isn't built. CUDA kernels may
    also lie in a package of their own, ``exkv-cuda13`` for CUDA 13."""
    folders = [_FOLDER]
    if name == "_cuda":
        folders += _cuda_package()
    files = (folder / f"{name}{suffix}" for folder in folders for suffix in EXTENSION_SUFFIXES)
    return next((file for file in files if file.is_file()), None)


def _cuda_package() -> list[Path]:
    """The folder of the package with kernels for torch's CUDA: none where it isn't installed, nor,
    with a warning, where it belongs to another version of exkv."""
    spec = importlib.util.find_spec(f"exkv_cuda{_cuda_major()}")
    if spec is None:
        return []
    name = f"exkv-cuda{_cuda_major()}"
    ours, theirs = _version("exkv"), _version(name)
    if ours != theirs:
        warnings.warn(
            f"exkv {ours} runs without the CUDA kernels of {name} {theirs}, which are another "
            f"version's: pip install {name}=={ours}",
            RuntimeWarning,
            stacklevel=3,
        )
        return []
    return list(map(Path, spec.submodule_search_locations or ()))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def load(name: str) -> bool:
    """Load a compiled module once; False, with a warning, where it is broken; False if absent."""
    if name in _handles:
        return True
    if disabled() or (path := find(name)) is None:
        return False
    try:
        # Not an import: the modules hold no Python objects, only registrations.
        _handles[name] = ctypes.CDLL(str(path))
    except OSError as reason:
        warnings.warn(
            f"exkv runs without its native module {path.name}, which does not load: {reason}. "
            f"It was likely built for another torch than {torch.__version__}; build it again: "
            f"{_build_line()}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def loaded() -> dict[str, bool]:
    """Which native modules this process has loaded."""
    return {name: name in _handles or f"exkv_ext.{name}" in sys.modules for name in _MODULES}


def missing(device: torch.device) -> Missing | None:
    """Why kernels don't serve a device of this machine; None where they do. Simulated devices
    compute by the CPU's."""
    if device.type == "xpu" or (device.type == "cuda" and torch.version.hip):
        return Missing("exkv has kernels for CUDA and for CPUs only", "")
    on_gpu = device.type == "cuda"
    name = "_cuda" if on_gpu else "_C"
    if name in _handles:
        return _missing_code(device) if on_gpu else None
    if disabled():
        return Missing("EXKV_DISABLE_EXT leaves them out", "unset EXKV_DISABLE_EXT")
    if find(name) is not None:
        return Missing(f"exkv_ext.{name} does not load", _remedy(name))
    packaged = on_gpu and not _is_clone() and _cuda_major() in _PACKAGED_CUDA
    remedy = f"pip install exkv-cuda{_cuda_major()}" if packaged else _remedy(name)
    return Missing(f"exkv_ext.{name} isn't built", remedy)


def _remedy(name: str) -> str:
    return f"EXKV_BUILD={_BUILDS[name]} {_build_line()}"


def _missing_code(device: torch.device) -> Missing | None:
    """The same of a GPU where the CUDA kernels are loaded, of which the driver may take none."""
    has_code = _handles["_cuda"].exkv_cuda_has_code
    has_code.restype = ctypes.c_bool
    if has_code(device.index or 0):
        return None
    capability = torch.cuda.get_device_capability(device)
    number = f"{capability[0]}.{capability[1]}"
    built = ", ".join(f"{major}.{minor}" for major, minor in cuda_architectures())
    why = f"exkv_ext._cuda is built for compute capability {built}, and this is {number}"
    if capability < OLDEST_GPU:
        oldest = ".".join(map(str, OLDEST_GPU))
        return Missing(f"{why}, where kernels are made from {oldest} on", "")
    return Missing(why, f"TORCH_CUDA_ARCH_LIST={number} EXKV_BUILD=cuda {_build_line()}")


def cuda_architectures() -> list[tuple[int, int]]:
    """The compute capabilities that the CUDA kernels, which are loaded, were built for."""
    numbers = _text("_cuda", "exkv_cuda_architectures").split(",")
    return [divmod(int(number) // 10, 10) for number in numbers]


def _build_line() -> str:
    """What builds the modules: of a clone where it lies, else of the source that PyPI has."""
    what = "-e ." if _is_clone() else "--force-reinstall --no-binary exkv exkv"
    return f"pip install --no-build-isolation --no-deps {what}"


def _is_clone() -> bool:
    return (_FOLDER.parent / "setup.py").is_file()


def _cuda_major() -> str:
    """The major version of the CUDA that torch is built for, "None" for none."""
    return str(torch.version.cuda).split(".")[0]


def _text(module: str, name: str) -> str:
    """What a function of a loaded module tells."""
    tell = getattr(_handles[module], name)
    tell.restype = ctypes.c_char_p
    return tell().decode()


def cpu_isa() -> str | None:
    """The instruction set that the CPU kernels use here, or None where they aren't loaded."""
    if "_C" not in _handles:
        return None
    return _text("_C", "exkv_cpu_isa")


def activations() -> tuple[str, ...] | None:
    """The activations that bound runs know, by config.json's names. None where the CPU kernels
    aren't loaded."""
    if "_C" not in _handles:
        return None
    return tuple(_text("_C", "exkv_activations").splitlines())


def kv_formats() -> dict[str, tuple[int, int, int]] | None:
    """What the CPU kernels know of the formats of keys and values, by their names: bits of a value
    (0 for floats), tensors, tokens encoded together. None where they aren't loaded."""
    if "_C" not in _handles:
        return None
    lines = (line.split() for line in _text("_C", "exkv_kv_formats").splitlines())
    return {name: (int(bits), int(tensors), int(tokens)) for name, bits, tensors, tokens in lines}


load("_C")
# A CPU build of torch lacks what the CUDA kernels link to, though it can compile them.
if torch.version.cuda is not None:
    load("_cuda")
