"""Compiles exkv's native modules against the headers of several releases of torch, without
installing any: what pyproject.toml promises of them is tried before a release.

``python tests/gpu/build_matrix.py [VERSION ...]``, by default the oldest that is supported and the
newest that pip finds. Wheels come from pip as it is set up here (some hundred MB each). Only their
``torch/include`` is kept, in ``build/headers/VERSION``: a second run downloads nothing.
Everything that includes torch is compiled: both bindings through the stable ABI, and the simulated
accelerator. CUDA sources include none of it; where the toolkit is here, they are compiled once, for
every architecture of setup.py. Exits 1 if anything failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # so that it runs as a file

from native_ops import setup_script  # noqa: E402

setup = setup_script()
HEADERS = ROOT / "build" / "headers"
NEWEST = "newest"


def versions_asked() -> list[str]:
    parser = argparse.ArgumentParser(description="Compile against the headers of torch releases.")
    oldest = ".".join(map(str, setup.TORCH_MINIMUM)) + ".0"
    parser.add_argument("versions", nargs="*", default=[oldest, NEWEST], metavar="VERSION")
    return parser.parse_args().versions


def headers_of(version: str) -> tuple[str, Path]:
    """The version's full name and its include folder, downloaded unless it is there."""
    folder = HEADERS / version
    if version != NEWEST and folder.is_dir():
        return version, folder
    with tempfile.TemporaryDirectory() as download:
        wanted = "torch" if version == NEWEST else f"torch=={version}"
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", download]
        subprocess.run([*pip, "--only-binary=:all:", wanted], check=True)
        (wheel,) = Path(download).glob("*.whl")
        name = wheel.name.split("-")[1]
        unpack(wheel, HEADERS / name)
    return name, HEADERS / name


def unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        headers = [name for name in archive.namelist() if name.startswith("torch/include/")]
        archive.extractall(folder, headers)


def compile_with(headers: Path, flags: list[str], source: str) -> bool:
    """Whether a source compiles; the compiler says itself what is wrong."""
    include = headers / "torch" / "include"
    folders = [include, include / "torch" / "csrc" / "api" / "include"]
    folders.append(Path(sysconfig.get_paths()["include"]))
    if home := setup.find_cuda_home():
        folders.append(home / "include")
    includes = [part for folder in folders for part in ("-isystem", str(folder))]
    command = [setup.find_cxx(), *flags, *includes, "-O0", "-fPIC", "-Werror", "-c", source]
    return subprocess.run([*command, "-o", "/dev/null"], cwd=ROOT).returncode == 0


def try_version(version: str) -> dict[str, bool]:
    """Source -> whether it compiles against this version's headers."""
    name, headers = headers_of(version)
    stable = [*setup.CXX_FLAGS, *setup.STABLE_ABI]
    tried = {"exkv_ext/bindings/cpu.cpp": stable}
    if setup.find_cuda_home() is not None:
        tried["exkv_ext/bindings/cuda.cpp"] = [*stable, "-DUSE_CUDA"]
    tried |= {source: ["-std=c++20"] for source in setup.sources("sim", ".cpp")}
    results = {source: compile_with(headers, flags, source) for source, flags in tried.items()}
    for source, right in results.items():
        print(f"torch {name}  {'ok    ' if right else 'FAILED'}  {source}", flush=True)
    return results


def try_cuda_sources() -> dict[str, bool]:
    """The same for CUDA sources, for every architecture at once; spills are errors."""
    home = setup.find_cuda_home()
    if home is None:
        print("no CUDA toolkit here: the CUDA sources are not compiled")
        return {}
    targets = []
    for name in setup.cuda_architectures(home, []).removesuffix("+PTX").split(";"):
        number = name.replace(".", "")
        targets.append(f"-gencode=arch=compute_{number},code=sm_{number}")
    targets.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    results = {}
    for source in setup.sources("cuda", ".cu"):
        command = [home / "bin" / "nvcc", *setup.NVCC_FLAGS, *targets, "-Xcompiler", "-fPIC"]
        done = subprocess.run([*command, "-c", source, "-o", "/dev/null"], cwd=ROOT)
        results[source] = done.returncode == 0
        print(f"nvcc  {'ok    ' if results[source] else 'FAILED'}  {source}", flush=True)
    return results


if __name__ == "__main__":
    found = [try_version(version) for version in versions_asked()]
    found.append(try_cuda_sources())
    sys.exit(not all(right for results in found for right in results.values()))
