"""PEFT's adapter files: settings are followed; hostile, contradictory or unsupported files are
refused by name before anything is loaded."""

from __future__ import annotations

import json
import math

import pytest
import tiny
import torch
from adapters import PREFIX, linears_of, write_adapter

from exkv import Model
from exkv.checkpoint import CheckpointError
from exkv.weights.lora import AdapterConfig, AdapterError, AdapterFolder

QUERY = "model.layers.0.self_attn.q_proj"
A, B = f"{PREFIX}{QUERY}.lora_A.weight", f"{PREFIX}{QUERY}.lora_B.weight"


@pytest.fixture(scope="module")
def reference():
    return tiny.reference(tiny.llama(num_hidden_layers=2))


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory):
    return Model(tiny.save(reference, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def queries(reference):
    return linears_of(reference, ("q_proj",))


def config_of(tmp_path, **values) -> AdapterConfig:
    values = {"peft_type": "LORA", "target_modules": ["q_proj"], **values}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    return AdapterConfig.from_folder(tmp_path)


def test_ranks_and_scales_follow_patterns(tmp_path):
    config = config_of(
        tmp_path,
        r=8,
        lora_alpha=16,
        rank_pattern={"k_proj": 4, r"layers\.1\.self_attn\.q_proj": 2},
        alpha_pattern={"k_proj": 32},
    )
    first, second = QUERY, QUERY.replace("0", "1")
    key = QUERY.replace("q_proj", "k_proj")
    assert [config.rank_of(module) for module in (first, second, key)] == [8, 2, 4]
    assert [config.scale_of(module) for module in (first, second, key)] == [2, 8, 8]
    rooted = config_of(tmp_path, r=8, lora_alpha=16, use_rslora=True)
    assert rooted.scale_of(first) == 16 / math.sqrt(8)


@pytest.mark.parametrize(
    ("values", "first", "second"),
    [
        ({}, True, True),
        ({"target_modules": [QUERY]}, True, False),
        ({"layers_to_transform": [1]}, False, True),
        ({"layers_to_transform": 0, "layers_pattern": "layers"}, True, False),
        ({"target_modules": r".*layers\.1\..*(q|k)_proj"}, False, True),
        ({"target_modules": "all-linear", "exclude_modules": [QUERY]}, False, True),
        ({"target_modules": ["proj"]}, False, False),
    ],
)
def test_targets_select_layers(tmp_path, values, first, second):
    config = config_of(tmp_path, **values)
    assert [config.is_for(QUERY), config.is_for(QUERY.replace("0", "1"))] == [first, second]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', and exkv runs LORA"),
        ({"use_dora": True}, "use_dora is True: the adapter asks for DoRA"),
        ({"bias": "all"}, "bias is 'all': it also changes the model's biases"),
        ({"modules_to_save": ["lm_head"]}, "whole matrices of its own"),
        ({"kasa_config": {"a": 1}}, "kasa_config is .* something that exkv doesn't know"),
        ({"init_lora_weights": "pissa_niter_4"}, "own matrices were changed"),
        ({"r": 0}, "r is 0: it must be an int from 1"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": 1e999}, "lora_alpha is inf|not valid JSON"),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern of 'q_proj' is '8'"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": 3}, "target_modules is 3"),
        ({"target_modules": "(.*)*x"}, "repetitions"),
        ({"target_modules": ".*a.*a.*a.*a.*a.*a"}, "has 6 repetitions; at most 5"),
        ({"alpha_pattern": {"(": 8}}, "not a regular expression"),
        ({"layers_to_transform": ["0"]}, "must be numbers of layers"),
    ],
)
def test_invalid_configs_are_refused(tmp_path, values, message):
    with pytest.raises(AdapterError, match=message) as refused:
        config_of(tmp_path, **values)
    assert "adapter_config.json" in str(refused.value) and len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({B: None}, {}, r"lora_A.weight' has no matching B"),
        ({A: torch.zeros(5, 128)}, {}, r"is \[5, 128\] and its B .* for the rank 4"),
        ({A: torch.zeros(4, 64)}, {}, r"B A of \[256, 4\] and \[4, 64\], but has \[256, 128\]"),
        ({A: torch.zeros(4, 128).to(torch.float8_e4m3fn)}, {}, "must hold floats"),
        ({f"{PREFIX}{QUERY}.lora_magnitude_vector": torch.zeros(4)}, {}, "belongs to DoRA"),
        ({f"{PREFIX}{QUERY}.lora_B.bias": torch.zeros(4)}, {}, "not a part of LoRA"),
        ({f"{PREFIX}{QUERY}.weight": torch.zeros(4)}, {}, "is a whole matrix"),
        ({A: None, B: None}, {}, "no tensors for 'model.layers.0.self_attn.q_proj', which"),
        ({}, {"target_modules": ["k_proj"]}, "target_modules and .* leave out"),
        ({}, {"r": 8}, "for the rank 8 of adapter_config.json"),
        ({}, {"peft_type": None}, "peft_type is None"),
    ],
)
def test_unmatched_tensors_are_refused(tmp_path, model, queries, tensors, config, message):
    folder = write_adapter(tmp_path / "adapter", queries, tensors=tensors, **config)
    with pytest.raises(AdapterError, match=message) as refused:
        model.load_adapter(folder)
    assert "adapter_" in str(refused.value) and len(str(refused.value)) < 600
    assert not model.adapters


