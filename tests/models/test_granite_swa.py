"""Granite Swash's bases of rotary frequencies, stated layer by layer."""

from __future__ import annotations

import pytest
import torch
from tiny import TINY, loaded, reference

from exkv import ModelConfig

NAME = "GraniteSWAForCausalLM"
IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", [NAME, "GraniteMoeSWAForCausalLM"])
@pytest.mark.parametrize(
    "changes",
    [
        {"layer_rope_theta": None},
        {"layer_rope_theta": [0, 0]},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e3}},
    ],
    ids=str,
)
@torch.no_grad()
def test_positions_are_transformers(name, changes, tmp_path):
    config = TINY[name](**changes)
    found = loaded(config, tmp_path).forward(IDS)
    torch.testing.assert_close(found, reference(config)(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("bases", "message"),
    [
        ([1e4, 1e4, 1e4, 5e5], "sliding_attention have the bases"),
        ([1e4] * 3, "names 3 layers, and num_hidden_layers is 4"),
        ([1e4, -1, 1e4, 1e4], "must be a list of numbers, 0 or more"),
    ],
)
def test_bases_that_no_two_tables_hold_are_refused(bases, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(
            {"architectures": [NAME], "num_hidden_layers": 4, "layer_rope_theta": bases}
        )
