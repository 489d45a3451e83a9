"""``exkv chat``: messages and commands, through a pipe and at a terminal."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import io
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

from exkv import Generator, Grammar
from exkv.cli import main
from exkv.cli.chat.commands import NAMES, mistaken_for_a_message
from exkv.cli.chat.flags import add_flags
from exkv.cli.chat.reading import is_open, unquoted
from exkv.cli.chat.showing import Rendered, split_complete, without_controls
from exkv.cli.loading import prepare
from exkv.text.reasoning import ReasoningFormat

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
KEY = "Anna put the key in the kitchen. Where is the key?"
TOM = "Tom is in the garden. Where is Tom?"
KEY_ANSWER, TOM_ANSWER = "The key is in the kitchen.", "Tom is in the garden."


@pytest.fixture
def chat(monkeypatch, capsys):
    """Run ``exkv chat`` on piped lines: exit status, standard output, standard error."""

    def run(*lines: str, flags: tuple[str, ...] = (), typed: bool = False) -> tuple[int, str, str]:
        stdin = io.TextIOWrapper(io.BytesIO("\n".join([*lines, ""]).encode()))
        stdin.isatty = lambda: typed
        monkeypatch.setattr(sys, "stdin", stdin)
        status = main(["chat", str(DEMO), "--devices", "cpu", *flags])
        return status, *capsys.readouterr()

    return run


# Messages -----------------------------------------------------------------------------------------


def test_lines_between_quotes_are_one_message(chat):
    status, answers, errors = chat('"""', "Tom is in the garden.", "Where is Tom?", '"""', KEY)
    assert (status, len(answers.splitlines()), answers.splitlines()[1]) == (0, 2, KEY_ANSWER), (
        errors
    )
    status, answers, errors = chat(KEY, '"""', "Where is Tom?")
    assert (status, answers) == (2, KEY_ANSWER + "\n")
    assert 'before the """' in errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plain", "plain"),
        ('"""one"""', " one"),
        ('"""\none\n/two\n"""', " one\n/two"),
        ('a """ b', 'a """ b'),
        ('"""/quit"""', " /quit"),
    ],
)
def test_quotes_are_stripped(text, message):
    assert not is_open(text)
    assert unquoted(text) == message


def test_quotes_are_open_until_they_are_closed():
    assert is_open('"""') and is_open('"""one\ntwo') and is_open('""""')


# Commands -----------------------------------------------------------------------------------------


def test_every_command_is_in_the_help(chat):
    status, answers, errors = chat("/help")
    assert (status, answers) == (0, "")
    assert [line.split()[0] for line in errors.splitlines()[: len(NAMES)]] == list(NAMES)


def test_undo_edit_and_regen(chat):
    status, answers, errors = chat(KEY, TOM, "/undo", "/regen", f"/edit {TOM}", "/undo", "/undo")
    assert status == 2  # the last one: there is nothing left
    assert answers.splitlines() == [KEY_ANSWER, TOM_ANSWER, KEY_ANSWER, TOM_ANSWER]
    assert f"(removed: {TOM})" in errors
    assert "decoding is greedy" in errors
    assert errors.splitlines()[-1] == "exkv chat: there is no message yet"


def test_regen_differs_with_a_seed(chat):
    flags = ("--temperature", "3", "--top-k", "0", "--top-p", "1", "--seed", "5")
    first, again = chat("hello", "/regen", flags=(*flags, "--max-tokens", "20"))[1].splitlines()
    assert first != again


def test_system_message_can_be_set_and_removed(chat):
    status, _, errors = chat(
        "/system be kind", "/system", "hello", '/system ""', "/system", "/undo", "hello"
    )
    assert status == 0
    assert "\nbe kind\n" in errors and "\n(nothing)\n" in errors
    told, plain = [sum(map(int, found)) for found in re.findall(r"(\d+) new, (\d+) reused", errors)]
    assert told > plain


def test_saved_conversation_continues(chat, tmp_path):
    file = tmp_path / "talk.json"
    status, _, errors = chat("/system be kind", "Tom is in the garden.", f"/save {file}")
    assert status == 0, errors
    saved = json.loads(file.read_text())
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant"]
    status, answers, errors = chat(f"/load {file}", "Where is Tom?", f"/save {file}")
    assert (status, answers) == (0, TOM_ANSWER + "\n"), errors
    assert "user: Tom is in the garden." in errors
    assert len(json.loads(file.read_text())["messages"]) == 5


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("no JSON", "talk.json"),
        ('{"a": 1}', "no list of messages"),
        ('{"messages": [{"role": "user"}]}', "message 0 has no role and content"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "message 0 is the assistant's"),
    ],
)
def test_other_files_are_neither_loaded_nor_overwritten(chat, tmp_path, content, reason):
    file = tmp_path / "talk.json"
    file.write_text(content)
    for command in ("/load", "/save"):
        status, _, errors = chat(f"{command} {file}")
        assert status == 2
        assert reason in errors
    assert file.read_text() == content


