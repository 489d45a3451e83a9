"""What Hugging Face's guide to caches shows, once by exkv's own model, once under stock models.

Each snippet is a function of a side, which has a model and its caches; both sides must give the
same tokens, and where nothing is rounded or forgotten those of transformers with a stock cache.
The table in docs/from-transformers.md has a line for each.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_families import WITH_STATES
from on_cpu import on_cpu
from tiny import TINY, reference, save
from transformers import DynamicCache

import exkv
from exkv import Model
from exkv.cache import CacheLayer, make_cache
from exkv.cache.layer import InPlace
from exkv.integrations.transformers import HFCache, disable, enable, resilient_generate

PROMPT = torch.arange(3, 43).tolist()
MORE = [[90, 91, 92, 93], [120, 121, 122]]
NEW = 5
DOCS = Path(__file__).resolve().parents[2] / "docs" / "from-transformers.md"
SETTINGS = {"sliding_window": {"window_length": 16}, "sink": {"window_length": 20}}
KINDS = ("dynamic", "static", "offloaded", "hybrid", "8bit", "4bit", "kivi", *SETTINGS)
QUANTIZED = {
    "backend": "quanto",
    "nbits": 4,
    "axis_key": 0,
    "axis_value": 0,
    "q_group_size": 64,
    "residual_length": 32,
    "compute_dtype": torch.float16,
    "device": "cpu",
}


class Plugged:
    """Stock transformers with exkv's caches and attention."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def cache(self, kind: str, **settings: Any) -> Any:
        return HFCache(self.model.config, kind, max_seq_len=96, **settings)

    def generate(self, ids: list[int], cache: Any = None, **call: Any) -> list[int]:
        call = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **call}
        given = {} if cache is None else {"cache": cache}
        return self._generate(torch.tensor([ids]), **given, **call)[0, len(ids) :].tolist()

    def _generate(self, ids: torch.Tensor, **call: Any) -> torch.Tensor:
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **call)

    def named(self, name: str, settings: dict[str, Any]) -> list[int]:
        if name not in ("sink", "sliding_window", "hybrid"):  # transformers' own names stay its own
            name, settings = "exkv", {"kind": name, **settings}
        enable()
        try:
            return self.generate(PROMPT, cache_implementation=name, cache_config=settings)
        finally:
            disable()

    @torch.no_grad()
    def logits(self, ids: list[int], cache: Any) -> torch.Tensor:
        return self.model(torch.tensor([ids]), cache=cache).logits[0, -1]

    def resilient(self, ids: list[int], steps: list[str], **call: Any) -> list[int]:
        self._generate = lambda ids, **rest: resilient_generate(
            self.model, ids, attention_mask=torch.ones_like(ids), on_oom=steps, **rest
        )
        try:
            return self.generate(ids, **call)
        finally:
            del self._generate


class Stock(Plugged):
    """transformers alone."""

    def cache(self, kind: str, **settings: Any) -> Any:
        return DynamicCache(config=self.model.config)

    def named(self, name: str, settings: dict[str, Any]) -> list[int]:
        return self.generate(PROMPT)

    def resilient(self, ids: list[int], steps: list[str], **call: Any) -> list[int]:
        return self.generate(ids, **call)


