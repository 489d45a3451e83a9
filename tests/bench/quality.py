"""What each kind of cache costs in quality; ``python -m tests.bench quality``.

On the demo model, over chats that its world makes and that training never saw (seeds of their own;
the facts asked for are held out). The model computes in float32 and the reference is a float32
cache, so that nothing but the cache differs; the caches themselves store bfloat16 where they store
floats, which shows what "nothing" looks like. Tokens come in chunks, so that all but the first
chunk are seen through what the cache made of the tokens before.

Three figures: perplexity, the mean KL divergence from the reference's next-token distribution to
that with the cache (nats a token: what is lost where the text itself is noise), and the share of
questions that greedy decoding answers right, by how far back the fact was told.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from exkv import CACHES, Cache, Model, QuantizedCache, SinkCache, SlidingWindowCache, Tokenizer
from exkv.cache import KVCache

from .harness import ROOT, markdown, setting

EXAMPLES = ROOT / "examples"
DEMO = EXAMPLES / "demo-model"
sys.path.append(str(EXAMPLES))
import toy_world  # noqa: E402 - the demo model's world, beside it

S = TypeVar("S")

#: Rows of a call; a cache of any kind has so many.
ROWS = 8
#: Tokens between a fact and its question: the bounds of the columns.
DISTANCES = (0, 100, 250, 500, 1000)


@dataclass(frozen=True, slots=True)
class Make:
    """A kind of cache and its options; floats are stored in ``dtype``."""

    kind: type[KVCache]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, kind: type[KVCache], **options: Any) -> Make:
        return cls(kind, {"dtype": torch.bfloat16, **options})

    def build(self, model: Model, max_seq_len: int) -> KVCache:
        return self.kind(model, max_seq_len, ROWS, **self.options)


REFERENCE = Make.of(Cache, dtype=torch.float32)
WINDOWS = {
    f"{name} {length}": Make.of(kind, window_length=length)
    for length in (128, 256)
    for name, kind in (("sliding_window", SlidingWindowCache), ("sink", SinkCache))
}
MAKES = {
    **{name: Make.of(kind) for name, kind in CACHES.items()},
    "8-bit keys, 4-bit values": Make.of(QuantizedCache, key_bits=8, value_bits=4),
    "4-bit keys, 2-bit values": Make.of(QuantizedCache, key_bits=4, value_bits=2),
    "4bit, not rotated": Make.of(QuantizedCache, nbits=4, rotate=False),
    "2bit, not rotated": Make.of(QuantizedCache, nbits=2, rotate=False),
    **WINDOWS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    makes: tuple[str, ...] = setting(tuple(MAKES), "kinds of cache", MAKES)
    texts: int = setting(8, "chats for perplexity and divergence")
    tokens: int = setting(1280, "of each chat")
    questions: int = setting(96, "held out, at distances spread evenly up to 1,000 tokens")
    chunk: int = setting(64, "tokens of a call")
    seed: int = setting(1, "of chats and questions")


# Running tokens through a cache -----------------------------------------------------------------


def logits_through(
    model: Model, cache: KVCache, rows: Sequence[Sequence[int]], chunk: int
) -> Iterator[Tensor]:
    """Logits (B, T, vocabulary) chunk by chunk, on the host, from empty rows; logits beyond a row's
    end are meaningless."""
    cache.reset()
    ids = padded(rows)
    for start in range(0, ids.shape[1], chunk):
        part = ids[:, start : start + chunk]
        new = [min(max(len(row) - start, 0), part.shape[1]) for row in rows]
        yield model.forward(part, cache, new_lens=new).float().cpu()


def calls(items: Sequence[S]) -> Iterator[Sequence[S]]:
    """Batches of as many items as a cache has rows."""
    yield from (items[first : first + ROWS] for first in range(0, len(items), ROWS))


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """int64 (B, T), padded with 0 on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


# Texts ------------------------------------------------------------------------------------------


