"""A loaded model in conversation: ``Session.answer`` streams an answer, ``_load`` loads a model."""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import Progress

from exkv.cache import KeepAll, KVCache
from exkv.cli.loading import Prepared, prepare
from exkv.cli.picture import draw_bars, say
from exkv.decode import Generator
from exkv.devices import allocated_memory
from exkv.model import Model
from exkv.planning import Ledger
from exkv.sampling import SamplingParams
from exkv.sampling.exllamav2 import PLAIN
from exkv.sizes import human
from exkv.text import Conversation, Tokenizer
from exkv.text.reasoning import Piece, reasoning_format

from .showing import Plain, Rendered, counted, without_controls

#: Notes in the statistics about truncated answers.
_CUTS = {"length": " | cut at -maxr", "cache_full": " | cut: the context is full"}


class Session:
    """A model in conversation.

    Attributes:
        args: flags with which the model was loaded.
        models: the model, and its draft if there is one.
        chosen: fields of SamplingParams that the user set; they override the checkpoint's.
        most: upper bound on the tokens of an answer.
        answers: number of answers so far, added to the seed.
    """

    models: list[Model]
    generator: Generator

    def __init__(self, args: argparse.Namespace, show: Plain | Rendered, notes: Console) -> None:
        self.show, self.notes = show, notes
        given = ((name, getattr(args, name)) for name in PLAIN)
        self.chosen: dict[str, Any] = {name: value for name, value in given if value is not None}
        self.most: int = args.max_response
        self.seed: int | None = args.seed
        self.answers = 0
        self._load(args, args.system, [], drawn=True)

    # Answers ----------------------------------------------------------------------------------

    def answer(self, message: str) -> None:
        """Stream the answer to a message. Ctrl-C stops it; the partial answer stays.

        Raises:
            ValueError: the message is too long; it is removed.
        """
        prompt = self._prompt(message)
        if joined := self.models[0].take_in():
            self.note(f"({', '.join(joined)} joined, and now holds units of the model)")
        text, stopped = "", False
        try:
            pieces = self._pieces(prompt)
            first = self._show_reasoning(pieces)
            with self.show.answer() as show:
                for piece in itertools.chain(first, pieces):
                    if not piece.reasoning:
                        text += piece.text
                        show(piece.text)
        except KeyboardInterrupt:
            stopped = True
        finally:
            self.conversation.add("assistant", text)
        self.answers += 1
        try:
            self.note(self._statistics(stopped))
        except KeyboardInterrupt:  # just as the answer was complete
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

    def _pieces(self, prompt: list[int]) -> Iterator[Piece]:
        """Yield the pieces of reasoning, then those of the answer."""
        tokenizer = self.conversation.tokenizer
        if (form := reasoning_format(tokenizer)) is None:
            yield from (Piece(text=text) for text in self._stream(prompt))
            return
        reader = form.reader(tokenizer, prompt)
        for text in self._stream(prompt, form.shown_tokens(tokenizer)):
            yield from reader.push(text)
        yield from reader.flush()

    def _show_reasoning(self, pieces: Iterator[Piece]) -> list[Piece]:
        """Print pieces of reasoning as notes -> the first piece of the answer."""
        shown = False
        for piece in pieces:
            if not piece.reasoning:
                break
            self.note(without_controls(piece.text), end="")
            shown = True
        else:
            piece = Piece()
        if shown:
            self.note("\n")
        return [piece]

    def _stream(self, prompt: list[int], shown: Sequence[int] = ()) -> Iterator[str]:
        seed = None if self.seed is None else self.seed + self.answers
        most = min(self.most, self.generator.cache.max_seq_len)
        return self.generator.stream(prompt, self.settings, most, seed, shown_tokens=shown)

    def _room(self) -> int:
        """Tokens reserved for an answer."""
        return min(self.most, max(self.generator.cache.max_seq_len // 4, 1))

    # Notes ------------------------------------------------------------------------------------

    def note(self, text: str, end: str = "\n") -> None:
        """Print a note."""
        self.notes.print(
            text, end=end, style="dim", markup=False, highlight=False, emoji=False, soft_wrap=True
        )

    def show_statistics(self) -> None:
        """Print where units are placed, and the cache's memory."""
        model = self.generator.model
        if isinstance(model, Model) and (report := model.full_report()) is not None:
            self.notes.print(report.table())
        self.note(about_cache(self.generator.cache))

    def _statistics(self, stopped: bool) -> str:
        stats, cache = self.generator.stats, self.generator.cache
        cut = "".join(_CUTS.get(reason, "") for reason in stats.stop_reasons)
        parts = [
            counted(stats.new_tokens, "token"),
            f"{stats.tokens_per_second:.1f} tokens/s",
            f"prompt {stats.prompt_tokens - stats.cached_tokens} new, {stats.cached_tokens} reused",
            *self._acceptance(),
            f"context {cache.current_seq_len} of {cache.max_seq_len}",
            *self._memory(),
        ]
        return " | ".join(parts) + (" | stopped" if stopped else cut)

    def _acceptance(self) -> Iterator[str]:
        """Yield the draft's acceptance, if there is a draft."""
        stats = self.generator.stats
        if stats.proposed_tokens:
            yield f"{stats.accepted_tokens} of {stats.proposed_tokens} draft tokens accepted"

    def _memory(self) -> Iterator[str]:
        """Yield memory in use on each device with units. The host doesn't count its memory:
        predicted weights and the cache's current bytes stand in."""
        cache = self.generator.cache.nbytes()
        model = self.generator.model
        report = model.report if isinstance(model, Model) else None
        for row in report.devices if report else ():
            held = cache.pop(row.device, 0)
            if row.units:
                count = allocated_memory(row.device)
                yield f"{row.device} {human(row.ledger.weights + held if count is None else count)}"
        for device, count in cache.items():  # a cache in host memory, where no layer is placed
            yield f"{device} {human(count)}"

    # Another model ----------------------------------------------------------------------------

    def planned(self, args: argparse.Namespace) -> Prepared:
        """Plan another model in place of this one, and show the plan.

        Raises:
            ValueError, OSError: invalid flags or files.
            PlacementError: it doesn't fit.
        """
        prepared = prepare(args, replaced=self.models)
        recommended(args.model, self.chosen)
        conversation_with(prepared, *self._so_far())
        show_plan(self.notes, prepared)
        return prepared

    def replace_model(self, args: argparse.Namespace) -> None:
        """Unload this model and load another, which continues the conversation; if that fails,
        load this one again.

        Raises:
            ValueError, OSError, PlacementError: why the other one was not loaded.
        """
        before, so_far = self.args, self._so_far()
        self._unload()
        try:
            self._load(args, *so_far)
        except BaseException:
            self._load(before, *so_far)
            raise

    def _so_far(self) -> tuple[str | None, list[dict[str, str]]]:
        """The system message and the turns so far."""
        system, messages = self.conversation.system, self.conversation.messages
        return system, messages[0 if system is None else 1 :]

    def _unload(self) -> None:
        del self.generator
        for model in self.models:
            model.unload()
        self.models = []
        gc.collect()

    def _load(
        self,
        args: argparse.Namespace,
        system: str | None,
        turns: list[dict[str, str]],
        *,
        drawn: bool = False,
    ) -> None:
        """Load a model for a conversation; errors in small files are found before weights are
        read."""
        settings, loading = recommended(args.model, self.chosen), _Loading(self.notes)
        with loading.bar:
            prepared = prepare(args)
            conversation = conversation_with(prepared, system, turns)
        if drawn:
            show_plan(self.notes, prepared)
        loading.carry_out(prepared)
        self.models, self.generator = prepared.models, prepared.generator()
        self.conversation, self.settings = conversation, settings
        self.args, self.name = args, prepared.name


def conversation_with(
    prepared: Prepared, system: str | None, turns: list[dict[str, str]]
) -> Conversation:
    """A conversation with a model, after these turns; ValueError if its chat template can't render
    it."""
    made = Conversation(prepared.tokenizer, prepared.cache.max_seq_len, system)
    check_template(made)
    made.messages += turns
    return made


class _Loading:
    """A progress bar for planning and loading, at a terminal."""

    def __init__(self, notes: Console) -> None:
        visible = sys.stderr.isatty() and sys.stdout.isatty()
        self.bar = Progress(console=notes, disable=not visible, transient=True)
        self._task = self.bar.add_task("Planning", total=None)

    def carry_out(self, prepared: Prepared) -> None:
        with self.bar:
            self.bar.update(self._task, description="Loading")
            prepared.load(lambda unit, of: self.bar.update(self._task, completed=unit, total=of))


def show_plan(notes: Console, prepared: Prepared) -> None:
    """Print the model's name and its plan, at a terminal."""
    if not notes.is_terminal:
        return
    cache = prepared.cache
    line = f"{prepared.name}: {cache.max_seq_len:,} tokens of {type(cache).__name__}"
    if prepared.shortened:
        most = prepared.model.config.max_position_embeddings
        line += f" (of the model's {most:,}: no more fit)"
    say(notes, line, style="bold")
    names = ["model", "draft"][: len(prepared.plans)]
    draw_bars(notes, prepared.plans, names)
    for name, plan in zip(names, prepared.plans, strict=True):
        for ledger in plan.ledgers:
            if ledger.units:
                say(notes, f"{name} on {ledger.device}: {_in_words(ledger)}", style="dim")


def _in_words(ledger: Ledger) -> str:
    """Describe a device's ledger."""
    parts = [f"{human(getattr(ledger, line))} {line}" for line in ("weights", "cache")]
    calls = human(ledger.workspace + ledger.logits)
    return ", ".join([*parts, f"{calls} for calls", f"{human(ledger.headroom)} left"])


def recommended(model: str, chosen: dict[str, Any]) -> SamplingParams:
    """The checkpoint's recommended settings, overridden by the user's."""
    settings = SamplingParams.recommended(model)
    if settings == SamplingParams.greedy() and chosen:
        settings = SamplingParams()
    return replace(settings, **chosen)


def check_template(conversation: Conversation) -> None:
    """Raise ValueError if there is no chat template, or it doesn't take the conversation's system
    message."""
    message = {"role": "user", "content": "Hello"}
    tokenizer: Tokenizer = conversation.tokenizer
    tokenizer.encode_chat([*conversation.messages, message])


def about_cache(cache: KVCache) -> str:
    """Describe a cache: its kind, current bytes, and how it differs from a plain one."""
    current = cache.nbytes()
    sizes = ", ".join(f"{device} {human(count)}" for device, count in current.items())
    parts = [f"{type(cache).__name__} of {cache.max_seq_len} tokens: {sizes}"]
    if any(layer.offloaded for layer in cache.layers):
        parts.append("offloaded to host memory, fetched layer by layer")
    full = sum(layer.full_bytes() for layer in cache.layers if not layer.shares)
    if full > sum(current.values()):
        parts.append(f"{human(full)} when full")
    specs = [layer.spec for layer in cache.layers]
    if any((spec.storage, spec.retention) != (spec.storage.floats, KeepAll()) for spec in specs):
        parts.append(" and ".join(dict.fromkeys(f"{x.storage}, {x.retention}" for x in specs)))
    return "; ".join(parts)
