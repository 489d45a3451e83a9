"""Constrain several answers to a JSON schema.

``python examples/json_schema.py DIR QUESTION [QUESTION ...]``
"""

import json
import sys

from exkv import Engine, Grammar, Job, Model, PagedCache, SamplingParams, Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["kitchen", "garden", "office", "cellar"]}},
    "required": ["place"],
    "additionalProperties": False,
}


def main(folder: str, questions: list[str]) -> None:
    model, tokenizer = Model(folder), Tokenizer(folder)
    cache = PagedCache(model, max_seq_len=min(model.config.max_position_embeddings, 4096))
    model.load_autosplit(cache)
    with Engine(model, cache, tokenizer) as engine:
        handles = [
            engine.submit(
                Job(
                    prompt=[{"role": "user", "content": question}],
                    settings=SamplingParams.greedy(),
                    grammar=Grammar.json_schema(SCHEMA),
                )
            )
            for question in questions
        ]
        for question, handle in zip(questions, handles, strict=True):
            print(f"{question} {json.loads(handle.result())['place']}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: json_schema.py DIR QUESTION [QUESTION ...]")
    main(sys.argv[1], sys.argv[2:])
