"""Prompts of unlike lengths, a cache for each, and one call a token for all of them."""

import argparse
import random

import torch
from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2Sampler

flags = argparse.ArgumentParser()
flags.add_argument("-m", "--model", required=True)
config = ExLlamaV2Config(flags.parse_args().model)
model = ExLlamaV2(config)
model.load()
tokenizer = ExLlamaV2Tokenizer(config)

settings = ExLlamaV2Sampler.Settings.greedy()
places = ["kitchen", "garden, under the old tree", "hall"]
prompts = [
    f"<|user|> Anna put the key in the {place}. Where is the key?<|end|><|assistant|>"
    for place in places
]
sequences, caches = [], []
for prompt in prompts:
    ids = tokenizer.encode(prompt, add_bos=True, encode_special_tokens=True)
    cache = ExLlamaV2Cache(model, max_seq_len=128)
    model.forward(ids[:, :-1], cache, preprocess_only=True)
    sequences.append(ids)
    caches.append(cache)

for _ in range(8):
    newest = torch.cat([ids[:, -1:] for ids in sequences])
    logits = model.forward(newest, caches, input_mask=None).float().cpu()
    for row, ids in enumerate(sequences):
        token, *_ = ExLlamaV2Sampler.sample(
            logits[row : row + 1], settings, ids, random.random(), tokenizer
        )
        sequences[row] = torch.cat((ids, token), dim=1)

for prompt, ids in zip(prompts, sequences, strict=True):
    start = tokenizer.encode(prompt, add_bos=True, encode_special_tokens=True).shape[1]
    print(tokenizer.decode(ids[:, start:])[0].strip())
