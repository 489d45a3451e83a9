"""Building: EXKV_BUILD's values, what a user reads when something is missing, and the compilers'
warnings as errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import native_ops
import pytest
import torch
from native import ROOT, setup_script
from native_ops import checked_once, cpu_headers, cuda_headers
from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

import exkv
import exkv_ext
from exkv_ext import simulator

setup = setup_script()


def run_setup(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """setup.py in a process of its own."""
    return subprocess.run(
        [sys.executable, "setup.py", *arguments],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def hide_torch(folder: Path) -> str:
    """A PYTHONPATH that makes torch as absent as an isolated build finds it."""
    (folder / "sitecustomize.py").write_text(
        "import sys, importlib.abc\n"
        "class Hide(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch':\n"
        "            raise ModuleNotFoundError(name)\n"
        "import importlib.util\n"
        "find_spec = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'torch' else find_spec(n, *a)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    return str(folder)


def test_an_unknown_mode_is_refused_with_the_known_ones():
    result = run_setup("--version", EXKV_BUILD="gpu")
    assert result.returncode != 0
    assert "EXKV_BUILD='gpu' is unknown; say one of auto, cpu, cuda, none." in result.stderr


def test_an_isolated_build_says_what_to_type(tmp_path):
    result = run_setup("--version", EXKV_BUILD="auto", PYTHONPATH=hide_torch(tmp_path))
    assert result.returncode != 0
    assert "&& pip install --no-build-isolation -e ." in result.stderr
    assert "Traceback" not in result.stderr


def test_mode_none_needs_no_torch(tmp_path):
    result = run_setup("--version", EXKV_BUILD="none", PYTHONPATH=hide_torch(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [exkv.__version__]


def test_the_command_says_the_version():
    result = subprocess.run(
        [sys.executable, "-m", "exkv", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.stdout.split() == ["exkv", exkv.__version__], result.stderr


def test_mode_none_builds_nothing():
    assert setup.modules("none") == []


def test_an_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    with pytest.raises(SystemExit, match=r"torch 2.10.1\+cu128 is too old; install torch>=2.11"):
        setup.require_torch()


def names(modules: list) -> list[str]:
    return [module.name for module in modules]


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A folder that looks like CUDA 13.0, and a torch that was built for CUDA 13."""
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    (tmp_path / "bin").mkdir()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudart.so.13").touch()  # as pip's packages have it
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(setup, "find_cxx", lambda: "g++")
    return tmp_path


def test_auto_builds_cuda_kernels_where_torch_and_toolkit_match(toolkit):
    assert "exkv_ext._cuda" in names(setup.modules("auto"))
    assert "exkv_ext._cuda" not in names(setup.modules("cpu"))


