"""Mixtures of experts in bound runs, and attention that these ask for as a whole: the readable
way's bits, of every way to route and in the formats of weights that native code knows."""

from __future__ import annotations

import pytest
import tiny
import torch
from adapters import write_adapter
from native import needs_kernels
from packers import gguf
from runs import Readable, bound_runs
from safetensors.torch import load_file
from test_bound_run import loaded

from exkv import CACHES, Model
from exkv.layers import Experts
from exkv.layers.descriptions import ExpertsBlock
from exkv.layers.linear import linear_at
from exkv.models.native_run import BoundLayer, _stretch
from exkv.models.runs import bind

pytestmark = needs_kernels
BF16 = torch.bfloat16
#: Softmax with and without normalization, with a shared expert, with and without its gate; sigmoids
#: with a correction, by an exact router, in groups; after attention of every kind.
ROUTED = (
    *("MixtralForCausalLM", "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM"),
    *("MiniMaxM2ForCausalLM", "Glm4MoeForCausalLM", "DeepseekV2ForCausalLM"),
    *("DeepseekV3ForCausalLM", "Ernie4_5_MoeForCausalLM"),
)
#: The first is run; rows of unlike lengths, as few and as many as a run takes.
LENGTHS = ((1,), (8, 5), (1,) * 8, (2, 1, 0, 2, 1, 2, 2, 1), (3, 1, 2, 1), (1, 1))
IDS = torch.randint(3, 320, (8, 64), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: tiny.save(tiny.reference(tiny.TINY[name]()), tmp_path_factory.mktemp(name))
        for name in ROUTED
    }


def bound_experts(model: Model, cache) -> list[bool]:
    """For each layer with a mixture, whether native code runs it."""
    parts = [part for part in _stretch(model.units, cache, model.dtype)]
    layers = [part.layer for part in parts if isinstance(part, BoundLayer)]
    mlps = [unit.module.mlp for unit in model.units if unit.spec.layer is not None]
    pairs = zip(mlps, layers, strict=True)
    return [isinstance(layer.mlp, ExpertsBlock) for mlp, layer in pairs if isinstance(mlp, Experts)]


def answers(model: Model) -> list[torch.Tensor]:
    """Logits of real tokens: of prompts of unlike length, then of as many rows at once."""
    found = []
    for lengths in LENGTHS:
        cache = CACHES["fp16"](model, 64, len(lengths))
        rows, longest = len(lengths), max(lengths)
        model.forward(IDS[:rows, :20], cache, new_lens=[20 - row for row in range(rows)])
        for start in (20, 20 + longest):
            ids = IDS[:rows, start : start + longest]
            out = model.forward(ids, cache, new_lens=list(lengths))
            found += [row[:new] for row, new in zip(out, lengths, strict=True)]
    return found


def assert_bound_with_the_same_bits(model: Model) -> None:
    with bound_runs() as runs:
        found = answers(model)
    with Readable():
        expected = answers(model)
    assert all(map(torch.equal, found, expected))
    assert runs == [len(model.units)] * 2 * len(LENGTHS)
    assert all(experts := bound_experts(model, CACHES["fp16"](model, 64))) and experts


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", ROUTED)
def test_every_way_to_route_gives_the_readable_ways_bits(folders, name, dtype):
    assert_bound_with_the_same_bits(loaded(folders[name], dtype))


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_experts_of_integers_too(folders, weights):
    model = Model(folders["Qwen2MoeForCausalLM"], dtype=BF16, weights=weights)
    model.load(devices=["cpu"])
    assert_bound_with_the_same_bits(model)


