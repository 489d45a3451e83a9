"""The examples do what their users are told: in this process where that shows as much, else as
programs with pipes or a terminal."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from apart import run_script
from cases import forgets
from simproc import needs_sim
from tiny import llama, reference, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from exkv import CACHES, Model, SamplingParams
from exkv.cli.chat.session import recommended
from exkv.cli.chat.showing import answers_to

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEMO = EXAMPLES / "demo-model"
CONTEXT = 8192
SPECIAL = ["<s>", "</s>", "<user>", "<bot>", "<system>"]
TEMPLATE = (
    "<s>{% for m in messages %}{{ {'user': '<user>', 'assistant': '<bot>', 'system': '<system>'}"
    "[m.role] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
KEY = "Anna put the key in the kitchen. Where is the key?"

needs_demo = pytest.mark.skipif(
    not (DEMO / "model.safetensors").is_file(), reason="the demo model isn't there"
)


def example(name: str) -> ModuleType:
    """An example as a module, so that a test needn't start a program to call it."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up here
    spec.loader.exec_module(module)
    return module


chat = example("chat")
matrix = example("autosplit_matrix")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model that never stops by itself, a token for each printable ASCII character."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    letters = sorted(c for c in pre_tokenizers.ByteLevel.alphabet() if c.isascii() or c == "Ġ")
    vocabulary = {piece: index for index, piece in enumerate([*SPECIAL, *letters])}
    config = llama(
        vocab_size=len(vocabulary),
        bos_token_id=0,
        eos_token_id=1,
        max_position_embeddings=CONTEXT,
    )
    model = reference(config)
    with torch.no_grad():
        model.lm_head.weight[: len(SPECIAL)] = 0  # the likeliest logit is above 0
    save(model, folder)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return folder


@pytest.fixture
def run_chat(folder, monkeypatch, capsys):
    """Run chat.py on piped lines: exit status, standard output, standard error."""

    def run(
        lines: str, *flags: str, model: Path = folder, typed: bool = False
    ) -> tuple[int, str, str]:
        stdin = io.TextIOWrapper(io.BytesIO(lines.encode()))
        stdin.isatty = lambda: typed
        monkeypatch.setattr(sys, "stdin", stdin)
        try:
            status = chat.main(["-m", str(model), "--devices", "cpu", "-maxr", "8", *flags])
        except SystemExit as leaving:
            status = leaving.code
        return status, *capsys.readouterr()

    return run


def program(name: str, *args: object, typed: str = "", **env: str) -> tuple[str, str]:
    """Standard output and standard error of an example that ends well."""
    done = run_script(EXAMPLES / f"{name}.py", *args, typed=typed, TERM="dumb", **env)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def statistics(errors: str) -> list[dict[str, int]]:
    """The numbers of each line of statistics."""
    pattern = r"(\d+) tokens? .*prompt (\d+) new, (\d+) reused \| context (\d+) of (\d+)"
    names = ("tokens", "new", "reused", "used", "context")
    found = re.findall(pattern, errors)
    return [dict(zip(names, map(int, numbers), strict=True)) for numbers in found]


# Turns --------------------------------------------------------------------------------------------


def test_answers_alone_are_on_standard_output(run_chat):
    status, answers, errors = run_chat("hello\n\n   \nagain\n")
    assert status == 0
    assert [len(line) for line in answers.splitlines()] == [8, 8]
    assert [turn["tokens"] for turn in statistics(errors)] == [8, 8]
    assert "cpu" in errors and "cut at -maxr" in errors
    assert "Traceback" not in errors and "\x1b" not in errors


def test_a_later_turn_reuses_what_the_cache_holds(run_chat):
    first, second = statistics(run_chat("hello\nagain\n")[2])
    assert first["reused"] == 0
    # All but the answer's last token, which was never run.
    assert second["reused"] == first["new"] + first["tokens"] - 1 == first["used"]
    assert second["new"] == len("again") + 3  # that token, and the template's two markers


