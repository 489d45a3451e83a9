"""Ask many questions about one long prompt: it runs once, and each question continues in a fork of
its cache, which stores only the question and its answer (with pages, in the same pool).

``python examples/prompt_reuse.py DIR ["QUESTION" ...] [--cache KIND]``
"""

import argparse
import sys

import torch
from toy_world import NAMES, OBJECTS, ROOMS

from exkv import CACHES, Model, Tokenizer
from exkv.cache import KVCache, common_prefix
from exkv.sizes import human

FACTS = [(NAMES[i % 40], thing, ROOMS[i % 20]) for i, thing in enumerate(OBJECTS[:-1])]
STORY = " ".join(f"{name} put the {thing} in the {room}." for name, thing, room in FACTS)
QUESTIONS = ["Where is the cup?", "Where is the key?", "Where is the torch?"]
ROOM = 32  # tokens for each answer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="one prompt, many questions")
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("questions", metavar="QUESTION", nargs="*", default=QUESTIONS)
    parser.add_argument("--cache", choices=CACHES, default="fp16", help="the kind of cache")
    args = parser.parse_args(argv)

    model, tokenizer = Model(args.folder), Tokenizer(args.folder)
    story = [{"role": "user", "content": STORY}, {"role": "assistant", "content": "Okay."}]
    ids = tokenizer.encode_chat(story, add_generation_prompt=False)
    prompts = [
        tokenizer.encode_chat([*story, {"role": "user", "content": question}])
        for question in args.questions
    ]
    # One fork at a time, which copies the page where the story ends: hence one page more.
    longest = max(map(len, prompts)) + ROOM
    pool = {"page": 16, "pages": -(-longest // 16) + 1} if args.cache == "paged" else {}
    cache = CACHES[args.cache](model, max_seq_len=len(ids), **pool)
    model.load_autosplit(cache, last_id_only=True)
    model.forward(torch.tensor([ids]), cache, last_id_only=True)
    print(f"  (story: {len(ids)} tokens new, {size(cache)})", file=sys.stderr)
    for question, asked in zip(args.questions, prompts, strict=True):
        own = cache.fork(max_seq_len=len(asked) + ROOM)  # the story itself stays unchanged
        held = common_prefix(asked, own.sequences[0])
        out = model.generate([asked], cache=own, max_new_tokens=ROOM)[0, len(asked) :].tolist()
        print(f"> {question}\n{tokenizer.decode(out).strip()}")
        print(
            f"  (prompt: {len(asked) - held} tokens new, {held} reused; fork: {size(own)})",
            file=sys.stderr,
        )
        own.free()


def size(cache: KVCache) -> str:
    return human(sum(cache.nbytes().values()))


if __name__ == "__main__":
    main()