def test_experts_of_a_files_blocks_too(tmp_path):
    """Each of another type than the one before, in blocks of 32 and of 256."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    theirs = tiny.reference(tiny.mixtral(**sizes))
    theirs.config.architectures = [type(theirs).__name__]
    tensors = load_file(tiny.save(theirs, tmp_path / "floats") / "model.safetensors")
    types = gguf.in_types("Q4_K", "Q6_K", "Q8_0", "Q5_K", "Q4_0")
    file = tmp_path / "m.gguf"
    gguf.write_gguf(file, theirs.config, tensors, types, experts_apart=True)
    model = Model(tmp_path / "m.gguf", dtype=BF16)
    model.load(devices=["cpu"])
    assert_bound_with_the_same_bits(model)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(folders, threads):
    before = torch.get_num_threads()
    model = loaded(folders["Glm4MoeForCausalLM"], BF16)
    with Readable():
        expected = answers(model)
    torch.set_num_threads(threads)
    try:
        assert all(map(torch.equal, answers(model), expected))
    finally:
        torch.set_num_threads(before)


def test_equal_logits_are_taken_as_the_readable_way_takes_them(folders):
    model = loaded(folders["Qwen2MoeForCausalLM"])
    for unit in model.units:
        for part in unit.module.modules():
            if isinstance(part, Experts):
                part.gate.weight.data.zero_()
    assert_bound_with_the_same_bits(model)


def test_logits_that_are_no_numbers_end_nothing(folders):
    model = loaded(folders["MixtralForCausalLM"])
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        model.units[2].module.mlp.gate.weight.data[row] = value
    cache, model._logits_checked = CACHES["fp16"](model, 64, 2), True
    with bound_runs() as runs:
        for _ in range(3):
            model.forward(IDS[:2, :3], cache)
    assert runs == [len(model.units)] * 3


# What is asked for ----------------------------------------------------------------------------


def test_attention_and_experts_with_hooks_are_asked_for(folders):
    model = loaded(folders["MixtralForCausalLM"])
    first, second, third = (model.units[index].module for index in (1, 2, 3))
    hooked = [first.self_attn, second.mlp, third.mlp.experts[0].w1]
    seen = []
    for module in hooked:
        module.register_forward_hook(lambda module, args, out: seen.append(module))
    with bound_runs() as runs:
        found = answers(model)
    assert set(runs) == {len(model.units)} and set(hooked) == set(seen)
    with Readable():
        assert all(map(torch.equal, found, answers(model)))


def test_adapters_of_a_dense_mlp_behind_attention_that_is_asked_for(folders, tmp_path):
    """Its projections are identified by their positions among all of a layer."""
    model = loaded(folders["DeepseekV3ForCausalLM"])
    names = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    linears = {name: tuple(linear_at(model.units[1].module, name[15:]).size) for name in names}
    only = r".*layers\.0\.mlp\.(gate|up|down)_proj"
    adapter = write_adapter(tmp_path / "adapter", linears, rank=3, target_modules=only)
    model.load_adapter(adapter, "one")
    first, second, without = (CACHES["kivi"](model, 64) for _ in range(3))
    with bound_runs() as runs:
        found = model.forward(IDS[:1, :3], first, adapter="one")
    assert runs == [len(model.units)]
    assert not torch.equal(found, model.forward(IDS[:1, :3], without))
    with Readable():
        assert torch.equal(found, model.forward(IDS[:1, :3], second, adapter="one"))


def test_experts_that_do_not_fit_are_refused(folders):
    model = loaded(folders["Qwen2MoeForCausalLM"])
    cache = CACHES["fp16"](model, 64)
    bound = bind(model.units, cache, model.dtype)
    hidden, inner = 128, 64
    whole = {
        "weights": [torch.randn(4, hidden), *gate_up_down(inner, hidden) * 4],
        "layouts": [0] * 4 * 13,
        "biases": [None] * 13,
        "correction": None,
        "act": "silu",
        "experts": 4,
        "shared": False,
        "router": (2, False, True, 0.0, 1, 1, 2, 1.0),
        "gated": True,
        "weighs_inputs": False,
        "narrow": False,
        "elsewhere": [],
    }

    def call(**changes: object) -> None:
        given = {**whole, **changes}
        *rest, router, gated, weighs, narrow, elsewhere = given.values()
        flags = (gated, weighs, narrow)
        add = torch.ops.exkv.add_experts
        add(new_run(hidden), *rest, *router, *flags, elsewhere=elsewhere)

    def refused(message: str, **changes: object) -> None:
        with pytest.raises(RuntimeError, match=message):
            call(**changes)

    call()
    with pytest.raises(RuntimeError, match="there is no layer without an MLP for experts"):
        *rest, router, _, _, _, _ = whole.values()
        torch.ops.exkv.add_experts(bound._handle.tensor, *rest, *router)
    refused("13 matrices are not the router's and three of each of 5 experts", experts=5)
    refused("13 matrices are not", shared=True)
    refused("12 biases of 13 matrices", biases=[None] * 12)
    refused(r"expert 1's up is \(64, 127\)", weights=with_columns(whole["weights"], 5, 127))
    refused(r"router is \(4, 127\)", weights=with_columns(whole["weights"], 0, 127))
    refused(r"correction is \(3\)", correction=torch.zeros(3))
    refused("correction is Half", correction=torch.zeros(4).half())
    refused("top_k is 5, of 4 experts", router=(5, *whole["router"][1:]))
    refused("top_k is 0, of 4 experts", router=(0, *whole["router"][1:]))
    refused("1 of 3 groups of equal size", router=(*whole["router"][:4], 3, 1, 2, 1.0))
    refused("3 of 2 groups of equal size", router=(*whole["router"][:4], 2, 3, 2, 1.0))
    refused("groups of 2 experts are judged by 3", router=(*whole["router"][:4], 2, 1, 3, 1.0))
    refused("act is tanh; it must be one of silu", act="tanh")
    for elsewhere in ([2, 1], [1, 1], [4], [-1]):
        refused("must be some of 4, in ascending order", elsewhere=elsewhere)
    refused("three of each of 2 experts", elsewhere=[1, 3])
    refused("must get what the layer gets", elsewhere=[1], weighs_inputs=True)
    refused("13 matrices are not the router's and two of each of 4 experts", gated=False)
    refused(r"expert 0's gate is \(64, 128\); the run asks for \(64, 64\)", narrow=True,
            weights=[*whole["weights"], torch.randn(64, hidden), torch.randn(hidden, 64)],
            biases=[None] * 15, layouts=[0] * 4 * 15)  # fmt: skip
    refused("router is Half and the run Float", weights=[whole["weights"][0].half(),
                                                         *whole["weights"][1:]])  # fmt: skip


def gate_up_down(inner: int, hidden: int) -> list[torch.Tensor]:
    return [torch.randn(inner, hidden), torch.randn(inner, hidden), torch.randn(hidden, inner)]


def with_columns(weights: list[torch.Tensor], index: int, columns: int) -> list[torch.Tensor]:
    """The matrices, one of which has a different number of columns."""
    changed = list(weights)
    changed[index] = torch.randn(len(weights[index]), columns)
    return changed


def new_run(hidden: int) -> torch.Tensor:
    """A run with a layer that does everything by callbacks."""
    run = torch.ops.exkv.new_run(torch.empty(0), hidden)
    norms = [torch.ones(hidden), None, torch.ones(hidden), None, None, None]
    torch.ops.exkv.add_layer(
        run, norms, [1e-5] * 6, [0] * 6, [None] * 6, [], [], [], 0, "silu", 0, 1.0, False, 0,
        1.0, 0, 0.0, [], "", [], "", 0, False,
    )  # fmt: skip
    return run
