"""``exkv plan``: show what fits where, before anything is loaded.

Arguments become a ``Scenario``, ``exkv.planning.answer`` solves it, and ``picture`` draws it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from exkv.cache import CACHES
from exkv.checkpoint import ModelConfig
from exkv.decode.speculation import OWN_HEAD
from exkv.errors import UnsupportedArchitecture
from exkv.model import Model
from exkv.planning import (
    Budget,
    CacheShape,
    Scenario,
    Workload,
    make_budgets,
    with_measured_bandwidths,
)
from exkv.planning.answer import (
    Answer,
    as_values,
    best_cache,
    disk_sentences,
    expectations,
    experts_placed,
    fixed,
    gains,
    host_cache_bytes,
    prompts_sent,
    solved,
    weights_chosen,
)
from exkv.planning.budgets import devices_to_load
from exkv.planning.launches import missing_kernels
from exkv.planning.named_hosts import parse_hosts, parse_link
from exkv.planning.solve import largest_batch, longest
from exkv.sim import ALLOCATORS
from exkv.sizes import human
from exkv.weights.on_load import BEST

from .flags import add_loading_flags, unknowns
from .foreign import plan_foreign
from .loading import model_of
from .picture import PAGE_WIDTH, as_svg, draw, page_console, say

#: Seconds between two pictures.
_WATCH_SECONDS = 1.0

#: Loading flags that differ here: devices may be hypothetical, and one value unknown.
_CHANGES: dict[str, dict[str, Any]] = {
    "--devices": {
        "type": str,
        "metavar": "LIST",
        "help": "cards by size (24G,24G,8G; they needn't exist) or by name (cuda:0,cuda:2); "
        "default: this machine's, with their free memory",
    },
    "--max-seq-len": {
        "type": str,
        "help": "tokens per row (the model's positions); max: as many as fit",
    },
    "--cache": {"choices": None, "metavar": "KIND", "help": f"{', '.join(CACHES)}, or best (fp16)"},
    "--draft": {
        "help": "a second model with the same kind of cache, placed in the room that the first "
        "leaves; or mtp, the model's own head"
    },
    "--hosts": {
        "metavar": "NAME=LIST",
        "help": "cards of several hosts by size: a=24G,24G b=12G,8G,cpu:32G; hidden states pass "
        "through the hosts in this order",
    },
}


def add_to(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "plan",
        help="show what fits where, before a byte is loaded",
        description="Place a model and its cache on devices, from its config alone. Exit status: 0 "
        "it fits, 1 it doesn't fit, 2 invalid input.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a checkpoint's folder, a GGUF file, or a config.json")
    add_loading_flags(parser, leave_out=["--gpu-split", "--cluster"], changes=_CHANGES)
    add("--link", metavar="RATE,TIME", help="between hosts: 10Gbit,0.2ms; for --objective speed")
    add("--cpu", metavar="SIZE", help="use the host's memory for the rest: 32G, or free")
    add("--batch-size", metavar="B", default="1", help="rows (1); max: as many as fit")
    add(
        "--adapter",
        metavar="FOLDER",
        action="append",
        default=[],
        help="a LoRA adapter to load with the model; may be given several times",
    )
    add("--draft-first", action="store_true", help="place the draft model before the main one")
    add("--cap", metavar="SIZES", help="most memory to use of each device; 0 leaves it out")
    add("--margin", metavar="SIZES", help="memory for what can't be predicted (by device)")
    add(
        "--allocator",
        choices=ALLOCATORS,
        default="cuda",
        help="how cards allocate memory: in segments, as torch's caching allocator does, and with "
        "a driver's context (cuda), or to the byte (exact)",
    )
    add(
        "--bandwidth", metavar="LIST", help="GB/s of each device, for --objective speed; or measure"
    )
    add(
        "--disk-bandwidth",
        type=float,
        metavar="GB/S",
        help="bandwidth of the disk that experts are read from (measured if the file is here)",
    )
    add("--last-id-only", action="store_true", help="plan logits of the last token only")
    add("--simulate", action="store_true", help="carry out the plan on simulated devices")
    add("--watch", action="store_true", help="redraw the bars every second, until Ctrl-C")
    add("--json", action="store_true", help="print the answer and the plan as JSON")
    add("--svg", metavar="FILE", help="also write the picture as SVG")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    _check(args)
    try:
        models = [_model(args.model, args, args.adapter)]
    except UnsupportedArchitecture as refused:
        return plan_foreign(args, _budgets(args), refused)
    names = ["model"]
    if args.draft and args.draft != OWN_HEAD:
        models.append(_model(args.draft, args))
        names.append("draft")
    if args.draft_first:
        models.reverse()
        names.reverse()
    if args.watch:
        return _watch(args, models, names)
    answer = solve(args, models)
    seconds = time.perf_counter() - started
    remedies, again = itertools.tee(answer.remedies)
    answer = replace(answer, remedies=remedies)
    if args.json:
        print(json.dumps(as_values(answer, names, seconds), indent=1))
    else:
        console = page_console()
        _print(console, args, answer, names, seconds)
        for note in itertools.chain(_notes(args, models, names), _missing(args, answer, names)):
            say(console, note, style="yellow")
    if args.svg:
        _write_svg(Path(args.svg), args, replace(answer, remedies=again), names, seconds)
    if args.simulate and answer.fits:
        from .simulate import simulate  # compiled code, which not every build has

        out = sys.stderr if args.json else sys.stdout
        simulate(answer.scenario, answer.plans, dict(zip(names, models, strict=True)), out)
    return 0 if answer.fits else 1


def _watch(args: argparse.Namespace, models: Sequence[Model], names: Sequence[str]) -> int:
    """Plan and draw repeatedly, as other programs take and free memory."""
    console = page_console()
    fits = True
    try:
        while True:
            started = time.perf_counter()
            answer = solve(args, models)
            fits = answer.fits
            console.clear()
            _print(console, args, answer, list(names), time.perf_counter() - started)
            time.sleep(_WATCH_SECONDS)
    except KeyboardInterrupt:
        return 0 if fits else 1


def _notes(
    args: argparse.Namespace, models: Sequence[Model], names: Sequence[str]
) -> Iterator[str]:
    """Yield assumptions that the user may not expect."""
    limits = [model.config.max_position_embeddings for model in models]
    if args.max_seq_len is None and len(set(limits)) > 1:
        shortest = names[limits.index(min(limits))]
        yield f"Both caches have {min(limits):,} tokens, the positions of the {shortest}."
    if args.max_seq_len not in (None, "max"):
        for name, limit in zip(names, limits, strict=True):
            if int(args.max_seq_len) > limit:
                yield (
                    f"--max-seq-len {args.max_seq_len} is beyond the {limit:,} positions that "
                    f"the {name} was made for: text beyond them makes no sense."
                )


def _missing(args: argparse.Namespace, answer: Answer, names: Sequence[str]) -> Iterable[str]:
    """Kernels that this machine's devices lack; nothing for hypothetical devices."""
    if args.hosts or not answer.fits:
        return ()
    try:
        devices = devices_to_load(args.devices)
    except ValueError:  # sizes
        return ()
    devices = devices or [budget.device for budget in answer.scenario.budgets]
    workload = answer.scenario.workloads[names.index("model")]
    return missing_kernels(workload.model, workload.promise, devices).values()


