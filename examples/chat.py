"""Chat with a model over the devices that there are: ``chat.py -m DIR -gs auto``.

Reads downwards: ``main`` parses the flags (which come at the end), loads, converses. ``load``
shows how a model, its cache and its tokenizer come together, ``Chat.answer`` how one streams.
Answers go to standard output and everything else to standard error, so both ends can be pipes.
``minimal_chat.py`` is the same idea in 40 lines.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from exkv import CACHES, Generator, Model, ModelConfig, PlacementError, SamplingParams, Tokenizer
from exkv.cache import KeepAll, KVCache, Storage
from exkv.checkpoint import DTYPES
from exkv.devices import allocated_memory
from exkv.sizes import human, parse_sizes
from exkv.text import Conversation

HELP = """\
/help    this list
/reset   forget the conversation and begin anew
/stats   what is placed on which device, and what the cache takes there
/quit    leave; so does Ctrl-D
Ctrl-C stops an answer. A message that begins with / goes to the model after a space."""

#: What the statistics say of an answer that did not end by itself.
CUTS = {"length": " | cut at -maxr", "cache_full": " | cut: the context is full"}


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, 2 for what the user can put right, 1 for a model that does not fit."""
    args = parse_args(argv)
    sys.stdin.reconfigure(errors="replace")
    notes = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    try:
        return converse(load(args, notes))
    except PlacementError as error:
        return fail(error, 1)
    except BrokenPipeError:  # whoever reads the answers has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError) as error:
        return fail(error, 2)
    except KeyboardInterrupt:  # while loading
        return 130


def fail(error: Exception, status: int) -> int:
    print(f"chat.py: {one_line(error)}", file=sys.stderr)
    return status


# Loading ------------------------------------------------------------------------------------------


def load(args: argparse.Namespace, notes: Console) -> Chat:
    """Everything that can be wrong with the small files is found before the weights are read."""
    config = ModelConfig.from_pretrained(args.model_dir)
    settings = sampling_from_flags(args)
    tokenizer = Tokenizer(config)
    dtype = DTYPES[args.dtype] if args.dtype else None
    model = Model(config, dtype=dtype, max_input_len=args.chunk_size, embed_cpu=args.embed_cpu)
    cache = CACHES[args.cache](model, max_seq_len=args.length or -1, lazy=args.lazy)
    conversation = Conversation(tokenizer, cache.max_seq_len, args.system)
    check_template(conversation)
    progress = sys.stderr.isatty() and sys.stdout.isatty()
    if args.gpu_split is None:
        model.load_autosplit(
            cache, args.reserve_vram, last_id_only=True, devices=args.devices, progress=progress
        )
    else:
        model.load(args.gpu_split, devices=args.devices, progress=progress)
    return Chat(
        generator=Generator(model, cache, tokenizer),
        conversation=conversation,
        settings=settings,
        max_response=min(args.max_response, cache.max_seq_len),
        seed=args.seed,
        notes=notes,
    )


def check_template(conversation: Conversation) -> None:
    """ValueError for a checkpoint without a chat template, or whose template takes no system
    message where there is one."""
    message = {"role": "user", "content": "Hello"}
    conversation.tokenizer.encode_chat([*conversation.messages, message])


# Conversing ---------------------------------------------------------------------------------------


