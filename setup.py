"""Builds the native modules of ``exkv_ext``; what is plain data is in ``pyproject.toml``.

``EXKV_BUILD`` says which: ``auto`` (the default) builds what the tools at hand allow, ``cpu`` and
``cuda`` insist, ``none`` builds nothing: exkv then runs on its PyTorch references, slowly.
``EXKV_WERROR=1``, which continuous integration sets, makes the C++ compiler's warnings errors.
The sources start at ``exkv_ext/bindings/cpu.cpp`` and ``exkv_ext/bindings/cuda.cpp``. The simulated
accelerator is built where it is first used (``exkv_ext/simulator.py``); ``exkv_ext/release/`` makes
what is released.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
EXT = Path("exkv_ext")

MODES = ("auto", "cpu", "cuda", "none")
TORCH_MINIMUM = (2, 11)

# Every compiler flag of the project is one of these; tests that compile import them from here.
CXX_FLAGS = [
    *("-std=c++17", "-O3", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"),
    "-Wno-unused-parameter",  # torch's headers have some
    "-ffp-contract=off",  # a kernel's arithmetic is its reference's
    "-fno-trapping-math",  # nobody reads the exception flags, and loops vectorise
]
if os.environ.get("EXKV_WERROR", "0") not in ("", "0"):
    CXX_FLAGS.append("-Werror")
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "--fmad=false",  # likewise; a kernel writes fmaf() where it may fuse
    *("-Werror", "all-warnings"),
    *("-Xptxas", "-warn-spills"),
    *("-Xfatbin", "-compress-all"),  # a seventh of the size
]
#: The libtorch stable ABI as torch 2.11 has it: one binary serves every later torch.
STABLE_ABI = [f"-DTORCH_TARGET_VERSION=0x{TORCH_MINIMUM[0]:02x}{TORCH_MINIMUM[1]:02x}{0:012x}"]
#: A compiler that links libstdc++ statically would otherwise export its copy, which then mixes with
#: torch's: a refusal crashed in the middle of its sentence.
LINK_FLAGS = ["-Wl,--exclude-libs,ALL"] if sys.platform.startswith("linux") else []
#: Compute capabilities that the CUDA kernels are built for where no GPU is there to ask: Turing,
#: A100, RTX 30, RTX 40, H100, B200, RTX 50. Older GPUs lack ldmatrix, and run the references.
CUDA_CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
CUDA_MODULE = "exkv_ext._cuda"
BUILD_LINE = "pip install --no-build-isolation --no-deps -e ."


def build_mode() -> str:
    """The value of EXKV_BUILD, checked."""
    mode = os.environ.get("EXKV_BUILD") or "auto"
    if mode not in MODES:
        sys.exit(f"exkv: EXKV_BUILD={mode!r} is unknown; say one of {', '.join(MODES)}.")
    return mode


def require_torch() -> None:
    """The modules are compiled against torch's headers, so it must be here."""
    if importlib.util.find_spec("torch") is None:
        what = "exkv" if (ROOT / "PKG-INFO").exists() else "-e ."  # an sdist, or a clone
        sys.exit(
            "exkv: torch isn't visible to the build. Type: pip install 'torch>=2.11' "
            f"'setuptools>=77' && pip install --no-build-isolation {what}"
        )
    import torch

    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if version < TORCH_MINIMUM:
        sys.exit(f"exkv: torch {torch.__version__} is too old; install torch>=2.11, then retry.")


def find_cxx() -> str | None:
    """The C++ compiler's path: $CXX, else c++ or g++."""
    names = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["c++", "g++"]
    return next(filter(None, map(shutil.which, names)), None)


