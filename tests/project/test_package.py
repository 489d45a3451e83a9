"""From a package: the sdist, the wheel that comes of it, and what a user has of the wheel, in an
environment of its own outside of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from setuptools import Distribution
from simproc import needs_sim
from test_build import hide_torch, setup

import exkv
import exkv_ext

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo-model"
NAME = f"exkv-{exkv.__version__}"
FOLDERS = ("exkv", "exkv_ext")


def run(*command: str | Path, cwd: Path, check: bool = True, **environment: str):
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "PYTHONPATH": "", **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def listed(*, by_git: str) -> set[str]:
    done = run("git", "ls-files", "-z", *by_git.split(), cwd=ROOT)
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the tree in which something was built."""
    if not (ROOT / ".git").exists():
        pytest.skip("git says which files belong to the tree, and this is no clone")
    clone = tmp_path_factory.mktemp("clone")
    for name in listed(by_git="--cached --others --exclude-standard"):
        if not name.startswith(("docs/", "examples/", "tests/")):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
    (clone / "exkv_ext" / "_C.abi3.so").write_text("of this machine")
    return clone


@pytest.fixture(scope="module")
def sdist(clone, tmp_path_factory):
    """Made where there is no torch."""
    folder = tmp_path_factory.mktemp("sdist")
    command = (sys.executable, "setup.py", "-q", "sdist", "-d", folder)
    run(*command, cwd=clone, PYTHONPATH=hide_torch(tmp_path_factory.mktemp("no-torch")))
    return folder / f"{NAME}.tar.gz"


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    return folder / NAME


def pip_wheel(source: Path, folder: Path, **environment: str) -> Path:
    """The wheel that pip makes of a folder, and that nothing else may be installed for."""
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run(*pip, "--no-index", "-w", folder, ".", cwd=source, **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory):
    """With the CPU kernels where a compiler is. Those of the tree are taken where they are newer
    than everything that they are compiled from, as make asks: setuptools finds them where it would
    have put them, and has nothing to compile. (With ninja torch leaves that question to ninja.)"""
    folder = tmp_path_factory.mktemp("wheel")
    if (compiler := setup.find_cxx()) is None:
        return pip_wheel(unpacked, folder, EXKV_BUILD="none")
    sources = [f for f in (ROOT / "exkv_ext").rglob("*") if f.suffix in (".cpp", ".h", ".inc")]
    newest = max(file.stat().st_mtime for file in [ROOT / "setup.py", *sources])
    ours = exkv_ext.find("_C")
    if ours is None or ours.stat().st_mtime < newest:
        return pip_wheel(unpacked, folder, EXKV_BUILD="cpu")
    build = Distribution().get_command_obj("build")
    build.ensure_finalized()
    there = unpacked / build.build_platlib / "exkv_ext"
    there.mkdir(parents=True)
    shutil.copy(ours, there / "_C.abi3.so")
    return pip_wheel(unpacked, folder, EXKV_BUILD="cpu", CXX=compiler, PATH="")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of commands of an environment that has exkv and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index")
    run(*pip, "--no-deps", wheel, cwd=folder)
    return python.parent


@pytest.fixture(scope="module")
def bin_of_user(installed):
    """The same with what exkv depends on, as these tests have it. A path in a .pth file is searched
    after the environment's own, and .pth files there, such as an editable exkv's, don't count."""
    found = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages,) = installed.parent.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(found))
    return installed


# The sdist ------------------------------------------------------------------------------------


def test_the_sdist_holds_all_sources_and_nothing_built(sdist):
    with tarfile.open(sdist) as archive:
        files = {m.name.removeprefix(f"{NAME}/") for m in archive.getmembers() if m.isfile()}
    tracked = listed(by_git="--cached --others --exclude-standard")
    sources = {name for name in tracked if name.startswith(tuple(f"{f}/" for f in FOLDERS))}
    kinds = {Path(name).suffix for name in sources}
    assert {".py", ".cpp", ".h", ".inc", ".cu", ".cuh", ".html", ".js", ".sh"} <= kinds
    assert {name for name in files if name.startswith(tuple(f"{f}/" for f in FOLDERS))} == sources
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py"} <= files
    assert not [name for name in files if name.endswith((".so", ".o", ".pyc"))]


def test_an_isolated_build_of_the_sdist_says_what_to_type(unpacked, tmp_path):
    command = (sys.executable, "setup.py", "-q", "bdist_wheel")
    done = run(*command, cwd=unpacked, check=False, PYTHONPATH=hide_torch(tmp_path))
    assert done.returncode != 0
    assert "'setuptools>=77' && pip install --no-build-isolation exkv\n" in done.stderr