def test_layers_that_the_model_does_not_have_are_refused(tmp_path, model):
    for path, message in {
        "model.layers.7.self_attn.q_proj": "is not a linear layer or embedding of this model",
        "vision_tower.layers.0.self_attn.q_proj": "is not a linear layer",
        "model.layers.0.mlp.experts.0.q_proj": "is an expert or its router",
    }.items():
        folder = write_adapter(tmp_path / path, {path: (256, 128)})
        with pytest.raises(AdapterError, match=message):
            model.load_adapter(folder)


def test_damaged_and_missing_files_are_refused(tmp_path, model, queries):
    folder = write_adapter(tmp_path / "adapter", queries)
    file = folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    for length in (4, 60, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="adapter_model.safetensors"):
            model.load_adapter(folder)
    file.unlink()
    (folder / "adapter_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="a pickle, which may run code"):
        model.load_adapter(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match="adapter_config.json is missing"):
        model.load_adapter(folder)
    assert not model.adapters


@pytest.mark.parametrize(("name", "shape"), [(A, (4, 128)), (B, (256, 4))])
def test_a_number_that_is_not_finite_is_refused(tmp_path, model, queries, name, shape):
    values = torch.zeros(shape)
    values[1, 2] = torch.inf
    write_adapter(tmp_path, queries, tensors={name: values})
    model.load(devices=["cpu"])
    try:
        place = shape[1] + 2
        with pytest.raises(AdapterError, match=rf"{name}.*number {place} is NaN, infinite"):
            model.load_adapter(tmp_path)
    finally:
        model.unload()


def test_names_are_distinct_and_known(tmp_path, model, queries):
    folder = write_adapter(tmp_path / "mine", queries)
    try:
        assert model.load_adapter(folder) is model.adapters["mine"]
        with pytest.raises(ValueError, match="there is an adapter 'mine' already"):
            model.load_adapter(folder)
        with pytest.raises(ValueError, match="no adapter 'yours': .* .now: 'mine'"):
            model.unload_adapter("yours")
        for name in ("", 3):
            with pytest.raises(ValueError, match="an adapter is named"):
                model.load_adapter(folder, name)
    finally:
        model.unload_adapter("mine")
    assert not model.adapters


def test_saved_embedding_beside_an_adapter_must_be_the_models(tmp_path, model, reference):
    layers = linears_of(reference, ("embed_tokens",))
    whole = reference.model.embed_tokens.weight.data
    name = f"{PREFIX}model.embed_tokens.base_layer.weight"
    folder = write_adapter(tmp_path / "same", layers, tensors={name: whole})
    model.load_adapter(folder, "same")
    model.unload_adapter("same")
    folder = write_adapter(tmp_path / "other", layers, tensors={name: whole + 1})
    with pytest.raises(AdapterError, match="is a whole matrix that differs from the model's own"):
        model.load_adapter(folder)


def test_the_key_tells_contents_and_scales_apart(tmp_path, queries):
    folders = [
        write_adapter(tmp_path / "a", queries),
        write_adapter(tmp_path / "b", queries),
        write_adapter(tmp_path / "c", queries, seed=1),
        write_adapter(tmp_path / "d", queries, lora_alpha=8),
    ]
    a, b, c, d = (AdapterFolder(folder).fingerprint for folder in folders)
    assert a == b and len({a, c, d}) == 3
