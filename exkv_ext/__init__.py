"""Finds and loads exkv's native modules; the package works without any of them, slowly.

Loading ``_C`` (CPU kernels) or ``_cuda`` registers kernels for ops whose schemas are in
``exkv.ops``; ``_sim`` (the simulated accelerator) is imported by ``exkv.sim`` alone. Reading goes
on at ``bindings/cpu.cpp``, then ``cpu/``, and at ``bindings/cuda.cpp``, then ``cuda/``. How they
are built: ``setup.py``.

``EXKV_DISABLE_EXT=1`` leaves the kernels out; ``EXKV_CPU_ISA`` (portable, avx2, avx512,
avx512_bf16) caps the instruction set of the CPU kernels.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

__all__ = ["activations", "cpu_isa", "disabled", "find", "kv_formats", "load", "loaded"]

_FOLDER = Path(__file__).resolve().parent
_MODULES = ("_C", "_cuda", "_sim")
_handles: dict[str, ctypes.CDLL] = {}


def disabled() -> bool:
    """Whether EXKV_DISABLE_EXT asks to leave the native modules out."""
    return os.environ.get("EXKV_DISABLE_EXT", "0") not in ("", "0")


def find(name: str) -> Path | None:
    """The file of a compiled module such as ``_C``, or None where it isn't built."""
    files = (_FOLDER / f"{name}{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((file for file in files if file.is_file()), None)


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
            "pip install --no-build-isolation --no-deps -e .",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def loaded() -> dict[str, bool]:
    """Which native modules this process has loaded."""
    return {name: name in _handles or f"exkv_ext.{name}" in sys.modules for name in _MODULES}


def cpu_isa() -> str | None:
    """The instruction set that the CPU kernels use here, or None where they aren't loaded."""
    if "_C" not in _handles:
        return None
    tell = _handles["_C"].exkv_cpu_isa
    tell.restype = ctypes.c_char_p
    return tell().decode()


def activations() -> tuple[str, ...] | None:
    """The activations that bound runs know, by config.json's names. None where the CPU kernels
    aren't loaded."""
    if "_C" not in _handles:
        return None
    tell = _handles["_C"].exkv_activations
    tell.restype = ctypes.c_char_p
    return tuple(tell().decode().splitlines())


def kv_formats() -> dict[str, tuple[int, int, int]] | None:
    """What the CPU kernels know of the formats of keys and values, by their names: bits of a value
    (0 for floats), tensors, tokens encoded together. None where they aren't loaded."""
    if "_C" not in _handles:
        return None
    tell = _handles["_C"].exkv_kv_formats
    tell.restype = ctypes.c_char_p
    lines = (line.split() for line in tell().decode().splitlines())
    return {name: (int(bits), int(tensors), int(tokens)) for name, bits, tensors, tokens in lines}


load("_C")
# A CPU build of torch lacks what the CUDA kernels link to, though it can compile them.
if torch.version.cuda is not None:
    load("_cuda")
