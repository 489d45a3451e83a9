"""A model over the devices, one text, and how fast it came."""

import argparse

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer, Timer
from exllamav2.generator import ExLlamaV2BaseGenerator, ExLlamaV2Sampler

flags = argparse.ArgumentParser()
flags.add_argument("-m", "--model", required=True)
config = ExLlamaV2Config()
config.model_dir = flags.parse_args().model
config.prepare()

model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, max_seq_len=512, lazy=True)
model.load_autosplit(cache, reserve_vram=64 * 1024)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2BaseGenerator(model, cache, tokenizer)

settings = ExLlamaV2Sampler.Settings()
settings.temperature = 0.85
settings.top_k = 50
settings.top_p = 0.8
settings.token_repetition_penalty = 1.01
settings.disallow_tokens(tokenizer, [tokenizer.eos_token_id])

generator.warmup()
with Timer() as timer:
    text = generator.generate_simple("Anna put the key in the", settings, 30, seed=1234)
print(text)
print(f"{30 / timer.interval:.1f} tokens a second")