def test_auto_says_why_it_leaves_cuda_kernels_out(toolkit, monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "exkv_ext._cuda" not in names(setup.modules("auto"))
    assert "is CUDA 13.0 and torch is built for 12.8" in capsys.readouterr().err


def test_a_cpu_torch_gets_cuda_kernels_only_on_demand(toolkit, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert names(setup.modules("auto"))[0] == "exkv_ext._C"
    assert "exkv_ext._cuda" not in names(setup.modules("auto"))
    assert "exkv_ext._cuda" in names(setup.modules("cuda"))


def test_mode_cuda_without_a_toolkit_says_what_to_do(monkeypatch):
    monkeypatch.setattr(setup, "find_cuda_home", lambda: None)
    with pytest.raises(SystemExit, match="needs the CUDA toolkit.*CUDA_HOME.*EXKV_BUILD=cpu"):
        setup.cuda_home_for("cuda")


@pytest.mark.parametrize(
    "listed, gpus, expected",
    [
        ("75 80 86 87 89 90 100 103 120 121", [], "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"),
        ("50 61 75 80 86 89 90", [], "7.5;8.0;8.6;8.9;9.0+PTX"),
        ("75 80 86 90 120", [(8, 6), (6, 1), (8, 6)], "8.6+PTX"),
        ("75 80 86 90", [(12, 0)], "9.0+PTX"),  # its driver makes code of the PTX
    ],
)
def test_kernels_are_made_for_what_the_toolkit_knows(toolkit, listed, gpus, expected):
    """For the GPUs that are here, without older ones, or for all; and PTX for what is newer."""
    names = "\\n".join(f"compute_{number}" for number in listed.split())
    (toolkit / "bin" / "nvcc").write_text(f"#!/bin/sh\nprintf '{names}\\n'\n")
    assert setup.cuda_architectures(toolkit, gpus) == expected


def test_auto_leaves_cuda_kernels_out_where_no_gpu_can_run_them(toolkit, monkeypatch, capsys):
    monkeypatch.setattr(setup, "gpus_here", lambda: [(6, 1)])
    assert "exkv_ext._cuda" not in names(setup.modules("auto"))
    assert "they need compute capability 7.5, and the GPUs here have 6.1" in capsys.readouterr().err
    monkeypatch.setattr(setup, "gpus_here", lambda: [(6, 1), (8, 6)])
    assert "exkv_ext._cuda" in names(setup.modules("auto"))


def build_beside_a_broken_cuda_module(mode: str, folder: Path) -> list[str]:
    """Run the build of a module that compiles and of a CUDA module that doesn't; the names of what
    was built."""
    from setuptools import Distribution, Extension

    (folder / "right.cpp").write_text("int exkv_right() { return 0; }\n")
    (folder / "broken.cpp").write_text("this is no C++\n")
    modules = [
        Extension("right", [str(folder / "right.cpp")]),
        Extension(setup.CUDA_MODULE, [str(folder / "broken.cpp")]),
    ]
    command = setup.build_command(mode)(Distribution({"ext_modules": modules}))
    command.ensure_finalized()
    command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "temp")
    command.run()
    return sorted(file.name.split(".")[0] for file in (folder / "lib").rglob("*.so"))


@pytest.mark.skipif(setup.find_cxx() is None, reason="no C++ compiler")
def test_auto_goes_on_without_cuda_kernels_that_do_not_build(tmp_path, capfd):
    assert build_beside_a_broken_cuda_module("auto", tmp_path) == ["right"]
    assert "exkv: no CUDA kernels: their build failed" in capfd.readouterr().err
    with pytest.raises(Exception, match="Error compiling objects|command .* failed"):
        build_beside_a_broken_cuda_module("cuda", tmp_path)


def test_a_missing_compiler_stops_only_a_build_that_was_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(setup, "find_cxx", lambda: None)
    assert setup.modules("auto") == []
    assert "no C++ compiler found" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="EXKV_BUILD=cpu needs one"):
        setup.modules("cpu")


def test_an_nvcc_wrapper_on_path_is_no_toolkit(toolkit, tmp_path, monkeypatch):
    wrapper = tmp_path / "elsewhere" / "bin"
    wrapper.mkdir(parents=True)
    (wrapper / "nvcc").write_text("#!/bin/sh\n")
    (wrapper / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(wrapper), prepend=os.pathsep)
    assert setup.find_cuda_home() == toolkit
    monkeypatch.delenv("CUDA_HOME")
    assert setup.find_cuda_home() != wrapper.parent


def test_the_toolkit_of_pips_packages_is_found(toolkit, monkeypatch):
    """Without nvcc on PATH: it is in site-packages, and libcudart's name has a version."""
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", "")
    home = toolkit / "site-packages" / "nvidia" / "cu13"
    home.mkdir(parents=True)
    for folder in ("bin", "include", "lib"):
        (toolkit / folder).rename(home / folder)
    monkeypatch.syspath_prepend(toolkit / "site-packages")
    assert setup.find_cuda_home() == home
    assert setup.cuda_module(home).extra_link_args[-1] == str(home / "lib" / "libcudart.so.13")


def test_a_toolkit_without_its_runtime_is_named(toolkit):
    (toolkit / "lib" / "libcudart.so.13").unlink()
    with pytest.raises(SystemExit, match=f"{toolkit} has nvcc, but no libcudart.so"):
        setup.cuda_module(toolkit)