# The wheels -----------------------------------------------------------------------------------


def test_a_wheel_without_modules_is_for_every_platform_and_holds_no_library(clone, tmp_path):
    wheel = pip_wheel(clone, tmp_path, EXKV_BUILD="none")
    assert wheel.name == f"{NAME}-py3-none-any.whl"
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_a_wheel_with_kernels_is_for_this_platform_and_every_python(wheel):
    if setup.find_cxx() is None:
        pytest.skip("no C++ compiler")
    assert wheel.name.startswith(f"{NAME}-cp310-abi3-{sys.platform}_")
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in files if name.endswith(".so")} == {"exkv_ext/_C.abi3.so"}
    page = {str(file.relative_to(ROOT)) for file in (ROOT / "exkv/serve/page").iterdir()}
    simulator = {*setup.sources("sim", ".cpp", ".h"), *setup.sources("params", ".h")}
    assert {"exkv/py.typed", *simulator, *page} <= files
    assert not [name for name in files if name.startswith(("exkv_ext/cpu/", "exkv_ext/cuda/"))]
    (licence,) = (name for name in files if name.endswith("/LICENSE"))
    assert zipfile.ZipFile(wheel).read(licence) == (ROOT / "LICENSE").read_bytes()


# In use ---------------------------------------------------------------------------------------


def test_a_type_checker_sees_the_types_of_exkv(installed, tmp_path):
    script = [
        "from exkv import Cache, Generator, Model, SamplingParams, Tokenizer",
        'model = Model("folder", dtype="bfloat16")',
        "cache = Cache(model, max_seq_len=1024)",
        'model.load_autosplit(cache, reserved="1G")  # there is no such argument',
        "tokenizer = Tokenizer(model.config)",
        "generator = Generator(model, cache, tokenizer)",
        'ids = tokenizer.encode_chat([{"role": "user", "content": "Hello?"}])',
        "for piece in generator.stream(ids, SamplingParams.greedy(), 50):",
        "    reveal_type(piece)",
        "reveal_type(model)",
    ]
    (tmp_path / "script.py").write_text("\n".join(script))
    mypy = (sys.executable, "-m", "mypy", "--python-executable", installed / "python")
    done = run(*mypy, "script.py", cwd=tmp_path, check=False)
    said = [line.partition("script.py:")[2] for line in done.stdout.splitlines()]
    assert said[0].startswith('4: error: Unexpected keyword argument "reserved"'), done.stdout
    assert '9: note: Revealed type is "str"' in said
    assert '10: note: Revealed type is "exkv.model.Model"' in said


def test_planning_needs_no_compiler_and_simulating_says_that_it_does(bin_of_user, tmp_path):
    command = (bin_of_user / "exkv", "plan", DEMO / "config.json", "--devices", "24G,24G")
    alone = {"PATH": str(bin_of_user), "XDG_CACHE_HOME": str(tmp_path), "CXX": ""}
    done = run(*command, "--simulate", cwd=tmp_path, check=False, **alone)
    assert "It fits on 1 device" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 2
    assert "no C++ compiler here (c++): install g++" in done.stderr
    assert len(done.stderr.splitlines()) == 1


ANSWERING = f"""
import exkv, exkv_ext
from exkv import Cache, Generator, Model, SamplingParams, Tokenizer

model = Model({str(DEMO)!r})
cache = Cache(model, max_seq_len=256)
model.load_autosplit(cache)
tokenizer = Tokenizer(model.config)
question = "Anna put the key in the kitchen. Where is the key?"
ids = tokenizer.encode_chat([{{"role": "user", "content": question}}])
print("".join(Generator(model, cache, tokenizer).stream(ids, SamplingParams.greedy(), 50)))
print({{device.type for device in model.cache_map.values()}})
print(exkv_ext.loaded()["_C"], exkv.__file__)
"""


@needs_sim
def test_the_wheel_answers_on_simulated_devices(bin_of_user, tmp_path):
    # The simulator is that of the tests: it is made of the same sources.
    done = run(
        *(bin_of_user / "python", "-c", ANSWERING), cwd=tmp_path, EXKV_SIM_DEVICES="3M,4M,9M"
    )
    answer, devices, last = done.stdout.splitlines()
    assert answer == "The key is in the kitchen."
    assert devices == "{'sim'}"
    (imported,) = bin_of_user.parent.glob("lib/python*/site-packages/exkv/__init__.py")
    assert last == f"{setup.find_cxx() is not None} {imported}"
