"""The 8-bit cache: int8 keys and values, a float16 scale for every 32 values of a head.

8.5 bits a value, and attention reads them where they lie: no full-size float copy exists at any
time. See ``exkv.ops.kv_quant`` for the format.
"""

from __future__ import annotations

import torch

from exkv.ops.attention import AttentionParams
from exkv.ops.kv_quant import num_groups

from .base import CacheLayer, KVCache
from .retention import View


class Int8Layer(CacheLayer):
    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        scales = (*self.spec.shape[:-1], num_groups(self.spec.head_dim))
        return {
            "k": (self.spec.shape, torch.int8),
            "k_scale": (scales, torch.float16),
            "v": (self.spec.shape, torch.int8),
            "v_scale": (scales, torch.float16),
        }

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        k_values, k_scale = torch.ops.exkv.quantize_kv(k)
        v_values, v_scale = torch.ops.exkv.quantize_kv(v)
        return {"k": k_values, "k_scale": k_scale, "v": v_values, "v_scale": v_scale}

    def read(self, q: torch.Tensor, view: View, params: AttentionParams) -> torch.Tensor:
        return torch.ops.exkv.attention_int8(
            q,
            *(view.stored[name] for name in ("k", "k_scale", "v", "v_scale")),
            view.past_lens,
            view.kv_len,
            params.scale,
            view.window,
            params.softcap,
        )


class Cache8bit(KVCache):
    """Keys and values in 8 bits; ``dtype`` is not used."""

    layer_type = Int8Layer
