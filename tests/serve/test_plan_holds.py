"""A server's memory under random load, on simulated devices: never above the plan."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from pathlib import Path

import torch
from heads import agreeing, with_head
from simproc import run_sim

from exkv import Job, PlacementError, SamplingParams, sim
from exkv.sampling import Grammar
from exkv.serve.guard import Limits
from exkv.serve.hosting import Prepared, ServeOptions
from exkv.serve.serving import Serving

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
WORDS = "the key is in a kitchen and anna put it there where tom had his lamp".split()  # noqa: SIM905
OPTIONS = ServeOptions(page=16, chunk_size=64)
LONG = {"max_position_embeddings": 2048, "vocab_size": 320}
PLAIN = SamplingParams(top_k=0, top_p=1.0, token_repetition_penalty=1.0)


def peaks_under_load(
    seed: int, devices: int, draft: str | None, folder: str = str(DEMO), clients: int = 8
) -> list[list[int]]:
    """Of each device that holds units: planned bytes, peak, and bytes before and after the load."""
    options = ServeOptions(
        max_seq_len=768,
        chunk_size=64,
        max_running=clients - 2,
        draft=Path(draft) if draft == str(DEMO) else draft,
    )
    prepared = Prepared(Path(folder), options)
    for _ in prepared.load():
        pass
    serving = Serving(prepared.serve(), limits=Limits(jobs=1000))
    planned = _planned(prepared)
    assert len(planned) == devices
    before = {device: torch.accelerator.memory_allocated(device) for device in planned}
    for device in planned:
        torch.accelerator.reset_peak_memory_stats(device)
    asyncio.run(_load(serving, random.Random(seed), clients))
    stats = serving.loaded.engine.stats
    assert bool(stats.proposed_tokens) == (draft is not None)
    return [
        [
            total,
            torch.accelerator.max_memory_allocated(device),
            before[device],
            torch.accelerator.memory_allocated(device),
        ]
        for device, total in planned.items()
    ]


def _planned(prepared: Prepared) -> dict[torch.device, int]:
    """Planned bytes of each device that holds units; two models' calls run one at a time."""
    ledgers = [each for model in prepared.models for each in model.plan.ledgers if each.units]
    return {
        device: sum(each.total - each.workspace for each in ledgers if each.device == device)
        + max(each.workspace for each in ledgers if each.device == device)
        for device in {each.device: None for each in ledgers}
    }


async def _load(serving: Serving, source: random.Random, clients: int) -> None:
    """Ask for more tokens than there are pages; some clients disconnect."""
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

    await asyncio.gather(*(client(number) for number in range(clients)))


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


def test_peak_stays_within_the_plan_and_memory_is_freed(tmp_path):
    demo = str(DEMO)
    agrees = str(agreeing("Glm4MoeForCausalLM", tmp_path / "agrees", **LONG))
    states = str(with_head("Qwen3NextForCausalLM", tmp_path / "states", **LONG))
    cases = [("32M", 7, 1, demo), ("2M,16M", 7, 2, None)]
    cases += [("1M,16M", 7, 2, "mtp", agrees, 4), ("16M", 7, 1, "mtp", states, 4)]
    for sizes, *args in cases:
        for planned, peak, before, after in run_sim(peaks_under_load, sizes, args=args):
            assert peak <= planned
            assert after == before


def small_steps() -> list:
    """Shrink the card until the prefill step is below the default; there, ask for the default."""
    usual = replace(OPTIONS, chunk_size=None, max_seq_len=512, max_running=2)
    for size in range(3000 << 10, 0, -(50 << 10)):
        sim.set_capacity(0, size)
        prepared = Prepared(DEMO, usual)
        for _ in prepared.load():
            pass
        served, report = prepared.serve(), prepared.model.report
        served.unload()
        if served.chunk < 256:
            break
    try:
        list(Prepared(DEMO, replace(usual, chunk_size=256)).load())
        refusal = ()
    except PlacementError as error:
        refusal = [each for each in error.suggestions if "chunks of" in each]
    return [served.chunk, served.options.chunk_size, report.remarks, refusal]


def test_largest_prefill_step_that_fits_is_chosen():
    chunk, asked, said, refusal = run_sim(small_steps, "64M")
    assert chunk in (64, 128) and asked is None
    assert said == [f"To fit: chunks of {chunk} tokens; the same answers."]
    assert refusal == ["chunks of 128 tokens (max_input_len=128): the same answers"]


def the_longest() -> list[bool]:
    """Whether the longest planned cache loads, and one page more does not fit."""
    found = Prepared(DEMO, OPTIONS).plan(as_long_as_fits=True)["found"]["max_seq_len"]
    more = Prepared(DEMO, replace(OPTIONS, max_seq_len=found + 16))
    prepared = Prepared(DEMO, replace(OPTIONS, max_seq_len=found))
    fit = [each.answer().fits for each in (prepared, more)]
    for _ in prepared.load():
        pass
    return [16 < found < prepared.limit, *fit, prepared.model.loaded]


def test_longest_cache_is_found():
    """Jobs' rows share the pool: they have no pages of their own."""
    assert run_sim(the_longest, "2M,1250K") == [True, True, False, True]
