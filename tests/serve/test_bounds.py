"""Time and size limits of untrusted input."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from exkv.sampling import Grammar
from exkv.serve.bounds import GrammarTrials, _Trial, in_time


def test_in_time_returns_results_and_raises_errors():
    assert asyncio.run(in_time(lambda: 7, 180, "it")) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_time(lambda: 1 // 0, 180, "it"))


def test_in_time_stops_endless_work():
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


@pytest.fixture
def trials():
    trials = GrammarTrials(workers=1)
    yield trials
    trials.close()


def test_grammar_trials_survive_the_end_of_their_process(trials):
    async def checks() -> None:
        await trials.check(Grammar.regex("a+"))
        with pytest.raises(ValueError, match="can't be followed"):
            await trials.check(Grammar.regex("("))
        with pytest.raises(ValueError, match="more than 262144 bytes"):
            await trials.check(Grammar.regex("a" * 300_000))
        process = trials._trials[0].process
        process.kill()  # as the system does to one that takes too long
        process.wait()
        await trials.check(Grammar.json_schema())

    asyncio.run(checks())


def test_small_grammars_are_tried_before_large_ones(trials, monkeypatch):
    begun, go_on, order = threading.Event(), threading.Event(), []

    def tried(self, grammar: Grammar) -> str:
        begun.set()
        assert go_on.wait(180)
        order.append(len(grammar.text))
        return ""

    monkeypatch.setattr(_Trial, "_try", tried)

    async def many() -> None:
        first = asyncio.create_task(trials.check(Grammar.regex("a" * 9)))
        await asyncio.to_thread(begun.wait, 180)
        sizes = (5000, 300, 7000, 20)
        rest = [asyncio.create_task(trials.check(Grammar.regex("a" * size))) for size in sizes]
        await asyncio.to_thread(lambda: 0)  # the pool that other routes use is free
        go_on.set()
        await asyncio.gather(first, *rest)

    asyncio.run(many())
    assert order == [9, 20, 300, 5000, 7000]
