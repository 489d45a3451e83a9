"""Stream several answers concurrently in one event loop, as a server does.

``python examples/async_engine.py DIR QUESTION [QUESTION ...]``
"""

import asyncio
import sys

from exkv import Engine, Job, Model, PagedCache, SamplingParams, Tokenizer


async def answer(engine: Engine, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    job = Job(prompt=messages, settings=SamplingParams.greedy(), max_new_tokens=32)
    return "".join([event.text async for event in engine.stream(job)]).strip()


async def answers(engine: Engine, questions: list[str]) -> list[str]:
    return await asyncio.gather(*(answer(engine, question) for question in questions))


def main(folder: str, questions: list[str]) -> None:
    model, tokenizer = Model(folder), Tokenizer(folder)
    longest = min(model.config.max_position_embeddings, 4096)
    cache = PagedCache(model, max_seq_len=longest)
    model.load_autosplit(cache)
    with Engine(model, cache, tokenizer) as engine:
        for question, text in zip(questions, asyncio.run(answers(engine, questions)), strict=True):
            print(question, text)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: async_engine.py DIR QUESTION [QUESTION ...]")
    main(sys.argv[1], sys.argv[2:])
