"""Jobs whose prompts begin alike, and share the pages of that beginning."""

import argparse

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob

flags = argparse.ArgumentParser()
flags.add_argument("-m", "--model", required=True)
config = ExLlamaV2Config(flags.parse_args().model)
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, max_seq_len=2048, lazy=True)
model.load_autosplit(cache)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)
begins = "Anna put the key in the kitchen. " * 60
for who in ("Anna", "Ben", "Cara"):
    ids = tokenizer.encode(f"{begins}{who} put the ball")
    generator.enqueue(ExLlamaV2DynamicJob(input_ids=ids, max_new_tokens=10))
cached = 0
while generator.num_remaining_jobs():
    cached += sum(result.get("cached_pages", 0) for result in generator.iterate())
print(f"{cached} pages were there already")
