"""Run many prompts at once in one pool of pages, and print each answer when it is complete.

``python examples/bulk.py DIR QUESTION [QUESTION ...]``
"""

import sys

from exkv import Engine, Job, Model, PagedCache, SamplingParams, Tokenizer


def main(folder: str, questions: list[str], max_new_tokens: int = 32) -> None:
    model, tokenizer = Model(folder), Tokenizer(folder)
    longest = min(model.config.max_position_embeddings, 4096)
    cache = PagedCache(model, max_seq_len=longest)  # tokens of all jobs together
    model.load_autosplit(cache)
    with Engine(model, cache, tokenizer) as engine:
        for question in questions:
            messages = [{"role": "user", "content": question}]
            engine.submit(
                Job(
                    prompt=messages,
                    settings=SamplingParams.greedy(),
                    max_new_tokens=max_new_tokens,
                )
            )
        while engine.busy:
            for event in engine.iterate():
                if event.reason:
                    asked = questions[event.handle.number - 1]
                    print(f"{asked} {event.handle.text.strip()}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: bulk.py DIR QUESTION [QUESTION ...]")
    main(sys.argv[1], sys.argv[2:])
