"""Every public name of ExLlamaV2 0.3.2 exists, or its error says what to use instead."""

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
from exkv.compat.exllamav2.missing import ARGUMENTS, INSTEAD, NotHere, instead_of
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


def test_list_covers_the_package():
    assert {"exllamav2", "exllamav2.generator", "exllamav2.model_init"} <= set(LISTED["modules"])
    assert "load_autosplit" in LISTED["classes"]["ExLlamaV2"]
    assert "temperature" in LISTED["classes"]["ExLlamaV2Sampler.Settings"]
    assert sum(map(len, LISTED["classes"].values())) > 700


def test_docs_tables_have_every_name_and_link():
    made = names.tables()
    assert "MISSING" not in made
    for owner in (*LISTED["classes"], *LISTED["modules"]):
        assert f"\n### {owner}\n" in made
    anchors = {heading.lower().replace(".", "") for heading in re.findall("^#+ (.*)", made, re.M)}
    pages = "".join(page.read_text() for page in (names.ROOT / "docs").glob("*.md"))
    linked = set(re.findall(r"\(exllamav2-names\.md#([^)]+)\)", pages))
    assert linked and linked <= anchors


@pytest.mark.parametrize("kind", sorted(LISTED["classes"]))
def test_members_exist_or_name_a_replacement(living, kind):
    for name in LISTED["classes"][kind]:
        advice = names.where_is_member(living, kind, name)
        assert advice, f"{kind}.{name}"
        if kind not in living or hasattr(living[kind], name):
            continue
        with pytest.raises(AttributeError) as error:
            getattr(living[kind], name)
        assert str(error.value).endswith(advice)


@pytest.mark.parametrize("module", sorted(LISTED["modules"]))
def test_module_names_exist_or_name_a_replacement(served, module):
    for name in LISTED["modules"][module]:
        advice = names.where_is(module, name)
        assert advice, f"{module}.{name}"
        line = f"from {module} import {name}"
        try:
            exec(line, found := {})
        except ImportError as error:
            assert str(error).endswith(advice), line
        else:
            if advice != names.HERE:
                with pytest.raises(NotHere, match="exkv has no") as refusal:
                    found[name]()
                assert str(refusal.value).endswith(advice)


def test_every_pattern_matches_a_name():
    listed = [
        name
        for group in LISTED.values()
        for owner, found in group.items()
        for name in (owner, *found, *(f"{owner}.{each}" for each in found))
    ]
    unused = [each for each in INSTEAD if not any(fnmatchcase(name, each) for name in listed)]
    assert unused == []


def test_misspelt_names_get_no_advice(served):
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
def test_placeholders_can_only_be_imported(line):
    with pytest.raises(NotHere, match="exkv has no ExLlamaV2VisionTower: exkv runs only the text"):
        exec(line, {"ExLlamaV2VisionTower": exllamav2.ExLlamaV2VisionTower})
    assert not isinstance(3, exllamav2.ExLlamaV2VisionTower)


def test_refused_arguments_name_a_replacement():
    assert all(len(advice) > 20 for advice in ARGUMENTS.values())


# import exllamav2 -----------------------------------------------------------------------------


def run(*arguments: object) -> CompletedProcess[str]:
    return run_script("-m", "exkv.compat.exllamav2", *arguments)


def test_script_runs_unchanged(tmp_path):
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


def test_errors_are_reported_in_one_line(tmp_path):
    assert "usage: python -m exkv.compat.exllamav2" in run().stderr
    assert run(tmp_path / "none.py").stderr == f"{tmp_path / 'none.py'} is not a file\n"
    script = tmp_path / "script.py"
    script.write_text("from exllamav2.attn import ExLlamaV2Attention as A\nisinstance(1, A)\nA()\n")
    advice = "line 3, in <module>.*exkv has no ExLlamaV2Attention: it is internal to ExLlamaV2"
    assert re.search(advice, run(script).stderr, re.S)


def test_distribution_is_found_and_flags_are_refused(served):
    assert importlib.metadata.version("exllamav2") == "0.3.2"
    assert importlib.util.find_spec("exllamav2") and importlib.util.find_spec("exllamav2.generator")
    assert "exllamav2" not in {each.name for each in importlib.metadata.distributions(name="torch")}
    exec("from exllamav2.attn import has_flash_attn", found := {})
    with pytest.raises(NotHere, match="exkv has no has_flash_attn"):
        bool(found["has_flash_attn"])


def test_imported_exllamav2_is_not_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "exllamav2", json)
    with pytest.raises(ImportError, match="is already imported"):
        serve()