def _check(args: argparse.Namespace) -> None:
    """Check combinations of flags that no other code checks."""
    others = {"--json": args.json, "--svg": args.svg, "--simulate": args.simulate}
    if args.watch and (given := [name for name, value in others.items() if value]):
        raise ValueError(f"--watch draws on the terminal: leave {given[0]} out")
    if args.link and not args.hosts:
        raise ValueError("--link connects hosts: give --hosts NAME=LIST ... too")
    if args.draft_first and args.draft in (None, OWN_HEAD):
        raise ValueError("--draft-first needs --draft MODEL")
    if args.cache not in (*CACHES, "best"):
        raise ValueError(f"--cache {args.cache!r} is none of {', '.join(CACHES)}, best")
    sought = unknowns(args)
    if args.weights == BEST and args.cache != "best":
        sought.append("--weights best")
    if len(sought) > 1:
        raise ValueError(f"{' and '.join(sought)}: one unknown at a time")


def _model(path: str, args: argparse.Namespace, adapters: Sequence[str] = ()) -> Model:
    model = model_of(ModelConfig.from_pretrained(path), args)
    for folder in adapters:
        model.load_adapter(folder, name=folder)
    return model


def _count(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name} is {text!r}: give a whole number of at least 1, or max")
    return int(text)


def solve(args: argparse.Namespace, models: Sequence[Model]) -> Answer:
    """Build the arguments' scenario, and solve it for its unknown, if any."""
    limit = min(model.config.max_position_embeddings for model in models)
    length = limit
    if args.max_seq_len not in (None, "max"):
        length = _count("--max-seq-len", args.max_seq_len)
    rows = 1 if args.batch_size == "max" else _count("--batch-size", args.batch_size)
    kind = CACHES["fp16" if args.cache == "best" else args.cache]
    shapes = [CacheShape.planned(model, kind, length, rows) for model in models]
    scenario = Scenario(
        workloads=tuple(
            Workload.of(model, [shape], last_id_only=args.last_id_only or None)
            for model, shape in zip(models, shapes, strict=True)
        ),
        budgets=_budgets(args),
        objective=args.objective,
        order=args.order,
        host_experts=args.host_experts,
        disk_experts=args.disk_experts,
        link=parse_link(args.link) if args.link else None,
    )
    if args.max_seq_len == "max":
        return solved(scenario, "max_seq_len", longest(scenario, limit), limit)
    if args.batch_size == "max":
        return solved(scenario, "batch_size", largest_batch(scenario), None)
    if args.cache == "best":
        return best_cache(scenario)
    return fixed(scenario)


