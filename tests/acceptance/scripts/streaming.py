"""A text as it comes, until the model ends it."""

import argparse

from exllamav2 import ExLlamaV2, ExLlamaV2Cache_Q8, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2Sampler, ExLlamaV2StreamingGenerator

flags = argparse.ArgumentParser()
flags.add_argument("-m", "--model", required=True)
config = ExLlamaV2Config(flags.parse_args().model)
model = ExLlamaV2(config)
model.load()
cache = ExLlamaV2Cache_Q8(model, max_seq_len=512)
tokenizer = ExLlamaV2Tokenizer(config)

generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
generator.set_stop_conditions([tokenizer.eos_token_id, "\n\n"])
prompt = "<|user|> Anna put the key in the kitchen. Where is the key?<|end|><|assistant|>"
ids = tokenizer.encode(prompt, add_bos=True, encode_special_tokens=True)
generator.begin_stream_ex(ids, ExLlamaV2Sampler.Settings.greedy(), return_probabilities=True)

tokens, least = 0, 1.0
while tokens < 60:
    result = generator.stream_ex()
    print(result["chunk"], end="", flush=True)
    tokens += result["chunk_token_ids"].shape[-1]
    least = min([least, *result["probs"].flatten().tolist()])
    if result["eos"]:
        break
print(f"\n{tokens} tokens, none chosen with less than {least:.2f}")