def test_every_way_to_load_gives_the_same_answers(run_chat):
    expected = run_chat("hello\nagain\n")[1]
    assert run_chat("hello\nagain\n", "--lazy", "-gs", "1")[1] == expected
    flags = ("--embed-cpu", "--chunk-size", "3", "--reserve-vram", "1M", "-l", "100")
    assert run_chat("hello\nagain\n", *flags)[1] == expected


def test_a_full_context_drops_the_oldest_turns_and_says_so(run_chat):
    status, answers, errors = run_chat("hello there\n" * 8, "-l", "64", "--cache", "8bit")
    assert status == 0
    assert len(answers.splitlines()) == 8
    assert "(the context is full: dropped the oldest 1 turn)" in errors
    assert {turn["context"] for turn in statistics(errors)} == {64}
    assert max(turn["used"] for turn in statistics(errors)) <= 64


def test_a_message_that_is_too_long_ends_a_script(run_chat):
    status, answers, errors = run_chat("hi\n" + "x" * 100 + "\nhi\n", "-l", "64")
    assert status == 2
    assert len(answers.splitlines()) == 1
    assert re.search(r"chat.py: .*103 tokens.*64", errors.splitlines()[-1])


def test_a_message_that_is_too_long_is_forgotten_when_it_was_typed(run_chat):
    status, answers, errors = run_chat("x" * 100 + "\nhi\n", "-l", "64", typed=True)
    assert status == 0
    assert "103 tokens" in errors
    assert len(answers.splitlines()) == 1
    assert "dropped" not in errors  # there was nothing left to drop


def test_the_system_message_reaches_the_model(run_chat):
    plain, told = run_chat("hello\n"), run_chat("hello\n", "--system", "be kind")
    difference = statistics(told[2])[0]["new"] - statistics(plain[2])[0]["new"]
    assert difference == len("be kind") + 1


def test_text_is_passed_on_as_it_is():
    file = io.StringIO()
    with answers_to(file, raw=False).answer() as show:
        show("a\tb[b]:smile:  \r\n\x1b[1m")
    assert file.getvalue() == "a\tb[b]:smile:  \r\n\x1b[1m\n"


# Commands -----------------------------------------------------------------------------------------


def test_commands(run_chat):
    status, answers, errors = run_chat("/help\n/foo\n/stats\nhi\n/reset\nhi\n /foo\n/quit\nhi\n")
    assert status == 0
    assert all(f"\n{name}" in f"\n{errors}" for name in ("/help", "/reset", "/stats", "/quit"))
    assert "unknown command /foo" in errors
    assert "predicted" in errors and f"Cache of {CONTEXT} tokens: cpu 16.00 MiB" in errors
    before, after, _ = answers.splitlines()  # the last is of " /foo"; nothing follows /quit
    assert before == after
    first, again, _ = statistics(errors)
    assert again["new"] + again["reused"] == first["new"]


# Kinds of cache -----------------------------------------------------------------------------------

#: What /stats says of a kind behind its bytes, on the host itself.
TOLD = {
    **dict.fromkeys(("fp16", "hybrid", "offloaded_static"), ""),
    **dict.fromkeys(("dynamic", "offloaded"), "; 2.00 MiB when full"),
    "8bit": "; int8 keys and int8 values, of all tokens",
    "4bit": "; int4 keys and int4 values, rotated, of all tokens",
    "2bit": "; int2 keys and int2 values, rotated, of all tokens",
    "kivi": "; int2c keys and int2 values, the last 64 tokens as floats, of all tokens",
    "sliding_window": "; float keys and float values, of the last 1024 tokens",
    "sink": "; float keys and float values, of the first 4 tokens and the last 1020",
}


@needs_demo
@pytest.mark.parametrize("kind", CACHES)
def test_every_kind_of_cache_answers_and_says_what_it_is(run_chat, kind):
    lines = KEY + "\nTom is in the garden. Where is Tom?\n/stats\n"
    status, answers, errors = run_chat(lines, "--cache", kind, model=DEMO)
    assert status == 0, errors
    assert answers.splitlines() == ["The key is in the kitchen.", "Tom is in the garden."]
    assert statistics(errors)[1]["reused"] == statistics(errors)[0]["used"]
    name = CACHES[kind].__name__
    (told,) = re.findall(rf"^{name} of 2048 tokens: cpu [\d.]+ [KM]iB(.*)$", errors, re.MULTILINE)
    assert told == TOLD.get(kind, told)


