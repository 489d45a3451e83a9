"""Multi-head latent attention: weights in other formats, plans of the real sizes, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from adapters import linears_of, merged, write_adapter
from on_cpu import on_cpu
from packers import write
from packers.bitsandbytes import RECIPES as BITSANDBYTES
from packers.fp8 import RECIPES as FP8
from packers.integers import RECIPES as INTEGERS
from safetensors.torch import load_file, save_file
from tiny import LATENT, ROUTED, TINY, reference, save, save_tokenizer, small

from exkv import (
    CACHES,
    Cache,
    Engine,
    Job,
    Model,
    ModelConfig,
    PagedCache,
    SamplingParams,
    Tokenizer,
)
from exkv.checkpoint import CheckpointError
from exkv.cluster.values import dumps, loads

IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))
RECIPES = {**FP8, **INTEGERS, **BITSANDBYTES}
#: Sizes that every format's groups divide; no experts, whose router recipes would pack.
WIDE = {
    **{"kv_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 32},
    **{"qk_nope_head_dim": 32, "v_head_dim": 32, "hidden_size": 128, "intermediate_size": 128},
}
PACKED = small("DeepseekV3", **{**LATENT, **WIDE}, first_k_dense_replace=2, **ROUTED)
#: DeepSeek-V3's config.json, without training settings.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "max_position_embeddings": 163840,
    "num_key_value_heads": 128,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "rope_scaling": {
        **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 matrix", "gptq 4", "awq", "nf4 nested"])
@torch.no_grad()
def test_what_makes_keys_and_values_may_be_packed(name, tmp_path):
    theirs = reference(PACKED())
    config = {**theirs.config.to_dict(), "dtype": "float32", "architectures": [ARCHITECTURE]}
    tensors = {key: value.clone() for key, value in theirs.state_dict().items()}
    plain = write(tmp_path, config, tensors, RECIPES[name])
    key = "model.layers.0.self_attn.kv_b_proj.weight"
    assert not torch.equal(plain[key], tensors[key])
    model = on_cpu(tmp_path)
    found = model.forward(IDS, Cache(model, 64, 2))
    expected = torch.func.functional_call(theirs, plain, (IDS,)).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


ARCHITECTURE = "DeepseekV3ForCausalLM"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    theirs = reference(TINY[ARCHITECTURE](eos_token_id=None))
    return save_tokenizer(save(theirs, tmp_path_factory.mktemp("v3")))


def test_weights_that_are_converted_on_load_leave_these_as_floats(tmp_path):
    folder = save(reference(PACKED()), tmp_path)
    floats = Model(folder, dtype=torch.bfloat16)
    converted = Model(folder, dtype=torch.bfloat16, weights="int8")
    for model in (floats, converted):
        model.load(devices=["cpu"])
    before, after = (model.units[1].module.self_attn for model in (floats, converted))
    assert before.q_b_proj.format.name == "bf16" != after.q_b_proj.format.name
    assert torch.equal(before.key_up.weight, after.key_up.weight)
    assert torch.equal(before.value_up.weight, after.value_up.weight)


def test_jobs_of_an_engine_get_the_tokens_that_they_get_alone(folder):
    model = on_cpu(folder, max_input_len=16)
    tokenizer = Tokenizer(folder)

    def tokens(*prompts: list[int]) -> list[list[int]]:
        engine = Engine(model, PagedCache(model, 256, page=16), tokenizer)
        handles = [
            engine.submit(Job(prompt=ids, settings=SamplingParams.greedy(), max_new_tokens=12))
            for ids in prompts
        ]
        for handle in handles:
            handle.result()
        engine.close()
        return [handle.tokens for handle in handles]

    prompts = [IDS[0, :30].tolist(), IDS[1, :5].tolist(), IDS[0, :20].tolist()]
    assert tokens(*prompts) == [tokens(prompt)[0] for prompt in prompts]


@torch.no_grad()
def test_adapters_go_to_linear_layers_and_not_to_what_makes_keys_and_values(folder, tmp_path):
    theirs = reference(TINY[ARCHITECTURE](eos_token_id=None))
    parts = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    adapter = write_adapter(tmp_path / "adapter", linears_of(theirs, parts))
    other = write_adapter(tmp_path / "other", linears_of(theirs, ["kv_b_proj"]))
    model = on_cpu(folder)
    model.load_adapter(adapter)
    found = model.forward(IDS, Cache(model, 64, 2), adapter="adapter")
    expected = merged(theirs, adapter)(IDS).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    with pytest.raises(ValueError, match="layers.0.self_attn.kv_b_proj' is not a linear layer"):
        model.load_adapter(other)


def test_a_plan_of_deepseek_v3_counts_one_latent_vector_a_token(tmp_path):
    """61 layers of 512 + 64 values of 2 bytes; queries of 128 heads of the same width."""
    config = ModelConfig.from_dict(DEEPSEEK_V3)
    assert (config.num_key_value_heads, config.head_dim, config.rotary_dim) == (1, 576, 64)
    layers = Cache.layer_specs(Model(config), 4096)
    assert sum(spec.nbytes(4096) for spec in layers) == 4096 * 70272
    quantized = CACHES["4bit"].layer_specs(Model(config), 4096)
    assert sum(spec.nbytes(4096) for spec in quantized) == 4096 * 61 * 576 * 5 // 8
    attention = Model(config).units[4].shapes
    assert attention["self_attn.key_up.weight"].shape == (128 * 512, 128)
    assert attention["self_attn.value_up.weight"].shape == (128 * 128, 512)


def test_the_temperature_of_long_texts_is_in_the_scale():
    """transformers' numbers for DeepSeek-V3: mscale 0.1 ln 40 + 1, squared."""
    config = ModelConfig.from_dict(DEEPSEEK_V3)
    attention = Model(config).units[1].spec
    with torch.device("meta"):
        scale = attention.build().self_attn.params.scale
    assert scale == pytest.approx(192**-0.5 * 1.368888**2, rel=1e-5)


