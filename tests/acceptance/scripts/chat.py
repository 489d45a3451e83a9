"""Turns read from the input, with the flags that ExLlamaV2's programs share."""

import argparse
import sys

from exllamav2 import ExLlamaV2Cache, ExLlamaV2Cache_8bit, model_init
from exllamav2.generator import ExLlamaV2Sampler, ExLlamaV2StreamingGenerator

flags = argparse.ArgumentParser()
flags.add_argument("-c8", "--cache_8bit", action="store_true")
flags.add_argument("-maxr", "--max_response_tokens", type=int, default=60)
model_init.add_args(flags)
args = flags.parse_args()
model_init.check_args(args)
model_init.print_options(args)
model, tokenizer = model_init.init(args, allow_auto_split=True)
cache_class = ExLlamaV2Cache_8bit if args.cache_8bit else ExLlamaV2Cache
cache = cache_class(model, lazy=not model.loaded)
if not model.loaded:
    model.load_autosplit(cache)

generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
generator.set_stop_conditions([tokenizer.eos_token_id])
settings = ExLlamaV2Sampler.Settings(temperature=0.0, token_repetition_penalty=1.0)
context = ""
for line in sys.stdin:
    context += f"<|user|> {line.strip()}<|end|><|assistant|>"
    ids = tokenizer.encode(context, add_bos=True, encode_special_tokens=True)
    generator.begin_stream_ex(ids[:, -(model.config.max_seq_len - 100) :], settings)
    answer = ""
    for _ in range(args.max_response_tokens):
        result = generator.stream_ex()
        answer += result["chunk"]
        print(result["chunk"], end="", flush=True)
        if result["eos"]:
            break
    print()
    context += f"{answer}<|end|>"
