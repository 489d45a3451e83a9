"""What is computed otherwise than its type says is computed so in every call: a subclass, a method
of an instance, a hook anywhere, a missing norm. Decode steps are compared with the same text in one
call without a cache, which runs module by module, and with the model as it was."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import tiny
import torch
from on_cpu import on_cpu
from torch import nn
from torch.utils._pytree import tree_map

from exkv import Cache, Model, epochs
from exkv.layers import MLP, Attention, GatedMLP, Linear, RMSNorm
from exkv.models.decoder import DecoderLayer, Head, SandwichLayer, TokenEmbedding

IDS = torch.randint(3, 320, (1, 12), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: tiny.save(tiny.reference(tiny.TINY[name]()), tmp_path_factory.mktemp(name))
        for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM")
    }


def loaded(folder) -> Model:
    return on_cpu(folder, dtype=torch.float32)


def decoded(model: Model) -> torch.Tensor:
    """Logits (T, vocabulary) of a text, token by token."""
    cache = Cache(model, 32)
    return torch.cat([model.forward(IDS[:, i : i + 1], cache)[0] for i in range(IDS.shape[1])])


def assert_noticed(model: Model, change: Callable[[Model], object]) -> None:
    before = decoded(model)
    change(model)
    after = decoded(model)
    assert not torch.allclose(after, before, atol=1e-3)
    whole = model.forward(IDS)[0]
    torch.testing.assert_close(after, whole, rtol=1e-4, atol=1e-5)


def layer(model: Model) -> nn.Module:
    return model.units[2].module


def as_subclass(module: nn.Module, **methods: Callable) -> None:
    """Give the module a class that overrides these methods."""
    module.__class__ = type("Mine", (type(module),), methods)


def other_project(self, x):
    q, k, v = Attention.project(self, x)
    return q * 0.5, k, v * 1.5


def scaled(factor: float, base: type) -> Callable:
    return lambda self, *args: base.forward(self, *args) * factor


#: Part of a layer, method, and its replacement.
METHODS = {
    "layer": (lambda m: layer(m), "forward", scaled(1.5, DecoderLayer)),
    "attention": (lambda m: layer(m).self_attn, "forward", scaled(1.5, Attention)),
    "projections": (lambda m: layer(m).self_attn, "project", other_project),
    "mlp": (lambda m: layer(m).mlp, "forward", scaled(1.5, GatedMLP)),
    "first norm": (lambda m: layer(m).input_layernorm, "forward", scaled(1.5, RMSNorm)),
    "second norm": (lambda m: layer(m).post_attention_layernorm, "forward", scaled(1.5, RMSNorm)),
    "query": (lambda m: layer(m).self_attn.q_proj, "forward", scaled(1.5, Linear)),
    "value": (lambda m: layer(m).self_attn.v_proj, "forward", scaled(1.5, Linear)),
    "output": (lambda m: layer(m).self_attn.o_proj, "forward", scaled(1.5, Linear)),
    "gate": (lambda m: layer(m).mlp.gate_proj, "forward", scaled(1.5, Linear)),
    "down": (lambda m: layer(m).mlp.down_proj, "forward", scaled(1.5, Linear)),
    "embedding": (lambda m: m.units[0].module, "forward", scaled(1.5, TokenEmbedding)),
    "head": (lambda m: m.units[-1].module, "forward", scaled(1.5, Head)),
    "last norm": (lambda m: m.units[-1].module.norm, "forward", scaled(1.5, RMSNorm)),
    "logits": (lambda m: m.units[-1].module.lm_head, "forward", scaled(1.5, Linear)),
}


@pytest.mark.parametrize("part", METHODS)
@pytest.mark.parametrize("how", ["subclass", "instance", "class"])
def test_an_overridden_method_is_run(folders, part, how, monkeypatch):
    model = loaded(folders["LlamaForCausalLM"])
    find, name, method = METHODS[part]
    kind = type(find(model))
    before = getattr(kind, name)

    def change(model: Model) -> None:
        module = find(model)
        if how == "subclass":
            as_subclass(module, **{name: method})
        elif how == "instance":
            setattr(module, name, types.MethodType(method, module))
        else:  # of all instances
            mine = lambda *args: tree_map(lambda x: x * 1.5, before(*args))  # noqa: E731
            monkeypatch.setattr(kind, name, mine)
            epochs.advance()  # of a class's attributes nobody is told

    assert_noticed(model, change)


def test_norms_over_heads_and_layers_between_norms_are_overridden_alike(folders):
    qwen, gemma = (loaded(folders[f"{name}ForCausalLM"]) for name in ("Qwen3", "Gemma2"))
    twice = scaled(2.0, RMSNorm)
    assert_noticed(qwen, lambda m: as_subclass(layer(m).self_attn.q_norm, forward=twice))
    for name in ("post_attention_layernorm", "pre_feedforward_layernorm"):
        assert_noticed(
            gemma, lambda m, name=name: as_subclass(getattr(layer(m), name), forward=twice)
        )
    assert_noticed(gemma, lambda m: as_subclass(layer(m), forward=scaled(1.5, SandwichLayer)))


class NoFirstNorm(DecoderLayer):
    """A layer that lacks a norm."""

    def forward(self, x, batch, cache):
        x, normed = self.post_attention_layernorm.of_sum(x, self.self_attn(x, batch, cache))
        return x.add_(self.mlp(normed))


def test_a_layer_that_lacks_a_norm_prefills_and_decodes(folders):
    def change(model: Model) -> None:
        del layer(model).input_layernorm
        layer(model).__class__ = NoFirstNorm

    assert_noticed(loaded(folders["LlamaForCausalLM"]), change)


class Doubled(MLP):
    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return self.mlp(x) * 2


def test_a_module_that_wraps_another_is_run(folders):
    def change(model: Model) -> None:
        layer(model).mlp = Doubled(layer(model).mlp)

    assert_noticed(loaded(folders["LlamaForCausalLM"]), change)


HOOKED = {name: find for name, (find, method, _) in METHODS.items() if method == "forward"}


@pytest.mark.parametrize("part", HOOKED)
def test_a_hook_fires_and_its_result_counts(folders, part):
    model, calls = loaded(folders["LlamaForCausalLM"]), []

    def hook(module, args, result):
        calls.append(module)
        return result * 1.5

    def change(model: Model) -> None:
        HOOKED[part](model).register_forward_hook(hook)

    assert_noticed(model, change)
    assert len(calls) == IDS.shape[1] + 1  # each step, and the call for the whole text


def test_a_hook_of_all_modules_fires_within_a_step(folders):
    model, seen = loaded(folders["LlamaForCausalLM"]), []
    cache = Cache(model, 32)
    model.forward(IDS[:, :1], cache)
    handle = nn.modules.module.register_module_forward_hook(lambda m, *rest: seen.append(type(m)))
    try:
        model.forward(IDS[:, 1:2], cache)
    finally:
        handle.remove()
    assert {DecoderLayer, Attention, GatedMLP, RMSNorm, Head, TokenEmbedding} <= set(seen)
    assert seen.count(Linear) == 7 * 4 + 1
