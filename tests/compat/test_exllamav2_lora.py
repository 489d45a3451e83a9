"""ExLlamaV2's adapters: ``loras=`` gives the merged model's logits and tokens."""

from __future__ import annotations

import pytest
import torch
from adapters import linears_of, merged, write_adapter
from tiny import llama, reference, save, save_tokenizer

from exkv.compat.exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Config,
    ExLlamaV2Lora,
    ExLlamaV2Tokenizer,
)
from exkv.compat.exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)

IDS = torch.arange(20, 50)[None]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    theirs = reference(llama(num_hidden_layers=2, eos_token_id=None))
    folder = save_tokenizer(save(theirs, tmp_path_factory.mktemp("model")))
    layers = linears_of(theirs, ("q_proj", "down_proj"))
    adapter = write_adapter(tmp_path_factory.mktemp("adapter"), layers)
    config = ExLlamaV2Config(folder)
    model = ExLlamaV2(config)
    model.load()
    return theirs, model, ExLlamaV2Tokenizer(config), adapter


def test_adapter_matches_the_merged_model(made, tmp_path):
    theirs, model, _, adapter = made
    cache = ExLlamaV2Cache(model, max_seq_len=64)
    loras = [ExLlamaV2Lora.from_directory(model, adapter, strength) for strength in (1.0, 0.5)]
    assert [lora.lora_scaling for lora in loras] == [1.5, 0.75]
    assert len({lora.name for lora in loras}) == 2 and loras[0].lora_r == 4
    half = write_adapter(tmp_path, linears_of(theirs, ("q_proj", "down_proj")), lora_alpha=3)
    for lora, folder in zip(loras, (adapter, half), strict=True):
        cache.reset()
        found = model.forward(IDS, cache, loras=[lora])
        expected = merged(theirs, folder)(IDS).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="loras has 2 adapters, but exkv runs a row through one"):
        model.forward(IDS, cache, loras=loras)
    with pytest.raises(TypeError, match="loras has a str"):
        model.forward(IDS, cache, loras="adapter")
    for lora in loras:
        lora.unload()
        lora.unload()
    assert not model.exkv.adapters


def test_jobs_take_adapters(made):
    _, model, tokenizer, adapter = made
    cache = ExLlamaV2Cache(model, max_seq_len=256)
    dynamic = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    base = ExLlamaV2BaseGenerator(model, ExLlamaV2Cache(model, max_seq_len=64), tokenizer)
    lora, greedy = (
        ExLlamaV2Lora.from_directory(model, str(adapter)),
        ExLlamaV2Sampler.Settings.greedy(),
    )
    call = {"gen_settings": greedy, "completion_only": True}
    for loras in (lora, None):
        dynamic.set_loras(loras)
        found = dynamic.generate("where is", max_new_tokens=8, **call)
        expected = base.generate_simple("where is", num_tokens=8, loras=loras, **call)
        assert found == expected
    lora.unload()


def test_generators_take_adapters(made):
    theirs, model, tokenizer, adapter = made
    cache = ExLlamaV2Cache(model, max_seq_len=64)
    lora = ExLlamaV2Lora.from_directory(model, adapter)
    generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    greedy = ExLlamaV2Sampler.Settings.greedy()
    for loras, whole in ((None, theirs), (lora, merged(theirs, adapter))):
        expected = whole.generate(IDS, max_new_tokens=6, do_sample=False)
        generator.begin_stream_ex(IDS, greedy, loras=loras)
        generator.set_stop_conditions([])
        while generator.sequence_ids.shape[1] < expected.shape[1]:
            generator.stream_ex()
        assert torch.equal(generator.sequence_ids, expected)
    texts = [
        generator.generate_simple("anna put", greedy, 8, loras=each) for each in (None, [lora])
    ]
    assert texts[0] != texts[1]
    lora.unload()
    with pytest.raises(ValueError, match="there is no adapter"):
        generator.generate_simple("anna put", greedy, 8, loras=lora)