@needs_demo
@needs_sim
@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_a_cache_in_host_memory_is_told_apart_from_the_devices(kind):
    flags = ("-m", DEMO, "--cache", kind, "-l", "512")
    answers, errors = program("chat", *flags, typed=KEY + "\n/stats\n", EXKV_SIM_DEVICES="32M")
    assert answers == "The key is in the kitchen.\n", errors
    size = "256.00 KiB" if kind == "offloaded" else "512.00 KiB"
    assert f"| sim:0 1.82 MiB | cpu {size}" in errors
    told = f"of 512 tokens: cpu {size}; offloaded to host memory, fetched layer by layer"
    assert told in errors


# Sampling -----------------------------------------------------------------------------------------


def test_a_seed_repeats_the_answers(run_chat):
    def answers(*flags):
        return run_chat("hi\nhi\n", "-temp", "1.5", "-topk", "0", "-topp", "1", *flags)[1]

    assert answers("--seed", "1") == answers("-seed", "1") != answers("-seed", "2")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, SamplingParams()),
        ({"eos_token_id": 2}, SamplingParams()),
        ({"do_sample": False, "temperature": 0.6}, SamplingParams.greedy()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            SamplingParams(temperature=0.6, top_p=0.9, token_repetition_penalty=1.0),
        ),
        (
            {"repetition_penalty": 1.1, "top_k": 20, "min_p": None},
            SamplingParams(temperature=1.0, top_p=1.0, top_k=20, token_repetition_penalty=1.1),
        ),
    ],
)
def test_the_checkpoint_recommends_how_to_sample(tmp_path, config, expected):
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert SamplingParams.recommended(tmp_path) == expected


def test_flags_replace_what_the_checkpoint_recommends(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"do_sample": false}')

    assert recommended(tmp_path, {}) == SamplingParams.greedy()
    chosen = {"min_p": 0.1, "token_repetition_penalty": 1.2, "typical": 0.5}
    assert recommended(tmp_path, chosen) == SamplingParams(**chosen)


@pytest.mark.parametrize("text", ["{", "[1]", '{"temperature": "hot"}'])
def test_a_broken_generation_config_is_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match="generation_config.json"):
        SamplingParams.recommended(tmp_path)


# What users get wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["-m", "no-such-folder"], 2, "no-such-folder"),
        (["-gs", "1,1"], 2, "gpu_split names 2 devices"),
        (["-gs", "1", "--reserve-vram", "1M"], 2, "--reserve and --gpu-split exclude each other"),
        (["-gs", "0.001"], 1, "no room for"),
        (["-l", "4"], 2, "context of 4"),
        (["--devices", "abacus"], 2, "abacus"),
        (["--no-such-flag"], 2, "--no-such-flag"),
    ],
)
def test_a_mistake_is_one_line(run_chat, flags, status, said):
    got, answers, errors = run_chat("hello\n", *flags)
    assert (got, answers) == (status, "")
    (line,) = errors.splitlines()
    assert said in line


def test_a_folder_without_chat_template_is_refused_before_loading(run_chat, folder, tmp_path):
    for file in folder.iterdir():
        if not file.name.startswith(("model", "tokenizer_config")):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    status, _, errors = run_chat("hello\n", model=tmp_path)
    assert status == 2
    assert "no chat template" in errors


# At a terminal ------------------------------------------------------------------------------------


