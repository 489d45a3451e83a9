"""MiniMax-Text-01 as MiniMax publishes it: names of its config.json, and heads that are rotated in
part, which transformers' class of it doesn't do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from on_cpu import on_cpu
from tiny import TINY, reference, save
from transformers.models.minimax import modeling_minimax
from transformers.models.minimax_m2.modeling_minimax_m2 import apply_rotary_pos_emb

from exkv import Cache, ModelConfig
from exkv.checkpoint.families import FAMILIES

IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))


def published(folder: Path, name: str, rotary_dim: int, **changes: object) -> Path:
    """The folder with config.json in MiniMax's form."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    for part, own in (("full_attn", "full_attention"), ("linear_attn", "linear_attention")):
        for factor in ("alpha", "beta"):
            values[f"layernorm_{own}_{factor}"] = values.pop(f"{part}_{factor}_factor")
    for factor in ("alpha", "beta"):
        values[f"layernorm_mlp_{factor}"] = values.pop(f"mlp_{factor}_factor")
    kinds = values.pop("layer_types")
    values["attn_type_list"] = [int(kind == "full_attention") for kind in kinds]
    values["rope_theta"] = values.pop("rope_parameters")["rope_theta"]
    values |= {"architectures": [name], "model_type": "minimax_text_01", "rotary_dim": rotary_dim}
    values |= {"postnorm": True, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid"}
    file.write_text(json.dumps(values | changes))
    return folder


@pytest.mark.parametrize(
    ("name", "part"), [("MiniMaxText01ForCausalLM", 1.0), ("MiniMaxM1ForCausalLM", 0.5)]
)
@torch.no_grad()
def test_logits_are_transformers(tmp_path, monkeypatch, name, part):
    monkeypatch.setattr(modeling_minimax, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    theirs = reference(TINY["MiniMaxForCausalLM"]())
    width = int(part * theirs.model.layers[2].self_attn.head_dim)
    folder = published(save(theirs, tmp_path), name, width)
    theta = theirs.config.rope_parameters["rope_theta"]
    theirs.model.rotary_emb.inv_freq = theta ** (-torch.arange(0, width, 2) / width)
    assert ModelConfig.from_pretrained(folder).architecture == "MiniMaxForCausalLM"
    model = on_cpu(folder, dtype=torch.float32)
    cache = Cache(model, 64, 2)
    found = torch.cat([model.forward(IDS[:, :29], cache), model.forward(IDS[:, 29:], cache)], 1)
    expected = theirs(IDS).logits
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"postnorm": False}, "postnorm False"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size 64"),
        ({"attn_type_list": [0, 2]}, "attn_type_list must be a list of 0 and 1"),
    ],
    ids=str,
)
def test_what_is_not_done_is_refused(tmp_path, changes, said):
    save(reference(TINY["MiniMaxForCausalLM"]()), tmp_path)
    folder = published(tmp_path, "MiniMaxText01ForCausalLM", 16, **changes)
    with pytest.raises(ValueError, match=said):
        ModelConfig.from_pretrained(folder)


def test_no_two_architectures_have_one_published_name():
    names = [each for family in FAMILIES.values() for each in family.published]
    assert len({*names, *FAMILIES}) == len(names) + len(FAMILIES)
