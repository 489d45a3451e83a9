"""A server's memory under a random load, on simulated devices: never above what was planned."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import torch
from simproc import run_sim

from exkv import Job, SamplingParams
from exkv.generation import Grammar
from exkv.serve.guard import Limits
from exkv.serve.hosting import LoadOptions, Prepared
from exkv.serve.serving import Serving

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
WORDS = "the key is in a kitchen and anna put it there where tom had his lamp".split()  # noqa: SIM905
PLAIN = SamplingParams(top_k=0, top_p=1.0, token_repetition_penalty=1.0)


def peaks_under_load(seed: int, devices: int) -> list[list[int]]:
    """Of each device that holds units: what was planned, the peak, and what is held at the end
    beside what was held before."""
    prepared = Prepared(DEMO, LoadOptions(max_seq_len=768, chunk_size=64, max_running=6))
    for _ in prepared.load():
        pass
    serving = Serving(prepared.serve(), limits=Limits(jobs=1000))
    used = [ledger for ledger in prepared.model.plan.ledgers if ledger.units]
    assert len(used) == devices
    before = {ledger.device: torch.accelerator.memory_allocated(ledger.device) for ledger in used}
    for ledger in used:
        torch.accelerator.reset_peak_memory_stats(ledger.device)
    asyncio.run(_load(serving, random.Random(seed)))
    return [
        [
            ledger.total,
            torch.accelerator.max_memory_allocated(ledger.device),
            before[ledger.device],
            torch.accelerator.memory_allocated(ledger.device),
        ]
        for ledger in used
    ]


async def _load(serving: Serving, source: random.Random) -> None:
    """More asked for than there are pages; some go away."""
    shared = " ".join(source.choices(WORDS, k=60))

    async def client(number: int) -> None:
        for _ in range(2):
            job = _job(source, shared, number)
            events = serving.events(serving.model, [job])
            most = source.randrange(1, 9) if number % 5 == 1 else 1000
            async with contextlib.aclosing(events):
                async for _ in events:
                    most -= 1
                    if not most:
                        break

    await asyncio.gather(*(client(number) for number in range(8)))


def _job(source: random.Random, shared: str, number: int) -> Job:
    own = " ".join(source.choices(WORDS, k=source.randrange(100, 200)))
    drawn = SamplingParams(temperature=0.8, top_k=20, token_repetition_penalty=1.1)
    return Job(
        prompt=f"{shared} {own}" if number % 3 == 0 else own,
        settings=source.choice((SamplingParams.greedy(), PLAIN, drawn)),
        max_new_tokens=source.randrange(40, 240),
        seed=number,
        grammar=Grammar.regex("[a-z ]{20,200}") if number % 4 == 0 else None,
        logprobs=3 if number % 4 == 1 else None,
    )


def test_the_peak_is_never_above_the_plan_and_all_is_given_back():
    for devices, sizes in ((1, "16M"), (2, "2M,16M")):
        found = run_sim(peaks_under_load, sizes, args=[7, devices])
        for planned, peak, before, after in found:
            assert peak <= planned
            assert after == before