def heed_ctrl_c() -> None:
    """Whoever runs the tests in the background may have had them ignore it: not the program."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A program on a pseudo-terminal."""

    PATIENCE = 60  # seconds before a test gives up; nothing waits for it to pass

    def __init__(self, *args: object) -> None:
        self.end, theirs = os.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        name, *rest = map(str, args)
        self.process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / f"{name}.py"), *rest],
            env={**os.environ, "TERM": "dumb"},
            preexec_fn=heed_ctrl_c,
            start_new_session=True,
            **streams,
        )
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def wait_for(self, pattern: str, interrupting: bool = False) -> str:
        """Read until the pattern has appeared; everything up to its end.

        With `interrupting`, send Ctrl-C's signal, again if nothing comes of it: one that arrives
        just before a blocking read waits for the next.
        """
        give_up = time.monotonic() + self.PATIENCE
        if interrupting:
            self.process.send_signal(signal.SIGINT)
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < give_up, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.end], [], [], 5)[0]:
                self.seen += os.read(self.end, 4096).decode()
            elif interrupting:
                self.process.send_signal(signal.SIGINT)
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def leave(self, keys: str) -> int:
        self.type(keys)
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while os.read(self.end, 4096):
                pass
        return self.process.wait(self.PATIENCE)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_stops_an_answer_and_not_the_program(folder):
    terminal = Terminal("chat", "-m", folder, "--devices", "cpu", "-maxr", CONTEXT)
    with contextlib.closing(terminal):
        terminal.wait_for("> ")
        terminal.wait_for(r"\(Ctrl-D or /quit leaves\)\r\n> ", interrupting=True)
        turns = []
        for message in ("hello", "again"):
            terminal.type(f"{message}\n")
            # The echo, and more than the line editor writes: some of the answer.
            terminal.wait_for(rf"{message}\r\n.*\S{{20}}")
            turns += statistics(terminal.wait_for(r"\| stopped\r\n> ", interrupting=True))
        first, second = turns
        assert 0 < first["tokens"] < CONTEXT // 2
        assert second["reused"] > first["new"]  # what there was of the answer has stayed
        assert terminal.leave("\x04") == 0


# With the demo model, as programs -----------------------------------------------------------------


@needs_demo
def test_the_demo_model_answers():
    answers, errors = program("chat", "-m", DEMO, "-gs", "auto", typed=f"{KEY}\n")
    assert "kitchen" in answers
    (turn,) = statistics(errors)
    assert (
        turn["context"] == json.loads((DEMO / "config.json").read_text())["max_position_embeddings"]
    )


@needs_demo
def test_the_minimal_chat_answers_the_same():
    answers, errors = program("minimal_chat", DEMO, typed=f"{KEY}\n")
    assert "kitchen" in answers
    assert "predicted" in errors


@needs_demo
@pytest.mark.parametrize("temperature", [[], ["0.01"]], ids=["greedy", "drawn"])
def test_a_loop_of_ones_own_answers_the_same(temperature):
    assert "kitchen" in program("own_loop", DEMO, KEY, *temperature)[0]


@pytest.fixture
def ran(monkeypatch):
    """The width of each forward call from now on."""
    widths: list[int] = []
    forward = Model.forward

    def spy(self, ids, *args, **kwargs):
        widths.append(ids.shape[1])
        return forward(self, ids, *args, **kwargs)

    monkeypatch.setattr(Model, "forward", spy)
    return widths


@needs_demo
@pytest.mark.parametrize("kind", CACHES)
def test_a_conversation_on_one_cache_runs_only_what_is_new(kind, ran, capsys):
    example("iterative_chat").main([str(DEMO), "--cache", kind])
    answers, errors = capsys.readouterr()
    assert answers.splitlines()[1::2] == [
        "The key is in the kitchen.",
        "Tom is in the garden.",
        "Tom has the lamp.",
        "The key is red.",
    ]
    turns = [(int(new), int(held)) for new, held in re.findall(r"(\d+) \w+ new, (\d+)", errors)]
    # After the prompt a call has one token; and what a turn leaves, the next one finds.
    assert [width for width in ran if width > 1] == [new for new, _ in turns]
    assert turns[0][1] == 0
    assert all(new < held for new, held in turns[1:])


