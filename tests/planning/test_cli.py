"""The command ``exkv``, run as users run it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree

import pytest
from apart import run_apart, run_script
from simproc import needs_sim, run_sim
from tiny import LLAMA_70B, llama

from exkv import Model, ModelConfig, place, sim
from exkv.cache import BY_LOSS, CACHES
from exkv.cli import main
from exkv.cli import simulate as simulating
from exkv.cli.picture import bar, stack
from exkv.planning import Plan

ROOT = Path(__file__).resolve().parents[2]
DEMO = "examples/demo-model"


@pytest.fixture(scope="module")
def config_70b(tmp_path_factory):
    file = tmp_path_factory.mktemp("70b") / "config.json"
    file.write_text(json.dumps(LLAMA_70B))
    return str(file)


def run(*arguments: str) -> subprocess.CompletedProcess:
    return run_script("-m", "exkv", *arguments, EXKV_SIM_DEVICES="")


def plan(capsys, *arguments: str) -> tuple[int, str, str]:
    """Run in this process, which has imported torch already: exit status, output, errors."""
    try:
        status = main(["plan", *arguments])
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


# What it says ---------------------------------------------------------------------------------


def test_plan_output_matches_the_readme(config_70b):
    done = run("plan", config_70b, "--devices", "48G,48G,80G")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout  # piped: no colour codes
    lines = done.stdout.splitlines()
    assert "1 x 32,768 tokens, fp16 cache, chunks of 2,048, pack" in lines[0]
    assert [line.split()[0] for line in lines[1:4]] == ["cuda:0", "cuda:1", "cuda:2"]
    assert "WWW" in lines[1] and "CC" in lines[1] and "··" in lines[3]
    assert "W weights   C cache" in lines[4]
    assert "embed 0-25" in done.stdout and "53-79 head" in done.stdout
    assert "128.48 GiB" in done.stdout and "10.00 GiB" in done.stdout
    assert "It fits on 3 devices; the smallest headroom is" in done.stdout
    assert "Planned in" in lines[-1]
    assert "\n".join(lines[1:-1]) in (ROOT / "README.md").read_text()  # which shows this plan


def test_many_unlike_cards_in_any_order_are_planned_and_it_says_how_near_the_best(
    config_70b, capsys
):
    cards = ",".join(f"{size}G" for size in range(8, 28))
    rates = ",".join(str(1000 - size) for size in range(20))
    asked = (config_70b, "--devices", cards, "--order", "any", "--allocator", "exact")
    status, out, _ = plan(capsys, *asked, "--objective", "fewest")
    assert status == 0 and "within" not in out  # a bound shows that fewer devices aren't enough
    asked += ("--objective", "speed", "--bandwidth", rates)
    status, out, _ = plan(capsys, *asked)
    told = re.search(r"It fits on 1\d devices, within ([\d.]+) % of the best in any order;", out)
    assert status == 0 and told
    assert f"the model is within {told[1]} % of the best in any order" in out
    status, out, _ = plan(capsys, *asked, "--json")
    answer = json.loads(out)
    gap = Plan.from_json(json.dumps(answer["plans"]["model"])).gap
    assert 0 < gap == answer["found"]["gap"] <= float(told[1]) / 100 < 0.05


def test_80_layers_are_planned_within_500_mebibytes(config_70b):
    program = (
        "import re, sys; from exkv.cli import main; "
        f"status = main(['plan', {config_70b!r}, '--devices', '48G,48G,80G', '--json']); "
        "peak = re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read()).group(1); "
        "print(peak, file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) < 500 * 1024
    answer = json.loads(done.stdout)
    assert answer["fits"] and answer["found"]["devices"] == 3
    print(f"planned in {answer['seconds']} s without the import")


def test_refusal_names_bytes_device_and_remedies(config_70b, capsys):
    status, out, _ = plan(capsys, config_70b, "--devices", "48G,48G,42G")
    assert status == 1
    assert "GiB over" in out and "!!!" in out
    assert "No room for model.layers.7" in out
    assert ", even with chunks of 128 tokens, the embedding in host memory: " in out
    assert "bytes) more on cuda:2 would be enough." in " ".join(out.split())
    assert "would fit: a cache of max_seq_len=" in out
    assert "would fit: Cache8bit at the same length" in out


def test_demo_model_fits_this_machine():
    done = run("plan", DEMO)
    assert done.returncode == 0, done.stderr
    assert "cpu" in done.stdout and "embed 0-3 head" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["{tmp}"], "config.json is missing"),
        (["{tmp}/model.safetensors"], "model.safetensors is not a model: give the folder"),
        ([DEMO, "--devices", "nonsense"], "no such device: 'nonsense'; this machine has: cpu"),
        (["{tmp}/broken.json"], "broken.json is not valid JSON"),
        ([DEMO, "--devices", "24Q"], "'24Q'.*sizes look like 24G"),
        ([DEMO, "--devices", "24G", "--reserve", "-1"], "'-1' is not a size"),
        ([DEMO, "--reserve", "1,2"], "reserve names 2 devices, and there are 1"),
        ([DEMO, "--max-seq-len", "0"], "--max-seq-len is '0'"),
        ([DEMO, "--batch-size", "many"], "--batch-size is 'many'"),
        ([DEMO, "--chunk-size", "0"], "--chunk-size: '0' is not a whole number"),
        ([DEMO, "--cache", "3bit"], f"'3bit' is none of {', '.join(CACHES)}, best"),
        ([DEMO, "--max-seq-len", "max", "--cache", "best"], "one unknown at a time"),
        ([DEMO, "--objective", "luck"], "invalid choice: 'luck'"),
        ([DEMO, "--devices", "24G", "--objective", "speed"], "needs the bandwidth of cuda:0"),
        ([DEMO, "--devices", "24G", "--bandwidth", "fast"], "'fast' is not a number of GB/s"),
        ([DEMO, "--devices", "24G", "--bandwidth", "measure"], "cuda:0 can't be measured"),
        ([DEMO, "--devices", "24G", "--bandwidth", "1,2"], "gives 2 rates, but there are 1"),
        ([DEMO, "--devices", "1G,1G", "--bandwidth", "1"], "gives 1 rates, but there are 2"),
        ([DEMO, "--draft-first"], "--draft-first needs --draft"),
        ([DEMO, "--draft", "nowhere"], "nowhere is not a folder"),
        ([], "the following arguments are required: MODEL"),
    ],
)
def test_invalid_arguments_are_named(tmp_path, capsys, arguments, complaint):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"\xff\x00")
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    status, out, err = plan(capsys, *arguments)
    assert (status, out) == (2, "")
    assert re.search(complaint, err), err
    assert err.count("\n") == 1  # no usage of all flags before it


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("cards", [["--devices", "1G"], ["--devices", "cpu"]], ids=["card", "host"])
def test_every_cache_kind_is_planned_and_host_memory_is_reported(capsys, kind, cards):
    arguments = [
        DEMO,
        *cards,
        "--cache",
        kind,
        "--max-seq-len",
        "512",
        "--margin",
        "0",
        "--allocator",
        "exact",
    ]
    status, out, _ = plan(capsys, *arguments)
    assert status == 0 and f"{kind} cache" in out
    values = answer(capsys, *arguments)
    cache = values["plans"]["model"]["ledgers"][0]["cache"]
    if "offloaded" not in kind:
        assert "host memory" not in out and values["host_cache_bytes"] == 0 < cache
        return
    # 4 layers of 2 heads of 32 keys and 32 values of 2 bytes, for 512 tokens.
    assert "The cache is in host memory, 512.00 KiB (524,288 bytes); " in out
    assert values["host_cache_bytes"] == 524288
    on_host = "cpu" in cards
    assert ("the cpu's bar shows it." if on_host else "no bar shows it.") in out
    assert cache == (524288 if on_host else 0)


def test_bar_of_the_host_includes_caches_of_its_layers(capsys):
    cards = ["--devices", "6M,7M,8M", "--cpu", "32M", "--margin", "0", "--allocator", "exact"]
    status, out, _ = plan(capsys, DEMO, *cards, "--cache", "offloaded")
    assert status == 0 and re.search(r"2.00 MiB \(.*; the cpu's bar shows 1.50 MiB of it\.", out)


# What it finds --------------------------------------------------------------------------------


def answer(capsys, *arguments: str) -> dict:
    status, out, _ = plan(capsys, *arguments, "--json")
    values = json.loads(out)
    assert status == (0 if values["fits"] else 1)
    return values


def test_max_seq_len_max_batch_and_best_cache(config_70b, capsys):
    cards = ["--devices", "48G,48G,46G"]
    longest = answer(capsys, config_70b, *cards, "--max-seq-len", "max")["found"]["max_seq_len"]
    assert answer(capsys, config_70b, *cards, "--max-seq-len", str(longest))["fits"]
    assert not answer(capsys, config_70b, *cards, "--max-seq-len", str(longest + 1))["fits"]
    short = ["--max-seq-len", "1000"]
    rows = answer(capsys, config_70b, *cards, *short, "--batch-size", "max")["found"]["batch_size"]
    assert rows > 1
    assert answer(capsys, config_70b, *cards, *short, "--batch-size", str(rows))["fits"]
    assert not answer(capsys, config_70b, *cards, *short, "--batch-size", str(rows + 1))["fits"]
    best = answer(capsys, config_70b, *cards, "--cache", "best")
    assert best["found"]["cache"] == "8bit" and "least lossy" in best["answer"]
    whole = answer(capsys, config_70b, "--devices", "80G,80G", "--max-seq-len", "max")
    assert whole["found"]["max_seq_len"] == 32768 and "made for" in whole["answer"]


def test_answer_when_nothing_fits(config_70b, capsys):
    none = answer(capsys, config_70b, "--devices", "8G", "--max-seq-len", "max")
    assert not none["fits"] and none["answer"].startswith("Not even max_seq_len=1 fits.")
    none = answer(capsys, config_70b, "--devices", "8G", "--cache", "best")
    assert not none["fits"] and none["answer"].startswith("No kind of cache fits.")
    lacking = none["found"]["extra_memory"]
    more = f"{(8 << 30) + lacking}"
    kind = BY_LOSS[-1]
    assert answer(capsys, config_70b, "--devices", more, "--cache", kind)["fits"]
    assert not answer(capsys, config_70b, "--devices", str(int(more) - 1), "--cache", kind)["fits"]


def test_json_plan_equals_the_library_plan(config_70b, capsys):
    values = answer(capsys, config_70b, "--devices", "48G,48G,80G", "--objective", "balance")
    model = Model(ModelConfig.from_pretrained(config_70b))
    kind = CACHES["fp16"]
    cache = kind(model, 32768)
    expected = place(model, cache, "48G,48G,80G", "balance")
    assert Plan.from_json(json.dumps(values["plans"]["model"])) == expected


def test_draft_displaces_the_main_model_only_on_request(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(llama().to_dict() | {"torch_dtype": "float32"}))
    cards = [
        "--devices",
        "4500K,4500K,64M",
        "--margin",
        "0",
        "--allocator",
        "exact",
        "--max-seq-len",
        "100",
    ]
    alone = answer(capsys, str(config), *cards)["plans"]["model"]
    both = answer(capsys, str(config), *cards, "--draft", str(config))["plans"]
    assert both["model"] == alone
    assert {unit["device"] for unit in both["draft"]["units"]} != {"cuda:0"}
    first = answer(capsys, str(config), *cards, "--draft", str(config), "--draft-first")["plans"]
    assert first["draft"]["units"] == alone["units"]
    assert list(first) == ["draft", "model"]


# What it draws --------------------------------------------------------------------------------


def test_svg_shows_the_same_plan(config_70b, tmp_path, capsys):
    file = tmp_path / "plan.svg"
    status, out, _ = plan(capsys, config_70b, "--devices", "48G,48G,80G", "--svg", str(file))
    assert status == 0
    text = "".join(ElementTree.parse(file).getroot().itertext()).replace("\xa0", " ")
    for line in ("cuda:0", "53-79 head", "workspace", "It fits on 3 devices"):
        assert line in text and line in out


def test_bar_cells_are_proportional_to_bytes():
    model = Model(ModelConfig.from_dict(LLAMA_70B))
    found = place(model, [], "80G,80G")
    parts = stack([found], ["model"], found.ledgers[0].place)
    text = bar(parts, found.ledgers[0], 80 << 30, colour=False).plain
    assert len(text) == 72
    share = found.ledgers[0].weights / (80 << 30)
    assert abs(text.count("W") / 72 - share) < 1 / 72
    half = bar(parts, found.ledgers[0], 160 << 30, colour=False).plain
    assert len(half) == 36


# Carried out ----------------------------------------------------------------------------------


@needs_sim
def test_simulate_shows_planned_and_measured_bytes(config_70b):
    hosts = ("a=48G,24G", "b=24G,16G", "c=24G,24G,cpu:32G", "d=12G,8G,8G")
    options = ("--objective", "balance", "--allocator", "exact", "--simulate")
    done = run("plan", config_70b, "--hosts", *hosts, *options)
    assert done.returncode == 0, done.stderr
    assert "It fits on 9 devices of 4 hosts" in done.stdout
    table = done.stdout.split("carried out on simulated devices")[1]
    rows = [line for line in table.splitlines() if "sim:" in line and "(" in line]
    assert len(rows) == 9
    for row in rows:
        cells = [cell.strip() for cell in row.split("│")[3:7]]
        pairs = [cell.rstrip(")").split(" (") for cell in cells]
        assert all(predicted == measured for predicted, measured in pairs), row
    assert done.stderr == ""


@needs_sim
def test_simulate_with_a_draft_model_and_the_host():
    done = run(
        "plan",
        DEMO,
        *(
            "--devices",
            "3M,4M,9M",
            "--margin",
            "0",
            "--allocator",
            "exact",
            "--cpu",
            "64M",
            "--draft",
            DEMO,
            "--simulate",
        ),
    )
    assert done.returncode == 0, done.stderr
    assert "The model, carried out" in done.stdout and "The draft, carried out" in done.stdout


def test_simulate_without_a_compiler_still_plans(capsys, monkeypatch, config_70b, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    status, out, err = plan(capsys, config_70b, "--devices", "48G,48G,80G", "--simulate")
    assert status == 2 and "It fits on 3 devices" in out
    assert "there is no C++ compiler here (no-such-compiler): install g++" in err
    assert len(err.splitlines()) == 1


def test_installed_command_exists():
    (command,) = [e for e in entry_points(group="console_scripts") if e.name == "exkv"]
    assert command.value == "exkv.cli:main"


@pytest.mark.parametrize("switch", ["enable", "disable"])
def test_import_restores_the_garbage_collector(switch):
    code = f"import gc; gc.{switch}(); before = gc.isenabled(); import exkv; "
    code += "assert gc.isenabled() == before, before; assert gc.get_freeze_count() > 100_000"
    done = run_apart(code)
    assert done.returncode == 0, done.stderr


def test_length_beyond_the_models_positions_warns(capsys):
    status, out, _ = plan(capsys, DEMO, "--devices", "24G", "--max-seq-len", "100000")
    assert status == 0
    assert re.search(r"--max-seq-len 100000 is beyond the [\d,]+ positions", out)
    _, out, _ = plan(capsys, DEMO, "--devices", "24G")
    assert "beyond" not in out


@pytest.mark.parametrize("width", [60, 80, 100, 120])
@pytest.mark.parametrize("cards", ["48G,48G,80G", "48G,48G,20G", "96G,96G,24G,24G,24G,24G"])
def test_lines_fit_the_terminal_without_cut_words(config_70b, capsys, monkeypatch, width, cards):
    monkeypatch.chdir(Path(config_70b).parent)
    arguments = ["config.json", "--devices", cards]
    monkeypatch.setattr("exkv.cli.picture.PAGE_WIDTH", 400)
    _, whole, _ = plan(capsys, *arguments)
    monkeypatch.setattr("exkv.cli.picture.PAGE_WIDTH", width)
    _, out, _ = plan(capsys, *arguments)
    lines = out.splitlines()
    assert [line for line in lines if len(line.rstrip()) > width] == []
    assert cells_of(out) == cells_of(whole)
    words = re.findall(r"[^\s┃│]+", out.split("Planned in")[0])
    bars = re.compile(r"[WClwaxm·!]{2,}|[━─┏┳┓┡╇╩┩├┼┤└┴┘]+")
    known = {*whole.split(), "device"}
    assert [word for word in words if word not in known and not bars.fullmatch(word)] == []


def cells_of(out: str) -> dict[tuple[str, str], str]:
    """The cells of the tables by device and column."""
    found, heads = {}, []
    for line in out.splitlines():
        cells = [cell.strip() for cell in re.split("[┃│]", line)[1:-1]]
        if "┃" in line:
            heads = cells
        elif cells:
            found |= {(cells[0], head): cell for head, cell in zip(heads, cells, strict=True)}
    return found


@needs_sim
def test_simulated_table_fits_the_terminal(config_70b):
    done = run_sim(simulated_at, "", args=[config_70b, 60])
    table = done.split("carried out on simulated devices")[1].splitlines()
    assert max(map(len, table)) <= 60
    assert cells_of(done)["sim:2", "of"] == "80.00 GiB"
    assert re.fullmatch(r"(\S+ GiB) \(\1\)", cells_of(done)["sim:2", "weights"])


def simulated_at(config: str, width: int) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        simulating._WIDTH = width
        main(["plan", config, "--devices", "48G,48G,80G", "--simulate"])
    return text.getvalue()


def test_svg_places_every_character(config_70b, tmp_path, capsys):
    """No renderer has to stretch a line, and bars need no font: they are rectangles."""
    file = tmp_path / "plan.svg"
    plan(capsys, config_70b, "--devices", "48G,48G,80G", "--svg", str(file))
    root = ElementTree.parse(file).getroot()
    assert "textLength" not in file.read_text()
    space = "{http://www.w3.org/2000/svg}"
    lines = [each for each in root.iter(f"{space}text") if "r" in each.get("class", "")]
    lines = [each for each in lines if "title" not in each.get("class")]
    assert len(lines) > 30
    for line in lines:
        assert len(line.get("x").split()) == len(line.text), line.text
    bars = [each for each in root.iter(f"{space}rect") if each.get("shape-rendering")]
    label = next(each for each in lines if "80.00" in each.text)
    row = [bar for bar in bars if float(bar.get("y")) < float(label.get("y"))][-4:]
    ends = [float(bar.get("x")) + float(bar.get("width")) for bar in row]
    assert max(ends) <= float(label.get("x").split()[0]) + 0.01


def watched(folder):
    """Two pictures of a card that another program fills between them, and how watching ends."""
    said, pictures = io.StringIO(), []

    def sleep(seconds: float) -> None:
        pictures.append(said.getvalue())
        if len(pictures) == 2:
            raise KeyboardInterrupt
        sim.set_capacity(0, 1 << 20)

    time.sleep = sleep
    with contextlib.redirect_stdout(said):
        status = main(["plan", folder, "--max-seq-len", "64", "--watch"])
    return status, pictures[0], pictures[1].removeprefix(pictures[0])


def test_watched_plan_is_redrawn_as_memory_changes():
    status, first, second = run_sim(watched, "64M", args=[str(ROOT / DEMO)])
    assert "It fits" in first and "It fits" not in second
    assert "64.00 MiB" in first and "64.00 MiB" not in second and "sim:0" in second
    assert status == 1  # as the last picture says


@pytest.mark.parametrize("other", [["--json"], ["--svg", "x.svg"], ["--simulate"]])
def test_watch_requires_a_terminal(capsys, config_70b, other):
    status, _, errors = plan(capsys, config_70b, "--devices", "48G", "--watch", *other)
    assert status == 2 and f"leave {other[0]} out" in errors