class Own:
    """exkv's own model with the same weights."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def cache(self, kind: str, **settings: Any) -> Any:
        return make_cache(kind, self.model, max_seq_len=96, **settings)

    def generate(self, ids: list[int], cache: Any = None, **call: Any) -> list[int]:
        call = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **call}
        return self.model.generate([ids], cache=cache, **call)[0, len(ids) :].tolist()

    def named(self, name: str, settings: dict[str, Any]) -> list[int]:
        return self.generate(PROMPT, cache_implementation=name, cache_config=settings)

    def logits(self, ids: list[int], cache: Any) -> torch.Tensor:
        return self.model.forward(torch.tensor([ids]), cache)[0, -1]

    def resilient(self, ids: list[int], steps: list[str], **call: Any) -> list[int]:
        return self.generate(ids, on_oom=steps, **call)


# Snippets -----------------------------------------------------------------------------------


def named(name, **settings):
    """``generate(cache_implementation=name, cache_config=settings)``."""
    return lambda side: side.named(name, {**SETTINGS.get(name, {}), **settings})


def own_loop(side):
    cache, new, tokens = side.cache("dynamic"), PROMPT, []
    for _ in range(NEW):
        tokens.append(int(side.logits(new, cache).argmax()))
        new = tokens[-1:]
    return tokens


def chat(kind):
    """Two turns over one cache."""

    def turns(side):
        cache, ids = side.cache(kind, **SETTINGS.get(kind, {})), PROMPT
        for more in MORE:
            ids = [*ids, *side.generate(ids, cache=cache), *more]
        return ids

    return turns


def reuse(side):
    """A prompt run once, and copies of its cache for what follows."""
    cache = side.cache("dynamic")
    side.logits(PROMPT, cache)
    return [side.generate(PROMPT + more, cache=copy.deepcopy(cache)) for more in MORE]


def resilient_beams(side):
    return side.resilient(PROMPT, ["offload"], num_beams=4)


#: As the table names them -> the snippet, and whether nothing is rounded or forgotten.
SNIPPETS = {
    "dynamic": (named("dynamic"), True),
    "offloaded": (named("offloaded"), True),
    "static": (named("static"), True),
    "offloaded static": (named("offloaded_static"), True),
    "quantized, each argument": (named("quantized", **QUANTIZED), False),
    "sliding window": (named("sliding_window"), False),
    "sinks": (named("sink"), False),
    "hybrid": (named("hybrid"), True),
    "own loop": (own_loop, True),
    **{f"chat, {kind}": (chat(kind), kind in KINDS[:4]) for kind in KINDS},
    "prompt reuse by deepcopy": (reuse, True),
    "resilient beams": (resilient_beams, True),
}
# Older editions -----------------------------------------------------------------------------
# What the guide showed from 4.42 to 4.57 besides, by names and arguments that are gone by now.
# exkv's model takes exkv's class of that name, if there is one; the plug-in's is transformers',
# under ``enable()``.

FOUR_BITS = {"nbits": 4, "backend": "quanto"}
HQQ = {"nbits": 4, "backend": "HQQ", "axis_key": 1, "axis_value": 1}
SINKS = {"window_length": 20, "num_sink_tokens": 4}
SIZES = {"max_batch_size": 1, "max_cache_len": 96, "device": "cpu", "dtype": torch.float32}


def implementation(name, **settings):
    """``generate(cache_implementation=...)``, word for word."""
    settings = {"cache_config": settings} if settings else {}
    return lambda side: side.generate(PROMPT, cache_implementation=name, **settings)


def built(name, kind, guides=None, **settings):
    """A cache that is built by hand: the guide's class, of exkv or of the plug-in, with the guide's
    arguments; and exkv's kind with its settings where exkv has no such class."""

    def generated(side):
        own = isinstance(side, Own)
        made = getattr(exkv if own else transformers, name, None)
        if own and (made is None or name == "SlidingWindowCache"):  # a window for every model here
            return side.generate(PROMPT, cache=side.cache(kind, **settings))
        cache = made(**(settings if guides is None else guides(side.model)))
        return side.generate(PROMPT, past_key_values=cache)

    return generated


def sized(model):
    return {"config": model.config, **SIZES}


def with_positions(side):
    """The loop with ``cache_position``, which transformers no longer looks at, and with the
    cache's older name, of which its ``forward`` warns."""
    if isinstance(side, Own):
        return own_loop(side)
    cache, new, tokens = side.cache("dynamic"), torch.tensor([PROMPT]), []
    position = torch.arange(len(PROMPT))
    for _ in range(NEW):
        with torch.no_grad(), pytest.warns(FutureWarning, match="Use `cache`"):
            out = side.model(new, past_key_values=cache, cache_position=position, use_cache=True)
        new, position = out.logits[:, -1:].argmax(-1), position[-1:] + 1
        tokens.append(int(new))
    return tokens


def cut_chat(side):
    """The chat that cuts its input to what a sink cache takes."""
    if isinstance(side, Own):
        return chat("sink")(side)
    cache, ids = transformers.SinkCache(window_length=20), PROMPT
    most = cache.get_max_cache_shape()
    for more in MORE:
        if isinstance(cache, transformers.SinkCache):
            ids = ids[-most:]
        ids = [*ids, *side.generate(ids, past_key_values=cache), *more]
    return ids


def static_reuse(side):
    cache = side.cache("static")
    side.logits(PROMPT, cache)
    return [side.generate(PROMPT + more, past_key_values=copy.deepcopy(cache)) for more in MORE]


#: As above; the first is lossless where it is True.
OLDER = {
    'cache_config={"nbits": 4, "backend": "quanto"}': (
        implementation("quantized", **FOUR_BITS), False,
    ),
    'cache_config={"backend": "HQQ", ...}': (implementation("quantized", **HQQ), False),
    "QuantizedCacheConfig, QuantoQuantizedCache": (
        built(
            "QuantoQuantizedCache", "quantized",
            lambda model: {"cache_config": transformers.QuantizedCacheConfig(nbits=4)}, nbits=4,
        ), False,
    ),
    "HQQQuantizedCache": (built("HQQQuantizedCache", "quantized", nbits=4, axis_key=1), False),
    'cache_implementation="offloaded"': (implementation("offloaded"), True),
    "OffloadedCache()": (built("OffloadedCache", "offloaded"), True),
    'cache_implementation="offloaded_static"': (implementation("offloaded_static"), True),
    "OffloadedStaticCache(config, ...)": (
        built("OffloadedStaticCache", "offloaded_static", sized), True,
    ),
    "StaticCache(config, max_batch_size, device, dtype)": (
        built("StaticCache", "static", sized), True,
    ),
    "SinkCache(window_length, num_sink_tokens)": (built("SinkCache", "sink", **SINKS), False),
    'cache_implementation="sliding_window", "hybrid"': (implementation("hybrid"), True),
    "SlidingWindowCache(config, ...)": (built("SlidingWindowCache", "hybrid", sized), True),
    "HybridCache(config, ...)": (built("HybridCache", "hybrid", sized), True),
    "own loop with cache_position": (with_positions, True),
    "chat cut to max_cache_length": (cut_chat, False),
    "prompt reuse with StaticCache": (static_reuse, True),
}  # fmt: skip


