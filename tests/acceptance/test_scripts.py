"""Scripts as ExLlamaV2's users write them, run on the demo model without a change."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from adapters import write_adapter
from simproc import run_sim

SCRIPTS = Path(__file__).with_name("scripts")
DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo-model"

#: Script -> patterns of the lines that it prints.
RUN = {
    "inference": ["Anna put the key in the .{60,}", "[0-9.]+ tokens a second"],
    "streaming": ["The key is in the kitchen.", "7 tokens, none chosen with less than [01].[0-9]+"],
    "multiple_caches": [f"The key is in the {place}." for place in ("kitchen", "garden", "hall")],
    "banned_strings": [
        r"The key is in the kitchen. \(taken back: \[\]\)",
        r"The key (?!.*in the kitchen.*\().* \(taken back: \[' in the kitchen'.*\]\)",
    ],
    "bulk": [r"\{0: ' [a-z].*, 19: '.*'\}"],
    "deduplication": ["2 pages were there already"],
    "dynamic_generation": ["Anna put the key in the [a-z].*"],
    "filters": [r"Where is the key\?(hall|garden)", r"Where is the key\?In the.*"],
    "speculative": ["The key is in the kitchen."],
    "cfg": [
        "1.0: The key is in the kitchen.",
        "0.5: The key is in the (hall|kitchen).",
        "0.0: The key is in the hall.",
    ],
}


def output(name: str, arguments: list[str], typed: str = "") -> list[str]:
    """What a script prints, and how it ended if not well."""
    from exkv.compat.exllamav2 import serve

    serve()
    sys.argv, sys.stdin = [name, *arguments], io.StringIO(typed)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        except (NotImplementedError, SystemExit, ValueError) as error:
            print(f"{type(error).__name__}: {error}")
    return printed.getvalue().splitlines()


def test_there_are_twelve_scripts_and_each_runs():
    names = {file.stem for file in SCRIPTS.glob("*.py")}
    assert names == {*RUN, "lora", "chat"}
    assert len(names) == 12


@pytest.mark.parametrize("devices", ["", "3M,64M"], ids=["cpu", "two devices"])
@pytest.mark.parametrize("name", RUN)
def test_a_script_runs_as_it_is(name, devices):
    lines = run_sim(output, devices, args=[name, ["-m", str(DEMO)]])
    assert len(lines) == len(RUN[name])
    for line, expected in zip(lines, RUN[name], strict=True):
        assert re.fullmatch(expected, line)


def test_a_script_runs_with_an_adapter_and_without(tmp_path):
    config = json.loads((DEMO / "config.json").read_text())
    wide, layers = config["hidden_size"], range(config["num_hidden_layers"])
    sizes = {f"model.layers.{n}.mlp.down_proj": (wide, config["intermediate_size"]) for n in layers}
    adapter = write_adapter(tmp_path, sizes)
    flags = ["-m", str(DEMO), "-l", str(adapter)]
    plain, adapted = "\n".join(run_sim(output, "", args=["lora", flags])).split("Anna put the key")[
        1:
    ]
    assert plain.strip() and adapted.strip() and plain != adapted


# The flags of model_init ----------------------------------------------------------------------

TURNS = "Anna put the key in the kitchen. Where is the key?\nWhere is the key?\n"


@pytest.mark.parametrize(
    "flags",
    [
        ["-gs", "auto", "-c8"],
        ["-gs", "0.003,0.05", "-lm", "-ng"],
        ["-l", "256", "-chunk", "64", "-nfa", "-nxf", "-nsdpa", "-fst", "-ic"],
    ],
    ids=" ".join,
)
def test_a_chat_runs_by_its_flags(flags):
    lines = run_sim(output, "8M,64M", args=["chat", ["-m", str(DEMO), *flags], TURNS])
    assert lines[-2:] == ["The key is in the kitchen."] * 2
    assert lines[0] == f"Model: {DEMO}"
    assert lines[1].startswith("Options: ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "SystemExit: give a model: -m FOLDER"),
        (["-m", "nowhere"], "SystemExit: nowhere is not a folder"),
        (["-m", str(SCRIPTS)], f"SystemExit: {SCRIPTS} has no config.json"),
        (["-m", str(DEMO), "-tp"], "ValueError: -tp: exkv keeps each layer on one device"),
        (["-m", str(DEMO), "-lq4"], "ValueError: -lq4: exkv quantizes while loading"),
        (["-m", str(DEMO), "-tp", "-ept", "1"], "ValueError: -tp: exkv keeps each layer"),
        (["-m", str(DEMO), "-gs", "1,1,1"], "gpu_split names 3 devices, and there are 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_flags_that_ask_for_what_is_not_there_are_refused(flags, said):
    *_, last = run_sim(output, "8M,64M", args=["chat", flags])
    assert said in last


def stretched(folder: str, flags: list[str]) -> list[object]:
    import argparse

    from exkv.compat.exllamav2 import model_init

    parser = argparse.ArgumentParser()
    model_init.add_args(parser)
    args = parser.parse_args(["-m", folder, *flags])
    model, _ = model_init.init(args, quiet=True, skip_load=True, max_input_len=512)
    scaling = model.exkv.config.rope_scaling
    numbers = (model.config.max_seq_len, model.exkv.max_input_len, model.exkv.config.rope_theta)
    return [*numbers, scaling and [scaling.rope_type, scaling.factor], model.loaded]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], [2048, 512, 50000.0, None, False]),
        (["-l", "100", "-rs", "2"], [100, 512, 50000.0, ["linear", 2.0], False]),
        (["-ra", "2"], [2048, 512, 50000.0 * 2 ** (32 / 30), None, False]),
        (["-ry", "4"], [2048, 512, 50000.0, ["yarn", 4.0], False]),
    ],
)
def test_flags_reach_the_model(flags, expected):
    assert run_sim(stretched, "", args=[str(DEMO), flags]) == expected
