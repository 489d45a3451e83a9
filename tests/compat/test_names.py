"""Every public name of ExLlamaV2 0.3.2 is here, or says what to use instead."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
from fnmatch import fnmatchcase
from subprocess import CompletedProcess

import exllamav2_names as names
import pytest
from apart import run_script

from exkv.compat import exllamav2
from exkv.compat.exllamav2.gone import ARGUMENTS, GONE, NotHere, instead_of
from exkv.compat.exllamav2.serving import MODULES, serve

LISTED = json.loads(names.NAMES.read_text())


@pytest.fixture(scope="module")
def living():
    return names.living()


@pytest.fixture
def served(monkeypatch):
    for name in ["exllamav2", *(f"exllamav2.{module}" for module in MODULES if module)]:
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)
    serve()
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_list_is_of_the_whole_package():
    assert {"exllamav2", "exllamav2.generator", "exllamav2.model_init"} <= set(LISTED["modules"])
    assert "load_autosplit" in LISTED["classes"]["ExLlamaV2"]
    assert "temperature" in LISTED["classes"]["ExLlamaV2Sampler.Settings"]
    assert sum(map(len, LISTED["classes"].values())) > 700


def test_the_tables_made_for_the_docs_have_a_place_for_every_name_and_every_link():
    made = names.tables()
    assert "MISSING" not in made
    for owner in (*LISTED["classes"], *LISTED["modules"]):
        assert f"\n### {owner}\n" in made
    anchors = {heading.lower().replace(".", "") for heading in re.findall("^#+ (.*)", made, re.M)}
    pages = "".join(page.read_text() for page in (names.ROOT / "docs").glob("*.md"))
    linked = set(re.findall(r"\(exllamav2-names\.md#([^)]+)\)", pages))
    assert linked and linked <= anchors


@pytest.mark.parametrize("kind", sorted(LISTED["classes"]))
def test_each_member_is_here_or_says_what_to_use(living, kind):
    for name in LISTED["classes"][kind]:
        said = names.where_is_member(living, kind, name)
        assert said, f"{kind}.{name}"
        if kind not in living or hasattr(living[kind], name):
            continue
        with pytest.raises(AttributeError) as error:
            getattr(living[kind], name)
        assert str(error.value).endswith(said)


@pytest.mark.parametrize("module", sorted(LISTED["modules"]))
def test_each_name_of_a_module_is_here_or_says_what_to_use(served, module):
    for name in LISTED["modules"][module]:
        said = names.where_is(module, name)
        assert said, f"{module}.{name}"
        line = f"from {module} import {name}"
        try:
            exec(line, found := {})
        except ImportError as error:
            assert str(error).endswith(said), line
        else:
            if said != names.HERE:
                with pytest.raises(NotHere, match="exkv has no") as refusal:
                    found[name]()
                assert str(refusal.value).endswith(said)


def test_no_sentence_is_for_a_name_that_is_not_there():
    listed = [
        name
        for group in LISTED.values()
        for owner, found in group.items()
        for name in (owner, *found, *(f"{owner}.{each}" for each in found))
    ]
    unused = [each for each in GONE if not any(fnmatchcase(name, each) for name in listed)]
    assert unused == []


def test_a_misspelt_name_is_no_name_of_theirs(served):
    assert instead_of("ExLlamaV2Config.max_sequence") is None
    assert instead_of("ExLlamaV2Sampler.Settings.temprature") is None
    with pytest.raises(ImportError, match="did you mean 'ExLlamaV2Cache'"):
        exec("from exllamav2 import ExLlamaV2Cach")


@pytest.mark.parametrize(
    "line",
    [
        "ExLlamaV2VisionTower.from_directory('model', 'adapter')",
        "class Mine(ExLlamaV2VisionTower): ...",
        "ExLlamaV2VisionTower()",
    ],
)
def test_a_name_without_anything_behind_it_can_be_imported_and_not_used(line):
    with pytest.raises(NotHere, match="exkv has no ExLlamaV2VisionTower: exkv runs the text"):
        exec(line, {"ExLlamaV2VisionTower": exllamav2.ExLlamaV2VisionTower})
    assert not isinstance(3, exllamav2.ExLlamaV2VisionTower)


def test_each_argument_that_is_refused_says_what_to_use():
    assert all(len(said) > 20 for said in ARGUMENTS.values())


# import exllamav2 -----------------------------------------------------------------------------


def run(*arguments: object) -> CompletedProcess[str]:
    return run_script("-m", "exkv.compat.exllamav2", *arguments)


def test_a_script_is_served_unchanged(tmp_path):
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import beside\n"
        "import exllamav2\n"
        "from exllamav2.generator.sampler import ExLlamaV2Sampler\n"
        "from exllamav2.generator import ExLlamaV2Sampler as again\n"
        "assert ExLlamaV2Sampler is again and __name__ == '__main__'\n"
        "print(exllamav2.__version__, beside.WORD, *sys.argv[1:])\n"
    )
    found = run(script, "-m", "x")
    assert (found.returncode, found.stdout) == (0, "0.3.2 beside -m x\n"), found.stderr


def test_what_goes_wrong_is_said_in_a_line(tmp_path):
    assert "usage: python -m exkv.compat.exllamav2" in run().stderr
    assert run(tmp_path / "none.py").stderr == f"{tmp_path / 'none.py'} is no file\n"
    script = tmp_path / "script.py"
    script.write_text("from exllamav2.attn import ExLlamaV2Attention as A\nisinstance(1, A)\nA()\n")
    said = "line 3, in <module>.*exkv has no ExLlamaV2Attention: it belongs to ExLlamaV2's insides"
    assert re.search(said, run(script).stderr, re.S)


def test_an_installation_is_found_and_its_flags_are_refused(served):
    assert importlib.metadata.version("exllamav2") == "0.3.2"
    assert importlib.util.find_spec("exllamav2") and importlib.util.find_spec("exllamav2.generator")
    assert "exllamav2" not in {each.name for each in importlib.metadata.distributions(name="torch")}
    exec("from exllamav2.attn import has_flash_attn", found := {})
    with pytest.raises(NotHere, match="exkv has no has_flash_attn"):
        bool(found["has_flash_attn"])


def test_an_exllamav2_that_is_imported_already_is_not_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "exllamav2", json)
    with pytest.raises(ImportError, match="is imported already"):
        serve()
