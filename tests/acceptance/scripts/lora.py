"""A text with an adapter, and without."""

import argparse

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Lora, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2BaseGenerator, ExLlamaV2Sampler

flags = argparse.ArgumentParser()
flags.add_argument("-m", "--model", required=True)
flags.add_argument("-l", "--lora", default="adapter")
args = flags.parse_args()
config = ExLlamaV2Config(args.model)
model = ExLlamaV2(config)
model.load()
cache = ExLlamaV2Cache(model, max_seq_len=256)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2BaseGenerator(model, cache, tokenizer)
settings = ExLlamaV2Sampler.Settings.greedy()
lora = ExLlamaV2Lora.from_directory(model, args.lora)
for loras in (None, lora):
    print(generator.generate_simple("Anna put the key in the", settings, 20, loras=loras))
