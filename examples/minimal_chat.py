"""A minimal chat: load over all devices, take turns, stream.

``python examples/minimal_chat.py DIR``; ``chat.py`` adds flags, commands, Ctrl-C and statistics.
"""

import sys

from exkv import Cache, Generator, Model, SamplingParams, Tokenizer
from exkv.text import Conversation


def main(folder: str) -> None:
    model = Model(folder)
    cache = Cache(model, lazy=True)
    model.load_autosplit(cache, last_id_only=True)  # cache and model, layer by layer
    print(model.report, file=sys.stderr)

    tokenizer = Tokenizer(folder)
    generator = Generator(model, cache, tokenizer)
    conversation = Conversation(tokenizer, cache.max_seq_len)
    room = cache.max_seq_len // 4  # tokens for each answer
    while True:
        print("> ", end="", flush=True, file=sys.stderr)
        message = sys.stdin.readline().strip()
        if not message:
            return
        conversation.add("user", message)
        prompt, _ = conversation.prompt(room)  # all turns, or the newest that fit
        answer = ""
        for piece in generator.stream(prompt, SamplingParams.greedy(), num_tokens=room):
            print(piece, end="", flush=True)
            answer += piece
        print()
        conversation.add("assistant", answer)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: minimal_chat.py DIR")
    main(sys.argv[1])