def converse(chat: Chat) -> int:
    """Take turns until the input ends; the exit status."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):  # not on every platform
            import readline  # noqa: F401 - gives input() its editing and history
        chat.note("/help lists the commands; Ctrl-D leaves")
    while True:
        try:
            line = read_line() if interactive else sys.stdin.readline()
        except KeyboardInterrupt:
            chat.note("\n(Ctrl-D or /quit leaves)")
            continue
        if not line:
            return 0
        try:
            if not respond(chat, line.rstrip("\r\n")):
                return 0
        except ValueError as error:
            if not interactive:
                raise  # a script must not go on without its message
            chat.note(one_line(error))


def respond(chat: Chat, line: str) -> bool:
    """Answer a line, or do what it says; False if it says to leave."""
    if line.startswith("/"):
        return chat.command(line.split()[0])
    if line.strip():
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C just as the answer was complete
            chat.answer(line.strip())
    return True


def read_line() -> str:
    """A line typed at the prompt, "" at the end of input. The prompt keeps out of a pipe."""
    if not sys.stdout.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
        return sys.stdin.readline()
    try:
        return input("> ") + "\n"
    except EOFError:
        show("\n")
        return ""


@dataclass(kw_only=True)
class Chat:
    """A loaded model in conversation."""

    generator: Generator
    conversation: Conversation
    settings: SamplingParams
    max_response: int
    seed: int | None
    notes: Console
    answers: int = 0

    def answer(self, message: str) -> None:
        """Stream the answer to a message. Ctrl-C ends it, and what there is of it stays.

        Raises ValueError for a message that is too long; it is taken back then.
        """
        prompt = self._prompt(message)
        text, stopped = "", False
        try:
            for piece in self._stream(prompt):
                text += piece
                show(piece)
        except KeyboardInterrupt:
            stopped = True
        finally:
            self.conversation.add("assistant", text)
        show("\n")
        self.answers += 1
        self.note(self._statistics(stopped))

    def _prompt(self, message: str) -> list[int]:
        self.conversation.add("user", message)
        try:
            prompt, dropped = self.conversation.prompt(self._room())
        except (ValueError, KeyboardInterrupt):
            self.conversation.messages.pop()
            raise
        if dropped:
            self.note(f"(the context is full: dropped the oldest {counted(dropped, 'turn')})")
        return prompt

    def _stream(self, prompt: list[int]) -> Iterator[str]:
        seed = None if self.seed is None else self.seed + self.answers
        return self.generator.stream(prompt, self.settings, self.max_response, seed)

    def _room(self) -> int:
        """Tokens to keep free for an answer; a short one leaves more of the conversation."""
        return min(self.max_response, max(self.generator.cache.max_seq_len // 4, 1))

    def _statistics(self, stopped: bool) -> str:
        stats, cache = self.generator.stats, self.generator.cache
        cut = "".join(CUTS.get(reason, "") for reason in stats.stop_reasons)
        parts = [
            counted(stats.new_tokens, "token"),
            f"{stats.tokens_per_second:.1f} tokens/s",
            f"prompt {stats.prompt_tokens - stats.cached_tokens} new, {stats.cached_tokens} reused",
            f"context {cache.current_seq_len} of {cache.max_seq_len}",
            *self._memory(),
        ]
        return " | ".join(parts) + (" | stopped" if stopped else cut)

    def _memory(self) -> Iterator[str]:
        """Bytes in use on each device that holds something. The host keeps no count, so what was
        predicted of weights, and what the cache takes now, stand for it."""
        cache = self.generator.cache.nbytes()
        for row in self.generator.model.report.devices:
            held = cache.pop(row.device, 0)
            if row.units:
                count = allocated_memory(row.device)
                yield f"{row.device} {human(row.ledger.weights + held if count is None else count)}"
        for device, count in cache.items():  # a cache in host memory, where no layer is placed
            yield f"{device} {human(count)}"

    def command(self, name: str) -> bool:
        """Do what a /command says; False if it is the one to leave."""
        if name == "/help":
            self.note(HELP)
        elif name == "/reset":
            self.conversation.reset()
            self.answers = 0
            self.note("(a new conversation)")
        elif name == "/stats":
            self.notes.print(self.generator.model.report.table())
            self.note(about_cache(self.generator.cache))
        elif name != "/quit":
            self.note(f"unknown command {name}; /help lists the commands")
        return name != "/quit"

    def note(self, text: str) -> None:
        self.notes.print(
            text, style="dim", markup=False, highlight=False, emoji=False, soft_wrap=True
        )


def about_cache(cache: KVCache) -> str:
    """Its kind, the bytes that it takes now, and in what it differs from a plain one."""
    taken = cache.nbytes()
    sizes = ", ".join(f"{device} {human(count)}" for device, count in taken.items())
    parts = [f"{type(cache).__name__} of {cache.max_seq_len} tokens: {sizes}"]
    if any(layer.offloaded for layer in cache.layers):
        parts.append("in host memory, from which each layer's tokens are fetched")
    full = sum(layer.full_bytes() for layer in cache.layers)
    if full > sum(taken.values()):
        parts.append(f"{human(full)} when full")
    specs = [layer.spec for layer in cache.layers]
    if any((spec.storage, spec.retention) != (Storage(), KeepAll()) for spec in specs):
        kept = dict.fromkeys(f"{spec.storage}, {spec.retention}" for spec in specs)
        parts.append(" and ".join(kept))
    return "; ".join(parts)


def show(text: str) -> None:
    """Text of the answer as it is: rich would expand its tabs."""
    sys.stdout.write(text)
    sys.stdout.flush()


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


# Sampling -----------------------------------------------------------------------------------------


def sampling_from_flags(args: argparse.Namespace) -> SamplingParams:
    """The checkpoint's own settings, with what the flags say instead."""
    names = ["temperature", "top_k", "top_p", "min_p", "typical", "token_repetition_penalty"]
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    settings = SamplingParams.recommended(args.model_dir)
    if settings == SamplingParams.greedy() and given:
        settings = SamplingParams()
    return replace(settings, **given)


