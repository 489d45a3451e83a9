"""The 8-bit cache: int8 keys and values, a float16 scale for every 32 values of a head.

8.5 bits a value, and attention reads them where they lie: no full-size float copy exists at any
time. See ``exkv.ops.kv_quant`` for the format.
"""

from __future__ import annotations

import torch

from exkv.batch import Batch
from exkv.ops.attention import AttentionParams
from exkv.ops.kv_quant import num_groups

from .base import CacheLayer, KVCache


class Int8Layer(CacheLayer):
    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        scales = (*self.spec.shape[:-1], num_groups(self.spec.head_dim))
        return {
            "k": (self.spec.shape, torch.int8),
            "k_scale": (scales, torch.float16),
            "v": (self.spec.shape, torch.int8),
            "v_scale": (scales, torch.float16),
        }

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        params: AttentionParams,
    ) -> torch.Tensor:
        k_values, k_scale = torch.ops.exkv.quantize_kv(k)
        v_values, v_scale = torch.ops.exkv.quantize_kv(v)
        self.write(batch, k=k_values, k_scale=k_scale, v=v_values, v_scale=v_scale)
        return torch.ops.exkv.attention_int8(
            q,
            *(self.rows(name, batch) for name in ("k", "k_scale", "v", "v_scale")),
            batch.past_lens,
            batch.lengths.kv_len,
            params.scale,
            params.window,
            params.softcap,
        )


class Cache8bit(KVCache):
    """Keys and values in 8 bits; ``dtype`` is not used."""

    layer_type = Int8Layer
