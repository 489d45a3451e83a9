"""From logits to the next token, by ExLlamaV2's vocabulary: :func:`sample` runs the steps that
:class:`SamplingParams` asks for.

It runs on the logits' device, in float32, and copies only tokens to the host. Random numbers are
drawn on the CPU, one a row, so a seed gives the same tokens however a model is split.
``torch.ops.exkv.sample`` fuses the steps of candidates into one kernel, if it has all that are
asked for. ``exkv.decode.job_chooser`` samples once a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from exkv.ops.sample import candidates, draw

from .exllamav2 import SamplingParams
from .penalties import check_bias
from .scores import check_choosable, where_there_is_room
from .step import Candidates

History: TypeAlias = Sequence[Sequence[int] | Tensor]

_READABLE = (torch.float32, torch.bfloat16, torch.float16)  # by the op's kernel


@dataclass(frozen=True, slots=True)
class _SoFar:
    """The tokens so far, for steps."""

    histories: list[Tensor]


def sample(
    logits: Tensor,
    params: SamplingParams,
    history: History | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> Tensor:
    """Choose one token for each row.

    Args:
        logits: (B, V), any float dtype, any device.
        history: for each row the token ids so far (a list, or a 1-d int64 tensor, which is faster
            when long), most recent last; None penalizes nothing. Ids in a tensor on an accelerator
            are not checked.
        generator: a CPU generator for the batch, or one for each row, with which it draws the token
            that it draws alone; None is torch's global one.

    Returns:
        int64 (B,) on the CPU.

    Raises:
        ValueError: logits hold NaN or +inf, or a row has no token left; shapes, ids or generators
            that don't fit.
    """
    return sample_placed(logits, params, history, generator)[0]


def sample_placed(
    logits: Tensor,
    params: SamplingParams,
    history: History | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`sample`, and the tokens on the logits' device."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params is a {type(params).__name__}; it must be SamplingParams")
    raw = _as_rows(logits)
    rows, vocab_size = raw.shape
    generators = _checked_generators(generator, rows)
    known = _known(history, params, raw)
    check_bias(params.token_bias, vocab_size)
    uniforms = None if params.is_greedy else _uniforms(generators, rows)
    placed = where_there_is_room(lambda x: _choose(x, params, known, uniforms), raw)
    tokens = placed.cpu()
    if min(tokens.tolist()) < 0:
        check_choosable(raw, "the logits")
        _scored(raw.cpu(), params, [ids.cpu() for ids in known], explain=True)
    return tokens, placed


def distribution(
    logits: Tensor, params: SamplingParams, history: History | None = None
) -> tuple[Tensor, Tensor]:
    """The distribution that :func:`sample` draws from: probabilities (B, K), 0 for dropped tokens,
    and ids (B, K). A greedy choice has probability 1."""
    raw = _as_rows(logits)
    known = _known(history, params, raw)
    check_bias(params.token_bias, raw.shape[1])
    scores = _scored(raw, params, known).float()
    check_choosable(scores, "the scores")
    if params.is_greedy:
        best = scores.argmax(-1, keepdim=True)
        return torch.ones_like(best, dtype=torch.float32), best
    fused = params.chain.fused
    scores, ids = candidates(scores, *fused) if fused else _candidates(scores, params)
    return scores.softmax(-1), ids


def greedy(logits: Tensor) -> Tensor:
    """Argmax of each row (the first of equals), -1 for a row that :func:`sample` refuses: (B, V) ->
    int64 (B,) on the logits' device."""
    return torch.ops.exkv.sample(_as_rows(logits), None, 0.0, 0, 1.0, 0.0, 0.0, False)


def _choose(
    logits: Tensor, params: SamplingParams, history: Sequence[Tensor], uniforms: Tensor | None
) -> Tensor:
    """Run the chain on the logits' device: (B, V) -> int64 (B,)."""
    scores, fused = _scored(logits, params, history), params.chain.fused
    uniforms = None if uniforms is None else uniforms.to(logits.device)
    if fused is not None:
        return torch.ops.exkv.sample(scores, uniforms, *fused)
    assert uniforms is not None, "a greedy choice is the op's"
    scores = scores.float()
    choosable = scores.amax(-1).isfinite()
    scores, ids = _candidates(scores.where(choosable[:, None], 0.0), params)
    return ids.gather(-1, draw(scores, uniforms)[:, None])[:, 0].where(choosable, -1)


def _scored(
    logits: Tensor, params: SamplingParams, history: Sequence[Tensor], *, explain: bool = False
) -> Tensor:
    """Run the steps on scores in columns; with ``explain``, raise ValueError after the first step
    that leaves a row without a token."""
    if not params.chain.columns:
        return logits
    at = _SoFar([ids.to(logits.device) for ids in history])
    for row in params.chain.columns:
        if history or not row.step.needs_history:
            assert row.step.columns is not None
            logits = row.step.columns(logits.float(), at, *row.values(params))
            if explain:
                check_choosable(logits, f"the logits after {row.switched_on(params)[0]}")
    return logits


def _candidates(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Run the steps on candidates: (B, V) -> scores (B, K), -inf for dropped tokens, and ids."""
    ids = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    those = Candidates(scores=scores, ids=ids)
    for row in params.chain.candidates:
        assert row.step.candidates is not None
        those = row.step.candidates(those, *row.values(params))
    those = those.mixed()
    return those.scores, those.ids


def _uniforms(generators: Sequence[torch.Generator | None], rows: int) -> Tensor:
    each = rows // len(generators)
    return torch.cat([torch.rand(each, generator=g, dtype=torch.float64) for g in generators])


def _as_rows(logits: Tensor) -> Tensor:
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"logits must be a float tensor of shape (B, V), not {kind}")
    if logits.dim() != 2 or 0 in logits.shape:
        raise ValueError(f"logits must have the shape (B, V), not {tuple(logits.shape)}")
    logits = logits.detach()
    return logits if logits.dtype in _READABLE else logits.float()


def _known(history: History | None, params: SamplingParams, logits: Tensor) -> list[Tensor]:
    """The history as tensors if the parameters need it, else nothing."""
    if history is None or not params.needs_history:
        return []
    return _checked_history(history, *logits.shape)


def _checked_history(history: History, rows: int, vocab_size: int) -> list[Tensor]:
    if len(history) != rows:
        raise ValueError(f"history has {len(history)} rows, but the logits have {rows}")
    tensors = [torch.as_tensor(ids, dtype=torch.int64) for ids in history]
    for row, ids in enumerate(tensors):
        if ids.dim() != 1:
            raise ValueError(f"history[{row}] must be a flat list of ids, not {tuple(ids.shape)}")
        if not ids.is_cpu:
            continue
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        if len(wrong):
            raise ValueError(
                f"history[{row}] holds the id {int(wrong[0])}, outside of 0..{vocab_size - 1}"
            )
    return tensors


def _checked_generators(
    generator: torch.Generator | Sequence[torch.Generator] | None, rows: int
) -> Sequence[torch.Generator | None]:
    if generator is None or isinstance(generator, torch.Generator):
        generators: Sequence[torch.Generator | None] = [generator]
    elif len(generator) == rows:
        generators = generator
    else:
        raise ValueError(f"{len(generator)} generators for {rows} rows: give one, or one for each")
    for each in generators:
        if each is not None and each.device.type != "cpu":
            raise ValueError(
                f"a generator is on {each.device}: tokens are drawn on the CPU, so make it with "
                "torch.Generator()"
            )
    return generators
