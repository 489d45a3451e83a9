"""The plain cache: keys and values as floats, all of them kept, allocated whole."""

from __future__ import annotations

import torch

from exkv.ops.attention import AttentionParams

from .base import CacheLayer, KVCache, LayerSpec
from .retention import View

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class FloatLayer(CacheLayer):
    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (self.spec.shape, self.spec.dtype) for name in ("k", "v")}

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"k": k.to(self.spec.dtype), "v": v.to(self.spec.dtype)}

    def read(self, q: torch.Tensor, view: View, params: AttentionParams) -> torch.Tensor:
        out = torch.ops.exkv.attention(
            q.to(self.spec.dtype),
            view.stored["k"],
            view.stored["v"],
            view.past_lens,
            view.kv_len,
            view.ragged,
            params.scale,
            view.window,
            params.softcap,
        )
        return out.to(q.dtype)


class Cache(KVCache):
    """Full-precision keys and values; ``dtype`` float32, float16 or bfloat16."""

    layer_type = FloatLayer

    @classmethod
    def make_layer(cls, spec: LayerSpec) -> CacheLayer:
        if spec.dtype not in _DTYPES:
            names = ", ".join(map(str, _DTYPES))
            raise ValueError(f"Cache stores {names}, not {spec.dtype}")
        return super().make_layer(spec)
