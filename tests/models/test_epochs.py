"""Memos about layers and stores from one call to the next: none is used after a change."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import tiny
import torch
from native import needs_kernels
from runs import Readable, bound_runs
from torch import nn

from exkv import CACHES, Model, epochs
from exkv.cache import KVCache
from exkv.cache.growth import Dynamic
from exkv.cache.storage import Storage
from exkv.epochs import WatchedDict
from exkv.models.decoder import DecoderLayer

PROMPT = torch.arange(3, 40).unsqueeze(0)
pytestmark = needs_kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tiny.reference(tiny.llama()), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def case(folder) -> tuple[Model, KVCache]:
    """A model, and a cache for it whose layers are bound."""
    model = Model(folder, dtype=torch.float32)
    cache = CACHES["dynamic"](model, 64)
    model.load_autosplit(cache, devices=["cpu"])
    begun(model, cache)
    return model, cache


def begun(model: Model, cache: KVCache) -> None:
    model.forward(PROMPT, cache, preprocess_only=True)
    assert step(model, cache)[1] == 1
    assert model._runs._bound[cache][0, None].count == len(model.units)


def step(model: Model, cache: KVCache) -> tuple[torch.Tensor, int]:
    """Logits of the token after the prompt, and the number of runs; module by module it gives the
    same bits."""
    cache.crop(PROMPT.shape[1])
    with bound_runs() as runs:
        logits = model.forward(torch.tensor([[5]]), cache)
    assert torch.equal(logits, one_by_one(model, cache))
    return logits, len(runs)


def one_by_one(model: Model, cache: KVCache) -> torch.Tensor:
    """Likewise, by the modules themselves."""
    cache.crop(PROMPT.shape[1])
    with Readable(), bound_runs() as runs:
        logits = model.forward(torch.tensor([[5]]), cache)
    assert not runs
    return logits


def other(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach() * 0.5 + 0.01, requires_grad=False)


def changed_copy(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    for weight in module.parameters():
        weight.data = other(weight).data
    return module


def weight_is_set(layer: DecoderLayer) -> None:
    layer.self_attn.o_proj.weight = other(layer.self_attn.o_proj.weight)


def weight_is_set_in_its_dictionary(layer: DecoderLayer) -> None:
    layer.mlp.down_proj._parameters["weight"] = other(layer.mlp.down_proj.weight)


def weight_is_updated_in_its_dictionary(layer: DecoderLayer) -> None:
    layer.mlp.down_proj._parameters.update(weight=other(layer.mlp.down_proj.weight))


def weight_gets_other_data(layer: DecoderLayer) -> None:
    layer.self_attn.v_proj.weight.data = other(layer.self_attn.v_proj.weight).data


def weight_is_deleted_and_registered(layer: DecoderLayer) -> None:
    weight = other(layer.mlp.up_proj.weight)
    del layer.mlp.up_proj.weight
    layer.mlp.up_proj.register_parameter("weight", weight)


def bias_is_set(layer: DecoderLayer) -> None:
    layer.self_attn.o_proj.bias = nn.Parameter(torch.full((128,), 0.5))


def norm_gets_a_weight(layer: DecoderLayer) -> None:
    layer.post_attention_layernorm.weight = other(layer.input_layernorm.weight)


def norm_gets_an_epsilon(layer: DecoderLayer) -> None:
    layer.input_layernorm.eps = layer.post_attention_layernorm.eps = 0.5


def one_norm_gets_an_epsilon(layer: DecoderLayer) -> None:
    layer.post_attention_layernorm.eps = 0.5


def network_is_replaced(layer: DecoderLayer) -> None:
    layer.mlp = changed_copy(layer.mlp)


def act_is_replaced(layer: DecoderLayer) -> None:
    layer.mlp.act = "gelu_pytorch_tanh"


def map_is_replaced(layer: DecoderLayer) -> None:  # as an adapter that is merged
    layer.self_attn.q_proj = changed_copy(layer.self_attn.q_proj)


def parameters_are_moved(layer: DecoderLayer) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        layer._apply(other)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def state_is_assigned(layer: DecoderLayer) -> None:
    layer.load_state_dict(changed_copy(layer).state_dict(), assign=True)


def forward_is_replaced(layer: DecoderLayer) -> None:
    forward = layer.forward
    layer.forward = lambda x, *rest: forward(x * 1.5, *rest)


def hook_is_registered(layer: DecoderLayer) -> None:
    layer.register_forward_hook(lambda module, args, x: x * 1.5)


def pre_hook_is_registered(layer: DecoderLayer) -> None:
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))


LAYER_CHANGES = {
    weight_is_set: 1,
    weight_is_set_in_its_dictionary: 1,
    weight_is_updated_in_its_dictionary: 1,
    weight_gets_other_data: 1,
    weight_is_deleted_and_registered: 1,
    bias_is_set: 1,
    norm_gets_a_weight: 1,
    norm_gets_an_epsilon: 1,
    one_norm_gets_an_epsilon: 1,
    network_is_replaced: 1,
    act_is_replaced: 1,
    map_is_replaced: 1,
    parameters_are_moved: 1,
    state_is_assigned: 1,
    forward_is_replaced: 2,
    hook_is_registered: 2,
    pre_hook_is_registered: 2,
}


@pytest.mark.parametrize(
    ("change", "runs"), LAYER_CHANGES.items(), ids=[change.__name__ for change in LAYER_CHANGES]
)
def test_a_layer_that_is_changed_is_so_in_the_next_call(
    case: tuple[Model, KVCache], change: Callable[[DecoderLayer], None], runs: int
):
    before, _ = step(*case)
    change(case[0].units[2].module)
    after, count = step(*case)
    assert count == runs
    assert torch.equal(after, one_by_one(*case))
    assert not torch.allclose(after, before, atol=1e-4)


def test_layers_are_bound_again_once_nobody_watches_them(case):
    before, _ = step(*case)
    handle = case[0].units[2].module.register_forward_hook(lambda *call: None)
    assert step(*case)[1] == step(*case)[1] == 2
    handle.remove()
    after, runs = step(*case)
    assert runs == 1 and torch.equal(after, before)


def test_attention_with_a_foreign_part_is_asked_for(case):
    layer = case[0].units[2].module
    foreign = nn.Linear(128, 128, bias=False)
    foreign.weight = other(layer.self_attn.o_proj.weight)
    layer.self_attn.o_proj = foreign
    first, runs = step(*case)
    assert runs == 1
    foreign.weight = other(foreign.weight)
    second, _ = step(*case)
    assert not torch.equal(first, second)


def test_a_layer_with_a_foreign_norm_goes_on_its_own(case):
    layer = case[0].units[2].module
    layer.input_layernorm.forward = lambda x: x * 2
    first, runs = step(*case)
    assert runs == 2
    layer.input_layernorm.forward = lambda x: x * 3
    second, _ = step(*case)
    assert not torch.equal(first, second)


def test_attention_whose_dictionaries_are_not_watched_is_asked_for(case):
    part = case[0].units[2].module.self_attn.o_proj
    part._parameters = dict(part._parameters)
    first, runs = step(*case)
    assert runs == 1
    part._parameters["weight"] = other(part.weight)
    second, _ = step(*case)
    assert not torch.equal(first, second)


def test_units_that_get_other_modules_or_go_are_looked_at_again(case):
    model, cache = case
    module = changed_copy(model.units[3].module)
    before, _ = step(*case)
    model.units[3].module = module
    after, _ = step(*case)
    assert torch.equal(after, one_by_one(*case))
    assert not torch.equal(after, before)
    assert step(*case)[1] == 1
    model.units[3].release()
    with pytest.raises(ValueError, match="not loaded"):
        step(*case)
    model.unload()
    model.load_autosplit(cache, devices=["cpu"])
    begun(*case)
    assert torch.equal(step(*case)[0], before)


def test_layers_that_are_read_one_by_one_are_bound_once_they_are_there(folder, case):
    model = Model(folder, dtype=torch.float32)
    cache = CACHES["dynamic"](model, 64)
    model.load(lazy=True, devices=["cpu"])
    with bound_runs() as runs:
        model.forward(torch.tensor([[3]]), cache)
    assert runs == [1] * 4  # each was read when it was its turn
    cache.reset()
    begun(model, cache)
    assert torch.equal(step(model, cache)[0], step(*case)[0])


def test_models_and_caches_are_known_by_themselves(folder, case):
    model, cache = case
    mine, _ = step(*case)
    theirs = Model(folder, dtype=torch.float32)
    second = CACHES["dynamic"](theirs, 64)
    theirs.load_autosplit(second, devices=["cpu"])
    for unit in theirs.units[1:-1]:
        unit.module = changed_copy(unit.module)
    third = CACHES["8bit"](model, 64)
    begun(theirs, second)
    begun(model, third)
    for each in ((theirs, second), (model, third)):
        assert torch.equal(step(*case)[0], mine)
        found, runs = step(*each)
        assert runs == 1
        assert torch.equal(found, one_by_one(*each))
        assert not torch.equal(found, mine)


# Stores ---------------------------------------------------------------------------------------


def test_a_cache_that_grows_or_shrinks_is_read_where_it_lies(folder, case):
    model, cache = case
    small = KVCache(model, 64, growth=Dynamic(block=4))
    for token in range(3, 30):
        ids = torch.tensor([[token]])
        assert torch.equal(model.forward(ids, small), one_more(model, ids, token - 3))
    small.reset()
    assert small.layers[0].room == 4
    assert torch.equal(model.forward(torch.tensor([[3]]), small), one_more(model, ids * 0 + 3, 0))


def one_more(model: Model, ids: torch.Tensor, past: int) -> torch.Tensor:
    """Logits of the token after ``past`` others, 3, 4, ..., in a cache that doesn't grow."""
    cache = KVCache(model, 64)
    for token in range(3, 3 + past):
        model.forward(torch.tensor([[token]]), cache)
    return model.forward(ids, cache)


