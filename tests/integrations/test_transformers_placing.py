"""Device maps for stock models, carried out by transformers and accelerate on simulated devices."""

from __future__ import annotations

import gc

import pytest
import torch
from accelerate import dispatch_model, infer_auto_device_map
from hf_families import BOTH, DECODER, ENCODER_DECODERS, HEADS, WITH_STATES, given
from simproc import run_sim
from tiny import llama, reference, save
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    BartConfig,
    BartForConditionalGeneration,
    DeepseekV3Config,
    EncoderDecoderCache,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    ViTConfig,
)

from exkv import sim
from exkv.errors import PlacementError
from exkv.integrations.transformers import HFCache, plan_device_map, resilient_generate
from exkv.integrations.transformers.measuring import Promise
from exkv.integrations.transformers.placing import plan_blocks
from exkv.integrations.transformers.versions import SINCE_5
from exkv.planning import make_budgets

CONFIG = llama(max_position_embeddings=1024, eos_token_id=None)
LENGTH, ROWS, KIND = 1024, 2, "8bit"
#: Room for weights, cache and workspace; auto fills the first one with weights only.
SIZES = "16M,15M"
CALL = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


def prompt():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 300, (ROWS, LENGTH - 16), generator=generator)


def generated_here():
    model = reference(CONFIG)
    model.set_attn_implementation("exkv")
    cache = HFCache(CONFIG, KIND, max_seq_len=LENGTH)
    return model.generate(prompt(), **CALL, **given(model, cache))[:, -16:].tolist()


def generated_there(folder):
    """Generate with the plan's placement."""
    where = plan_device_map(CONFIG, max_seq_len=LENGTH, batch_size=ROWS, cache=KIND)
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map=where, attn_implementation="exkv", dtype=torch.float32
    )
    cache = HFCache(CONFIG, KIND, max_seq_len=LENGTH)
    found = model.generate(prompt().to("sim:0"), **CALL, **given(model, cache))
    return found[:, -16:].tolist(), sorted(set(where.values()))


def generated_by_auto(folder):
    """Generate with accelerate's placement for the same sizes."""
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
    """A dynamic cache that outgrows its device."""
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


def test_planned_map_generates_where_auto_overflows(folder):
    tokens, devices = run_sim(generated_there, SIZES, args=[folder])
    assert tokens == generated_here()
    assert devices == ["sim:0", "sim:1"]
    assert run_sim(generated_by_auto, SIZES, args=[folder]) == "out of memory"


def generated_in_segments(folder, by_segments):
    """Generate on devices that allocate in segments, with exactly the memory that the plan
    reserves, or only with the bytes that it counts without the allocator's."""
    promise = Promise(max_seq_len=LENGTH, batch_size=ROWS, cache=KIND)
    budgets = make_budgets(["sim:0"])
    _, plan = plan_blocks(CONFIG, promise, budgets, dtype=torch.float32)
    (ledger,) = plan.ledgers
    total = ledger.total if by_segments else ledger.total - ledger.allocator
    sim.set_capacity(0, ledger.budget.in_use_by_others + total)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, device_map="sim:0", attn_implementation="exkv", dtype=torch.float32
        )
        cache = HFCache(CONFIG, KIND, max_seq_len=LENGTH)
        found = model.generate(prompt().to("sim:0"), **CALL, **given(model, cache))
    except torch.OutOfMemoryError:
        return "out of memory", ledger.allocator
    return found[:, -16:].tolist(), ledger.allocator


def test_map_counts_reserved_memory(folder):
    env = {"EXKV_SIM_ALLOCATOR": "cuda"}
    found, beyond = run_sim(generated_in_segments, "256M", args=[folder, True], env=env)
    assert found == generated_here() and beyond > 0
    found, _ = run_sim(generated_in_segments, "256M", args=[folder, False], env=env)
    assert found == "out of memory"


def test_cache_that_fills_the_device_is_offloaded(folder):
    tokens, steps = run_sim(offloaded_in_time, "20500K", args=[folder])
    model = reference(CONFIG)
    call = {**CALL, "num_beams": 4, "max_new_tokens": 8}
    assert tokens == model.generate(prompt()[:1, :600], **call)[:, -8:].tolist()
    assert steps == ["offload"]


@pytest.mark.older
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
def test_every_module_has_a_device(config):
    where = plan_device_map(config, max_seq_len=256, devices="1G,1G", objective="balance")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, _ in model.named_parameters():
        assert any(name.startswith(f"{module}.") for module in where), name
    assert set(where.values()) == {"cuda:0", "cuda:1"}


@pytest.mark.older
def test_models_that_cannot_be_placed_are_refused():
    with pytest.raises(PlacementError, match=r"no room for model\.layers"):
        plan_device_map(CONFIG, max_seq_len=LENGTH, devices="844M,844M", reserve="31M")
    with pytest.raises(ValueError, match="no model that generates text from a ViTConfig"):
        plan_device_map(ViTConfig(), max_seq_len=64)
    if not SINCE_5:  # there, Python looks up a token's experts
        with pytest.raises(ValueError, match="MixtralForCausalLM can't be planned"):
            plan_device_map(config_of("Mixtral"), max_seq_len=64)


@pytest.mark.older
def test_encoder_decoder_is_planned_over_two_devices():
    where = plan_device_map(
        BartConfig(**BOTH), max_seq_len=64, devices="1G,1G", objective="balance"
    )
    with torch.device("meta"):
        model = BartForConditionalGeneration(BartConfig(**BOTH))
    for name in model.state_dict():
        assert any(name == module or name.startswith(f"{module}.") for module in where), name
    assert where["model.encoder.layers.0"] == "cuda:0"
    assert where["model.decoder.layers.1"] == "cuda:1"
    assert where["lm_head"] == where["model.shared"] == "cuda:0"  # one tensor


