"""One question answered without and with each of several adapters, in one engine.

``python examples/adapters.py DIR ADAPTER [ADAPTER ...] QUESTION``. With the demo model,
``examples/demo-adapter`` answers as briefly as possible.
"""

import sys
from pathlib import Path

from exkv import Engine, Job, Model, PagedCache, SamplingParams, Tokenizer


def main(folder: str, adapters: list[str], question: str) -> None:
    model, tokenizer = Model(folder), Tokenizer(folder)
    names = [model.load_adapter(adapter).name for adapter in adapters]
    cache = PagedCache(model, max_seq_len=min(model.config.max_position_embeddings, 4096))
    model.load_autosplit(cache)  # weights, adapters and cache are planned together
    messages = [{"role": "user", "content": question}]
    with Engine(model, cache, tokenizer) as engine:
        handles = [
            engine.submit(
                Job(
                    prompt=messages,
                    settings=SamplingParams.greedy(),
                    max_new_tokens=64,
                    adapter=name,
                )
            )
            for name in (None, *names)
        ]
        for handle in handles:  # rows of one call, each through its own adapter
            print(f"{handle.job.adapter or Path(folder).name}: {handle.result().strip()}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: adapters.py DIR ADAPTER [ADAPTER ...] QUESTION")
    main(sys.argv[1], sys.argv[2:-1], sys.argv[-1])
