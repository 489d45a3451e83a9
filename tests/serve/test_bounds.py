"""What a request makes the server work out has its limits."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from exkv.generation import Grammar
from exkv.serve.bounds import GrammarTrial, in_time


def test_work_in_time_is_given_with_its_errors():
    assert asyncio.run(in_time(lambda: 7, 180, "it")) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_time(lambda: 1 // 0, 180, "it"))


def test_work_that_does_not_end_is_stopped():
    stopped = threading.Event()

    def endless() -> None:
        try:
            while True:
                time.sleep(0.001)
        finally:
            stopped.set()

    with pytest.raises(ValueError, match="the prompt takes more than 0.05 s"):
        asyncio.run(in_time(endless, 0.05, "the prompt"))
    assert stopped.wait(180)


def test_grammars_are_tried_apart_and_one_that_ends_the_trial_does_no_harm():
    trial = GrammarTrial()
    try:
        trial.check(Grammar.regex("a+"))
        with pytest.raises(ValueError, match="can't be followed"):
            trial.check(Grammar.regex("("))
        with pytest.raises(ValueError, match="more than 262144 bytes"):
            trial.check(Grammar.regex("a" * 300_000))
        assert trial._process is not None
        trial._process.kill()  # as the system does where one takes too long
        trial._process.wait()
        trial.check(Grammar.json_schema())
    finally:
        trial.close()
