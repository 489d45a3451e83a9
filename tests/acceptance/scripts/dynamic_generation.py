"""A text from the dynamic generator."""

import argparse

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator

flags = argparse.ArgumentParser()
flags.add_argument("-m", "--model", required=True)
config = ExLlamaV2Config(flags.parse_args().model)
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, max_seq_len=2048, lazy=True)
model.load_autosplit(cache)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)
print(generator.generate(prompt="Anna put the key in the", max_new_tokens=20, add_bos=True))
