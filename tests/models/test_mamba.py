"""Layers of Mamba: what config.json says of them, and what of it the tests over all architectures
leave alone."""

from __future__ import annotations

import json

import pytest
import torch
from on_cpu import on_cpu
from tiny import TINY, reference, save

from exkv import CACHES, Cache, Model, ModelConfig
from exkv.cache.spec import placed

IDS = torch.randint(3, 320, (2, 80), generator=torch.Generator().manual_seed(1))
BAMBA = TINY["BambaForCausalLM"]().to_dict() | {"architectures": ["BambaForCausalLM"]}


@torch.no_grad()
@pytest.mark.parametrize("name", ["BambaForCausalLM", "GraniteMoeHybridForCausalLM"])
def test_steps_are_limited_as_transformers_limits_them(name, tmp_path):
    """Over several tokens: transformers doesn't limit steps in single-token calls."""
    limited = reference(TINY[name](time_step_limit=(0.68, 0.7)))
    model = on_cpu(save(limited, tmp_path), max_input_len=32)
    expected, free = limited(IDS).logits, reference(TINY[name]())(IDS).logits
    found = model.forward(IDS, Cache(model, batch_size=2))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert (free - expected).abs().max() > 1e-2 * expected.abs().max()


def test_configs_of_transformers_4_name_layers_otherwise_and_leave_out_heads_sizes():
    values = TINY["GraniteMoeHybridForCausalLM"]().to_dict()
    values |= {"architectures": ["GraniteMoeHybridForCausalLM"], "mamba_d_head": "auto"}
    older = values | {"layer_types": ["mamba", "attention"], "position_embedding_type": "nope"}
    config = ModelConfig.from_dict(older)
    assert config.layer_types == ("linear_attention", "full_attention")
    assert config.specific.mamba_d_head == 32 and config.rotated == (False, False)
    shapes = {each.name: each.shape for each in config.state(0)}
    assert shapes == {"conv": (3, 128 + 2 * 32), "recurrent": (4, 16, 32)}
    assert config.state(1) is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mamba_d_head": 8}, "4 times mamba_d_head 8 is not mamba_expand . hidden_size"),
        ({"mamba_n_groups": 3}, "mamba_n_heads 4 is not a multiple of mamba_n_groups 3"),
        ({"mamba_d_conv": 1}, "mamba_d_conv 1: a convolution is over at least 2 tokens"),
        ({"time_step_limit": [1, 0]}, "time_step_limit must be two numbers"),
        ({"time_step_limit": 3}, "time_step_limit must be two numbers"),
        ({"attn_layer_indices": ["1"]}, "attn_layer_indices must be a list of integers"),
        ({"mamba_d_state": 1 << 20}, "mamba_d_state 1048576 is more than"),
        ({"mamba_conv_bias": "yes"}, "mamba_conv_bias must be true or false"),
    ],
)
def test_settings_that_make_no_layer_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**BAMBA, **changes})


def test_a_limit_without_end_is_read_as_python_and_as_transformers_write_it():
    for text in ("[0.0, Infinity]", '[0, {"__float__": "Infinity"}]'):
        config = ModelConfig.from_dict({**BAMBA, "time_step_limit": json.loads(text)})
        assert config.specific.time_step_limit == (0.0, float("inf"))


@pytest.mark.parametrize("kind", CACHES)
def test_a_state_beside_keys_and_values_is_a_cache_layer_on_their_device(kind):
    values = TINY["FalconH1ForCausalLM"](num_hidden_layers=3).to_dict()
    config = ModelConfig.from_dict(values | {"architectures": ["FalconH1ForCausalLM"]})
    model = Model(config, dtype=torch.float32)
    cache = CACHES[kind](model, 64)
    specs = [layer.spec for layer in cache.layers]
    assert [spec.beside for spec in specs] == [None] * 3 + [0, 1, 2]
    assert [spec.state is None for spec in specs] == [True] * 3 + [False] * 3
    assert [len(layer.parts) for layer in cache.layers] == [2] * 3 + [1] * 3
    assert cache.layers[1].beside is cache.layers[4]
    there = torch.device("cpu")
    assert placed(specs, {1: there}) == {1: there, 4: there}
    cache.allocate({1: there})
    assert [layer.device for layer in cache.layers] == [None, there, None, None, there, None]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mamba_d_ssm": 100}, "4 times mamba_d_head 24 is not mamba_d_ssm 100"),
        ({"mamba_d_ssm": None}, "is not mamba_expand . hidden_size 128"),
        ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers must be 5 numbers, not 4"),
        ({"mlp_multipliers": 2.0}, "mlp_multipliers must be a list of numbers, not 2.0"),
        ({"key_multiplier": "1"}, "key_multiplier must be a positive number"),
    ],
)
def test_multipliers_and_sizes_that_are_none_are_refused(changes, message):
    values = TINY["FalconH1ForCausalLM"]().to_dict() | {"architectures": ["FalconH1ForCausalLM"]}
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**values, **changes})


