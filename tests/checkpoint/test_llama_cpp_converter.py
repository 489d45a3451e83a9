"""Files from llama.cpp's own converter, for every architecture, against transformers' models:
names, metadata and changed values, independent of this project's reading of the format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from adapters import linears_of, merged, write_adapter
from on_cpu import on_cpu
from packers.gguf import gguf, rewrite
from packers.llama_cpp import Converter
from safetensors.torch import load_file, save_file
from simproc import run_sim
from tiny import (
    ALPHA,
    GEMMA4_EXPERTS,
    GEMMA4_SHARED,
    LATENT_YARN,
    ROPE,
    TINY,
    WINDOW,
    beside_images,
    gemma4,
    is_mixture,
    llama,
    longrope,
    mistral,
    phi3,
    reference,
    save,
    save_tokenizer,
)
from transformers import PreTrainedModel

from exkv import Cache, Model, ModelConfig, Tokenizer
from exkv.checkpoint import CheckpointError, GGUFContents, open_checkpoint
from exkv.checkpoint.families import FAMILIES
from exkv.loading import gguf_floats
from exkv.loading.calibration import rounded_units
from exkv.loading.report import LINES
from exkv.weights.groups import GroupFormat

pytestmark = pytest.mark.skipif(
    not golden.COMPLETE.exists(), reason="`make test` fetches llama.cpp's converter"
)

IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))
#: The converter has no class for these: nothing is known of files of them.
UNWRITTEN = (
    *("CwmForCausalLM", "FlexOlmoForCausalLM", "HeliumForCausalLM", "HyperCLOVAXForCausalLM"),
    *("LongcatFlashForCausalLM", "MiniMaxForCausalLM", "MinistralForCausalLM"),
    *("OlmoHybridForCausalLM", "VaultGemmaForCausalLM"),
)
#: What a file can't say, or the converter takes to be so: Gemma's scores are divided by the root of
#: a head's features; one number stands for both of DeepSeek's temperatures; and so on.
ONE_TEMPERATURE = {"rope_parameters": {**LATENT_YARN["rope_parameters"], "mscale": 1.0}}
LLAMA4 = {
    **{"num_hidden_layers": 4, "no_rope_layers": None, "attention_chunk_size": 8192},
    **{"moe_layers": None, "interleave_moe_layer_step": 2, "floor_scale": 8192, "attn_scale": 0.1},
}
#: Rows that its table for layers lacks are zeros in files.
GEMMA3N = {"altup_num_inputs": 4, "vocab_size_per_layer_input": 320}
GEMMA3 = {"num_hidden_layers": 6, "layer_types": None}
MISTRAL4_ROPE = TINY["Mistral4ForCausalLM"]().rope_parameters | {"mscale": 1.0}
PHIMOE_ROPE = TINY["PhimoeForCausalLM"]().rope_parameters
PHIMOE = {
    "router_jitter_noise": 0.01,
    "rope_parameters": PHIMOE_ROPE
    | dict.fromkeys(("short_mscale", "long_mscale"), 1.243163121016122),
}
HUNYUAN = {"max_position_embeddings": 32768}
#: Which are in the weights of files; powers of two lose nothing in blocks.
FALCON_FACTORS = {
    **{"embedding_multiplier": 4.0, "lm_head_multiplier": 0.5, "key_multiplier": 2.0},
    **{"attention_in_multiplier": 0.5, "attention_out_multiplier": 0.25},
    **{"ssm_in_multiplier": 2.0, "ssm_out_multiplier": 0.5, "mlp_multipliers": [0.5, 2.0]},
    "ssm_multipliers": [0.5, 2.0, 0.25, 4.0, 0.125],
}
NEMOTRON = {
    "layers_block_type": ["moe", "linear_attention", "full_attention"],
    "mamba_head_dim": 32,
}
LAGUNA = {
    **{"layer_types": ["full_attention", "sliding_attention"], "moe_router_logit_softcapping": 0.0},
    **{"num_attention_heads_per_layer": [4, 6], "mlp_layer_types": ["dense", "sparse"]},
}
CHANGES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {"num_hidden_layers": 4, "global_attn_every_n_layers": 4},
    "Cohere2ForCausalLM": {"num_hidden_layers": 4, "layer_types": None},
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), ONE_TEMPERATURE),
    "Ernie4_5_MoeForCausalLM": {"moe_norm_min": 1e-12},
    "FalconH1ForCausalLM": FALCON_FACTORS,
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 32},
    "Gemma3ForCausalLM": {**GEMMA3, "query_pre_attn_scalar": 32},
    "Gemma3ForConditionalGeneration": {**GEMMA3, "query_pre_attn_scalar": 16},
    **dict.fromkeys(("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"), GEMMA3N),
    "GlmForCausalLM": {"rms_norm_eps": 1e-5},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "GptOssForCausalLM": {"swiglu_limit": 7.0},
    "GraniteMoeSWAForCausalLM": {"layer_rope_theta": [10000.0, 10000.0]},
    "GraniteSWAForCausalLM": {"layer_rope_theta": [10000.0, 0]},
    "HunYuanDenseV1ForCausalLM": HUNYUAN,
    "HunYuanMoEV1ForCausalLM": {
        **{**HUNYUAN, "hidden_size": 512, "head_dim": 128},
        "rope_parameters": {**ALPHA["rope_parameters"], "alpha": 1000.0},
    },
    "KimiLinearForCausalLM": {"linear_num_heads": 4, "num_expert_group": 1},
    "Kimi_K25ForConditionalGeneration": ONE_TEMPERATURE,
    "LagunaForCausalLM": LAGUNA,
    **dict.fromkeys(("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), LLAMA4),
    "MellumForCausalLM": {"mlp_layer_types": ["sparse", "sparse"]},
    "MiMoV2FlashForCausalLM": {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    "Mistral4ForCausalLM": {"rope_parameters": {**MISTRAL4_ROPE, "llama_4_scaling_beta": 0.0}},
    "MistralForCausalLM": {"sliding_window": None},
    "NemotronHForCausalLM": NEMOTRON,
    "PhiForCausalLM": {"num_key_value_heads": 4, "intermediate_size": 256},
    "PhimoeForCausalLM": PHIMOE,
    "Qwen3MoeForCausalLM": {"decoder_sparse_step": 1, "norm_topk_prob": True},
    "Qwen3VLMoeForConditionalGeneration": {"decoder_sparse_step": 1},
    "Step3p7ForConditionalGeneration": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    },
    "SmolLM3ForCausalLM": {"num_hidden_layers": 4, "no_rope_layers": None},
}
#: The converter reads the file itself then, without what transformers would add.
OLD = {"model_type": "of another version"}
KIMI_DELTA = {
    **{"full_attn_layers": [2], "kda_layers": [1], "head_dim": 8, "num_heads": 4},
    "short_conv_kernel_size": 4,
}
#: StepFun's names, and what it states by layer.
STEP = {
    "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2},
    **{"num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2},
    **{"rope_theta": [5e5, 1e3, 5e5], "partial_rotary_factors": [0.5, 1.0, 0.5]},
    "rope_scaling": ROPE["llama3"],
}
#: Xiaomi's names. Its window is without a token's own.
MIMO = {
    **{"hybrid_layer_pattern": [1, 0], "swa_num_key_value_heads": 4, "swa_num_attention_heads": 4},
    **{"swa_head_dim": 24, "swa_v_head_dim": 16, "topk_method": "noaux_tc"},
    **{"sliding_window": WINDOW - 1, "sliding_window_size": WINDOW - 1, "layernorm_epsilon": 1e-5},
    **{"rope_parameters": None, "rope_theta": 5e6, "swa_rope_theta": 1e4},
    **{"partial_rotary_factor": 0.334, **OLD},
}
#: What published checkpoints' config.json has beside what transformers' classes write; None for
#: what it lacks.
SIGMOID = {"scoring_func": "sigmoid"}
GRANITE_HYBRID = {"layer_types": ["mamba", "attention"]}
PUBLISHED: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_rotary_emb": 8},
    **dict.fromkeys(("FalconH1ForCausalLM", "Falcon-H1 with norms"), {"head_dim": 16}),
    "Cohere2ForCausalLM": {"rotary_pct": 1.0},
    **dict.fromkeys(("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"), SIGMOID),
    **dict.fromkeys(("GraniteMoeHybridForCausalLM", "Granite 4 H-Micro"), GRANITE_HYBRID),
    "Granite 4 Micro": {"layer_types": ["attention", "attention"], "num_experts_per_tok": 0},
    "Nemotron-H": {
        **{"hybrid_override_pattern": "M*-", **OLD},
        **dict.fromkeys(("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group")),
    },
    # The key that transformers 5 no longer keeps.
    "GPTNeoXForCausalLM": {"rotary_pct": 0.25, **OLD},
    "GraniteSWAForCausalLM": {"no_rope_layers": [1, 0]},
    "HunYuanMoEV1ForCausalLM": {"moe_intermediate_size": [64, 64], "num_shared_expert": [1, 1]},
    "KimiLinearForCausalLM": {
        **{"first_k_dense_replace": 1, "linear_attn_config": KIMI_DELTA, "moe_layer_freq": 1},
        **OLD,
    },
    "Kimi_K25ForConditionalGeneration": {"architectures": ["KimiK25ForConditionalGeneration"]},
    "Laguna M": {"sliding_window": None, **OLD},
    "MiMoV2FlashForCausalLM": MIMO,
    "MiniMaxM2ForCausalLM": {"rotary_dim": 8},
    "PhimoeForCausalLM": {"architectures": ["PhiMoEForCausalLM"]},
    "Step3p7ForConditionalGeneration": OLD,
    "SolarOpenForCausalLM": {"partial_rotary_factor": 1.0},
}
#: The same of the text model beside one of images.
OF_TEXT = {
    "Gemma4UnifiedForConditionalGeneration": {"moe_intermediate_size": None},
    "Kimi_K25ForConditionalGeneration": SIGMOID,
}
#: Settings that take another path through the converter.
VARIANTS = {
    "llama3": lambda: llama("llama3"),
    "linear": lambda: llama("linear", tie_word_embeddings=True),
    "yarn": lambda: llama("yarn", attention_bias=True, mlp_bias=True),
    "longrope": lambda: phi3(**longrope()),
    "Falcon-H1 with norms": partial(
        TINY["FalconH1ForCausalLM"],
        **FALCON_FACTORS | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "Gemma 4 26B-A4B": partial(gemma4, **GEMMA4_EXPERTS),
    "Gemma 4 E2B": partial(gemma4, **GEMMA4_SHARED),
    "Granite 4 H-Micro": partial(TINY["GraniteMoeHybridForCausalLM"], num_local_experts=0),
    "Granite 4 Micro": partial(
        TINY["GraniteMoeHybridForCausalLM"],
        num_local_experts=0,
        shared_intermediate_size=64,
        layer_types=["full_attention"] * 2,
        position_embedding_type="rope",
    ),
    "Nemotron-H": partial(
        TINY["NemotronHForCausalLM"],
        mamba_head_dim=32,
        layers_block_type=["linear_attention", "full_attention", "mlp"],
    ),
    "Nemotron 3 Super": partial(TINY["NemotronHForCausalLM"], **NEMOTRON, moe_latent_size=32),
    "Laguna M": partial(
        TINY["LagunaForCausalLM"],
        **LAGUNA
        | {"layer_types": ["full_attention"] * 2, "num_attention_heads_per_layer": None}
        | {"gating": "per-element"},
    ),
    "Llama 4 without chunks": partial(
        TINY["Llama4ForCausalLM"],
        **LLAMA4
        | {"layer_types": ["full_attention"] * 4, "no_rope_layers": [1, 1, 1, 1]}
        | {"attn_temperature_tuning": False},
    ),
    "Llama 4 Maverick": partial(
        TINY["Llama4ForCausalLM"], **LLAMA4, num_local_experts=128, use_qk_norm=False
    ),
    "Mistral Small 3.1": beside_images(
        "Mistral3", partial(mistral, sliding_window=None), "Pixtral"
    ),
}
#: Files of these have the name of another architecture, whose family reads them.
AS_OTHERS = (
    *("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"),
    *("Exaone4_5_ForConditionalGeneration", "Gemma3ForConditionalGeneration"),
    *("Gemma3nForConditionalGeneration", "Gemma4ForConditionalGeneration"),
    *("Gemma4UnifiedForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    *("Glm4MoeLiteForCausalLM", "Llama4ForConditionalGeneration", "MistralForCausalLM"),
    *("Mistral3ForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    "SolarOpenForCausalLM",
)
#: Whose text models' files are those of another name here.
ALIKE = {"Gemma4UnifiedForCausalLM", "Mistral3ForConditionalGeneration:mistral4"}
WRITTEN = [name for name in TINY if FAMILIES[name].gguf is not None or name in AS_OTHERS]
assert {*TINY} == {*WRITTEN, *UNWRITTEN, *ALIKE}, "one says nothing of its files"
#: With layers whose keys and values are no heads', so that nothing is joined with queries; and with
#: experts' gates and ups, which are joined on demand.
STATES = [name for name in TINY if name.startswith(("Qwen3Next", "Qwen3_5"))]
STATES_AND_EXPERTS = [name for name in STATES if is_mixture(name)]
CASES = [
    *((name, how) for name in (*WRITTEN, *VARIANTS) for how in ("f32", "q8_0")),
    *((name, "q8_0 fuse_qkv") for name in WRITTEN if name not in STATES),
    *((name, "q8_0 fuse_gate_up_exps") for name in STATES_AND_EXPERTS),
]


@pytest.fixture(scope="module")
def convert() -> Iterator[Converter]:
    converter = Converter(golden.CONVERTER)
    yield converter
    converter.close()


def saved(name: str, folder: Path, how: str = "f32") -> PreTrainedModel:
    """transformers' model, saved as published ones are; its matrices have numbers that are
    converted without loss."""
    make = VARIANTS[name] if name in VARIANTS else TINY[name]
    theirs = reference(make(**CHANGES.get(name, {})))
    if "q8_0" in how:
        _make_codes(theirs)
    save(theirs, folder)
    file = folder / "config.json"
    values = {**json.loads(file.read_text()), **PUBLISHED.get(name, {})}
    for key in [key for key, value in PUBLISHED.get(name, {}).items() if value is None]:
        del values[key]
    if name == "Step3p7ForConditionalGeneration":
        values["text_config"] |= STEP
        del values["text_config"]["rope_parameters"]
    if name in OF_TEXT:
        values["text_config"] |= OF_TEXT[name]
    if name == "Mistral4ForCausalLM":  # which is published beside a model of images
        images = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
        values = {**images, "text_config": {**values, "architectures": None}}
    file.write_text(json.dumps(values))
    if name == "KimiLinearForCausalLM":
        _name_dense_mlp(folder / "model.safetensors")
    if name == "Qwen3VLMoeForConditionalGeneration":
        _put_inputs_first(folder / "model.safetensors")
    if name.startswith(("Gemma3", "Gemma4", "Gemma 4")):  # whose embedding has rows for tokens only
        words = {"model": {"vocab": dict.fromkeys(map(str, range(320)))}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(words))
    return theirs


def _name_dense_mlp(file: Path) -> None:
    """Rename a dense MLP to Moonshot's name, unlike that of a layer with experts."""
    dense = re.compile(r"block_sparse_moe(?=\.(gate|up|down)_proj)")
    tensors = {dense.sub("mlp", key): values for key, values in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def _put_inputs_first(file: Path) -> None:
    """Transpose experts' matrices to Qwen's layout."""
    tensors = load_file(file)
    for key, values in tensors.items():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[key] = values.transpose(1, 2).contiguous()
    save_file(tensors, file, {"format": "pt"})


def _make_codes(model: PreTrainedModel) -> None:
    """Weights of codes -127 to 127 with one scale, the largest code in every eighth row and column
    at the least, so that each block has it in whatever order the converter puts them."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            codes = torch.randint(-127, 128, parameter.shape, generator=generator)
            codes[..., ::8] = codes[..., ::8, :] = 127
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.data = codes.mul(signs).to(parameter.dtype) / 2048


def logits_of(file: Path) -> torch.Tensor:
    model = on_cpu(file, dtype=torch.float32)
    cache = Cache(model, 64, 2)
    return torch.cat([model.forward(IDS[:, :39], cache), model.forward(IDS[:, 39:], cache)], 1)


def expected_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.sweep(14)
@pytest.mark.parametrize(("name", "how"), CASES)
def test_converted_models_match_transformers(tmp_path, convert, name, how):
    theirs = saved(name, tmp_path / "saved", how)
    convert(tmp_path / "saved", tmp_path / "model.gguf", how)
    assert_near(logits_of(tmp_path / "model.gguf"), expected_of(theirs))


@pytest.mark.parametrize("name", ["Cohere2ForCausalLM", "SmolLM3ForCausalLM", "AfmoeForCausalLM"])
def test_missing_metadata_is_reported_with_the_assumption(tmp_path, convert, caplog, name):
    saved(name, tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "model.gguf")
    ModelConfig.from_pretrained(tmp_path / "model.gguf")
    assert "the metadata lacks" in caplog.text
    assert "every fourth layer" in caplog.text


def test_what_files_of_llama_4_lack_is_as_published(tmp_path, convert):
    """Of texts longer than these tests', which the first chunk doesn't hold."""
    saved("Llama4ForCausalLM", tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "model.gguf")
    paths = tmp_path / "saved", tmp_path / "model.gguf"
    of_folder, of_file = map(ModelConfig.from_pretrained, paths)
    assert of_file.query_scaling == of_folder.query_scaling is not None
    for layer in range(4):
        rotated = of_file.rotates(layer)
        assert rotated == of_folder.rotates(layer) == (layer < 3)
        chunks = [x.specific.chunk(layer, rotated=rotated) for x in (of_file, of_folder)]
        assert chunks == [8192 * rotated] * 2
        assert of_file.specific.is_dense(layer) == of_folder.specific.is_dense(layer)


@pytest.mark.parametrize("name", UNWRITTEN)
def test_the_converter_has_no_class_for_the_others(tmp_path, convert, name):
    saved(name, tmp_path / "saved")
    with pytest.raises(RuntimeError, match=f"Architecture '{name}' not supported"):
        convert(tmp_path / "saved", tmp_path / "model.gguf")
    assert FAMILIES[name].gguf is None


def test_mtp_heads_after_windowed_layers_are_ignored(tmp_path, convert):
    """The metadata's lists have their entries, too."""
    theirs = saved("MiMoV2FlashForCausalLM", tmp_path / "saved")
    file, slides = tmp_path / "saved/model.safetensors", "model.layers.0."
    tensors = load_file(file)
    layer = {key: x + 1 for key, x in tensors.items() if key.startswith(slides)}
    names = [f"model.mtp.layers.{index}." for index in range(3)]
    heads = {k.replace(slides, name): x.clone() for name in names for k, x in layer.items()}
    save_file({**tensors, **heads}, file, {"format": "pt"})
    convert(tmp_path / "saved", tmp_path / "model.gguf", "f32 heads")
    assert GGUFContents(tmp_path / "model.gguf").own("block_count") == 5
    assert_near(logits_of(tmp_path / "model.gguf"), expected_of(theirs))


def test_mtp_heads_after_layers_with_states_are_ignored(tmp_path, convert):
    """They count as blocks, without a state."""
    theirs = saved("Qwen3_5ForCausalLM", tmp_path / "saved")
    file = tmp_path / "saved/model.safetensors"
    tensors = load_file(file)
    attends = "model.layers.1."
    heads = {k.replace(attends, "mtp.layers.0."): v + 1 for k, v in tensors.items() if attends in k}
    heads |= {"mtp.fc.weight": torch.ones(64, 128), "mtp.norm.weight": torch.ones(64)}
    save_file({**tensors, **heads}, file, {"format": "pt"})
    config = tmp_path / "saved/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mtp_num_hidden_layers": 1}))
    convert(tmp_path / "saved", tmp_path / "model.gguf", "f32 heads")
    assert GGUFContents(tmp_path / "model.gguf").own("block_count") == 3
    assert_near(logits_of(tmp_path / "model.gguf"), expected_of(theirs))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GemmaForCausalLM"])
