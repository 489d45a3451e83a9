"""One unit's part of a forward call, run alone: by a prediction on shapes, or by a load's probe on
the device itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from exkv.batch import Batch
from exkv.cache import CacheLayer, NoCacheLayer
from exkv.models import Unit, mtp

from .model import ModelShape


class Wanted(NamedTuple):
    """Which logits the head computes: of each row's last token only, and ``at_once`` tokens per row
    at a time; None for all."""

    last_id_only: bool = False
    at_once: int | None = None


def run_unit(
    model: ModelShape,
    unit: Unit,
    module: nn.Module,
    store: CacheLayer | None,
    batch: Batch,
    logits: Wanted,
) -> torch.Tensor:
    """The unit's output for an input of zeros; used by the prediction and the probe alike."""
    rows, chunk = len(batch.lengths.past), batch.lengths.chunk
    device = batch.past_lens.device
    if unit.spec.is_mtp:
        return _predicted(model, module, store, batch)
    if unit.index == 0:
        x = torch.zeros((rows, chunk), dtype=torch.int64, device=device)
    else:
        head = unit.index == len(model.units) - 1
        length = 1 if logits.last_id_only and head else chunk
        shape = (rows, length, model.config.handed_on)
        x = torch.zeros(shape, dtype=model.dtype, device=device)
        if head and logits.at_once is not None and length > logits.at_once:
            return module(x.split(logits.at_once, 1)[0], batch, NoCacheLayer())
    if store is None:
        return module(x, batch, NoCacheLayer())
    with amid_others(store, batch):
        return module(x, batch, store)


def _predicted(
    model: ModelShape, module: nn.Module, store: CacheLayer | None, batch: Batch
) -> torch.Tensor:
    """What an MTP head keeps from a call, for an input of zeros."""
    rows, chunk, size = len(batch.lengths.past), batch.lengths.chunk, model.config.hidden_size
    zeros = partial(torch.zeros, dtype=model.dtype, device=batch.past_lens.device)
    first, embedded, x = zeros(rows, 1, size), zeros(rows, chunk, size), zeros(rows, chunk, size)
    if store is None:
        return mtp.store(module, embedded, x, first, batch, NoCacheLayer())
    with amid_others(store, batch):
        return mtp.store(module, embedded, x, first, batch, store)


@contextlib.contextmanager
def amid_others(layer: CacheLayer, batch: Batch) -> Iterator[None]:
    """Put a cache's layer in its mid-call state: if it is offloaded, its tokens are being
    prefetched, and the previous layer's buffer is free for the next one's. It stores its input, as
    the last of the layers that share its keys and values does."""
    after, read_by, layer.read_by = layer.after, layer.read_by, None
    if layer.offloaded:
        own = batch if layer.shared is None else layer.shared.rest(batch)
        layer.prefetched = prefetch = layer.start_prefetch(own.lengths)
        prefetch.spare = torch.empty_like(prefetch.memory)
        layer.after = after and _stand_in(after, layer.device)
    try:
        yield
    finally:
        layer.after, layer.read_by, layer.prefetched = after, read_by, None
        layer.settle()


def _stand_in(layer: CacheLayer, device: torch.device | None) -> CacheLayer:
    """A full layer of the same spec, all zeros, that takes no memory."""
    other = CacheLayer(layer.spec.alone)
    other.device, other.offloaded, other.room = device, True, layer.spec.capacity
    other.tensors = {
        name: torch.zeros((), dtype=dtype).expand(shape)
        for name, (shape, dtype) in layer.spec.layout(layer.spec.capacity).items()
    }
    return other
