"""How often each expert is chosen, by which plans tell hot experts from cold ones.

Counted on a text, which runs through the units on the host one by one, as for
``exkv.loading.losses``, and while serving. The counts of each text and of serving are stored in
``exkv-experts.json`` (see ``exkv.loading.measured_file``); those of serving decay by half every
:data:`HALF_LIFE` tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from exkv.batch import Batch, Lengths
from exkv.cache import NoCacheLayer
from exkv.checkpoint import Checkpoint, CheckpointError, ModelConfig, open_checkpoint
from exkv.devices import CPU
from exkv.models import Transformer, Unit
from exkv.models.expert_usage import ExpertUsage, UsageCounter
from exkv.text import Tokenizer
from exkv.weights.on_load import METHOD

from .measured_file import MeasuredFile, digest, may_be_measured

logger = logging.getLogger(__name__)

FILE = "exkv-experts.json"
#: Version of the file; files of another one are not read.
_VERSION = 1
#: The key of counts from serving; the other keys are texts.
SERVED = "served"
#: Served tokens after which a count has decayed to half.
HALF_LIFE = 1_000_000
#: Rows of a text that are used, and tokens of a row.
_ROWS, _TOKENS = 4, 512
_FEWEST_TOKENS = 32
#: Weight of the prior that all experts are equally hot, in tokens, beside those counted.
PRIOR = 256

#: Unit name -> counts of its experts.
Usage = Mapping[str, ExpertUsage]


def usage_of(model: Transformer, text: str | None = None) -> Mapping[str, tuple[float, ...]] | None:
    """The share of tokens that choose each expert, for the units where it is known; few tokens
    count little (:data:`PRIOR`). None if it is known for no unit.

    Args:
        text: in the model's language; its counts are measured, if not known, and added to those
            of serving. None for all known texts.

    Raises:
        ValueError: the text is too short.
        CheckpointError: the files are damaged, or contradict the config.
    """
    path, units = model.config.path, units_with_experts(model)
    if path is None or not units or (text is None and not may_be_measured(path, FILE)):
        return None
    try:
        checkpoint = open_checkpoint(path)
    except FileNotFoundError:
        return None  # a config alone
    with checkpoint:
        file = _file(model, checkpoint)
        keys = [key for key in file.known() if text is None or key == SERVED]
        found = [usage for key in keys if (usage := _read(file, key, units)) is not None]
        if text is not None:
            ids = _rows(model.config, text)
            found.append(_known_or_measured(model, checkpoint, file, ids))
    return _shares(found, units)


def usage_of_rows(
    model: Transformer, checkpoint: Checkpoint, ids: torch.Tensor
) -> Mapping[str, tuple[float, ...]] | None:
    """:func:`usage_of` by tokens alone, int64 (B, T), of a model with a folder."""
    if not (units := units_with_experts(model)):
        return None
    found = _known_or_measured(model, checkpoint, _file(model, checkpoint), ids)
    return _shares([found], units)


def _shares(found: Sequence[Usage], units: Iterable[str]) -> dict[str, tuple[float, ...]] | None:
    shares = {}
    for name in units:
        known = [usage[name] for usage in found if name in usage]
        if known:
            shares[name] = sum_of(known).shares_with_prior(PRIOR)
    return shares or None


def units_with_experts(model: Transformer) -> dict[str, int]:
    """Unit name -> its number of routed experts; without an MTP head's, which no text reaches."""
    units = (unit for unit in model.units if not unit.spec.is_mtp)
    return {unit.name: count for unit in units if (count := len(unit.expert_bytes))}


def sum_of(usages: Sequence[ExpertUsage]) -> ExpertUsage:
    """The sum of several usages, with equal weight."""
    first, *others = usages
    for other in others:
        first = first.after(other, 1.0)
    return first


def add_served(model: Transformer, served: Usage) -> None:
    """Add a model's counts from serving to the stored ones; its files may be gone."""
    if not served or model.config.path is None:
        return
    try:
        with open_checkpoint(model.config.path) as checkpoint:
            file = _file(model, checkpoint)
    except (OSError, CheckpointError) as error:
        logger.info("experts' counts are not stored: %s", error)
        return
    before = _read(file, SERVED, units_with_experts(model)) or {}
    after = {
        name: usage.after(before[name], 0.5 ** (usage.tokens / HALF_LIFE))
        if name in before
        else usage
        for name, usage in served.items()
    }
    file.write(SERVED, _values({**before, **after}))