def test_sentencepiece_as_the_converter_writes_it_tokenizes_as_the_folder(tmp_path, convert, name):
    """With the normalization of both models: none but Llama's space before a text."""
    saved(name, tmp_path / "saved")
    normalization = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    save_tokenizer(tmp_path / "saved", **normalization, add_dummy_prefix="Llama" in name)
    convert(tmp_path / "saved", tmp_path / "model.gguf", "f32 vocabulary")
    ours, theirs = Tokenizer(tmp_path / "model.gguf"), Tokenizer(tmp_path / "saved")
    for text in ("the key is in the  red kitchen\n", "Zürich ✓ where", " "):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_early_projections_of_linear_attention_are_read(tmp_path, convert):
    """In one tensor, head by head, as the checkpoint has them."""
    theirs = saved("Qwen3NextForCausalLM", tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "model.gguf")
    fused = load_file(tmp_path / "saved/model.safetensors")[
        "model.layers.0.linear_attn.in_proj_qkvz.weight"
    ]

    def earlier(tensors: dict) -> dict:
        later = ("blk.0.attn_qkv.weight", "blk.0.attn_gate.weight")
        kept = {name: values for name, values in tensors.items() if name not in later}
        return {**kept, "blk.0.ssm_in.weight": fused.numpy()}

    rewrite(tmp_path / "model.gguf", tmp_path / "first.gguf", {}, earlier)
    assert_near(logits_of(tmp_path / "first.gguf"), expected_of(theirs))


