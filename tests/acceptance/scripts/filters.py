"""An answer that must be one of a few texts."""

import argparse

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2BaseGenerator, ExLlamaV2Sampler
from exllamav2.generator.filters import ExLlamaV2PrefixFilter, ExLlamaV2SelectFilter

flags = argparse.ArgumentParser()
flags.add_argument("-m", "--model", required=True)
config = ExLlamaV2Config(flags.parse_args().model)
model = ExLlamaV2(config)
model.load()
cache = ExLlamaV2Cache(model, max_seq_len=256)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2BaseGenerator(model, cache, tokenizer)
settings = ExLlamaV2Sampler.Settings()
for chosen in (
    ExLlamaV2SelectFilter(model, tokenizer, ["hall", "garden"]),
    ExLlamaV2PrefixFilter(model, tokenizer, ["In the"]),
):
    print(generator.generate_simple("Where is the key?", settings, 10, filters=[chosen]))