def nemotron(**changes: object) -> ModelConfig:
    values = TINY["NemotronHForCausalLM"]().to_dict() | {"architectures": ["NemotronHForCausalLM"]}
    return ModelConfig.from_dict({**values, **changes})


def test_a_pattern_says_of_each_layer_which_one_it_is():
    config = nemotron(layers_block_type=None, hybrid_override_pattern="M-M*E", num_hidden_layers=9)
    kinds = ("linear_attention", "mlp", "linear_attention", "full_attention", "moe")
    assert config.layer_types == kinds and config.num_hidden_layers == 5
    assert [config.state(layer) for layer in (1, 3, 4)] == [(), None, ()]
    with pytest.raises(ValueError, match="hybrid_override_pattern must be of M, E, ., -, a letter"):
        nemotron(layers_block_type=None, hybrid_override_pattern="MX")
    with pytest.raises(ValueError, match=r"layer_types\[0\] is 'sliding_attention'"):
        nemotron(layers_block_type=["sliding_attention"])


@torch.no_grad()
@pytest.mark.parametrize("kind", CACHES)
def test_layers_that_keep_nothing_take_no_bytes_and_need_no_run_again(kind, tmp_path):
    """Without states, a cropped row continues directly, and forks share what is stored."""
    types = ["full_attention", "mlp", "moe", "full_attention"]
    theirs = reference(TINY["NemotronHForCausalLM"](layers_block_type=types))
    model = on_cpu(save(theirs, tmp_path), max_input_len=16)
    cache = CACHES[kind](model, 64)
    taken = [layer.full_bytes() for layer in cache.layers]
    assert taken[1] == taken[2] == 0 and taken[0] == taken[3] > 0
    model.forward(IDS[:1, :30], cache)
    fork = cache.fork(2)
    fork.crop(25)
    assert bool(fork.stale) == cache.layers[0].spec.arrangement.lost(30, 25)
    ids = IDS[:1, 25:26].expand(2, -1)
    if kind == "fp16":
        found = model.forward(ids, fork)[:, 0]
        expected = theirs(IDS[:1, :26]).logits[:, -1].expand(2, -1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def jamba(**changes: object) -> ModelConfig:
    values = TINY["JambaForCausalLM"]().to_dict() | {"architectures": ["JambaForCausalLM"]}
    return ModelConfig.from_dict({**values, **changes})


def test_periods_say_which_layers_attend_and_which_have_experts():
    config = jamba(num_hidden_layers=8, attn_layer_period=4, attn_layer_offset=2, num_experts=2)
    attend = [layer for layer in range(8) if config.state(layer) is None]
    experts = [layer for layer in range(8) if not config.specific.is_dense(layer)]
    assert attend == [2, 6] and experts == [0, 2, 4, 6]
    assert {each.name: each.shape for each in config.state(0)} == {
        "conv": (3, 128),
        "recurrent": (8, 128),
    }
    assert all(jamba(num_experts=1).specific.is_dense(layer) for layer in range(2))
    assert jamba(mamba_dt_rank="auto").specific.mamba_dt_rank == 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attn_layer_offset": 2}, "attn_layer_offset must be below attn_layer_period 2, not 2"),
        ({"expert_layer_offset": -1}, "expert_layer_offset must be below expert_layer_period 2"),
        ({"expert_layer_period": 0}, "expert_layer_period must be a positive integer"),
        ({"mamba_dt_rank": "all"}, "mamba_dt_rank must be a positive integer"),
        ({"mamba_d_conv": 1}, "mamba_d_conv 1: a convolution is over at least 2 tokens"),
    ],
)
def test_periods_and_ranks_that_are_none_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        jamba(**changes)