@pytest.mark.parametrize(
    ("name", "attention", "stored"),
    [
        ("GraniteMoeHybrid", "model.layers.1.self_attn", "model.layers.1.self_attn"),
        ("NemotronH", "model.layers.2.mixer", "backbone.layers.2.mixer"),
    ],
)
def test_rows_without_positions_are_restored_too(tmp_path, convert, name, attention, stored):
    """No logits tell, but adapters' rows are added to them."""
    saved(f"{name}ForCausalLM", tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "model.gguf")
    theirs = load_file(tmp_path / "saved/model.safetensors")
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        for part in ("q_proj.weight", "k_proj.weight"):
            assert torch.equal(checkpoint.tensor(f"{attention}.{part}"), theirs[f"{stored}.{part}"])


def test_adapters_of_a_matrix_with_reordered_columns(tmp_path, convert):
    """Heads of values are put in the order of the file behind an adapter's own matrix."""
    theirs = saved("Qwen3_5ForCausalLM", tmp_path / "saved", "q8_0")
    convert(tmp_path / "saved", tmp_path / "model.gguf", "q8_0")
    adapter = write_adapter(tmp_path / "adapter", linears_of(theirs, ["out_proj"]))
    model = on_cpu(tmp_path / "model.gguf", dtype=torch.float32)
    model.load_adapter(adapter)
    found = model.forward(IDS, Cache(model, 64, 2), adapter="adapter")
    assert_near(found, expected_of(merged(theirs, adapter)))