def find_cuda_home() -> Path | None:
    """The CUDA toolkit's folder: the first candidate with both the compiler and the headers.

    An nvcc on PATH can be a wrapper in a folder of its own, so its parent is only a candidate.
    pip's packages (the extra ``build-cuda``) make a folder ``nvidia/cu13``.
    """
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):
        candidates += [Path(nvcc).parents[1], Path(nvcc).resolve().parents[1]]
    if nvidia := importlib.util.find_spec("nvidia"):
        folders = map(Path, nvidia.submodule_search_locations or ())
        candidates += [home for folder in folders for home in sorted(folder.glob("cu[0-9]*"))[::-1]]
    candidates += ["/usr/local/cuda", *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    for home in map(Path, filter(None, candidates)):
        if (home / "bin/nvcc").is_file() and (home / "include/cuda_runtime.h").is_file():
            return home
    return None


def cuda_runtime(home: Path) -> Path:
    """The toolkit's libcudart.so, which pip's packages have under its versioned name only."""
    folders = (home / "lib64", home / "lib")
    found = [file for folder in folders for file in sorted(folder.glob("libcudart.so*"))]
    if not found:
        sys.exit(f"exkv: {home} has nvcc, but no libcudart.so in lib64 or lib; install it whole.")
    return found[0]


def cuda_release(home: Path) -> str:
    """The toolkit's version as nvcc tells it, e.g. "13.0"."""
    told = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True)
    found = re.search(r"release (\d+\.\d+)", told.stdout)
    return found.group(1) if found else "unknown"


def known_capabilities(home: Path) -> set[tuple[int, int]]:
    """The compute capabilities that the toolkit's compiler can make code for."""
    listed = subprocess.run([home / "bin/nvcc", "--list-gpu-arch"], capture_output=True, text=True)
    digits = re.findall(r"compute_(\d+)(\d)\b", listed.stdout)
    return {(int(major), int(minor)) for major, minor in digits}


