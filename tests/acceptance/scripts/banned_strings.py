"""A stream in which some texts may not appear."""

import argparse

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2Sampler, ExLlamaV2StreamingGenerator

flags = argparse.ArgumentParser()
flags.add_argument("-m", "--model", required=True)
config = ExLlamaV2Config(flags.parse_args().model)
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, lazy=True)
model.load_autosplit(cache)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
generator.set_stop_conditions([tokenizer.eos_token_id])

prompt = "<|user|> Anna put the key in the kitchen. Where is the key?<|end|><|assistant|>"
ids = tokenizer.encode(prompt, add_bos=True, encode_special_tokens=True)
for banned in ([], ["In The Kitchen"]):
    generator.begin_stream_ex(ids, ExLlamaV2Sampler.Settings.greedy(), banned_strings=banned)
    text, suppressed = "", []
    for _ in range(40):
        result = generator.stream_ex()
        text += result["chunk"]
        if "suppressed" in result:
            suppressed.append(result["suppressed"])
        if result["eos"]:
            break
    print(f"{text} (taken back: {suppressed})")