@pytest.mark.sweep(2)
@pytest.mark.skipif(setup.find_cuda_home() is None, reason="no CUDA toolkit (nvcc) here")
@pytest.mark.parametrize("age", ["oldest", "newest"])
@pytest.mark.parametrize("source", setup.sources("cuda", ".cu"))
def test_cuda_sources_compile_for_the_oldest_and_the_newest_gpus_without_a_warning(
    source, age, tmp_path
):
    """What one can't do, the oldest can't: every kernel, hardly optimised. Where registers spill,
    they do on the newest: as it is built, but of kernels of the same code the hungriest.
    ``tests/gpu/build_matrix.py`` builds all of them for all, which takes minutes."""
    home = setup.find_cuda_home()
    listed = setup.cuda_architectures(home, []).removesuffix("+PTX").split(";")
    number = listed[0 if age == "oldest" else -1].replace(".", "")
    command = [home / "bin" / "nvcc", *COMMON_NVCC_FLAGS, *setup.NVCC_FLAGS, "-Xcompiler", "-fPIC"]
    command += [f"-gencode=arch=compute_{number},code=sm_{number}", source]
    if age == "oldest":
        command += ["-c", "-Xcicc", "-O1", "-Xptxas", "-O0"]
    else:  # the host's part is the same
        command += ["-cubin", "-DEXKV_HUNGRIEST_KERNELS"]
    inputs = [ROOT / source, *cuda_headers()]
    result = checked_once(command, inputs, ["-o", tmp_path / "kernel.o"])
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr


@pytest.mark.skipif(setup.find_cuda_home() is None, reason="no CUDA toolkit (nvcc) here")
@pytest.mark.skipif(setup.find_cxx() is None, reason="no C++ compiler")
def test_cuda_bindings_compile_against_this_torch():
    module = setup.cuda_module(setup.find_cuda_home())
    (binding,) = (source for source in module.sources if source.endswith(".cpp"))
    flags = [*module.extra_compile_args["cxx"], "-Werror", "-fsyntax-only"]
    includes = [part for folder in module.include_dirs for part in ("-isystem", folder)]
    command = [setup.find_cxx(), *flags, *includes, binding]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.sweep(3)
@pytest.mark.skipif(setup.find_cxx() is None, reason="no C++ compiler")
@pytest.mark.parametrize("source", ["exkv_ext/bindings/cpu.cpp", *setup.sources("cpu", ".cpp")])
def test_cpu_sources_give_no_warning(source):
    """Those that come of optimising are errors where the modules are built with EXKV_WERROR=1."""
    includes = ["-isystem", str(Path(torch.__file__).parent / "include")]
    flags = [*setup.CXX_FLAGS, *setup.STABLE_ABI, "-Werror", "-fsyntax-only"]
    command = [setup.find_cxx(), *flags, *includes, source]
    result = checked_once(command, [ROOT / source, *cpu_headers()])
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(setup.find_cxx() is None, reason="no C++ compiler")
@pytest.mark.skipif(
    os.environ.get("EXKV_BUILD") == "none" or exkv_ext.disabled(),
    reason="asked for without exkv_ext._C",
)
def test_the_cpu_module_is_built_and_loads_where_a_compiler_is():
    assert exkv_ext.find("_C") is not None
    assert exkv_ext.loaded()["_C"]


@pytest.mark.skipif(setup.find_cxx() is None, reason="no C++ compiler")
def test_what_compiled_without_a_word_is_compiled_again_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(native_ops, "ROOT", tmp_path)
    source = tmp_path / "some.cpp"
    command = [setup.find_cxx(), "-Wall", "-fsyntax-only", source]
    for text, said in [("int f();", ""), ("static int f();", "f"), ("int f() {}", "return")]:
        source.write_text(text)
        for _ in range(2):  # a warning is said each time
            result = checked_once(command, [source])
            assert (result.returncode, bool(result.stderr)) == (0, bool(said))
            assert said in result.stderr
    source.write_text("int f();")
    monkeypatch.setattr(native_ops.subprocess, "run", None)  # known: nothing is run
    assert checked_once(command, [source]).returncode == 0