@needs_demo
@pytest.mark.parametrize("kind", CACHES)
def test_a_long_prompt_runs_once_for_many_questions(kind, ran, capsys, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)  # where a program finds the toy world
    reuse = example("prompt_reuse")
    reuse.main([str(DEMO), "--cache", kind])
    answers, errors = capsys.readouterr()
    (story,) = re.findall(r"story: (\d+)", errors)
    spec = CACHES[kind](Model(DEMO), int(story)).layers[0].spec
    room = {thing: room for _, thing, room in reuse.FACTS}
    cup, key, untold = answers.splitlines()[1::2]
    assert untold == "I don't know."
    if not forgets(spec, int(story)):
        assert cup == f"The cup is in the {room['cup']}."
        assert key == f"The key is in the {room['key']}."
    questions = re.findall(r"prompt: (\d+) tokens new, (\d+)", errors)
    assert [width for width in ran if width > 1] == [int(story), *(int(n) for n, _ in questions)]
    assert {held for _, held in questions} == {story}
    assert int(story) > 400 and all(int(new) < 20 for new, _ in questions)
    stored = re.findall(r"([\d.]+) (?:Ki)?B\)$", errors, re.MULTILINE)  # story, forks
    assert len(stored) == 4
    if kind == "paged":  # forks take from the story's pool
        assert all(float(fork) == 0 for fork in stored[1:])
        return
    # A ring of recent tokens is written in place, so that a fork of it is a copy.
    most = 1.1 if spec.storage.recent or forgets(spec, int(story)) else 0.2
    assert all(0 < float(fork) < most * float(stored[0]) for fork in stored[1:])


@needs_demo
@pytest.mark.parametrize("name", ["iterative_chat", "prompt_reuse"])
def test_an_example_asks_what_it_is_given(name):
    answers, _ = program(name, DEMO, KEY, "--cache", "8bit")
    assert answers.splitlines() == [f"> {KEY}", "The key is in the kitchen."]


# The matrix ---------------------------------------------------------------------------------------


@needs_sim
def test_the_matrix_agrees_on_simulated_devices(folder):
    flags = ("--lengths", "64,4096", "--tokens", "4", "--caches", "fp16")
    table, _ = program("autosplit_matrix", folder.parent, *flags, EXKV_SIM_DEVICES="2M,4M")
    assert "sim:0 0-1" in table and "sim:1 2-3" in table
    assert "no room for" in table  # 4,096 tokens are too many, lazily as eagerly
    assert "NO" not in table


def run_matrix(folder, *flags):
    return matrix.main([str(folder), "--devices", "cpu", "--tokens=2", "--lengths=16", *flags])


def test_the_matrix_fails_where_lazy_and_eager_differ(folder, monkeypatch, capsys):
    assert run_matrix(folder.parent) == 0
    capsys.readouterr()
    tokens = matrix.generate

    def different(model, cache, count):
        return tokens(model, cache, count)[: 1 if cache.lazy else 2]

    monkeypatch.setattr(matrix, "generate", different)
    assert run_matrix(folder, "--caches", "8bit") == 1
    table, errors = capsys.readouterr()
    assert "NO" in table
    assert "tiny, 8bit cache of 16, eager: tokens is" in errors


def test_the_matrix_fails_where_memory_is_not_returned(folder, monkeypatch, capsys):
    counts = iter(range(0, 1 << 20, 1024))
    monkeypatch.setattr(matrix, "allocated_memory", lambda device: next(counts))
    assert run_matrix(folder, "--caches", "fp16") == 1
    assert "tiny, fp16 cache of 16, lazy: cpu holds +" in capsys.readouterr().err


def test_the_matrix_refuses_a_folder_without_models(tmp_path, capsys):
    assert run_matrix(tmp_path) == 2
    assert str(tmp_path) in capsys.readouterr().err


# Flags ------------------------------------------------------------------------------------------