def test_matrix_with_reordered_columns_is_rounded_for_its_own_inputs(tmp_path, convert):
    """The remaining error is as small as in the checkpoint's order."""
    saved("Qwen3_5ForCausalLM", tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "model.gguf")
    errors = []
    for path in (tmp_path / "saved", tmp_path / "model.gguf"):
        config, seen = ModelConfig.from_pretrained(path), []
        with open_checkpoint(path) as checkpoint:
            found = list(rounded_units(config, checkpoint, IDS, of_layer))
        model = on_cpu(path, dtype=torch.float32)
        linear = model.units[1].module.get_submodule(PATH)
        linear.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        model.forward(IDS)
        left = linear.weight - found[1][PATH].values(4)
        errors.append((linear.aligned(seen[0]) @ left.T).square().mean())
    assert 0 < errors[1] < 1.1 * errors[0]


PATH = "self_attn.out_proj"


def of_layer(unit) -> dict[str, GroupFormat]:
    format = GroupFormat(bits=4, group=32, scale=torch.float16)
    return {PATH: format} if unit.spec.layer == 0 else {}


@pytest.mark.parametrize(
    ("name", "key", "value", "problem"),
    [
        ("Qwen3_5", "qwen35.ssm.group_count", 0, "linear_num_key_heads must be a positive"),
        ("Qwen3_5", "qwen35.ssm.time_step_rank", 3, "linear_num_value_heads 3 is not a multiple"),
        ("Qwen3_5", "qwen35.ssm.state_size", 40, "has 96 rows: they are not 160 and"),
        ("Qwen3_5", "qwen35.ssm.inner_size", 40, "linear_value_head_dim|ssm_norm|linear_attn"),
        ("Qwen3Next", "qwen3next.ssm.time_step_rank", 6, "'blk.0.ssm_ba.weight' has 8 rows"),
        ("Apertus", "xielu.beta", [0.5], "xielu.beta is .0.5., expected a number for each of 2"),
        ("Lfm2", "lfm2.attention.head_count_kv", [0, 0], "num_key_value_heads"),
        ("Lfm2", "lfm2.attention.head_count_kv", [0, 2, 2], "layer_types"),
        ("Lfm2", "lfm2.shortconv.l_cache", 5, "conv.conv.weight in model.gguf"),
        ("GraniteMoeHybrid", "granitehybrid.ssm.time_step_rank", 0, "mamba_n_heads must be"),
        ("GraniteMoeHybrid", "granitehybrid.ssm.inner_size", 100, "mamba_d_head 25 is not"),
        ("FalconH1", "falcon-h1.ssm.group_count", 4, "in_proj.weight in model.gguf"),
        ("NemotronH", "nemotron_h_moe.feed_forward_length", [32, 0], "name 3 and 2 layers"),
        ("Gemma4", "gemma4.attention.key_length_swa", 8, "q_norm.weight in model.gguf"),
        ("Gemma3n", "gemma3n.activation_sparsity_scale", [9.0] * 7, "activation_sparsity_pattern"),
        ("Laguna", "laguna.attention.head_count", [6, 4], "o_proj.weight in model.gguf"),
    ],
)
def test_metadata_of_another_model_is_named(tmp_path, convert, name, key, value, problem):
    saved(f"{name}ForCausalLM", tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "whole.gguf")
    rewrite(tmp_path / "whole.gguf", tmp_path / "model.gguf", {key: value})
    with pytest.raises((CheckpointError, ValueError), match=problem):
        Model(tmp_path / "model.gguf").load(devices=["cpu"])


