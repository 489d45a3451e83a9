"""Calls up to a cache's last token, in which a plan's promise is tightest."""

from __future__ import annotations

import torch

from exkv import Cache, Model

IDS = torch.randint(3, 320, (4, 300), generator=torch.Generator().manual_seed(3))


def work_at_the_edge(model: Model, cache: Cache, last_id_only: bool = False) -> None:
    """Calls at full batch and length, while the last call's logits are kept: rows of unlike
    length first, then all full, then token by token to the last."""
    rows, length = cache.batch_size, cache.max_seq_len
    ids = IDS[:rows].repeat(1, 1 + length // IDS.shape[1])[:, :length] % model.config.vocab_size
    kept = None
    for tail in (1, 2):
        cache.reset()
        new = [max(length - tail - row, 1) for row in range(rows)] if tail > 1 else None
        width = length - tail if new is None else max(new)
        if width > 0:
            kept = model.forward(ids[:, :width], cache, new_lens=new, last_id_only=last_id_only)
        while max(cache.seq_lens) < length:
            kept = model.forward(ids[:, :1], cache, last_id_only=last_id_only)
    del kept