def test_a_cache_that_is_lent_or_converted_is_so_at_once(case):
    model, cache = case
    before, _ = step(*case)
    cache.crop(PROMPT.shape[1])
    fork = cache.fork()
    own, runs = fork_step(model, fork)
    assert runs == 1  # which asks the fork for attention
    assert torch.allclose(own, before, atol=1e-4)
    cache.crop(3)  # what the fork reads is left to it
    model.forward(torch.full((1, 34), 9), cache)
    after, runs = step(*case)
    assert runs == 1 and torch.equal(after, one_by_one(*case))
    assert torch.equal(fork_step(model, fork)[0], own)
    del fork
    gc.collect()
    cache.convert(storage=Storage(keys="int8", values="int8"))
    rounded, runs = step(*case)
    assert runs == 1 and torch.equal(rounded, one_by_one(*case))
    assert not torch.equal(rounded, after)


def fork_step(model: Model, fork: KVCache) -> tuple[torch.Tensor, int]:
    with bound_runs() as runs:
        logits = model.forward(torch.tensor([[5]]), fork)
    fork.crop(PROMPT.shape[1])
    return logits, len(runs)


def test_a_layer_of_a_cache_that_has_another_way_is_asked(case):
    before, _ = step(*case)
    layer = case[1].layers[2]
    attend, calls = layer.attend, []
    layer.attend = lambda *given: calls.append(1) or attend(*given)
    after, runs = step(*case)
    assert runs == 1 and len(calls) == 2 and torch.equal(after, before)  # and module by module