#: Families with tied embedding and head, or tied embeddings of encoder and decoder.
TIED = {
    "Llama": lambda: llama(tie_word_embeddings=True, eos_token_id=None),
    "GPT2": lambda: GPT2Config(vocab_size=320, n_embd=64, n_layer=3, n_head=4, eos_token_id=None),
    "Bart": lambda: BartConfig(**BOTH),
    "T5": ENCODER_DECODERS["T5ForConditionalGeneration"],
}


def generated_when_tied(folder, name):
    where = plan_device_map(TIED[name](), max_seq_len=64, objective="balance")
    model = auto_of(name).from_pretrained(f"{folder}/{name}", device_map=where)
    found = model.generate(prompt()[:, :9].to("sim:0"), max_new_tokens=6, do_sample=False)
    return found.tolist(), sorted(set(where.values()))


def all_generated_when_tied(folder):
    return {name: generated_when_tied(folder, name) for name in TIED}


def auto_of(name):
    return AutoModelForSeq2SeqLM if name in ("Bart", "T5") else AutoModelForCausalLM


def test_tied_weights_are_on_one_device(tmp_path):
    expected = {}
    for name, config in TIED.items():
        model = auto_of(name).from_config(config()).eval()
        model.save_pretrained(tmp_path / name)
        ids = prompt()[:, :9]
        expected[name] = model.generate(ids, max_new_tokens=6, do_sample=False).tolist()
    found = run_sim(all_generated_when_tied, "40M,40M", args=[str(tmp_path)])
    assert found == {name: [tokens, ["sim:0", "sim:1"]] for name, tokens in expected.items()}


# Predictions ------------------------------------------------------------------------------------

#: Tokens of a text, in two rows; one is padded.
TEXT = 128
SOUND = 50  # positions of the encoder of ``WHISPER``
PREDICTED = [
    *("Llama", "OPT", "Falcon"),
    *(("Mamba", "Jamba", "Mixtral", "DeepseekV3") if SINCE_5 else ()),
    *("T5", "Whisper"),
]
DEEPSEEK = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def config_of(name):
    sizes = {**DECODER, **HEADS, "num_hidden_layers": 2}
    return {
        "Llama": lambda: LlamaConfig(**sizes),
        "OPT": lambda: OPTConfig(
            **DECODER,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=96,
            word_embed_proj_dim=64,
        ),
        "Falcon": lambda: FalconConfig(**DECODER, num_hidden_layers=2, num_attention_heads=4),
        "DeepseekV3": lambda: DeepseekV3Config(**sizes | {"num_key_value_heads": 4}, **DEEPSEEK),
        "Mamba": WITH_STATES["MambaForCausalLM"],
        "Jamba": WITH_STATES["JambaForCausalLM"],
        "Mixtral": lambda: MixtralConfig(**sizes, num_local_experts=4, sliding_window=None),
        "T5": ENCODER_DECODERS["T5ForConditionalGeneration"],
        "Whisper": ENCODER_DECODERS["WhisperForConditionalGeneration"],
    }[name]()


def kind_of(name):
    others = {"T5": AutoModelForSeq2SeqLM, "Whisper": AutoModelForSpeechSeq2Seq}
    return others.get(name, AutoModelForCausalLM)


def predicted_and_measured(folder, name):
    """Predicted and measured bytes of a model that generates on one device."""
    config = config_of(name)
    pair, length = config.is_encoder_decoder, 60 if name == "Whisper" else TEXT
    encoded = SOUND if name == "Whisper" else TEXT
    promise = Promise(
        max_seq_len=length,
        batch_size=2,
        cache="static",
        encoder_len=encoded,
        cross_cache="static",
        cross_config={"max_seq_len": encoded},
    )
    _, plan = plan_blocks(config, promise, make_budgets(None), dtype=torch.float32)
    gc.collect()
    before = torch.accelerator.memory_allocated(0)
    attention = "sdpa" if name == "Falcon" else "exkv"  # it has its own kinds
    model = kind_of(name).from_pretrained(
        f"{folder}/{name}", device_map="sim:0", attn_implementation=attention, dtype=torch.float32
    )
    inputs = {"input_features": torch.ones(2, 16, 2 * SOUND)}
    if name != "Whisper":
        ids = prompt()[:, : TEXT if pair else TEXT - 4]
        mask = torch.ones_like(ids)
        mask[0, -9:] = 0
        inputs = {"input_ids": ids, "attention_mask": mask if pair else mask.flip(1)}
    inputs = {key: x.to("sim:0") for key, x in inputs.items()}
    cache = HFCache(config, "static", max_seq_len=length)
    if pair:
        cache = EncoderDecoderCache(cache, HFCache(config, "static", max_seq_len=encoded))
    inputs |= given(model, cache)
    torch.accelerator.reset_peak_memory_stats(0)
    for new in (2, length - 4) if pair else (4,):  # an encoder besides existing caches
        cache.reset()
        model.generate(**inputs, max_new_tokens=new, do_sample=False, pad_token_id=0)
    measured = torch.accelerator.max_memory_allocated(0) - before
    return plan.ledgers[0].total, measured


def all_predicted_and_measured(folder):
    return {name: predicted_and_measured(folder, name) for name in PREDICTED}


def test_predictions_are_tight_bounds(tmp_path):
    for name in PREDICTED:
        config = config_of(name)
        model = kind_of(name).from_config(config)
        model.generation_config.eos_token_id = None
        model.save_pretrained(tmp_path / name)
    found = run_sim(all_predicted_and_measured, "4G", args=[str(tmp_path)])
    for name, (predicted, measured) in found.items():
        assert measured <= predicted <= 1.1 * measured, (name, predicted, measured)