def gpus_here() -> list[tuple[int, int]]:
    """The compute capabilities of this machine's GPUs, as far as torch sees them."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]


def cuda_architectures(home: Path, gpus: list[tuple[int, int]]) -> str:
    """What TORCH_CUDA_ARCH_LIST is by default: code for the GPUs given, or without any for all of
    :data:`CUDA_CAPABILITIES`, as far as the toolkit knows them, and PTX of the last, which drivers
    compile for what is newer."""
    oldest = CUDA_CAPABILITIES[0]
    known = known_capabilities(home) or set(CUDA_CAPABILITIES)
    wanted = {gpu for gpu in gpus if gpu >= oldest} or set(CUDA_CAPABILITIES)
    chosen = sorted(wanted & known) or [max(known)]
    return ";".join(map(_dotted, chosen)) + "+PTX"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def sources(folder: str, *suffixes: str) -> list[str]:
    """Source files of one folder, relative to the root as setuptools wants them."""
    files = (ROOT / EXT / folder).glob("*")
    return sorted(str(f.relative_to(ROOT)) for f in files if f.suffix in suffixes)


def cpu_module():
    """exkv_ext._C: CPU kernels and their bindings."""
    from torch.utils.cpp_extension import CppExtension

    return CppExtension(
        "exkv_ext._C",
        [str(EXT / "bindings/cpu.cpp"), *sources("cpu", ".cpp")],
        extra_compile_args={"cxx": CXX_FLAGS + STABLE_ABI},
        extra_link_args=LINK_FLAGS,
        py_limited_api=True,
    )


def cuda_module(home: Path):
    """exkv_ext._cuda: CUDA kernels and their bindings. Links against a CPU build of torch too."""
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = str(home)  # torch itself looks for nvcc only in its CUDA builds
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", cuda_architectures(home, gpus_here()))
    # The current stream's declaration hides behind USE_CUDA in torch's headers.
    flags = [*STABLE_ABI, "-DUSE_CUDA"]
    return cpp_extension.CppExtension(
        CUDA_MODULE,
        [str(EXT / "bindings/cuda.cpp"), *sources("cuda", ".cu")],
        include_dirs=[str(home / "include")],
        extra_compile_args={"cxx": CXX_FLAGS + flags, "nvcc": NVCC_FLAGS + flags},
        # Found at run time by its name, without a path: torch has loaded it by then.
        extra_link_args=[*LINK_FLAGS, "-Wl,--no-as-needed", "-ltorch", str(cuda_runtime(home))],
        py_limited_api=True,
    )


def cuda_home_for(mode: str) -> Path | None:
    """The toolkit to build exkv_ext._cuda with, or None to leave it out; never guesses loudly."""
    import torch

    home = find_cuda_home()
    if mode == "cuda":
        if home is None:
            sys.exit(
                "exkv: EXKV_BUILD=cuda needs the CUDA toolkit, and no folder with bin/nvcc and "
                "include/cuda_runtime.h was found. Type: pip install 'cuda-toolkit[cccl,nvcc]<14', "
                "or point CUDA_HOME to the one you have, or say EXKV_BUILD=cpu."
            )
        return home
    if mode != "auto" or torch.version.cuda is None or home is None:
        return None
    release = cuda_release(home)
    if release.split(".")[0] != torch.version.cuda.split(".")[0]:
        print(
            f"exkv: no CUDA kernels: {home} is CUDA {release} and torch is built for "
            f"{torch.version.cuda}; point CUDA_HOME to a toolkit of that major version.",
            file=sys.stderr,
        )
        return None
    gpus = gpus_here()
    if gpus and max(gpus) < CUDA_CAPABILITIES[0]:
        print(
            "exkv: no CUDA kernels: they need compute capability "
            f"{_dotted(CUDA_CAPABILITIES[0])}, and the GPUs here have "
            f"{', '.join(map(_dotted, sorted(set(gpus))))}; exkv runs on torch's own kernels.",
            file=sys.stderr,
        )
        return None
    return home


def modules(mode: str) -> list:
    """The extension modules that this mode asks for and this machine can build."""
    if mode == "none":
        return []
    require_torch()
    if find_cxx() is None:
        message = "exkv: no C++ compiler found (c++, g++ or $CXX)"
        if mode != "auto":
            sys.exit(f"{message}, and EXKV_BUILD={mode} needs one.")
        print(
            f"{message}: no native kernels, exkv will be many times slower. Install one, then "
            f"type: EXKV_BUILD=cpu {BUILD_LINE}",
            file=sys.stderr,
        )
        return []
    built = [cpu_module()]
    if home := cuda_home_for(mode):
        built.append(cuda_module(home))
    return built


def report_missing_kernels(built: list[str]) -> None:
    """Say at the end of a build that a GPU of this machine has no kernels, and what that costs."""
    if CUDA_MODULE in built or importlib.util.find_spec("torch") is None:
        return
    import torch

    served = sorted({gpu for gpu in gpus_here() if gpu >= CUDA_CAPABILITIES[0]})
    if not served or torch.version.cuda is None:
        return
    print(
        "exkv: built without CUDA kernels, and this machine has a GPU of compute capability "
        f"{', '.join(map(_dotted, served))}: PyTorch references will serve all ops there, many "
        "times slower. An int4 matrix of 14,336 x 4,096 takes 32 launches instead of 1, a token of "
        "an 8B model of int4 some 5,200 instead of 420. To mend it, install CUDA "
        f"{torch.version.cuda.split('.')[0]}'s toolkit, then type: EXKV_BUILD=cuda {BUILD_LINE}",
        file=sys.stderr,
    )


def build_command(mode: str):
    """torch's build_ext, with a build folder that lasts: a second build compiles only changes.

    Where CUDA kernels were not asked for (``auto``), a build of them that fails is reported, and
    the other modules are built all the same.
    """
    import torch
    from torch.utils.cpp_extension import BuildExtension

    class BuildExt(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            python = f"cp{sys.version_info.major}{sys.version_info.minor}"
            self.build_temp = str(ROOT / "build" / f"{python}-torch-{torch.__version__}")

        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except Exception as reason:
                others = [module for module in self.extensions if module.name != CUDA_MODULE]
                if mode != "auto" or len(others) == len(self.extensions):
                    raise
                print(
                    f"exkv: no CUDA kernels: their build failed ({_first_line(reason)}); the rest "
                    "is built without them. EXKV_BUILD=cuda shows the whole error.",
                    file=sys.stderr,
                )
                self.extensions = self.distribution.ext_modules = others
                super().build_extensions()

    return BuildExt


def _first_line(reason: Exception) -> str:
    return (str(reason).strip() or type(reason).__name__).splitlines()[0]


if __name__ == "__main__":
    build = build_mode()
    # An sdist takes neither torch nor a compiler; before pip builds anything, it asks for egg_info.
    only_sources = {"sdist", "egg_info"} & set(sys.argv) and "bdist_wheel" not in sys.argv
    ext_modules = [] if only_sources else modules(build)
    done = setup(
        ext_modules=ext_modules,
        cmdclass={"build_ext": build_command(build)} if ext_modules else {},
        # The modules go through stable ABIs, torch's and Python's: one wheel for all versions.
        options={"bdist_wheel": {"py_limited_api": "cp310"}} if ext_modules else {},
    )
    if done.have_run.get("build_py"):
        report_missing_kernels([module.name for module in done.ext_modules or []])
