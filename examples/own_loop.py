"""Your own generation loop on ``forward`` and a cache, greedy or sampled.

``python examples/own_loop.py DIR "Where is the key?" [TEMPERATURE]``
"""

import sys

import torch

from exkv import Cache, Model, Tokenizer


def main(folder: str, question: str, temperature: float = 0.0, max_new_tokens: int = 64) -> None:
    model, tokenizer = Model(folder), Tokenizer(folder)
    ids = tokenizer.encode_chat([{"role": "user", "content": question}])
    cache = Cache(model, max_seq_len=len(ids) + max_new_tokens)
    model.load_autosplit(cache, last_id_only=True)

    text = tokenizer.stream()
    new = torch.tensor([ids])  # (1, T): first the whole prompt, then one token per step
    for _ in range(max_new_tokens):
        logits = model.forward(new, cache, last_id_only=True)[0, -1].float().cpu()
        if temperature > 0:
            token = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            token = logits.argmax(-1, keepdim=True)
        if int(token) in tokenizer.eos_ids:
            break
        print(text.push(int(token)), end="", flush=True)
        new = token[None]
    print(text.flush())


def temperature(text: str) -> float:
    try:
        if 0 <= float(text) <= 100:
            return float(text)
    except ValueError:
        pass
    sys.exit(f"own_loop.py: the temperature is {text[:40]!r}; it must be a number from 0 to 100")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit('usage: own_loop.py DIR "QUESTION" [TEMPERATURE]')
    main(sys.argv[1], sys.argv[2], *map(temperature, sys.argv[3:]))