def test_settings_are_shown_checked_and_changed(chat):
    status, _, errors = chat(
        "/set", "/set temperature 0.5", "/set temprature 1", "/set top_p 7", "/set seed 3",
        "/set top-k many", "/set temperature_last on", "/set top_p default",
        "/set max_tokens 0",
        typed=True,
    )  # fmt: skip
    assert status == 0
    for line in (
        "max_tokens 1000",
        "(temperature is 0.5)",
        "there is no setting 'temprature': did you mean temperature?",
        "SamplingParams.top_p is 7.0; it must be in (0, 1]; 1 switches it off",
        "(seed is 3)",
        "top_k is 'many'; it must be a whole number, or default",
        "(temperature_last is True)",
        "max_tokens is '0'; it must be a whole number from 1",
    ):
        assert line in errors


@pytest.mark.parametrize(
    ("word", "command"),
    [("exit", "/quit"), ("Clear", "/reset"), ("help", "/help"), ("undo", "/undo"), ("q", "/quit")],
)
def test_bare_command_words_get_a_hint(word, command):
    assert f"the command is {command}" in mistaken_for_a_message(word)
    assert mistaken_for_a_message(f" {word}") is None
    assert mistaken_for_a_message(f"{word} it") is None


def test_pipe_sends_bare_command_words(chat):
    status, answers, errors = chat("exit")
    assert (status, len(answers.splitlines())) == (0, 1)
    assert "not sent" not in errors
    assert "(exit was not sent: the command is /quit" in chat("exit", typed=True)[2]


def test_long_running_commands_collect_garbage(chat):
    assert main(["plan", str(DEMO)]) == 0
    assert not gc.isenabled()
    chat("/help")
    assert gc.isenabled()
    assert main(["plan", str(DEMO)]) == 0
    assert main(["serve", "nowhere"]) == 2
    assert gc.isenabled()


# Models -------------------------------------------------------------------------------------------


def test_another_model_continues_the_conversation(chat):
    status, answers, errors = chat(
        "Tom is in the garden.", f"/model {DEMO} --cache 8bit --max-seq-len 300", "Where is Tom?"
    )
    assert status == 0, errors
    assert answers.splitlines()[1] == TOM_ANSWER
    assert "context" in errors and "of 300" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("nowhere", "nowhere"),
        (f"{DEMO} --cache 3bit", "invalid choice: '3bit'"),
        (f"{DEMO} --gpu-split 0.001", "no room for"),
    ],
)
def test_failed_model_change_keeps_this_model(chat, flags, reason):
    status, answers, errors = chat(f"/model {flags}", KEY, typed=True)
    assert (status, answers) == (0, KEY_ANSWER + "\n")
    assert reason in errors


def test_declined_model_is_not_loaded(chat, monkeypatch):
    questions = []

    def ask(question: str) -> bool:
        questions.append(question)
        return False

    monkeypatch.setattr("exkv.cli.chat.reading.Lines.yes", lambda self, question: ask(question))
    _, _, errors = chat(f"/model {DEMO} --max-seq-len 300", KEY)
    assert questions == ["Load it, and unload demo-model?"]
    assert "of 2048" in errors.splitlines()[-1]


def test_draft_changes_no_answer(chat):
    status, answers, errors = chat(KEY, flags=("--draft", str(DEMO)))
    assert (status, answers) == (0, KEY_ANSWER + "\n"), errors
    assert re.search(r"[1-9]\d* of \d+ draft tokens accepted", errors)


def test_cache_is_as_long_as_fits():
    gc.collect()  # models of other tests, which would count as memory in use

    def prepared(*flags: str):
        parser = argparse.ArgumentParser()
        add_flags(parser)
        args = parser.parse_args(["--devices", "cpu", "--chunk-size", "64", *flags])
        args.model = DEMO
        return prepare(args)

    (plan,) = prepared("--max-seq-len", "1024").plans
    enough = plan.ledgers[0].total / 2**30
    found = prepared("--gpu-split", f"{enough + 1e-8:.9f}")
    assert found.shortened and 1024 <= found.cache.max_seq_len < 1100
    whole = prepared()
    assert not whole.shortened and whole.cache.max_seq_len == 2048


# Answers at a terminal ----------------------------------------------------------------------------


def test_control_characters_are_dropped():
    assert without_controls("a\x1b[31mb\x07\tc\n\x9b2J\u202ed") == "a[31mb\tc\n2Jd"


MARKDOWN = "# Head\n\ntext **bold**\n\n1. one\n\n2. two\n\n```py\nx = 1\n\ny = 2\n```\n\nend\n"


def test_complete_blocks_never_change():
    pieces, held = [], ""
    for character in MARKDOWN:
        complete, held = split_complete(held + character)
        pieces += [complete] if complete else []
    assert "".join(pieces) + held == MARKDOWN
    assert "```py\nx = 1\n\ny = 2\n```\n\n" in pieces  # in one
    assert held == "end\n"


