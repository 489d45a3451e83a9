"""Many prompts as jobs, more than run at once."""

import argparse

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob

flags = argparse.ArgumentParser()
flags.add_argument("-m", "--model", required=True)
config = ExLlamaV2Config(flags.parse_args().model)
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, max_seq_len=4096, lazy=True)
model.load_autosplit(cache)
tokenizer = ExLlamaV2Tokenizer(config)
prompts = [f"Anna put {count} keys in the" for count in range(2, 22)]
jobs = [
    ExLlamaV2DynamicJob(input_ids=tokenizer.encode(text), max_new_tokens=8, identifier=number)
    for number, text in enumerate(prompts)
]
generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)
generator.enqueue(jobs)
texts = dict.fromkeys(range(len(prompts)), "")
while generator.num_remaining_jobs():
    for result in generator.iterate():
        texts[result["identifier"]] += result.get("text", "")
print(texts)
