"""The loading flags, which ``plan``, ``chat`` and ``serve`` share."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
from pathlib import Path

import pytest

from exkv.cli import chat, main, plan, serve
from exkv.cli.chat.showing import answers_to
from exkv.cli.flags import whole

ASKED = shlex.split(
    "--reserve-vram 1G,64M --chunk-size 64 --weights best --calibration text.txt --dtype float32 "
    "--embed-cpu --objective balance --order any --draft D --cache 8bit -l 512 --no-host-experts"
)


@pytest.fixture(scope="module")
def parsers():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for each in (plan, chat, serve):
        each.add_to(commands)
    return parser


def test_commands_parse_loading_flags_alike(parsers, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("the key")
    monkeypatch.chdir(tmp_path)
    found = [vars(parsers.parse_args([name, "M", *ASKED])) for name in ("plan", "chat", "serve")]
    for flag in (
        *("reserve", "chunk_size", "weights", "calibration", "dtype", "embed_cpu"),
        *("objective", "order", "host_experts", "cache", "draft"),
    ):
        assert found[0][flag] == found[1][flag] == found[2][flag]
    assert [int(each["max_seq_len"]) for each in found] == [512] * 3


def test_serve_options_follow_the_flags(parsers, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the key is in the kitchen")
    words = ["serve", "M", *ASKED, "--page", "32", "--host-tokens", "64", "--away-tokens", "96"]
    words[words.index("text.txt")] = str(text)
    found = serve.options(parsers.parse_args(words))
    assert (found.objective, found.order, found.embed_cpu) == ("balance", "any", True)
    assert found.host_experts is False
    assert (found.weights, found.calibration) == ("best", "the key is in the kitchen")
    assert found.draft == Path("D")
    assert (found.page, found.host_tokens, found.away_tokens) == (32, 64, 96)
    assert found.reserve == (2**30, 2**26) and found.chunk_size == 64
    for words in (["--away-tokens", "-1"], ["--max-running", "0"]):
        with pytest.raises(SystemExit):
            parsers.parse_args(["serve", "M", *words])
    for words in (["--order", "any"], ["--reserve", "1G"]):
        with pytest.raises(ValueError, match="gpu_split"):
            serve.options(parsers.parse_args(["serve", "M", "-gs", "1,2", *words]))
    assert serve.options(parsers.parse_args(["serve", "M", "-gs", "auto"])).gpu_split is None


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--port", "99999"], "'99999' is not a whole number from 0 to 65535"),
        (["--port", "-1"], "'-1' is not a whole number from 0 to 65535"),
        (["--calibration", "missing.txt"], "'missing.txt' can't be read: No such file"),
        (["--calibration", "."], "'.' can't be read: Is a directory"),
        (["--calibration", "binary"], "'binary' can't be read: it is not UTF-8 text"),
        (["--reserve", "1G,"], "no device sizes in ''"),
    ],
)
def test_invalid_values_are_reported_in_one_line(
    parsers, capsys, tmp_path, monkeypatch, words, error
):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        parsers.parse_args(["serve", "M", *words])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err.splitlines()[-1]


def test_whole_numbers_include_both_bounds():
    assert [whole(text, 2, 5) for text in "25"] == [2, 5]
    for text in ("1", "6", "-2", "2.0", "\u0663"):
        with pytest.raises(argparse.ArgumentTypeError, match="from 2 to 5"):
            whole(text, 2, 5)


def test_reserve_may_be_zero(parsers):
    for name in ("plan", "chat", "serve"):
        assert parsers.parse_args([name, "M", "--reserve", "1G,0"]).reserve == [2**30, 0]
        assert parsers.parse_args([name, "M", "--reserve", "0"]).reserve == 0


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "run", interrupted)
    assert main(["plan", "M"]) == 130
    assert capsys.readouterr() == ("", "")


def test_stopped_answer_ends_its_line():
    file = io.StringIO()
    with contextlib.suppress(KeyboardInterrupt), answers_to(file, raw=False).answer() as show:
        show("Once upon")
        raise KeyboardInterrupt
    assert file.getvalue() == "Once upon\n"