def test_configs_and_specs_go_to_other_hosts():
    config = ModelConfig.from_dict(DEEPSEEK_V3)
    assert loads(dumps(config)) == config
    specs = CACHES["4bit"].layer_specs(Model(config), 64)
    assert loads(dumps(specs)) == tuple(specs)


CONTRADICTIONS = {
    "kv_lora_rank": (32, r"kv_b_proj.weight in .*is \[104, 24\], expected \[104, 32\]"),
    "q_lora_rank": (None, "q_proj.weight is missing"),
    "qk_rope_head_dim": (7, "qk_rope_head_dim 7 must be even"),
    "qk_nope_head_dim": (16, "qk_head_dim 20 is not qk_nope_head_dim 16 plus qk_rope_head_dim 8"),
    "v_head_dim": (16, r"kv_b_proj.weight in .*is \[104, 24\], expected \[112, 24\]"),
    "num_attention_heads": (8, r"kv_b_proj.weight in .*is \[104, 24\], expected \[208, 24\]"),
    "qk_head_dim": (192, "qk_head_dim 192 is not"),
    "scoring_func": ("softmax", "scoring_func 'softmax' is not supported for a deepseek_v3"),
}


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_sizes_that_contradict_the_tensors_are_refused(key, folder, tmp_path):
    value, match = CONTRADICTIONS[key]
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises((ValueError, CheckpointError), match=match) as error:
        Model(tmp_path).load(devices=["cpu"])
    assert str(tmp_path) in str(error.value)


def test_a_latent_matrix_that_is_damaged_is_named(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.1.self_attn.kv_b_proj.weight"
    tensors[key][3, 5] = torch.nan
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=rf"{key}: self_attn.key_up.weight: number \d+ is NaN"
    ):
        Model(tmp_path).load(devices=["cpu"])


def test_settings_of_other_models_are_refused():
    lite = {"architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": True}
    with pytest.raises(ValueError, match="norm_topk_prob True is not supported"):
        ModelConfig.from_dict(lite)
    with pytest.raises(ValueError, match="topk_method 'noaux_tc' is unknown; exkv knows greedy"):
        ModelConfig.from_dict({**lite, "norm_topk_prob": False, "topk_method": "noaux_tc"})
    with pytest.raises(ValueError, match="needs latent to be LatentHeads, not None"):
        ModelConfig.from_dict(DEEPSEEK_V3).replace(latent=None)
    with pytest.raises(ValueError, match="partial_rotary_factor 0.25 is not qk_rope_head_dim 64"):
        ModelConfig.from_dict(
            {"architectures": ["Mistral4ForCausalLM"], "partial_rotary_factor": 0.25}
        )
