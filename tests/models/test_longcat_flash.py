"""LongCat Flash as Meituan's files have it, without matrices of experts that return what they are
given; and several layers, of which each hands its experts' outputs to its second half alone."""

from __future__ import annotations

import pytest
import torch
from on_cpu import on_cpu
from safetensors.torch import load_file, save_file
from tiny import TINY, loaded, reference, save

NAME = "LongcatFlashForCausalLM"
IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_experts_without_matrices_need_none_in_the_file(tmp_path):
    theirs = reference(TINY[NAME]())
    file = save(theirs, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    unused = tuple(f"model.layers.0.mlp.experts.{expert}." for expert in (4, 5))
    assert any(name.startswith(unused) for name in tensors)
    save_file({name: x for name, x in tensors.items() if not name.startswith(unused)}, file)
    model = on_cpu(tmp_path)
    torch.testing.assert_close(model.forward(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{"num_layers": 3}, {"zero_expert_num": 0}], ids=str)
@torch.no_grad()
def test_layers_and_experts_of_other_numbers_give_transformers_logits(changes, tmp_path):
    config = TINY[NAME](**changes)
    model = loaded(config, tmp_path)
    assert model.config.num_hidden_layers == 2 * config.num_layers
    expected = reference(config)(IDS).logits
    torch.testing.assert_close(model.forward(IDS), expected, rtol=1e-4, atol=1e-4)
