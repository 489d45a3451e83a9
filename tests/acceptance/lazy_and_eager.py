"""Does a lazy cache come to the same as an eager one? In ExLlamaV2's names, over all devices.

``python -m exkv.compat.exllamav2 tests/acceptance/lazy_and_eager.py MODELS --split 0.01,1`` loads
every model of a folder with each cache, lazy and not, at each length, by the split and by itself;
generates, and frees it all. Each pair of rows must have the same text and the same places, and each
row must leave the memory of every device as it was. Ends with status 1 where one doesn't.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
)
from exllamav2.generator import ExLlamaV2BaseGenerator, ExLlamaV2Sampler

PROMPT = "Anna put the key in the kitchen."
TOKENS = 150
LENGTHS = (1024, 2048, 4096, 8192)


def run(folder: Path, cache_class: type, length: int, lazy: bool, split: list[float] | None) -> Any:
    """One row: the text, and where layers and cache were."""
    config = ExLlamaV2Config()
    config.model_dir = str(folder)
    config.low_mem = True
    config.prepare()
    model = ExLlamaV2(config)
    if split is None:
        cache = cache_class(model, max_seq_len=length, lazy=lazy)
        model.load_autosplit(cache)
    else:
        model.load(split)
        cache = cache_class(model, max_seq_len=length, lazy=lazy)
        if lazy:
            cache.update_cache_tensors()
    tokenizer = ExLlamaV2Tokenizer(config)
    generator = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    cache.current_seq_len = 0
    generator.warmup()
    settings = ExLlamaV2Sampler.Settings()
    settings.temperature = 0.85
    settings.top_k = 50
    settings.top_p = 0.8
    settings.token_repetition_penalty = 1.15
    settings.disallow_tokens(tokenizer, [tokenizer.eos_token_id])
    text = generator.generate_simple(PROMPT, settings, TOKENS, seed=1234)
    made = generator.sequence_ids.shape[1] - tokenizer.num_tokens(PROMPT)
    found = text, made, model.cache_map, cache.footprint()
    model.unload()
    return found


def in_use() -> list[int]:
    """Bytes in use on each device."""
    gc.collect()
    return [torch.accelerator.memory_allocated(i) for i in range(torch.accelerator.device_count())]


def complaints(
    folders: Sequence[Path], lengths: Sequence[int], splits: Sequence[list[float] | None]
) -> Iterator[str]:
    """For each pair of rows what isn't as it should be, or ``ok: ...`` where all is."""
    texts: dict[tuple[Path, type], str] = {}
    kinds = (ExLlamaV2Cache, ExLlamaV2Cache_8bit)
    for folder, kind, length, split in itertools.product(folders, kinds, lengths, splits):
        name = f"{folder.name}, {kind.__name__} of {length}, split {split}"
        wrong, pair = [], []
        for lazy in (False, True):
            before = in_use()
            pair.append(run(folder, kind, length, lazy, split))
            if in_use() != before:
                wrong.append(f"lazy {lazy}: {before} bytes before, {in_use()} after")
            if pair[-1][1] != TOKENS:
                wrong.append(f"lazy {lazy}: {pair[-1][1]} tokens")
        if pair[0] != pair[1]:
            wrong.append(f"eager {pair[0]}, lazy {pair[1]}")
        # The same wherever layers are, and however long the cache is.
        if pair[0][0] != texts.setdefault((folder, kind), pair[0][0]):
            wrong.append(f"{pair[0][0]!r}, and before {texts[folder, kind]!r}")
        yield from (f"{name}: {each}" for each in wrong)
        if not wrong:
            yield f"ok: {name}: {sorted(set(pair[0][2].values()))}"


def main() -> int:
    flags = argparse.ArgumentParser()
    flags.add_argument("models", type=Path, help="a folder of model folders")
    flags.add_argument("--split", default="", help="GB for each device")
    flags.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    args = flags.parse_args()
    folders = sorted(file.parent for file in args.models.glob("*/config.json"))
    split = [float(size) for size in args.split.split(",") if size]
    lengths = [int(length) for length in args.lengths.split(",")]
    bad = 0
    for line in complaints(folders, lengths, [split, None]):
        print(line, flush=True)
        bad += not line.startswith("ok")
    return 1 if bad or not folders else 0


if __name__ == "__main__":
    sys.exit(main())
