"""Hold a conversation on one cache with ``model.generate``: each turn runs only tokens that the
cache doesn't hold yet.

``python examples/iterative_chat.py DIR ["MESSAGE" ...] [--cache KIND]``
"""

import argparse
import sys

from exkv import CACHES, Model, Tokenizer
from exkv.cache import common_prefix
from exkv.text import Conversation

MESSAGES = [
    "Anna put the red key in the kitchen. Where is the key?",
    "Tom went to the garden. Where is Tom?",
    "Tom has the lamp. Who has the lamp?",
    "What colour is the key?",
]
ROOM = 32  # tokens for each answer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="a conversation on one cache")
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("messages", metavar="MESSAGE", nargs="*", default=MESSAGES)
    parser.add_argument("--cache", choices=CACHES, default="fp16", help="the kind of cache")
    args = parser.parse_args(argv)

    model, tokenizer = Model(args.folder), Tokenizer(args.folder)
    cache = CACHES[args.cache](model)
    model.load_autosplit(cache, last_id_only=True)
    conversation = Conversation(tokenizer, cache.max_seq_len)
    for message in args.messages:
        conversation.add("user", message)
        ids, _ = conversation.prompt(ROOM)  # all turns so far, or the newest that fit
        held = common_prefix(ids, cache.sequences[0])
        out = model.generate([ids], cache=cache, max_new_tokens=ROOM)
        answer = tokenizer.decode(out[0, len(ids) :].tolist()).strip()
        conversation.add("assistant", answer)
        print(f"> {message}\n{answer}")
        print(f"  (prompt: {len(ids) - held} tokens new, {held} reused)", file=sys.stderr)


if __name__ == "__main__":
    main()
