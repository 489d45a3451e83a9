"""A cache's contents in a safetensors file: the tokens in its metadata, and what is stored of them.

Only what is used is written: the rows that have tokens, up to the longest. The tensor
``layers.3.k`` is the fourth layer's ``k`` with the shape (rows, tokens, ...), as the kind of cache
stores it. https://huggingface.co/docs/safetensors is the format, and its library reads and writes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

if TYPE_CHECKING:
    from .base import KVCache
    from .layer import CacheLayer

_FORMAT = "exkv cache 1"


def save(cache: KVCache, file: str | os.PathLike[str]) -> None:
    """Write the cache's contents; see :meth:`KVCache.save`."""
    if any(layer.shared for layer in cache.layers):
        raise ValueError("a fork shares its beginning: save the cache that it came from")
    rows = max((i + 1 for i, ids in enumerate(cache.sequences) if ids), default=0)
    length = cache.current_seq_len
    tensors = {
        f"layers.{index}.{name}": tensor[:rows, layer.spec.arrangement.slots(name, 0, length)]
        .cpu()
        .contiguous()
        for index, layer in enumerate(cache.layers)
        for name, tensor in layer.tensors.items()
    }
    about = {
        "format": _FORMAT,
        "layers": json.dumps([_kept_as(layer) for layer in cache.layers]),
        "sequences": json.dumps(cache.sequences[:rows]),
        "stale": json.dumps(sorted(cache.stale)),
        "written": json.dumps(cache.written[:rows]),
    }
    save_file(tensors, file, metadata=about)


def load(cache: KVCache, file: str | os.PathLike[str]) -> None:
    """Read a cache's contents back; see :meth:`KVCache.load`."""
    if not Path(file).is_file():
        raise FileNotFoundError(f"{file} is not there: save a cache to it first")
    if any(layer.shared for layer in cache.layers):
        raise ValueError("a fork shares its beginning: load into a cache of its own")
    cache.allocate(cache.model.cache_map)
    try:
        with safe_open(file, framework="pt") as stored:
            about = stored.metadata() or {}
            sequences = _check_about(cache, about)
            (stale,) = _read_rows(f"[{about.get('stale', '')}]", len(sequences))
            (written,) = _read_rows(f"[{about.get('written', '')}]", sys.maxsize)
            if len(written) != len(sequences):
                raise ValueError(f"it says of {len(written)} rows what was written, of others not")
            tensors = {
                (layer, name): stored.get_tensor(f"layers.{layer}.{name}")
                for layer in range(len(cache.layers))
                for name in cache.layers[layer].tensors
            }
        _check_shapes(cache, tensors, len(sequences), max(map(len, sequences), default=0))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None
    cache.make_room([len(ids) for ids in sequences])
    for (layer, name), tensor in tensors.items():
        cache.layers[layer].tensors[name][: tensor.shape[0], : tensor.shape[1]] = tensor
    cache.become(sequences, stale)
    cache.written[: len(written)] = written


def _check_about(cache: KVCache, about: dict[str, str]) -> list[list[int]]:
    """The rows' tokens, once it is clear that they fit here."""
    if about.get("format") != _FORMAT:
        raise ValueError(f"it is no cache that exkv saved (format {about.get('format')!r})")
    theirs, mine = json.loads(about.get("layers", "[]")), list(map(_kept_as, cache.layers))
    if not isinstance(theirs, list) or len(theirs) != len(mine):
        count = len(theirs) if isinstance(theirs, list) else "no"
        raise ValueError(f"it has {count} layers, and this cache {len(mine)}")
    for layer, (here, there) in enumerate(zip(mine, theirs, strict=True)):
        if here != there:
            raise ValueError(f"its layer {layer} has {there}, and this cache's {here}")
    sequences = _read_rows(about.get("sequences", ""), cache.model.config.vocab_size)
    longest = max(map(len, sequences), default=0)
    if len(sequences) > cache.batch_size or longest > cache.max_seq_len:
        raise ValueError(
            f"it has {len(sequences)} rows of up to {longest} tokens, and this cache room for "
            f"{cache.batch_size} of {cache.max_seq_len}"
        )
    return sequences


def _kept_as(layer: CacheLayer) -> str:
    """What says how to read the tensors; where they lie and when they grow makes no difference."""
    return f"{layer.spec.storage} {layer.spec.retention}"


def _read_rows(text: str, limit: int) -> list[list[int]]:
    """Rows of numbers below the limit, from JSON."""
    rows: Any = json.loads(text)
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, list) or not all(type(n) is int and 0 <= n < limit for n in row):
            raise ValueError(f"its metadata has no rows of numbers below {limit}")
    return rows


def _check_shapes(
    cache: KVCache, tensors: dict[tuple[int, str], torch.Tensor], rows: int, length: int
) -> None:
    for (layer, name), tensor in tensors.items():
        mine = cache.layers[layer].tensors[name]
        used = cache.layers[layer].spec.arrangement.slots(name, 0, length).stop
        expected = (rows, used, *mine.shape[2:])
        if tuple(tensor.shape) != expected or tensor.dtype != mine.dtype:
            raise ValueError(
                f"tensor layers.{layer}.{name} is {tensor.dtype} {tuple(tensor.shape)}, and this "
                f"cache stores {mine.dtype} {expected}: it is another model's, or of another dtype"
            )
