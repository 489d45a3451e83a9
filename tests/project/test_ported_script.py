"""A script as ExLlamaV2's users write it, with the names changed and nothing else."""

from __future__ import annotations

from pathlib import Path

from simproc import run_sim

from exkv import CACHES

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo-model"


def ported(model_dir):
    from exkv import Cache, Generator, Model, ModelConfig, SamplingParams, Tokenizer

    config = ModelConfig.from_pretrained(model_dir)
    model = Model(config)
    cache = Cache(model, max_seq_len=512, lazy=True)
    model.load_autosplit(cache, progress=True)
    tokenizer = Tokenizer(config)
    generator = Generator(model, cache, tokenizer)
    generator.warmup()
    settings = SamplingParams(
        temperature=0.85, top_k=50, top_p=0.8, token_repetition_penalty=1.01
    ).disallow_tokens(tokenizer.eos_ids)
    prompt = "<|user|> Anna put the key in the kitchen. Where is the key?<|end|><|assistant|>"
    first = generator.generate_simple(prompt, settings, 12, seed=1234)
    again = generator.generate_simple(prompt, settings, 12, seed=1234)
    return first, again, prompt, generator.stats.new_tokens, len(set(model.cache_map.values()))


def test_a_ported_script_runs_over_two_devices_and_repeats_itself():
    first, again, prompt, tokens, devices = run_sim(ported, "3M,64M", args=[str(DEMO)])
    assert first == again
    assert first.startswith(prompt)
    assert "The key is in the kitchen." in first
    assert tokens == 12  # the end-of-sequence tokens are disallowed
    assert devices == 2


def answers(model_dir):
    import exkv_ext
    from exkv import CACHES, Generator, Model, SamplingParams, Tokenizer

    model = Model(model_dir)
    model.load(devices=["cpu"])
    tokenizer = Tokenizer(model_dir)
    prompt = "<|user|> Anna put the key in the kitchen. Where is the key?<|end|><|assistant|>"
    texts = [
        Generator(model, kind(model, 128), tokenizer).generate_simple(
            prompt, SamplingParams.greedy(), 12, completion_only=True
        )
        for kind in CACHES.values()
    ]
    return texts, exkv_ext.loaded()


def test_without_a_compiled_byte_it_says_the_same():
    texts, loaded = run_sim(
        answers, "", args=[str(DEMO)], env={"EXKV_DISABLE_EXT": "1"}, fresh=True
    )
    assert not any(loaded.values())
    assert texts == ["The key is in the kitchen."] * len(CACHES)