HUGE = "1" + "0" * 30
#: Script -> its flags for numbers, and values that are none, or out of range, for each.
WRONG = {
    "chat": {
        "-l": ("0", "-1", "many", "1.5", HUGE),
        "-maxr": ("0", "-1", "many", HUGE),
        "--chunk-size": ("0", "-5", "x", HUGE),
        "-seed": ("-1", "x", HUGE),
        "-gs": ("x", "nan", "inf", "20,,24"),
        "--reserve-vram": ("x", "-1", "24Q"),
        "--cache": ("3bit",),
        "-temp": ("warm", "nan", "-1", "inf"),
        "-topk": ("x", "-1", "1.5"),
        "-topp": ("x", "2", "-1", "nan"),
        "-minp": ("x", "2", "nan"),
        "-typical": ("x", "2", "nan"),
        "-repp": ("x", "-1", "0", "nan"),
    },
    "autosplit_matrix": {
        "--lengths": ("0", "9", "x", "-1", f"256,{HUGE}", "256,"),
        "--tokens": ("0", "x", "-1", "1.5", HUGE),
        "--caches": ("3bit", "fp16,3bit", ""),
        "--reserve-vram": ("x", "-1"),
    },
    "iterative_chat": {"--cache": ("3bit",)},
    "prompt_reuse": {"--cache": ("3bit",)},
    "resilient_beams": {
        "--beams": ("0", "-2", "3", "x", "1.5", HUGE),
        "--cache": ("3bit",),
        "--simulate": ("24Q", "-1", "x"),
    },
    "train_demo": {
        "--questions": ("0", "x", "1.5", HUGE),
        "--minutes": ("0", "-1", "nan", "inf", "x"),
        "--seed": ("-1", "x", HUGE),
        "--processes": ("0", "-1", "x", HUGE),
        "--lr": ("0", "nan", "-1", "2", "x"),
        "--batch-tokens": ("0", "x", HUGE),
        "--vocab-size": ("0", "x", HUGE),
    },
}
FLAGS = [
    (name, flag, value) for name in WRONG for flag in WRONG[name] for value in WRONG[name][flag]
]


@pytest.mark.parametrize(("name", "flag", "value"), FLAGS, ids=str)
def test_a_wrong_number_is_told_before_anything_is_asked_for(
    monkeypatch, capsys, tmp_path, name, flag, value
):
    monkeypatch.syspath_prepend(str(EXAMPLES))  # where they find each other
    folder = {"chat": ["-m", str(DEMO)], "train_demo": ["--out", str(tmp_path / "out")]}
    arguments = [*folder.get(name, [str(DEMO)]), f"{flag}={value}" if flag[1] == "-" else flag]
    arguments += [] if flag[1] == "-" else [value]
    monkeypatch.setattr(Model, "load", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(Model, "load_autosplit", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    try:
        status = example(name).main(arguments)
    except SystemExit as leaving:
        status = leaving.code
    told = capsys.readouterr().err
    assert status == 2
    last = told.splitlines()[-1]
    assert len(last) < 300 and "Traceback" not in told
    assert re.search(r"(?i)" + NAMES.get(flag, re.escape(flag)), last), last
    assert not (tmp_path / "out").exists()


#: How values that the library itself refuses are called there.
NAMES = {
    "-gs": "gpu.split",
    "-l": "max-seq-len",
    "-temp": "temperature|-temp",
    "-topk": "top.k",
    "-topp": "top.p",
    "-minp": "min.p",
    "-typical": "typical",
    "-repp": "repetition.penalty",
}


@pytest.mark.parametrize("value", ["warm", "nan", "-1", HUGE])
def test_own_loop_takes_temperatures_only(value):
    with pytest.raises(SystemExit, match="the temperature is .*a number from 0 to 100"):
        example("own_loop").temperature(value)


def test_every_flag_for_a_number_is_tried():
    folders = ("--out", "--evaluate", "--devices", "--model-dir")
    call = re.compile(r"\badd(?:_argument)?\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
    for file in EXAMPLES.glob("*.py"):
        for arguments in call.findall(file.read_text()):
            names = set(re.findall(r'"(--?[\w-]+)"', arguments))
            if "type=" in arguments and names and not names & set(folders):
                assert names & set(WRONG[file.stem]), (file.name, names)
