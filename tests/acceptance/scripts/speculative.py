"""A text for which a small model drafts tokens."""

import argparse

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler

flags = argparse.ArgumentParser()
flags.add_argument("-m", "--model", required=True)
folder = flags.parse_args().model


def load(path: str) -> tuple[ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config]:
    config = ExLlamaV2Config(path)
    model = ExLlamaV2(config)
    cache = ExLlamaV2Cache(model, max_seq_len=256, lazy=True)
    model.load_autosplit(cache)
    return model, cache, config


model, cache, config = load(folder)
draft_model, draft_cache, _ = load(folder)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(
    model=model,
    cache=cache,
    draft_model=draft_model,
    draft_cache=draft_cache,
    num_draft_tokens=4,
    tokenizer=tokenizer,
)
text = generator.generate(
    prompt="<|user|> Anna put the key in the kitchen. Where is the key?<|end|><|assistant|>",
    max_new_tokens=40,
    gen_settings=ExLlamaV2Sampler.Settings.greedy(),
    stop_conditions=[tokenizer.eos_token_id],
    encode_special_tokens=True,
    add_bos=True,
    completion_only=True,
)
print(text.strip())
