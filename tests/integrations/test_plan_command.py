"""``exkv plan`` of models that exkv has no file for and transformers runs."""

from __future__ import annotations

import json
import sys

import pytest
from hf_families import ENCODER_DECODERS, WITH_STATES
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

from exkv.cli import main
from exkv.integrations.transformers import plan_device_map


def plan(capsys, *arguments):
    try:
        status = main(["plan", *map(str, arguments)])
    except SystemExit as ended:
        status = ended.code
    return status, *capsys.readouterr()


def saved(folder, name):
    config = {**WITH_STATES, **ENCODER_DECODERS}[name]()
    config.architectures = [name]
    config.save_pretrained(folder)
    return config


@pytest.mark.parametrize("name", ["Mamba2ForCausalLM", "BartForConditionalGeneration"])
def test_a_model_of_transformers_is_planned_as_the_map_for_it_is(tmp_path, capsys, name):
    config = saved(tmp_path, name)
    call = ("--devices", "1G,1G", "--max-seq-len", 64, "--cache", "8bit", "--objective", "balance")
    status, out, err = plan(capsys, tmp_path, *call, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["runs_with"] == "transformers" and f"transformers runs {name}" in found["answer"]
    assert found["device_map"] == plan_device_map(
        config, max_seq_len=64, cache="8bit", devices="1G,1G", objective="balance"
    )
    ledgers = found["plans"][0]["ledgers"]
    assert all(ledger["weights"] and ledger["workspace"] for ledger in ledgers)


def test_a_model_of_images_and_text_is_planned_at_its_texts_length(tmp_path, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    text = LlamaConfig(**sizes, num_attention_heads=4, vocab_size=320, max_position_embeddings=96)
    images = CLIPVisionConfig(**sizes, num_attention_heads=4, image_size=28, patch_size=14)
    config = LlavaConfig(text_config=text, vision_config=images, image_token_index=319)
    config.architectures = ["LlavaForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    call = ("--devices", "1G,1G", "--objective", "balance", "--json")
    status, out, err = plan(capsys, tmp_path, *call)
    assert status == 0, err
    found = json.loads(out)
    expected = plan_device_map(config, max_seq_len=96, devices="1G,1G", objective="balance")
    assert found["device_map"] == expected
    assert any("vision_tower" in name for name in expected)


def test_what_does_not_fit_or_is_not_asked_of_such_models_is_said(tmp_path, capsys, monkeypatch):
    saved(tmp_path, "Mamba2ForCausalLM")
    small = ("--devices", "400K", "--margin", "0", "--allocator", "exact", "--max-seq-len", 64)
    status, out, _ = plan(capsys, tmp_path, *small)
    assert status == 1 and "transformers runs Mamba2ForCausalLM" in out
    assert "no room for " in out and "too few" in out
    status, _, err = plan(capsys, tmp_path, *small, "--cache", "best")
    assert status == 2 and "--cache best: for models that exkv runs itself" in err
    status, _, err = plan(capsys, tmp_path, "--devices", "1G")
    assert status == 2 and "--max-seq-len is needed" in err
    for name in ("measuring", "placing"):  # an import of them fails
        monkeypatch.setitem(sys.modules, f"exkv.integrations.transformers.{name}", None)
    status, _, err = plan(capsys, tmp_path, *small)
    assert status == 2 and "'Mamba2ForCausalLM' is not supported" in err
    assert "pip install 'exkv[hf]'" in err