def test_tensors_that_are_replaced_in_place_are_so_at_once(case):
    before, _ = step(*case)
    tensors = case[1].layers[2].tensors
    for name in list(tensors):
        tensors[name] = tensors[name] * 0.5
    after, _ = step(*case)
    assert torch.equal(after, one_by_one(*case))
    assert not torch.equal(after, before)


def test_no_tensor_is_held_for_what_is_known_of_it(case):
    model, cache = case
    weight = weakref.ref(model.units[2].module.mlp.up_proj.weight)
    weight_of(model).weight = other(weight())
    assert weight() is None
    step(*case)
    store = weakref.ref(cache.layers[1].tensors["k"])
    cache.free()
    assert store() is None
    model.forward(PROMPT, cache)
    step(*case)
    store, weight = weakref.ref(cache.layers[1].tensors["k"]), weakref.ref(weight_of(model).weight)
    model.unload()
    assert store() is None and weight() is None


def weight_of(model: Model) -> nn.Module:
    return model.units[2].module.mlp.up_proj


def test_a_cache_that_is_dropped_holds_nothing(case):
    model, _ = case
    cache = CACHES["dynamic"](model, 64)
    begun(model, cache)
    store = weakref.ref(cache.layers[1].tensors["k"])
    del cache
    gc.collect()
    assert store() is None


# The mechanism --------------------------------------------------------------------------------


class Held:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_what_is_bound_is_released_once_when_its_epoch_ends():
    held = Held()
    epochs.bind(held, epochs.current())
    assert held.released == 0
    epochs.advance()
    epochs.advance()
    assert held.released == 1


def test_what_was_found_before_a_change_is_not_bound_after_it():
    held, epoch = Held(), epochs.current()
    epochs.advance()
    epochs.bind(held, epoch)  # too late
    assert held.released == 1


def test_what_is_bound_is_not_kept_alive_by_that():
    held = Held()
    gone = weakref.ref(held)
    epochs.bind(held, epochs.current())
    del held
    assert gone() is None
    epochs.advance()


@pytest.mark.parametrize(
    "change",
    [
        lambda watched: watched.__setitem__("b", 2),
        lambda watched: watched.__delitem__("a"),
        lambda watched: watched.pop("a"),
        lambda watched: watched.popitem(),
        lambda watched: watched.setdefault("b", 2),
        lambda watched: watched.update(b=2),
        lambda watched: watched.__ior__({"b": 2}),
        lambda watched: watched.clear(),
    ],
)
def test_every_change_of_a_watched_dictionary_advances_the_epoch(change):
    watched = WatchedDict(a=1)
    before = epochs.current()
    assert watched["a"] == 1 and watched.get("b") is None
    assert epochs.current() == before
    change(watched)
    assert epochs.current() > before
