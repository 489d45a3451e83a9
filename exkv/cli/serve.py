"""``exkv serve MODEL``: answer requests over HTTP until a signal ends it."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exkv import PlacementError
from exkv.decode.speculation import OWN_HEAD
from exkv.serve.hosting import CACHE_BITS, ModelFolder, Prepared, ServeOptions, model_folder
from exkv.weights.on_load import BEST

from .flags import add_loading_flags, count, number, whole
from .hosts import model_kind
from .picture import page_console, say

if TYPE_CHECKING:
    from exkv.serve.serving import Serving


#: Loading flags that differ here: jobs share pages.
_CHANGES: dict[str, dict[str, Any]] = {
    "--max-seq-len": {
        "help": "capacity of the cache, over all jobs (the model's positions, at most 32768)"
    },
    "--cache": {"choices": [*CACHE_BITS, BEST]},
    "--chunk-size": {"help": "most tokens per prefill step (256, or fewer if only they fit)"},
}


def add_to(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, with OpenAI's API",
        description="Load a model and serve it, by default to this machine only; with another "
        "--host, clients need a key. On SIGTERM, the server finishes running requests and ends.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="a checkpoint's folder, or a GGUF file")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=port, default=5000, help="port to listen on (5000); 0 for any free one")
    add("--api-key-file", type=Path, metavar="FILE", help="holds the key that clients must send")
    add(
        "--model-dir",
        type=Path,
        metavar="FOLDER",
        help="models that clients may load instead (the folder of MODEL)",
    )
    add("--name", help="the model's name for clients (its folder's or file's)")
    add_loading_flags(parser, changes=_CHANGES)
    add("--page", type=count, default=256, metavar="N", help="tokens per KV page (256)")
    add(
        "--host-tokens",
        type=number,
        default=0,
        metavar="N",
        help="capacity of host memory for evicted pages of the prefix cache, in tokens (0)",
    )
    add(
        "--away-tokens",
        type=number,
        metavar="N",
        help="most tokens of preempted jobs in host memory; beyond that, jobs wait (no limit)",
    )
    add("--max-running", type=count, default=16, metavar="N", help="jobs that run at once (16)")
    add("--max-jobs", type=count, default=256, metavar="N", help="jobs before status 429 (256)")
    add(
        "--no-exchange",
        dest="exchange_experts",
        action="store_false",
        help="never move often chosen experts from host memory to cards",
    )
    parser.set_defaults(run=run, lasts=True)


def run(args: argparse.Namespace) -> int:
    try:
        from exkv.serve import server
    except ImportError as error:
        raise ValueError(f"pip install 'exkv[serve]': {error}") from None

    key, is_new = server.read_key(args.api_key_file, args.host)
    sockets = server.bound(args.host, args.port)
    notes = page_console(stderr=True)
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
                say(notes, remark)
        address = f"http://{args.host}:{sockets[0].getsockname()[1]}"
        where = f"{serving.loaded.name} at {address}/v1, a page to chat in at {address}"
        notes.print(where, highlight=False, markup=False, soft_wrap=True)
        if is_new:
            notes.print(f"key for this run: {key}", highlight=False, soft_wrap=True)
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
        raise ValueError(f"--model-dir {folder} is not a folder")
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
    same = {each.name: getattr(args, each.name) for each in fields(ServeOptions)}
    changed = {
        "devices": tuple(args.devices) if args.devices else None,
        "gpu_split": tuple(args.gpu_split) if args.gpu_split else None,
        "reserve": tuple(args.reserve) if isinstance(args.reserve, list) else args.reserve,
        "draft": Path(args.draft) if args.draft and args.draft != OWN_HEAD else args.draft,
    }
    return ServeOptions(**same | changed)