def logits_on_devices(file: str) -> dict:
    """On one simulated device and on two, and the bytes planned and measured there."""
    model = Model(file, dtype=torch.float32, max_input_len=12)
    cache, seen = Cache(model, 64, 2), {"rows": [], "logits": []}
    for names in (["sim:0"], ["sim:0", "sim:1"]):
        model.load_autosplit(cache, devices=names, objective="balance")
        for row in model.report.devices:
            seen["rows"] += [[getattr(row.ledger, k), row.measured.get(k, 0)] for k in LINES]
        cache.reset()
        seen["logits"].append(model.forward(IDS, cache).cpu().tolist())
        model.unload()
    return seen


def test_reordered_rows_are_loaded_and_planned_to_the_byte(tmp_path, convert):
    """Packed tensors are read piece by piece."""
    theirs = saved("Qwen3_5ForCausalLM", tmp_path / "saved", "q8_0")
    convert(tmp_path / "saved", tmp_path / "model.gguf", "q8_0")
    seen = run_sim(logits_on_devices, "64M,64M", args=[str(tmp_path / "model.gguf")])
    assert all(planned == measured for planned, measured in seen["rows"])
    for found in seen["logits"]:
        assert_near(torch.tensor(found), expected_of(theirs))


def test_contiguous_pieces_stay_mapped(tmp_path, convert):
    """Values behind queries and keys, and each expert's ups behind its gates."""
    saved("Qwen3MoeForCausalLM", tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "model.gguf", "f32 fuse_qkv")
    saved("Qwen3_5MoeForCausalLM", tmp_path / "experts")
    convert(tmp_path / "experts", tmp_path / "experts.gguf", "f32 fuse_gate_up_exps")
    for file, name in (
        ("model.gguf", "model.layers.0.self_attn.v_proj.weight"),
        ("experts.gguf", "model.layers.0.mlp.experts.3.up_proj.weight"),
    ):
        with open_checkpoint(tmp_path / file) as checkpoint:
            assert checkpoint.mapping(name) is not None


