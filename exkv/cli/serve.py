"""``exkv serve MODEL``: answer requests over HTTP until a signal ends it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from exkv import Engine, Model, PagedCache, PlacementError, SamplingParams, Tokenizer
from exkv.checkpoint import DTYPES, ModelConfig
from exkv.sizes import parse_sizes
from exkv.weights.on_load import BITS

if TYPE_CHECKING:
    from exkv.serve.app import Serving

#: ``--cache`` -> bits of a key or value.
CACHE_BITS = {"fp16": 16, "8bit": 8, "4bit": 4, "2bit": 2}
_TOKENS = 32_768  # of the cache, where the model has positions for more


def add_to(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="answer requests over HTTP, in the words of OpenAI's API",
        description="Load a model and serve it. It listens on this machine alone unless --host "
        "says otherwise; then clients need a key. SIGTERM ends it when what it has is answered.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="a checkpoint's folder, or a GGUF file")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=5000, help="(5000)")
    add("--api-key-file", type=Path, metavar="FILE", help="holds the key that clients must give")
    add("--name", help="of the model, as clients see it (the folder's)")
    add("--max-seq-len", type=int, metavar="N", help="tokens of the cache, for all jobs together")
    add("--cache", choices=CACHE_BITS, default="fp16", help="kind of cache (fp16)")
    add("--max-running", type=int, default=16, metavar="N", help="jobs that run at once (16)")
    add("--max-jobs", type=int, default=256, metavar="N", help="and wait, before 429 (256)")
    add("--chunk-size", type=int, default=256, metavar="C", help="tokens of a prefill step (256)")
    add("--devices", metavar="NAMES", help="in the order in which they are filled (all)")
    add("--gpu-split", metavar="GB,GB", help="GB to use on each device, such as 20,24")
    add("--reserve-vram", metavar="SIZES", help="what to leave free on each device: 1G, or 1G,64M")
    add("--weights", choices=[*BITS], help="turn float weights into integers as they are loaded")
    add("--dtype", choices=DTYPES, help="of arithmetic and floats (what the model says)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        from exkv.serve import server
    except ImportError as error:
        raise ValueError(f"pip install 'exkv[serve]': {error}") from None

    key, made_up = server.read_key(args.api_key_file, args.host)
    notes = Console(stderr=True)
    try:
        serving = _serving(args, key, server.allowed_hosts(args.host))
    except PlacementError as error:
        print(f"exkv serve: {error}", file=sys.stderr)
        return 1
    with serving.engine:
        model = serving.engine.model
        assert isinstance(model, Model)
        assert model.report is not None
        notes.print(model.report.table())
        notes.print(f"{serving.name} at http://{args.host}:{args.port}/v1", highlight=False)
        if made_up:
            notes.print(f"key, for this run: {key}", highlight=False, soft_wrap=True)
        server.serve(serving, args.host, args.port)
    return 0


def _serving(args: argparse.Namespace, key: str | None, hosts: frozenset[str] | None) -> Serving:
    """Everything loaded; what can be wrong with the small files is found before the weights are
    read."""
    from exkv.serve.app import Limits, Serving

    config = ModelConfig.from_pretrained(args.model)
    tokenizer, usual = Tokenizer(config), SamplingParams.recommended(args.model)
    dtype = DTYPES[args.dtype] if args.dtype else None
    model = Model(config, dtype=dtype, max_input_len=args.chunk_size, weights=args.weights)
    tokens = args.max_seq_len or min(config.max_position_embeddings, _TOKENS)
    cache = PagedCache(model, max_seq_len=tokens, nbits=CACHE_BITS[args.cache])
    _load(model, cache, args)
    engine = Engine(model, cache, tokenizer, max_running=args.max_running, chunk=args.chunk_size)
    return Serving(
        engine=engine,
        name=args.name or args.model.resolve().name,
        usual=usual,
        limits=Limits(jobs=args.max_jobs),
        key=key,
        hosts=hosts,
    )


def _load(model: Model, cache: PagedCache, args: argparse.Namespace) -> None:
    devices = args.devices.split(",") if args.devices else None
    progress = sys.stderr.isatty()
    if args.gpu_split is None:
        sizes = parse_sizes(args.reserve_vram) if args.reserve_vram else None
        reserve = sizes[0] if sizes and len(sizes) == 1 else sizes
        model.load_autosplit(cache, reserve, last_id_only=True, devices=devices, progress=progress)
        return
    if args.reserve_vram:
        raise ValueError("--reserve-vram and --gpu-split: a split says itself how much to use")
    try:
        split = [float(size) for size in args.gpu_split.split(",")]
    except ValueError:
        raise ValueError(f"--gpu-split {args.gpu_split}: give GB, such as 20,24") from None
    model.load(split, devices=devices, progress=progress)
