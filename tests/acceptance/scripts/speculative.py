"""A stream for which a small model drafts tokens."""

import argparse

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2Sampler, ExLlamaV2StreamingGenerator

flags = argparse.ArgumentParser()
flags.add_argument("-m", "--model", required=True)
folder = flags.parse_args().model


def load(path: str) -> tuple[ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config]:
    config = ExLlamaV2Config(path)
    model = ExLlamaV2(config)
    cache = ExLlamaV2Cache(model, max_seq_len=256, lazy=True)
    model.load_autosplit(cache)
    return model, cache, config


model, cache, config = load(folder)
draft_model, draft_cache, _ = load(folder)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2StreamingGenerator(
    model, cache, tokenizer, draft_model, draft_cache, num_speculative_tokens=5
)
generator.begin_stream_ex(tokenizer.encode("Anna put"), ExLlamaV2Sampler.Settings.greedy())
for _ in range(20):
    print(generator.stream_ex()["chunk"], end="")
print(generator.get_sd_stats())
