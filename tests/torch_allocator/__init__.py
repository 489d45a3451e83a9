"""What torch's own caching allocator reserves, recorded without a GPU.

``build.sh`` puts ``libc10_cuda.so`` of a wheel of torch for CUDA on a runtime that only counts
(``fake_cudart.cpp``), ``python -m tests.torch_allocator`` records its answers to seeded requests
in ``traces.json`` (torch 2.13.0), and tests hold exkv's model and its simulated devices against
them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

MEBI = 1 << 20
TRACES = Path(__file__).with_name("traces.json")
#: Name -> PYTORCH_CUDA_ALLOC_CONF, bytes of the device, seed.
CASES = {
    "default": ("", 80 << 30, 1),
    "a card that is full": ("", 200 * MEBI, 2),
    "expandable": ("expandable_segments:True", 80 << 30, 3),
    "expandable, full": ("expandable_segments:True", 200 * MEBI, 4),
    "no large splits": ("max_split_size_mb:32", 80 << 30, 5),
    "no large splits, full": ("max_split_size_mb:32", 200 * MEBI, 6),
    "divisions": ("roundup_power2_divisions:4", 80 << 30, 7),
    "larger segments": ("large_segment_size_mb:40", 80 << 30, 8),
}
#: Bytes of a request are below one of these.
_BOUNDS = (2048, MEBI, 2 * MEBI, 11 * MEBI, 30 * MEBI, 90 * MEBI)


def requests(seed: int, count: int = 250) -> Iterator[tuple[str | int, ...]]:
    """Requests ("a", id, bytes), ("f", id) and ("e",); one that finds no memory is freed all the
    same, which does nothing."""
    rng = random.Random(seed)
    held: list[int] = []
    for number in range(count):
        draw = rng.random()
        if held and (draw < 0.42 or len(held) > 40):
            yield "f", held.pop(rng.randrange(len(held)))
        elif draw < 0.46:
            yield ("e",)
        else:
            held.append(number)
            nbytes = rng.randrange(1, rng.choice(_BOUNDS))
            if rng.random() < 0.3:
                nbytes = rng.choice([512, MEBI, 4 * MEBI, 10 * MEBI, 20 * MEBI])
            yield "a", number, nbytes
