"""Step 3.7 as StepFun's files state it: layer by layer, with lists that continue after the
layers."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import ROPE, TINY, reference, save

from exkv import Model, ModelConfig

NAME = "Step3p7ForConditionalGeneration"
IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))
#: What the tiny config says in this way; the fourth layer proposes tokens.
STATED = {
    "num_nextn_predict_layers": 1,
    "layer_types": ["sliding_attention", *["full_attention"] * 3],
    "moe_layers_enum": "0,2",
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6},
    "rope_theta": [1e3, 5e5, 5e5, 5e5],
    "partial_rotary_factors": [1.0, 0.5, 0.5, 0.5],
    "rope_scaling": ROPE["llama3"],
    "swiglu_limits": [0.0, 0.0, 0.03, 0.0],
    "swiglu_limits_shared": [None, 0.03, 0.02, 0.0],
}
#: Keys under other names, and those that STATED replaces.
RENAMED = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
}
REPLACED = ("mlp_layer_types", "num_sliding_attention_heads", "per_layer_config", "rope_parameters")


def stated(values: dict) -> dict:
    """The text model's settings in StepFun's form."""
    kept = {key: value for key, value in values.items() if key not in REPLACED}
    return {RENAMED.get(key, key): value for key, value in kept.items()} | STATED


@torch.no_grad()
def test_what_is_stated_by_layer_gives_the_same_logits(tmp_path):
    theirs = reference(TINY[NAME]())
    file = save(theirs, tmp_path) / "config.json"
    plain = ModelConfig.from_pretrained(tmp_path)
    values = json.loads(file.read_text())
    values["text_config"] = stated(values["text_config"])
    file.write_text(json.dumps(values))
    model = Model(tmp_path)
    assert model.config == plain
    model.load(devices=["cpu"])
    torch.testing.assert_close(model.forward(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": [1e3, 5e5, 1e4]}, "rope_theta: layers of the type full_attention have"),
        ({"moe_layers_enum": "0,two"}, "moe_layers_enum must be layers"),
        ({"swiglu_limits": [0.0]}, "swiglu_limits names 1 layers"),
        ({"swiglu_limits": [0.0, -1, 0]}, "swiglu_limits must be a list of numbers"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config must have"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "must have an object for each of sliding"),
    ],
    ids=str,
)
def test_settings_by_layer_that_are_none_are_refused(changes, message):
    values = stated(TINY[NAME]().get_text_config().to_dict()) | {"num_nextn_predict_layers": 0}
    lists = {key: x[:3] for key, x in STATED.items() if isinstance(x, list)}
    text = {**values, **lists, **changes}
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({"architectures": [NAME], "text_config": text})
