"""``exkv plan`` for models that only transformers runs."""

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
def test_plan_matches_plan_device_map(tmp_path, capsys, name):
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


def test_multimodal_model_is_planned_for_text(tmp_path, capsys):
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


def test_refusals_are_reported(tmp_path, capsys, monkeypatch):
    saved(tmp_path, "Mamba2ForCausalLM")
    small = ("--devices", "400K", "--margin", "0", "--allocator", "exact", "--max-seq-len", 64)
    status, out, _ = plan(capsys, tmp_path, *small)
    assert status == 1 and "transformers runs Mamba2ForCausalLM" in out
    assert "no room for " in out and "too few" in out
    status, _, err = plan(capsys, tmp_path, *small, "--cache", "best")
    assert status == 2 and "--cache best: for models that exkv runs itself" in err
    status, _, err = plan(capsys, tmp_path, "--devices", "1G")
    assert status == 2 and "give --max-seq-len" in err
    for name in ("measuring", "placing"):  # make their import fail
        monkeypatch.setitem(sys.modules, f"exkv.integrations.transformers.{name}", None)
    status, _, err = plan(capsys, tmp_path, *small)
    assert status == 2 and "'Mamba2ForCausalLM' is not supported" in err
    assert "pip install 'exkv[hf]'" in err
