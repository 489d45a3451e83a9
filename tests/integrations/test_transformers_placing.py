"""Device maps for stock models, carried out by transformers and accelerate on simulated devices."""

from __future__ import annotations

import pytest
import torch
from accelerate import dispatch_model, infer_auto_device_map
from simproc import run_sim
from tiny import llama, reference, save
from transformers import AutoModelForCausalLM, BartConfig, GPT2Config, MistralConfig

from exkv.errors import PlacementError
from exkv.integrations.transformers import HFCache, plan_device_map, resilient_generate

CONFIG = llama(max_position_embeddings=1024, eos_token_id=None)
LENGTH, ROWS, KIND = 1024, 2, "8bit"
#: Room for weights, a cache and a prompt's workspace; auto fills the first with weights alone.
SIZES = "16M,15M"
CALL = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


def prompt():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 300, (ROWS, LENGTH - 16), generator=generator)


def generated_here():
    model = reference(CONFIG)
    model.set_attn_implementation("exkv")
    cache = HFCache(CONFIG, KIND, max_seq_len=LENGTH)
    return model.generate(prompt(), **CALL, past_key_values=cache)[:, -16:].tolist()


def generated_there(folder):
    """Placed by the plan, and with the peaks measured beside what the devices have."""
    where = plan_device_map(CONFIG, max_seq_len=LENGTH, batch_size=ROWS, cache=KIND)
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map=where, attn_implementation="exkv", dtype=torch.float32
    )
    cache = HFCache(CONFIG, KIND, max_seq_len=LENGTH)
    found = model.generate(prompt().to("sim:0"), **CALL, past_key_values=cache)
    return found[:, -16:].tolist(), sorted(set(where.values()))


def generated_by_auto(folder):
    """Placed by accelerate with the same sizes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sizes, blocks = {0: 16 << 20, 1: 15 << 20}, ["LlamaDecoderLayer"]
    where = infer_auto_device_map(model, max_memory=sizes, no_split_module_classes=blocks)
    where = {name: f"sim:{index}" for name, index in where.items()}
    model = dispatch_model(model, where, force_hooks=True)
    try:
        model.generate(prompt().to("sim:0"), **CALL)
    except torch.OutOfMemoryError:
        return "out of memory"
    return "generated"


def offloaded_in_time(folder):
    """A dynamic cache that outgrows a device: the same model with less and less room."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="exkv", dtype=torch.float32
    ).to("sim:0")
    taken = []
    ids = prompt()[:1, :600].to("sim:0")
    call = {**CALL, "num_beams": 4, "max_new_tokens": 8}
    found = resilient_generate(model, ids, **call, on_fallback=taken.append, on_oom=["offload"])
    return found[:, -8:].tolist(), [step.step for step in taken]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save(reference(CONFIG), tmp_path_factory.mktemp("llama")))


def test_a_planned_map_generates_at_full_length_where_auto_overflows(folder):
    tokens, devices = run_sim(generated_there, SIZES, args=[folder])
    assert tokens == generated_here()
    assert devices == ["sim:0", "sim:1"]
    assert run_sim(generated_by_auto, SIZES, args=[folder]) == "out of memory"


def test_a_cache_that_fills_the_device_is_offloaded_and_generation_goes_on(folder):
    tokens, steps = run_sim(offloaded_in_time, "20500K", args=[folder])
    model = reference(CONFIG)
    call = {**CALL, "num_beams": 4, "max_new_tokens": 8}
    assert tokens == model.generate(prompt()[:1, :600], **call)[:, -8:].tolist()
    assert steps == ["offload"]


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=320, n_embd=64, n_layer=3, n_head=4),
        MistralConfig(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_every_module_has_a_device_and_tied_weights_count_once(config):
    where = plan_device_map(config, max_seq_len=256, devices="1G,1G", objective="balance")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, _ in model.named_parameters():
        assert any(name.startswith(f"{module}.") for module in where), name
    assert set(where.values()) == {"cuda:0", "cuda:1"}


def test_what_does_not_fit_says_where_and_what_cannot_be_is_refused():
    with pytest.raises(PlacementError, match=r"no room for model\.layers"):
        plan_device_map(CONFIG, max_seq_len=LENGTH, devices="800M,800M", reserve="31M")
    with pytest.raises(ValueError, match="an encoder-decoder's config"):
        plan_device_map(BartConfig(), max_seq_len=64)
