"""Generate the same answers in fewer calls: n-grams or a smaller model propose tokens, of which the
model verifies several at once.

``python examples/speculation.py DIR QUESTION [DRAFT_DIR]``
"""

import sys

from exkv import Cache, Draft, Generator, Model, NGrams, SamplingParams, Tokenizer


def main(folder: str, question: str, draft_folder: str | None = None) -> None:
    model, tokenizer = Model(folder), Tokenizer(folder)
    longest = min(model.config.max_position_embeddings, 1024)
    cache = Cache(model, max_seq_len=longest, snapshots=True)  # for models with recurrent states
    ways = {"without": {}, "n-grams": {"ngrams": NGrams(tokens=8)}}
    if draft_folder is None:
        model.load_autosplit(cache)
    else:
        small = Model(draft_folder)
        small_cache = Cache(small, max_seq_len=longest, snapshots=True)
        model.load_autosplit(cache, draft=small_cache)  # both in one plan
        ways["draft"] = {"draft": Draft(small, small_cache)}
    ids = tokenizer.encode_chat([{"role": "user", "content": question}])
    for name, way in ways.items():
        cache.reset()
        generator = Generator(model, cache, tokenizer, **way)
        text = generator.generate_simple(ids, SamplingParams.greedy(), 64, completion_only=True)
        stats = generator.stats
        right = f"{stats.accepted_tokens} of {stats.proposed_tokens} proposed tokens were right"
        print(f"{name}: {text.strip()} ({right})")


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 4:
        sys.exit("usage: speculation.py DIR QUESTION [DRAFT_DIR]")
    main(*sys.argv[1:])
