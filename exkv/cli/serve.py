"""``exkv serve MODEL``: answer requests over HTTP until a signal ends it."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from exkv import PlacementError
from exkv.decode.speculation import OWN_HEAD
from exkv.serve.hosting import CACHE_BITS, ModelFolder, Prepared, ServeOptions, model_folder
from exkv.weights.on_load import BEST

from .flags import add_loading_flags, count, number, whole
from .hosts import model_kind
from .picture import PAGE_WIDTH

if TYPE_CHECKING:
    from exkv.serve.serving import Serving


#: Flags whose help or choices differ from those of other commands: jobs share pages.
_CHANGES: dict[str, dict[str, Any]] = {
    "--max-seq-len": {
        "help": "tokens of the cache, for all jobs together (the model's positions, at most 32768)"
    },
    "--cache": {"choices": [*CACHE_BITS, BEST]},
    "--chunk-size": {"help": "the most tokens of a prompt to run at once (256, or fewer that fit)"},
}


def add_to(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="answer requests over HTTP, in the words of OpenAI's API",
        description="Load a model and serve it. It listens on this machine only unless --host "
        "says otherwise; then clients need a key. On SIGTERM it answers what is running, and ends.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="a checkpoint's folder, or a GGUF file")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=port, default=5000, help="5000; 0 for any that is free")
    add("--api-key-file", type=Path, metavar="FILE", help="holds the key that clients must give")
    add(
        "--model-dir",
        type=Path,
        metavar="FOLDER",
        help="models that clients may load instead (the folder of MODEL)",
    )
    add("--name", help="the model's name for clients (that of its folder or file)")
    add_loading_flags(parser, changes=_CHANGES)
    add("--page", type=count, default=256, metavar="N", help="tokens of a page of the cache (256)")
    add(
        "--host-tokens",
        type=number,
        default=0,
        metavar="N",
        help="for how many tokens host memory keeps pages that nobody holds (0)",
    )
    add(
        "--away-tokens",
        type=number,
        metavar="N",
        help="most tokens of preempted jobs in host memory: others wait instead (any number)",
    )
    add("--max-running", type=count, default=16, metavar="N", help="jobs that run at once (16)")
    add("--max-jobs", type=count, default=256, metavar="N", help="and wait, before 429 (256)")
    add(
        "--no-exchange",
        action="store_true",
        help="leave experts in host memory that turn out to be chosen often",
    )
    parser.set_defaults(run=run, lasts=True)


def run(args: argparse.Namespace) -> int:
    try:
        from exkv.serve import server
    except ImportError as error:
        raise ValueError(f"pip install 'exkv[serve]': {error}") from None

    key, made_up = server.read_key(args.api_key_file, args.host)
    sockets = server.bound(args.host, args.port)
    notes = Console(stderr=True, width=None if sys.stderr.isatty() else PAGE_WIDTH)
    try:
        serving = _serving(args, key, server.allowed_hosts(args.host))
    except PlacementError as error:
        print(f"exkv serve: {error}", file=sys.stderr)
        return 1
    try:
        assert serving.loaded is not None
        for model in serving.loaded.models:
            report = model.full_report()
            assert report is not None
            notes.print(report.table())
            for remark in report.remarks:
                notes.print(remark, highlight=False, markup=False)
        address = f"http://{args.host}:{sockets[0].getsockname()[1]}"
        where = f"{serving.loaded.name} at {address}/v1, a page to chat in at {address}"
        notes.print(where, highlight=False, markup=False, soft_wrap=True)
        if made_up:
            notes.print(f"key, for this run: {key}", highlight=False, soft_wrap=True)
        server.serve(serving, sockets)
    finally:
        serving.close()
    return 0


def _serving(args: argparse.Namespace, key: str | None, hosts: frozenset[str] | None) -> Serving:
    """Load the model; errors in the small files are found before the weights are read."""
    from exkv.serve.guard import Limits
    from exkv.serve.serving import Serving

    folder = args.model_dir or model_folder(args.model)
    if not folder.is_dir():
        raise ValueError(f"--model-dir {folder} is no folder")
    make = model_kind(args)
    prepared = Prepared(args.model, options(args), args.name, make)
    thread = ThreadPoolExecutor(1, thread_name_prefix="exkv-model")
    steps = prepared.load(progress=sys.stderr.isatty())
    while thread.submit(next, steps, None).result() is not None:
        pass
    return Serving(
        thread.submit(prepared.serve, thread).result(),
        folder=ModelFolder(folder, {prepared.name: args.model}),
        limits=Limits(jobs=args.max_jobs),
        key=key,
        hosts=hosts,
        thread=thread,
        make=make,
    )


def port(text: str) -> int:
    return whole(text, 0, 65535)


def options(args: argparse.Namespace) -> ServeOptions:
    """Load options from the command line."""
    several = isinstance(args.reserve, list)
    return ServeOptions(
        max_seq_len=args.max_seq_len,
        cache=args.cache,
        page=args.page,
        host_tokens=args.host_tokens,
        away_tokens=args.away_tokens,
        max_running=args.max_running,
        chunk_size=args.chunk_size,
        devices=tuple(args.devices) if args.devices else None,
        gpu_split=tuple(args.gpu_split) if args.gpu_split else None,
        reserve=tuple(args.reserve) if several else args.reserve,
        weights=args.weights,
        calibration=args.calibration,
        dtype=args.dtype,
        embed_cpu=args.embed_cpu,
        objective=args.objective,
        order=args.order,
        host_experts=args.host_experts,
        disk_experts=args.disk_experts,
        draft=Path(args.draft) if args.draft and args.draft != OWN_HEAD else args.draft,
        exchange_experts=not args.no_exchange,
    )
