"""Generate a text without some words, however they are tokenized: generation rolls back over them.

``python examples/banned_strings.py DIR PROMPT WORD [WORD ...]``
"""

import sys

from exkv import Cache, Generator, Model, SamplingParams, Tokenizer


def main(folder: str, prompt: str, words: list[str], num_tokens: int = 24) -> None:
    model, tokenizer = Model(folder), Tokenizer(folder)
    cache = Cache(model, max_seq_len=min(model.config.max_position_embeddings, 4096))
    model.load_autosplit(cache)
    generator = Generator(model, cache, tokenizer)
    for banned in ([], words):
        print(
            generator.generate_simple(
                prompt, SamplingParams.greedy(), num_tokens, banned_strings=banned
            )
        )


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: banned_strings.py DIR PROMPT WORD [WORD ...]")
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