@pytest.fixture
def enabled():
    enable(every_name=True)
    yield
    disable()


@pytest.mark.parametrize("name", OLDER)
def test_older_editions_run_word_for_word(sides, name, enabled):
    snippet, lossless = OLDER[name]
    own, plugged, stock = sides
    found = snippet(plugged)
    assert found == snippet(own)
    if lossless:
        disable()  # transformers alone
        new = {own_loop: own_loop, static_reuse: reuse, with_positions: own_loop}
        expected = new.get(snippet, lambda side: side.generate(PROMPT))
        assert found == expected(stock)


def test_the_guides_own_retry_finds_an_offloaded_cache(sides, enabled):
    """``generate`` again with another ``cache_implementation`` where memory ran out."""
    _, plugged, stock = sides
    tried = []

    def resilient(**call):
        try:
            tried.append(call.get("cache_implementation"))
            if len(tried) == 1:
                raise torch.OutOfMemoryError("no room")
            return plugged.generate(PROMPT, **call)
        except torch.OutOfMemoryError:
            return resilient(**call, cache_implementation="offloaded")

    assert resilient(num_beams=4) == Plugged.generate(stock, PROMPT, num_beams=4)
    assert tried == [None, "offloaded"]


def test_mamba_cache_by_its_name(enabled):
    model = transformers.AutoModelForCausalLM.from_config(WITH_STATES["MambaForCausalLM"]()).eval()
    ids = torch.tensor([PROMPT])
    call = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}
    cache = transformers.MambaCache(
        model.config, max_batch_size=1, dtype=torch.float32, device="cpu"
    )
    found = model.generate(ids, cache_params=cache, **call)
    assert found.tolist() == model.generate(ids, **call).tolist()


def test_what_knows_no_model_says_so_and_names_go_with_disable(sides):
    enable()
    cache = transformers.SinkCache(window_length=20)
    with pytest.raises(ValueError, match=r"know its model: make it with SinkCache\(config="):
        sides[1].logits(PROMPT, cache)
    config = sides[1].model.config
    found = sides[1].logits(PROMPT, transformers.SinkCache(config=config, window_length=20))
    assert torch.equal(found, sides[1].logits(PROMPT, HFCache(config, "sink", window_length=20)))
    disable()
    with pytest.raises(AttributeError):
        transformers.OffloadedCache  # noqa: B018


#: Those that need a model which exkv has none of, or are about transformers' own forms; see
#: tests/integrations.
PLUGGED_ONLY = {"encoder-decoder", "state space", "static and compiled", "legacy tuples"}


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """Mistral, whose layers all slide."""
    theirs = reference(TINY["MistralForCausalLM"](eos_token_id=None))
    ours = on_cpu(save(theirs, tmp_path_factory.mktemp("mistral")))
    theirs.set_attn_implementation("exkv")
    return Own(ours), Plugged(theirs), Stock(reference(theirs.config))


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_gives_the_same_tokens_on_both_sides(sides, name, monkeypatch):
    snippet, lossless = SNIPPETS[name]
    own, plugged, stock = sides
    expected = snippet(stock) if lossless else None
    found = []
    for side in (own, plugged):
        if snippet is resilient_beams:
            calls = []
            for stores in (CacheLayer, InPlace):
                monkeypatch.setattr(stores, "append", _full_once(stores.append, calls))
        found.append(snippet(side))
        assert snippet is not resilient_beams or len(calls) > 3  # it did run out
        monkeypatch.undo()
    assert found[0] == found[1]
    assert expected is None or found[0] == expected


def _full_once(append, calls):
    """A layer's ``append`` that runs out of memory the third time of all."""

    def full(self, *args):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        return append(self, *args)

    return full


def test_the_table_has_a_line_for_each_snippet():
    table = DOCS.read_text().split("## Snippets of the guide", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)[1:]
    chats = {name for name in SNIPPETS if name.startswith("chat, ")}
    assert set(rows) == (set(SNIPPETS) - chats) | {"chat, every kind"} | PLUGGED_ONLY


def test_the_table_of_older_editions_has_a_line_for_each():
    table = DOCS.read_text().split("## Older editions", 1)[1].split("\n## ", 1)[0]
    rows = [row.replace("`", "") for row in re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)]
    others = {
        "resilient_generate by a retry",
        "MambaCache(config, ...)",
        "legacy tuples",
    }
    assert set(rows[1:]) == set(OLDER) | others
