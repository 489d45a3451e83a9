"""Two prompts, of which the stream goes towards one and away from the other."""

import argparse

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2Sampler, ExLlamaV2StreamingGenerator

flags = argparse.ArgumentParser()
flags.add_argument("-m", "--model", required=True)
config = ExLlamaV2Config(flags.parse_args().model)
config.max_batch_size = 2
model = ExLlamaV2(config)
model.load()
cache = ExLlamaV2Cache(model, batch_size=2, max_seq_len=256)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
generator.set_stop_conditions([tokenizer.eos_token_id])

question = "Where is the key?<|end|><|assistant|>"
texts = [f"<|user|> Anna put the key in the {place}. {question}" for place in ("kitchen", "hall")]
ids, offsets = tokenizer.encode(
    texts, add_bos=True, encode_special_tokens=True, return_offsets=True
)
mask = tokenizer.padding_mask(ids)
settings = ExLlamaV2Sampler.Settings.greedy()
for scale in (1.0, 0.5, 0.0):
    settings.cfg_scale = scale
    generator.begin_stream_ex(ids, settings, input_mask=mask, position_offsets=offsets)
    text = ""
    for _ in range(20):
        result = generator.stream_ex()
        text += result["chunk"]
        if result["eos"]:
            break
    print(f"{scale}: {text}")