def _budgets(args: argparse.Namespace) -> tuple[Budget, ...]:
    host: bool | str = False if args.cpu is None else args.cpu == "free" or args.cpu
    hosts = parse_hosts(args.hosts) if args.hosts else None
    sizes = {"reserve": args.reserve, "cap": args.cap, "margin": args.margin}
    sizes["allocator"] = args.allocator
    sizes["disk_bandwidth"] = args.disk_bandwidth and args.disk_bandwidth * 1e9
    budgets = make_budgets(args.devices, cpu=host, hosts=hosts, **sizes)
    if args.bandwidth == "measure":
        budgets = with_measured_bandwidths(budgets)
    elif args.bandwidth is not None:
        rates = [_rate(text) for text in args.bandwidth.split(",")]
        if len(rates) != len(budgets):
            raise ValueError(
                f"--bandwidth gives {len(rates)} rates, but there are {len(budgets)} devices: give "
                "GB/s for each, or measure"
            )
        budgets = make_budgets(args.devices, cpu=host, hosts=hosts, bandwidth=rates, **sizes)
    return tuple(budgets)


def _rate(text: str) -> float:
    try:
        return float(text) * 1e9
    except ValueError:
        raise ValueError(f"--bandwidth: {text!r} is not a number of GB/s") from None


# Output -----------------------------------------------------------------------------------------


def _print(
    console: Console, args: argparse.Namespace, answer: Answer, names: list[str], seconds: float
) -> None:
    workload = answer.scenario.workloads[names.index("model")]
    cache, chunk = workload.promise.caches[0], workload.promise.max_input_len
    kind = answer.found.get("cache") or next(n for n, kind in CACHES.items() if kind is cache.kind)
    say(
        console,
        f"{args.model}: {cache.batch_size} x {cache.max_seq_len:,} tokens, {kind} cache, chunks of "
        f"{chunk:,}, {answer.scenario.objective}",
    )
    draw(console, answer.plans, names)
    say(console, answer.sentence, style="bold green" if answer.fits else "bold red")
    for line in [
        *weights_chosen(answer),
        *experts_placed(answer),
        *(
            f"Predicted with full caches: {each}, by bandwidths of {each.bandwidths}."
            for each in expectations(answer)
        ),
        *disk_sentences(answer),
        *prompts_sent(answer),
        *_host_cache(answer),
    ]:
        say(console, line)
    say(console, f"Planned in {seconds:.2f} s.", style="dim")
    for remedy in answer.remedies:  # after the refusal: they take longer to find
        say(console, f"  would fit: {remedy}")
    for gain in gains(answer):
        say(console, f"  with {gain}")


def _host_cache(answer: Answer) -> Iterator[str]:
    """Describe a cache in host memory, if there is one: the bars may not show it."""
    total = host_cache_bytes(answer.scenario)
    if not total:
        return
    ledgers = (ledger for plan in answer.plans for ledger in plan.ledgers)
    shown = sum(ledger.cache for ledger in ledgers if ledger.device.type == "cpu")
    where = "no bar shows it" if not shown else f"the cpu's bar shows {human(shown)} of it"
    if shown == total:
        where = "the cpu's bar shows it"
    yield f"The cache is in host memory, {human(total)} ({total:,} bytes); {where}."


def _write_svg(
    file: Path, args: argparse.Namespace, answer: Answer, names: list[str], seconds: float
) -> None:
    with open("/dev/null", "w") as nowhere:
        console = Console(
            record=True,
            file=nowhere,
            width=PAGE_WIDTH,
            force_terminal=True,
            color_system="truecolor",
        )
        _print(console, args, answer, names, seconds)
    file.write_text(as_svg(console, f"exkv plan {args.model}"), "utf-8")