# ---- Loading: exkv_ext/__init__.py ----


def import_ext(program: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_disabling_leaves_every_module_out_and_the_ops_work():
    program = (
        "import torch, exkv_ext, exkv.ops\n"
        "assert not any(exkv_ext.loaded().values()) and exkv_ext.cpu_isa() is None\n"
        "assert not exkv.ops.has_kernel('quantize_kv', 'cpu')\n"
        "q, scale = torch.ops.exkv.quantize_kv(torch.ones(2, 32))\n"
        "assert q.eq(127).all()\n"
    )
    result = import_ext(program, EXKV_DISABLE_EXT="1")
    assert result.returncode == 0, result.stderr


def test_a_broken_module_is_told_with_reason_and_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(exkv_ext, "_FOLDER", tmp_path)
    monkeypatch.setattr(exkv_ext, "_handles", {})
    (tmp_path / "_C.abi3.so").write_text("not a library")
    with pytest.warns(RuntimeWarning, match=r"_C\.abi3\.so, which does not load.*pip install"):
        assert not exkv_ext.load("_C")
    assert not exkv_ext.loaded()["_C"]


def test_a_missing_module_is_no_reason_to_warn(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(exkv_ext, "_FOLDER", tmp_path)
    monkeypatch.setattr(exkv_ext, "_handles", {})
    assert not exkv_ext.load("_C")
    assert not recwarn.list


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="about ELF's symbols")
@pytest.mark.parametrize("flags", [[], setup.LINK_FLAGS], ids=["without our flags", "with them"])
def test_a_static_c_plus_plus_library_is_not_exported(tmp_path, flags):
    """Some compilers link one: mixed with torch's, it made a refusal crash in mid-sentence."""
    if (compiler := setup.find_cxx()) is None:
        pytest.skip("no C++ compiler")
    source, library = tmp_path / "throws.cpp", tmp_path / "throws.so"
    source.write_text('#include <stdexcept>\nvoid f() { throw std::runtime_error("no"); }\n')
    command = [compiler, "-shared", "-fPIC", "-static-libstdc++", str(source), *flags]
    subprocess.run([*command, "-o", str(library)], check=True)
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True
    )
    assert ("__cxa_throw" in listed.stdout) == (not flags)


def test_every_module_is_linked_so():
    assert setup.cpu_module().extra_link_args == simulator.LINK_FLAGS == setup.LINK_FLAGS


# ---- CUDA kernels in a package of their own: exkv_ext/release/cuda/setup.py ----


@pytest.fixture
def kernels_package(tmp_path, monkeypatch):
    """A package of this exkv's CUDA kernels for CUDA 13, installed beside a torch for CUDA 13."""
    (tmp_path / "exkv_cuda13").mkdir()
    (tmp_path / "exkv_cuda13" / "_cuda.abi3.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(exkv_ext, "_FOLDER", tmp_path)
    versions = {"exkv": "0.1.0", "exkv-cuda13": "0.1.0"}
    monkeypatch.setattr(exkv_ext.metadata, "version", versions.__getitem__)
    return versions


def test_cuda_kernels_are_found_in_the_package_for_torchs_cuda(
    kernels_package, tmp_path, monkeypatch
):
    assert exkv_ext.find("_cuda") == tmp_path / "exkv_cuda13" / "_cuda.abi3.so"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert exkv_ext.find("_cuda") is None


def test_cuda_kernels_built_in_the_tree_come_first(kernels_package, tmp_path):
    (tmp_path / "_cuda.abi3.so").touch()
    assert exkv_ext.find("_cuda") == tmp_path / "_cuda.abi3.so"


def test_cuda_kernels_of_another_version_are_left_out_with_the_remedy(kernels_package):
    kernels_package["exkv-cuda13"] = "0.0.9"
    with pytest.warns(RuntimeWarning, match=r"another version's: pip install exkv-cuda13==0\.1\.0"):
        assert exkv_ext.find("_cuda") is None