#: What it states beside: what llama.cpp takes to be so without it.
DEFAULTS = {"rope.scaling.type": "none", "attention.sliding_window": 0}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", gguf_floats.WRITTEN)
def test_files_of_folders_have_its_tensors_and_metadata(name, convert, tmp_path, monkeypatch):
    """By the ``gguf`` package; tokenizers are compared in ``test_gguf_tokenizer.py``."""
    theirs = saved(name, tmp_path / "model")
    ends = theirs.config.eos_token_id
    words = {"tokenizer.ggml.tokens": list(map(str, range(320)))}
    words |= {"tokenizer.ggml.eos_token_id": ends} if isinstance(ends, int) else {}
    monkeypatch.setattr(gguf_floats, "tokenizer_metadata", lambda *_: words)
    monkeypatch.setattr(gguf_floats, "check_same", lambda *_: None)
    config = ModelConfig.from_pretrained(tmp_path / "model")
    with open_checkpoint(tmp_path / "model") as checkpoint:
        gguf_floats.write_gguf_floats(config, checkpoint, tmp_path / "ours.gguf")
    convert(tmp_path / "model", tmp_path / "theirs.gguf")
    ours, expected = (gguf.GGUFReader(tmp_path / f"{each}.gguf") for each in ("ours", "theirs"))
    tensors, wanted = ({t.name: t.data for t in each.tensors} for each in (ours, expected))
    assert tensors.keys() == wanted.keys()
    for key, values in wanted.items():
        assert values.shape == tensors[key].shape, key
        assert abs(values - tensors[key]).max() <= 1e-6, key
    prefix = f"{expected.fields['general.architecture'].contents()}."
    for key, field in expected.fields.items():
        if key.startswith(prefix):
            found, value = ours.fields.get(key), field.contents()
            if found is None:
                assert value == DEFAULTS[key.removeprefix(prefix)], key
            else:
                assert found.contents() == value, key
