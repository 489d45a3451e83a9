"""The flags that ExLlamaV2's scripts share, and the model and tokenizer that they describe."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from .config import ExLlamaV2Config
from .missing import instead_of, missing_from
from .model import ExLlamaV2
from .tokenizer import ExLlamaV2Tokenizer

_NO_EFFECT = "without effect"


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser."""
    add = parser.add_argument
    add("-m", "--model_dir", help="the model's folder")
    add("-gs", "--gpu_split", help='"auto", or GB per device: 20,24')
    add("-tp", "--tensor_parallel", action="store_true", help="refused: see the documentation")
    add("-l", "--length", type=int, help="maximum sequence length in tokens")
    add("-rs", "--rope_scale", type=float, help="divide positions by this factor")
    add("-ra", "--rope_alpha", type=float, help="extend positions by raising the rotary base")
    add("-ry", "--rope_yarn", type=float, help="extend positions by this factor, with YaRN")
    add("-nfa", "--no_flash_attn", action="store_true", help=_NO_EFFECT)
    add("-nxf", "--no_xformers", action="store_true", help=_NO_EFFECT)
    add("-nsdpa", "--no_sdpa", action="store_true", help=_NO_EFFECT)
    add("-ng", "--no_graphs", action="store_true", help=_NO_EFFECT)
    add("-lm", "--low_mem", action="store_true", help="run prompts in chunks of 1,024 tokens")
    add("-ept", "--experts_per_token", type=int, help="number of experts per token")
    add("-lq4", "--load_q4", action="store_true", help="refused: see the documentation")
    add("-fst", "--fast_safetensors", action="store_true", help=_NO_EFFECT)
    add("-ic", "--ignore_compatibility", action="store_true", help=_NO_EFFECT)
    add("-chunk", "--chunk_size", type=int, help="tokens per prefill step")


def print_options(args: argparse.Namespace) -> None:
    """Print the model and the given flags."""
    names = {action.dest for action in _flags() if action.dest not in ("help", "model_dir")}
    given = {name: value for name, value in vars(args).items() if name in names and value}
    print(f"Model: {args.model_dir}")
    print(f"Options: {', '.join(f'{name}={value}' for name, value in given.items()) or 'none'}")


def check_args(args: argparse.Namespace) -> None:
    """Exit with a message if there is no model to load."""
    if not args.model_dir:
        sys.exit("give a model: -m FOLDER")
    folder = Path(args.model_dir)
    if not folder.is_dir():
        sys.exit(f"{folder} is not a folder")
    for names in (("config.json",), ("tokenizer.json", "tokenizer.model"), ("*.safetensors",)):
        if not any(any(folder.glob(name)) for name in names):
            sys.exit(f"{folder} has no {' or '.join(names)}")


def init(
    args: argparse.Namespace,
    quiet: bool = False,
    allow_auto_split: bool = False,
    skip_load: bool = False,
    benchmark: bool = False,
    max_batch_size: int | None = None,
    max_input_len: int | None = None,
    max_output_len: int | None = None,
    progress: bool = False,
) -> tuple[ExLlamaV2, ExLlamaV2Tokenizer]:
    """Build model and tokenizer from the flags.

    With ``-gs auto``, or ``skip_load``, the model isn't loaded: build a cache for it, and call
    ``model.load_autosplit(cache)``.

    Raises:
        ValueError: a flag requests a feature that exkv doesn't have.
    """
    config = ExLlamaV2Config(args.model_dir)
    sizes = {
        "max_batch_size": max_batch_size,
        "max_input_len": max_input_len,
        "max_output_len": max_output_len,
    }
    _apply(config, sizes)
    _apply_flags(config, args)
    model = ExLlamaV2(config)
    if not skip_load:
        post_init_load(model, args, quiet, allow_auto_split, benchmark, progress)
    if not quiet:
        print("Loading tokenizer ...")
    return model, ExLlamaV2Tokenizer(config)


def post_init_load(
    model: ExLlamaV2,
    args: argparse.Namespace,
    quiet: bool = False,
    allow_auto_split: bool = False,
    benchmark: bool = False,
    progress: bool = False,
) -> None:
    """Load by ``-gs``; with ``-gs auto``, leave that to the caller, who has the cache."""
    if args.gpu_split == "auto":
        if not allow_auto_split:
            raise ValueError("-gs auto: this script loads without a cache; give GB per device")
        return
    split = [float(size) for size in args.gpu_split.split(",")] if args.gpu_split else None
    if not quiet and not progress:
        print("Loading model ...")
    started = time.perf_counter()
    model.load(split, progress=progress)
    if benchmark and not quiet:
        print(f"Loaded in {time.perf_counter() - started:.2f} s")


def _apply(config: ExLlamaV2Config, settings: dict[str, Any]) -> None:
    """Apply the settings that are given."""
    for name, value in settings.items():
        if value:
            setattr(config, name, value)


def _apply_flags(config: ExLlamaV2Config, args: argparse.Namespace) -> None:
    if args.tensor_parallel:
        raise ValueError(f"-tp: {instead_of('ExLlamaV2.load_tp')}")
    if args.load_q4:
        raise ValueError(f"-lq4: {instead_of('ExLlamaV2Config.load_in_q4')}")
    settings = {
        "max_seq_len": args.length,
        "scale_pos_emb": args.rope_scale,
        "scale_alpha_value": args.rope_alpha,
        "alt_rope_method": "yarn" if args.rope_yarn else None,
        "yarn_rope_factor": args.rope_yarn,
        "no_flash_attn": args.no_flash_attn,
        "no_xformers": args.no_xformers,
        "no_sdpa": args.no_sdpa,
        "no_graphs": args.no_graphs,
        "num_experts_per_token": args.experts_per_token,
        "low_mem": args.low_mem,
        "max_input_len": args.chunk_size,
    }
    _apply(config, settings)


def _flags() -> list[argparse.Action]:
    parser = argparse.ArgumentParser()
    add_args(parser)
    return list(parser._actions)


__getattr__ = missing_from(__name__)