# Flags --------------------------------------------------------------------------------------------


class Flags(argparse.ArgumentParser):
    """Says what is wrong with a flag in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    flags = Flags(description="Chat with a model.", allow_abbrev=False)
    add_model_flags(flags.add_argument_group("model and devices"))
    add_sampling_flags(flags.add_argument_group("answers"))
    args = flags.parse_args(argv)
    if args.gpu_split and args.reserve_vram is not None:
        flags.error("--reserve-vram belongs to -gs auto; a split says itself how much to use")
    return args


def add_model_flags(flags: argparse._ArgumentGroup) -> None:
    add = flags.add_argument
    add(
        "-m",
        "--model-dir",
        required=True,
        type=Path,
        metavar="PATH",
        help="the model's folder, or a GGUF file",
    )
    add(
        "-gs",
        "--gpu-split",
        type=gpu_split,
        metavar="GB,GB",
        help="GB to use on each device, such as 20,24; or auto (the default): fill one after the "
        "other with all that is free",
    )
    add("--cache", choices=list(CACHES), default="fp16", help="kind of cache (fp16)")
    add("--lazy", action="store_true", help="build the cache lazily; it makes no difference here")
    add(
        "-l",
        "--length",
        type=count,
        metavar="TOKENS",
        help="tokens that the cache holds (the model's max_position_embeddings)",
    )
    add(
        "--devices",
        type=lambda text: text.split(","),
        metavar="NAMES",
        help="devices in the order in which they are filled, such as cuda:0,cuda:1,cpu (all)",
    )
    add(
        "--reserve-vram",
        type=sizes,
        metavar="SIZES",
        help="what to leave free on each device, such as 256M; or of one after the other: 1G,64M",
    )
    add("--embed-cpu", action="store_true", help="keep the embedding in host memory")
    add("--dtype", choices=DTYPES, help="of arithmetic and floats (what the model says)")
    add(
        "--chunk-size",
        type=count,
        default=2048,
        metavar="TOKENS",
        help="the most tokens of a prompt to run at once (2048)",
    )


def add_sampling_flags(flags: argparse._ArgumentGroup) -> None:
    add = flags.add_argument
    add("--system", metavar="TEXT", help="what the model is told before everything else")
    add(
        "-maxr",
        "--max-response-tokens",
        dest="max_response",
        type=count,
        default=1000,
        metavar="TOKENS",
        help="the most tokens of an answer (1000)",
    )
    add("-seed", "--seed", type=seed, metavar="N", help="makes the answers repeatable")
    add("-temp", "--temperature", type=float, metavar="X", help="0 takes the likeliest token")
    add("-topk", "--top-k", type=int, metavar="N", help="keep the N likeliest tokens; 0: all")
    add("-topp", "--top-p", type=float, metavar="X", help="keep the likeliest with this mass")
    add("-minp", "--min-p", type=float, metavar="X", help="drop what is X times less likely")
    add("-typical", "--typical", type=float, metavar="X", help="mass of the typical set; 0: off")
    add(
        "-repp",
        "--repetition-penalty",
        dest="token_repetition_penalty",
        type=float,
        metavar="X",
        help="above 1 makes repeating less likely",
    )


def gpu_split(text: str) -> list[float] | None:
    if text == "auto":
        return None
    try:
        split = [float(size) for size in text.split(",")]
        if all(map(math.isfinite, split)):
            return split
        raise ValueError
    except ValueError:
        message = f"{text!r} is neither auto nor GB for each device, such as 20,24"
        raise argparse.ArgumentTypeError(message) from None


def whole(text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
    return int(text)


def count(text: str) -> int:
    return whole(text, 1, 1 << 30)


def seed(text: str) -> int:
    return whole(text, 0, 1 << 62)


def sizes(text: str) -> int | list[int]:
    """One size for every device, or a list of them."""
    try:
        parsed = parse_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return parsed if "," in text else parsed[0]


if __name__ == "__main__":
    sys.exit(main())
