"""The simulator is compiled at its first use, once for everything that it is made of. What is
compiled here is an empty module, which takes a second."""

from __future__ import annotations

import re
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from exkv_ext import simulator

pytestmark = pytest.mark.skipif(simulator.lacking() is not None, reason="no compiler here")

SOURCE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_sim", nullptr, 0, nullptr};
PyMODINIT_FUNC PyInit__sim() { return PyModule_Create(&definition); }
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    """The only source of the simulator; the folder beside it is the cache."""
    source = tmp_path / "sim" / "module.cpp"
    source.parent.mkdir()
    source.write_text(SOURCE)
    (tmp_path / "params").mkdir()
    monkeypatch.setattr(simulator, "_FOLDER", source.parent)
    monkeypatch.setattr(simulator, "_PARAMS", tmp_path / "params")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return source


def test_what_it_is_made_of_is_all_that_its_sources_include():
    files = simulator._files()
    for file in files:
        for name in re.findall(r'#include "(.*)"', file.read_text()):
            assert (file.parent / name).resolve() in files, f"{file} includes {name}"


@pytest.fixture
def made(source, monkeypatch):
    """The files that were made so far; making one takes no compiler."""
    made = []

    def touch(file, lock):
        file.touch()
        made.append(file)

    monkeypatch.setattr(simulator, "_compile", touch)
    return made


def test_it_is_built_once_and_shows_that_it_is(source, monkeypatch, capsys):
    file = simulator.build()
    told = f"Building the simulated accelerator for torch {torch.__version__} (once)"
    assert capsys.readouterr().err.split("\n")[0] == told
    assert sorted(f.suffix for f in file.parent.iterdir()) == [".lock", ".so"]
    monkeypatch.setattr(simulator, "_compile", None)
    assert simulator.build() == file
    assert capsys.readouterr().err == ""


def test_it_loads_as_a_module_of_exkv_ext(source):
    module = simulator.load.__wrapped__()  # apart from the real one, of which a process has one
    assert (module.__name__, module.__file__) == ("exkv_ext._sim", str(simulator.build()))


def test_what_a_killed_build_left_is_in_nobodys_way(source, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(simulator, "_compile", lambda file, lock: None)
        file = simulator.build()
    left = file.with_suffix(".draft") / "_sim.so" / "half"
    left.mkdir(parents=True)
    assert simulator.build() == file and file.is_file()
    assert not left.exists()


@pytest.mark.parametrize("changed", ["source", "header", "torch", "flags", "compiler"])
def test_whatever_it_is_made_of_makes_another_file(source, made, monkeypatch, changed):
    before = simulator.build()
    if changed == "source":
        source.write_text(SOURCE + "\n")
    if changed == "header":
        (source.parents[1] / "params" / "kv_formats.h").touch()
    if changed == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    if changed == "flags":
        monkeypatch.setattr(simulator, "CXX_FLAGS", ["-O1"])
    if changed == "compiler":
        monkeypatch.setattr(simulator, "_compiler_version", lambda: "g++ 99")
    assert simulator.build() != before
    assert len(made) == 2


def test_who_needs_it_at_the_same_time_waits_for_the_first(source, monkeypatch):
    calls = []
    compile = simulator._compile
    monkeypatch.setattr(simulator, "_compile", lambda *args: calls.append(compile(*args)))
    with ThreadPoolExecutor(4) as pool:
        files = set(pool.map(lambda _: simulator.build(), range(4)))
    assert len(files) == len(calls) == 1


def test_an_error_of_the_compiler_is_told_and_nothing_is_kept(source):
    source.write_text("#error not today\n")
    with pytest.raises(RuntimeError, match=r"failed: .*module\.cpp.*error: .*not today.*/log") as e:
        simulator.build()
    log = str(e.value).rpartition(": ")[2]
    assert "not today" in Path(log).read_text()
    source.write_text(SOURCE)
    assert simulator.build().exists()


def test_without_a_compiler_it_says_so_unless_it_was_built_before(source, made, monkeypatch):
    file = simulator.build()
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert simulator.build() == file
    file.unlink()
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler here \(no-such-compiler\): install"):
        simulator.build()


def test_without_pythons_headers_it_names_their_package(source, made, monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(RuntimeError, match=f"headers are not in {tmp_path}: install python3-dev"):
        simulator.build()


def test_a_cache_folder_that_takes_no_file_is_named(source, made, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))
    with pytest.raises(RuntimeError, match=r"can't be kept: .*module\.cpp.*XDG_CACHE_HOME"):
        simulator.build()


def test_an_environment_that_is_not_activated_has_ninja_all_the_same(source, monkeypatch):
    compilers = {shutil.which(name) for name in ("c++", "ld", "as")}
    beside = source.parent.parent / "bin"
    beside.mkdir()
    for compiler in compilers:
        (beside / compiler.rpartition("/")[2]).symlink_to(compiler)
    monkeypatch.setenv("PATH", str(beside))
    assert shutil.which("ninja") is None
    assert simulator.build().exists()
