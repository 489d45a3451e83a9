"""Jobs with proposals beside the same jobs without: ``python -m tests.bench speculation``.

Greedy texts that repeat themselves: once by an engine as it is, once by one that looks n-grams up
(``exkv.NGrams``). The tokens are the same, which is checked. New tokens a second, by the clock and
of the processor, from the first one on, and how many of the proposed tokens were right. Random
weights write what repeats where all but a few tokens are forbidden. ``--model FILE`` measures a
real model on a prompt that asks it to write a list again; ``--jobs`` has several at once, which
share what a call takes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from exkv import Engine, Job, Model, NGrams, PagedCache, SamplingParams, Tokenizer

from .common import (
    DTYPES,
    SHAPES,
    Spread,
    add_outputs,
    machine,
    machine_line,
    markdown,
    overridden,
    ratios,
    rotated,
    write_checkpoint,
    write_outputs,
)
from .engine import Wordless

WAYS = ("n-grams", "without")
LIST = "\n".join(
    f"- {name} {number} {place}"
    for number, (name, place) in enumerate(
        [
            ("apples", "in the red box"),
            ("lamps", "on the long shelf"),
            ("keys", "under the old clock"),
            ("books", "beside the green door"),
            ("coats", "behind the blue curtain"),
            ("maps", "inside the small drawer"),
        ],
        3,
    )
)
QUESTION = f"Repeat this list twice, word by word, and write nothing else:\n{LIST}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; sizes in tokens."""

    shape: str = "150M"
    dtype: str = "bf16"
    model: str = ""
    jobs: int = 1
    prompt: int = 64
    allowed: int = 2
    new: int = 256
    tokens: int = 10
    longest: int = 3
    rounds: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All jobs once.

    Attributes:
        speed: new tokens a second, from the first one of each job on.
        processor: the same a second of the processor.
        proposed, accepted: tokens.
    """

    speed: float
    processor: float
    proposed: int
    accepted: int


def jobs_of(settings: Settings, tokenizer: Tokenizer, seed: int) -> list[Job]:
    """A chat that asks for the list, or random tokens, for each job others."""
    made = torch.Generator().manual_seed(seed)
    greedy = SamplingParams.greedy()
    if not settings.model:
        greedy = replace(
            greedy, token_bias={token: 1e4 for token in range(3, 3 + settings.allowed)}
        )
    jobs = []
    for number in range(settings.jobs):
        most = SHAPES[settings.shape].vocab
        prompt = torch.randint(3, most, (settings.prompt,), generator=made).tolist()
        if settings.model:
            asked = QUESTION.replace("list", f"list of {number + 2} parts")
            prompt = tokenizer.encode_chat([{"role": "user", "content": asked}])
        jobs.append(Job(prompt=prompt, settings=greedy, max_new_tokens=settings.new))
    return jobs


def measure(
    model: Model, cache: PagedCache, tokenizer: Tokenizer, settings: Settings, way: str, seed: int
) -> tuple[Run, list[list[int]]]:
    """One run, and its tokens."""
    ngrams = NGrams(tokens=settings.tokens, longest=settings.longest) if way == WAYS[0] else None
    cache.free()
    with Engine(model, cache, tokenizer, max_running=settings.jobs, ngrams=ngrams) as engine:
        handles = [engine.submit(job) for job in jobs_of(settings, tokenizer, seed)]
        while not all(handle.tokens or handle.done for handle in handles):
            engine.iterate()
        begun = sum(len(handle.tokens) for handle in handles)
        started = time.perf_counter(), time.process_time()
        while engine.busy:
            engine.iterate()
        ended = time.perf_counter(), time.process_time()
        stats = engine.stats
    new = sum(len(handle.tokens) for handle in handles) - begun
    seconds, of_processor = (b - a for a, b in zip(started, ended, strict=True))
    run = Run(
        speed=new / seconds,
        processor=new / of_processor,
        proposed=stats.proposed_tokens,
        accepted=stats.accepted_tokens,
    )
    return run, [handle.tokens for handle in handles]


def measured(settings: Settings) -> dict[str, list[Run]]:
    """Way -> its runs, one a round; every round begins with another way."""
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = settings.model or write_checkpoint(
            Path(scratch) / "model", SHAPES[settings.shape], DTYPES[settings.dtype]
        )
        model = Model(folder)
        tokenizer = Tokenizer(model.config) if settings.model else Wordless()
        length = settings.jobs * (settings.prompt + settings.new + 512)
        cache = PagedCache(model, max_seq_len=length, page=128)
        model.load_autosplit(cache, devices=["cpu"])
        for index in range(settings.rounds + 1):
            written = []
            for way in rotated(WAYS, index):
                run, tokens = measure(model, cache, tokenizer, settings, way, index)
                runs[way].append(run)
                written.append(tokens)
            assert written[0] == written[1], "proposals changed a token"
    return {way: each[1:] for way, each in runs.items()}  # the first round warms up


def as_text(runs: dict[str, list[Run]], settings: Settings, line: str) -> str:
    speeds = {way: [run.speed for run in each] for way, each in runs.items()}
    used = {way: [run.processor for run in each] for way, each in runs.items()}
    rows = []
    for way in WAYS:
        proposed = sum(run.proposed for run in runs[way])
        accepted = sum(run.accepted for run in runs[way])
        rows.append(
            [
                way,
                Spread.of(speeds[way]).text(1),
                f"{accepted / proposed:.0%} of {proposed}" if proposed else "",
                ratios(speeds[way], speeds[WAYS[1]]).text(),
                Spread.of(used[way]).text(1),
                ratios(used[way], used[WAYS[1]]).text(),
            ]
        )
    what = Path(settings.model).name or f"{settings.shape} in {settings.dtype}"
    about = (
        f"{settings.jobs} jobs, {settings.new} new tokens each, n-grams of up to "
        f"{settings.longest}, {settings.tokens} tokens proposed at a time; {what}:"
    )
    headings = ["", "tokens/s", "right", "by without", "tokens/processor s", "by without"]
    return f"{line}.\n\n{about}\n\n{markdown(headings, rows)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench speculation", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--model", metavar="FILE", help="a checkpoint's folder or a GGUF file")
    for name in ("jobs", "prompt", "allowed", "new", "tokens", "longest", "rounds"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    add_outputs(parser)
    options = parser.parse_args(arguments)
    settings = Settings()
    if options.quick:
        settings = Settings(shape="tiny", jobs=2, prompt=20, new=40, rounds=2)
    settings = overridden(settings, options)
    runs = measured(settings)
    about = machine(torch.device("cpu"))
    text = as_text(runs, settings, machine_line(about)) + "\n"
    print(text)
    values = {way: [asdict(run) for run in each] for way, each in runs.items()}
    result = {"machine": about, "settings": asdict(settings), "values": values}
    write_outputs(options, result, text)
    return 0