def keep_counted(config: ModelConfig, ids: torch.Tensor, found: Usage) -> None:
    """Store a text's counts, int64 (B, T), beside the weights of this config."""
    assert config.path is not None
    with open_checkpoint(config.path) as checkpoint:
        file = MeasuredFile(config.path, FILE, checkpoint.fingerprint, _VERSION)
    file.write(key_of(ids), _values(found))


def _file(model: Transformer, checkpoint: Checkpoint) -> MeasuredFile:
    assert model.config.path is not None
    return MeasuredFile(model.config.path, FILE, checkpoint.fingerprint, _VERSION)


def _read(file: MeasuredFile, key: str, units: Mapping[str, int]) -> Usage | None:
    return file.read(key, partial(_checked, units))


def _values(usage: Usage) -> dict[str, Any]:
    return {name: {"tokens": of.tokens, "counts": of.counts} for name, of in usage.items()}


def _checked(units: Mapping[str, int], values: Mapping[str, Any]) -> Usage:
    """Parse counts read from a file; raises ValueError, or Python's own errors for malformed ones,
    unless they are for these units."""
    found = {}
    for name, each in values.items():
        tokens, counts = each["tokens"], each["counts"]
        if len(counts) != units[name]:
            raise ValueError(f"{name} has {units[name]} experts, and the file {len(counts)} counts")
        if not all(isinstance(n, int | float) and 0 <= n < math.inf for n in (tokens, *counts)):
            raise ValueError(f"a count of {name} isn't a number of at least 0")
        if tokens < max(counts) or not tokens:
            raise ValueError(f"{name} has {tokens} tokens, and one of its experts more")
        found[name] = ExpertUsage(float(tokens), tuple(map(float, counts)))
    return found


# Of a text --------------------------------------------------------------------------------------


def _known_or_measured(
    model: Transformer, checkpoint: Checkpoint, file: MeasuredFile, ids: torch.Tensor
) -> Usage:
    known = _read(file, key_of(ids), units_with_experts(model))
    if known is not None:
        return known
    logger.info("%s: counting how often each expert is chosen", model.config.path)
    checkpoint.expect(model.stored_tensors(), model.unused_modules())
    found = usage_of_tokens(model.config, checkpoint, ids)
    file.write(key_of(ids), _values(found))
    return found


def key_of(ids: torch.Tensor) -> str:
    """The key of a text's tokens."""
    return f"text {digest(ids.tolist())}"


def _rows(config: ModelConfig, text: str) -> torch.Tensor:
    """The text's first tokens (B, T): up to 4 rows of 512, or one of fewer."""
    assert config.path is not None
    ids = Tokenizer(config.path).encode(text)[: _ROWS * _TOKENS]
    if len(ids) < _FEWEST_TOKENS:
        raise ValueError(
            f"the calibration text has {len(ids)} tokens; give a few hundred words, at least "
            f"{_FEWEST_TOKENS} tokens"
        )
    length = min(len(ids), _TOKENS)
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


@torch.no_grad()
def usage_of_tokens(config: ModelConfig, checkpoint: Checkpoint, ids: torch.Tensor) -> Usage:
    """Run tokens, int64 (B, T), through the units up to the last one with experts, in float32."""
    if (config.quantization or {}).get("quant_method") == METHOD:
        config = replace(config, quantization=None)  # rounding takes long, and moves few choices
    model = Transformer(config, dtype=torch.float32)
    lengths = Lengths.uniform(len(ids), 0, ids.shape[1])
    batch = Batch.on(CPU, lengths, model.rotary, torch.float32)
    names, found, x = units_with_experts(model), dict[str, ExpertUsage](), ids
    for unit in model.units:
        if names.keys() <= found.keys():
            break
        unit.read(checkpoint, CPU, {})
        checkpoint.unmap()
        x = _counted(unit, x, batch, found)
        unit.release()
    return found


def _counted(
    unit: Unit, x: torch.Tensor, batch: Batch, found: dict[str, ExpertUsage]
) -> torch.Tensor:
    assert unit.module is not None
    with UsageCounter({unit.name: unit.module}) as counter:
        y: torch.Tensor = unit.module(x, batch, NoCacheLayer())
        found |= counter.take()
    return y