def test_streamed_markdown_is_rendered():
    screen = io.StringIO()
    console = Console(file=screen, width=60, force_terminal=True, color_system=None)
    with Rendered(console).answer() as show:
        for character in MARKDOWN:
            show(character)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue().rsplit("\x1b[2K", 1)[0])
    assert "bold" in text and "**" not in text and "x = 1" in text and "```" not in text


class Terminal:
    """``exkv chat`` on a fully capable pseudo-terminal."""

    PATIENCE = 180  # seconds before a test gives up; nothing waits for it to pass

    def __init__(self, state: Path, *flags: str) -> None:
        self.end, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "exkv", "chat", str(DEMO), "--devices", "cpu", *flags],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=DEMO.parents[1],
            env={**os.environ, "TERM": "xterm-256color", "XDG_STATE_HOME": str(state)},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.seen = ""

    def type(self, keys: str) -> None:
        os.write(self.end, keys.encode())

    def wait_for(self, pattern: str) -> str:
        """Read until the pattern has appeared; everything up to its end, without colours."""
        give_up = time.monotonic() + self.PATIENCE
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < give_up, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.end], [], [], 1)[0]:
                new = os.read(self.end, 1 << 16).decode(errors="replace")
                if "\x1b[6n" in new:  # where is the cursor?
                    self.type("\x1b[30;1R")
                self.seen += re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", new)
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)


def test_conversation_at_a_terminal(tmp_path):
    pytest.importorskip("prompt_toolkit", reason="exkv's own dependencies aren't all installed")
    with contextlib.closing(Terminal(tmp_path)) as terminal:
        begin = terminal.wait_for("Ctrl-D leaves")
        assert "Planning" in begin and "Loading" in begin
        assert "demo-model: 2,048 tokens of Cache" in begin
        assert "model on cpu: 1.82 MiB weights, 2.00 MiB cache" in begin
        terminal.wait_for(">")
        terminal.type("exit\r")
        terminal.wait_for("begin with a space")
        terminal.wait_for(">")
        # Pasted lines stay together.
        terminal.type("\x1b[200~Tom is in the garden.\nWhere is Tom?\x1b[201~\r")
        assert "Tom is in the garden." in terminal.wait_for(r"prompt \d+ new, 0 reused")
        terminal.wait_for(">")
        terminal.type("/edit\r")
        terminal.wait_for("Where is Tom\\?")
        terminal.type("\x01Tom has the lamp. \r")
        terminal.wait_for(r"prompt \d+ new, [1-9]\d* reused")
        terminal.wait_for(">")
        terminal.type("half a mess")
        terminal.wait_for("half a mess")
        terminal.type("\x03")
        terminal.wait_for("/quit leaves")
        terminal.wait_for(">")
        terminal.type("\x04")
        assert terminal.process.wait(terminal.PATIENCE) == 0
    history = tmp_path / "exkv" / "chat_history"
    assert "+Where is Tom?" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_history_is_recalled_and_ctrl_c_stops_an_answer(tmp_path):
    pytest.importorskip("prompt_toolkit", reason="exkv's own dependencies aren't all installed")
    history = tmp_path / "exkv" / "chat_history"
    history.parent.mkdir()
    history.write_text("\n# 2026-01-01 00:00:00\n+tell me\n+everything\n")
    # Random tokens, none of which ends the answer.
    flags = ("--temperature", "30", "--top-k", "0", "--top-p", "1", "--seed", "4")
    with contextlib.closing(Terminal(tmp_path, *flags)) as terminal:
        terminal.wait_for("Ctrl-D leaves")
        terminal.wait_for(">")
        terminal.type("\x1b[A")
        terminal.wait_for("everything")
        terminal.type("\r")
        terminal.wait_for(r"everything(.|\n)*?\w+\W+\w+\W+\w+\W+\w+\W+\w+")
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.wait_for(r"tokens/s .*(stopped|cut|context)")
        terminal.wait_for(">")
        terminal.type("/quit\r")
        assert terminal.process.wait(terminal.PATIENCE) == 0


def test_reasoning_is_a_note_and_not_part_of_the_answer(chat, monkeypatch, tmp_path):
    """For a model whose template has the tags; a grammar makes it write them."""
    wrote = "<think>\nthe key\n</think>\n\nin the kitchen"
    stream = Generator.stream

    def forced(self, *arguments, **fields):
        return stream(self, *arguments, grammar=Grammar.regex(re.escape(wrote)), **fields)

    monkeypatch.setattr(Generator, "stream", forced)
    monkeypatch.setattr(
        "exkv.cli.chat.session.reasoning_format",
        lambda tokenizer: ReasoningFormat("<think>", "</think>", ("<think>",)),
    )
    status, out, notes = chat(KEY, f"/save {tmp_path / 'saved.json'}")
    assert status == 0 and out.strip() == "in the kitchen"
    assert "the key\n" in notes and "think>" not in notes
    assert json.loads((tmp_path / "saved.json").read_text())["messages"][-1] == {
        "role": "assistant",
        "content": "in the kitchen",
    }