def chats(tokenizer: Tokenizer, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Chats of exactly ``tokens`` tokens each, as the model reads them."""
    rng = random.Random(f"quality/{seed}/{tokens}")
    found = []
    for _ in range(count):
        messages = toy_world.document(rng, tokens + 200).messages
        ids = tokenizer.encode_chat(messages, add_generation_prompt=False)
        assert len(ids) >= tokens, "a document is as long as it is asked to be, within a turn"
        found.append(ids[:tokens])
    return found


def divergence(reference: Tensor, found: Tensor) -> Tensor:
    """KL(reference || found) of distributions given as log-probabilities (..., V), in nats."""
    return F.kl_div(found, reference, log_target=True, reduction="none").sum(-1)


class Texts:
    """Chats, and the reference's distribution of each next token."""

    def __init__(self, model: Model, tokenizer: Tokenizer, settings: Settings) -> None:
        self.model, self.chunk = model, settings.chunk
        rows = chats(tokenizer, settings.texts, settings.tokens, settings.seed)
        self.batches = list(calls(rows))
        cache = REFERENCE.build(model, settings.tokens)
        self.expected = [self._log_probs(cache, rows) for rows in self.batches]

    def _log_probs(self, cache: KVCache, rows: Sequence[Sequence[int]]) -> Tensor:
        """(B, T, V)"""
        parts = logits_through(self.model, cache, rows, self.chunk)
        return torch.cat([logits.log_softmax(-1) for logits in parts], 1)

    def judge(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Each token's surprise in nats (N, T - 1), its divergence from the reference (N, T)."""
        surprise, apart = [], []
        for rows, expected in zip(self.batches, self.expected, strict=True):
            found, ids = self._log_probs(cache, rows), padded(rows)
            surprise.append(-found[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1))
            apart.append(divergence(expected, found))
        return torch.cat(surprise), torch.cat(apart)


# Questions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A chat's tokens with its answer behind them, and how far back the fact was told."""

    ids: list[int]
    answer: int
    distance: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, item: toy_world.HeldOut) -> Question:
        prompt = tokenizer.encode_chat([*item.messages])
        answered = [*item.messages, {"role": "assistant", "content": item.answer}]
        ids = tokenizer.encode_chat(answered, add_generation_prompt=False)
        assert ids[: len(prompt)] == prompt, "an answer goes on from its prompt"
        return cls(ids=ids, answer=len(ids) - len(prompt), distance=item.distance_tokens)


def questions(tokenizer: Tokenizer, settings: Settings) -> list[Question]:
    """Held-out questions, sorted by length."""
    items = toy_world.heldout(settings.seed, settings.questions, DISTANCES[-1])
    return sorted((Question.of(tokenizer, item) for item in items), key=lambda q: len(q.ids))


def answered(model: Model, cache: KVCache, asked: Sequence[Question], chunk: int) -> list[bool]:
    """Which answers greedy decoding would give, to the end-of-turn token.

    It would if and only if, with the answer fed in, the likeliest token at each of its places is
    the answer's own.
    """
    right = []
    for rows in calls(asked):
        parts = logits_through(model, cache, [question.ids for question in rows], chunk)
        best = torch.cat([logits.argmax(-1) for logits in parts], 1)  # (B, T)
        for row, question in enumerate(rows):
            end = len(question.ids) - 1
            said = best[row, end - question.answer : end].tolist()
            right.append(said == question.ids[-question.answer :])
    return right


# Measuring --------------------------------------------------------------------------------------


def measure(settings: Settings) -> dict[str, Any]:
    """All figures, by the names of makes.

    On one thread: so small a model is no faster on two, and sums are the same everywhere.
    """
    torch.set_num_threads(1)
    model = Model(DEMO, dtype=torch.float32, max_input_len=settings.chunk)
    model.load(devices=["cpu"])
    tokenizer = Tokenizer(DEMO)
    texts = Texts(model, tokenizer, settings)
    asked = questions(tokenizer, settings)
    reference = _quality(model, REFERENCE, texts, asked)
    kinds = {name: _quality(model, MAKES[name], texts, asked) for name in settings.makes}
    for found in kinds.values():
        found["perplexity_ratio"] = found["perplexity"] / reference["perplexity"]
    return {"reference": reference, "kinds": kinds}


def _quality(model: Model, make: Make, texts: Texts, asked: Sequence[Question]) -> dict[str, Any]:
    longest = max(max(len(q.ids) for q in asked), len(texts.batches[0][0]))
    cache = make.build(model, longest)
    surprise, apart = texts.judge(cache)
    right = answered(model, cache, asked, texts.chunk)
    verdicts = [(q.distance, ok) for q, ok in zip(asked, right, strict=True)]
    return {
        **sizes(model, make),
        "perplexity": math.exp(surprise.mean()),
        "divergence": max(apart.mean().item(), 0.0),
        "worst_divergence": apart.max().item(),
        "right": {
            f"{low}-{high}": _tally([ok for distance, ok in verdicts if low < distance <= high])
            for low, high in pairwise(DISTANCES)
        },
    }


def _tally(verdicts: Sequence[bool]) -> dict[str, int]:
    return {"right": sum(verdicts), "of": len(verdicts)}


def sizes(model: Model, make: Make) -> dict[str, float]:
    """Bytes of all layers for one stored token, and for a row of the model's length."""
    length = model.config.max_position_embeddings
    specs = make.kind.layer_specs(model, length, 1, **make.options)
    layers = [(spec.nbytes(spec.capacity), spec.capacity) for spec in specs]
    return {
        "bytes_a_token": sum(nbytes / capacity for nbytes, capacity in layers),
        "bytes_a_row": sum(nbytes for nbytes, _ in layers),
    }


# Reporting --------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> list[str]:
    """What the columns mean, and the tables."""
    asked = result["settings"]
    return [
        f"The demo model in float32, tokens in chunks of {asked['chunk']}, seed {asked['seed']}. "
        f"Perplexity and KL divergence (nats a token, from the distribution with a float32 cache) "
        f"over {asked['texts']} chats of {asked['tokens']:,} tokens; right: of "
        f"{asked['questions']} held-out questions, by the tokens between fact and question. Bytes: "
        "of a token that is kept, over all layers. Floats are stored as bfloat16. sliding_window "
        "and sink keep 1,024 tokens where no number is given.",
        _kinds(result),
    ]


def _kinds(result: dict[str, Any]) -> str:
    tallies = result["reference"]["right"].items()
    ranges = [f"right, {distance} back (of {tally['of']})" for distance, tally in tallies]
    rows = [_row("full precision (float32)", result["reference"])]
    rows += [_row(name, found) for name, found in result["kinds"].items()]
    return markdown(["cache", "bytes a token", "perplexity", "", "KL divergence", *ranges], rows)


def _row(name: str, found: dict[str, Any]) -> list[str]:
    ratio = found.get("perplexity_ratio")
    return [
        name,
        f"{found['bytes_a_token']:,.0f}",
        f"{found['perplexity']:.3f}",
        "" if ratio is None else f"{100 * (ratio - 1):+.2f} %",
        f"{found['divergence']:.1e}" if ratio is not None else "",
        *(_percent(tally) for tally in found["right"].values()),
    ]


def _percent(tally: Mapping[str, int]) -> str:
    return f"{tally['right'] / tally['of']:.0%}" if tally["of"] else ""


QUICK = {
    **{"makes": ("fp16", "8bit", "4bit", "sliding_window 128"), "texts": 1, "tokens": 300},
    "questions": 8,
}
