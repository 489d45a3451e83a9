"""``resilient_generate``: when memory runs out, convert the live cache, and let stock ``generate``
continue.

The steps are those of exkv's own ``generate`` (``exkv.decode.fallback``). ``generate`` doesn't
notice: the model's ``forward`` is retried.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from exkv import devices
from exkv.decode.fallback import STEPS, Fallback, OnOom
from exkv.errors import Attempt
from exkv.generation.arguments import one_of

from .cache import HFCache
from .snapshots import states
from .versions import cache_argument

logger = logging.getLogger(__name__)


def resilient_generate(
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    *,
    cache: HFCache | None = None,
    past_key_values: HFCache | None = None,
    on_oom: str | Sequence[str] = "fallback",
    on_fallback: Callable[[Fallback], Any] | None = None,
    **call: Any,
) -> Any:
    """Call ``model.generate(inputs, **call)``, and convert the cache when memory runs out.

    Args:
        cache: the cache in use; None for a new one of kind "dynamic".
        past_key_values: another name of ``cache``.
        on_oom: "fallback" for all of "offload", "8bit" and "4bit", or a list of some of them.
        on_fallback: called after each step, before the failed call is retried.

    Raises:
        ValueError: an unknown step, an encoder-decoder, or a cache by both names.
        TypeError: the cache isn't an :class:`HFCache`.
        torch.OutOfMemoryError: no step is left that would free memory.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            "resilient_generate is for decoders; for an encoder-decoder, pass generate() an "
            'EncoderDecoderCache(HFCache(config, "offloaded"), HFCache(config, "8bit"))'
        )
    wish = OnOom(on_oom=on_oom, on_fallback=on_fallback)
    cache = one_of("cache", cache, "past_key_values", past_key_values)
    cache = HFCache(model.config) if cache is None else cache
    if not isinstance(cache, HFCache):
        raise TypeError(f"cache is a {type(cache).__name__}: it must be an HFCache")
    with _guarded(model, _Rescue(cache, wish)):
        given = {cache_argument(model): cache}
        return model.generate(inputs, **given, **call)  # type: ignore[operator]


@contextmanager
def _guarded(model: PreTrainedModel, rescue: _Rescue) -> Iterator[None]:
    """Give the model a ``forward`` that is retried when memory runs out."""
    own, forward = vars(model).get("forward"), model.forward

    @functools.wraps(forward)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return rescue.run(lambda: forward(*args, **kwargs))

    model.forward = guarded
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


class _Rescue:
    """The remaining steps of one call."""

    def __init__(self, cache: HFCache, wish: OnOom) -> None:
        self.cache = cache
        self._left = [step for step in wish.steps if isinstance(step, str)]
        self._on_fallback = wish.on_fallback

    def run(self, call: Callable[[], Any]) -> Any:
        """Make a call, and retry it after each step that frees memory -> its result."""
        while self._left:
            tokens, kept = _tokens(self.cache), list(map(states, self.cache.layers))
            with Attempt() as attempt:
                return call()
            self.cache.rollback(tokens)
            for layer, values in zip(self.cache.layers, kept, strict=True):
                vars(layer).update(values)
            if (step := self._next()) is not None:
                self._convert(step, attempt.why, tokens)
        return call()

    def _next(self) -> str | None:
        """Take the next step that would free memory, and drop those before it."""
        while self._left:
            step = self._left.pop(0)
            if _frees(STEPS[step], self.cache):
                return step
        return None

    def _convert(self, step: str, why: str, tokens: int) -> None:
        before = self.cache.nbytes_by_device()
        with Attempt() as attempt:
            self.cache.convert(**STEPS[step])
        if attempt.why:
            logger.warning("%s itself ran out of memory: %s", step, attempt.why)
        devices.release_idle_memory()
        after = self.cache.nbytes_by_device()
        taken = Fallback(
            step=step, during="running the model", why=why, token=tokens, before=before, after=after
        )
        logger.warning(
            "out of memory at token %d; the step %s changes the cache from %s to %s bytes, and "
            "generation continues%s. The error: %s",
            tokens, step, before, after,
            "" if "residence" in STEPS[step] else "; further tokens may differ", why,
        )  # fmt: skip
        if self._on_fallback is not None:
            self._on_fallback(taken)


def _tokens(cache: HFCache) -> int:
    return max((layer.get_seq_length() for layer in cache.attention_layers), default=0)


def _frees(properties: Mapping[str, Any], cache: HFCache) -> bool:
    """Whether layers take less memory on their devices with these properties."""
    specs = [layer.template for layer in cache.attention_layers]
    if "residence" in properties:
        return any(spec.residence != properties["residence"] for spec in specs)
    return any(replace(spec, **properties).nbytes(1024) < spec.nbytes(1024) for spec in specs)
