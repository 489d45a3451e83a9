"""An :class:`HFCache` in a safetensors file: keys and values as they are stored, and states.

``layers.3.k`` is the fourth layer's tensor ``k`` up to the longest row, ``layers.0.conv_states.0``
a state. The metadata describes each layer's storage, and has the length of each row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_bytes

from exkv.cache.file import NO_CHECKSUM, check_checksum, replacing, write_checked

from .layer import HFLayer
from .versions import LinearAttentionCacheLayerMixin

if TYPE_CHECKING:
    from .cache import HFCache

_FORMAT = "exkv transformers cache 2"
_STATES = ("conv_states", "recurrent_states")


def save(cache: HFCache, file: str | os.PathLike[str]) -> None:
    """Write the contents; see :meth:`HFCache.save`."""
    tensors: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(cache.layers):
        own = {**_stored(layer), **_states(layer)}
        tensors |= {f"layers.{index}.{name}": x.cpu().contiguous() for name, x in own.items()}
    about = {
        **NO_CHECKSUM,
        "format": _FORMAT,
        "layers": json.dumps(list(map(_about, cache.layers))),
    }
    content = memoryview(as_bytes(tensors, about))
    data = 8 + int.from_bytes(content[:8], "little")
    with replacing(Path(file)) as stream:
        write_checked(stream, bytes(content[:data]), [content[data:]])


def _stored(layer: Any) -> dict[str, torch.Tensor]:
    """Name of a tensor in the store -> its part for the stored tokens."""
    if not isinstance(layer, HFLayer) or layer.store is None:
        return {}
    layer.settle()
    return {name: layer.store.rows(name, layer.lens) for name in layer.store.tensors}


def _states(layer: Any) -> dict[str, torch.Tensor]:
    """States of fixed size, by name and number."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return {}
    return {
        f"{name}.{number}": state
        for name in _STATES
        for number, state in getattr(layer, name).items()
        if state is not None
    }


def _about(layer: Any) -> dict[str, Any]:
    """Metadata that is needed to read a layer's tensors."""
    about: dict[str, Any] = {"type": getattr(layer, "file_type", type(layer).__name__)}
    if isinstance(layer, HFLayer):
        about["kept"] = f"{layer.template.storage} {layer.template.retention}"
        if layer.store is not None:
            spec = layer.store.spec
            about |= {"dims": layer.dims, "heads": spec.num_heads, "dtype": str(spec.dtype)}
            about |= {"lens": layer.lens, "pads": layer.pads, "written": layer.written}
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        about["kernels"] = list(layer.conv_kernel_size.values())
        about["came"] = list(layer.has_previous_state.values())
    return about


def load(
    cache: HFCache, file: str | os.PathLike[str], device: str | Mapping[int, str | torch.device]
) -> None:
    """Read contents back; see :meth:`HFCache.load`."""
    try:
        with safe_open(file, framework="pt") as stored:
            layers = _checked(cache, stored.metadata() or {})
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        check_checksum(file)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None
    cache.reset()
    for index, (layer, about) in enumerate(zip(cache.layers, layers, strict=True)):
        prefix = f"layers.{index}."
        own = {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}
        where = torch.device(device if isinstance(device, str) else device[index])
        if isinstance(layer, HFLayer) and "lens" in about:
            _fill(layer, about, own, where)
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            _set_states(layer, about, own, where)


def _checked(cache: HFCache, about: Mapping[str, str]) -> list[dict[str, Any]]:
    """The metadata of a file's layers; ValueError if they differ from this cache's."""
    if about.get("format") != _FORMAT:
        found = str(about.get("format"))[:40]
        raise ValueError(f"it wasn't written by HFCache.save (format {found!r})")
    layers: list[dict[str, Any]] = json.loads(about["layers"])
    if len(layers) != len(cache.layers):
        raise ValueError(f"it has {len(layers)} layers, but this cache has {len(cache.layers)}")
    for index, (layer, theirs) in enumerate(zip(cache.layers, layers, strict=True)):
        for key in ("type", "kept"):
            mine = _about(layer).get(key)
            if mine != theirs.get(key):
                raise ValueError(
                    f"its layer {index} is {theirs.get(key)}, but this cache's is {mine}: make the "
                    "cache for the same model, of the same kind"
                )
        longest = max(theirs.get("lens", [0]), default=0)
        if isinstance(layer, HFLayer) and longest > layer.template.max_seq_len:
            raise ValueError(
                f"it has {longest} tokens, but this cache holds {layer.template.max_seq_len}: make "
                "it longer"
            )
    return layers


def _fill(
    layer: HFLayer, about: Mapping[str, Any], own: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    lens = about["lens"]
    dtype = getattr(torch, about["dtype"].removeprefix("torch."))
    like = [
        torch.empty((len(lens), about["heads"], 0, dim), dtype=dtype, device=device)
        for dim in about["dims"]
    ]
    layer.lazy_initialization(*like)
    assert layer.store is not None
    layer.store.make_room(max(lens, default=0))
    for name in layer.store.tensors:
        layer.store.set_rows(name, lens, own[name])
    layer.set_rows(lens, about["pads"], about["written"])


def _set_states(
    layer: Any, about: Mapping[str, Any], own: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    for number, (kernel, came) in enumerate(zip(about["kernels"], about["came"], strict=True)):
        for name in _STATES:
            state = own.get(f"{name}.{number}")
            if state is not None:
                state = state.to(device)
                layer.device, layer.dtype = device, state.dtype
            getattr(layer, name)[number] = state
            getattr(layer, f"is_{name}_initialized")[number] = state is not None
        layer.conv_kernel_size[number], layer.has_previous_state[number] = kernel, came
