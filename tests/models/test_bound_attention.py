"""Layers with gated attention or attention over latent vectors, in bound runs: the readable route's
bits, without a callback."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tiny
import torch
from adapters import linears_of, write_adapter
from native import assert_right_on, each_isa, needs_kernels
from on_cpu import on_cpu
from packers.gguf import in_types, write_gguf
from runs import Readable, bound_runs
from safetensors.torch import load_file
from test_bound_run import assert_the_readable_ways_bits, loaded

from exkv import CACHES, Model
from exkv.layers.descriptions import AttentionBlock, LatentBlock, describe
from exkv.models import native_run
from exkv.models.native_run import NativeRun
from exkv.models.runs import bind
from exkv.ops.bound_run import FLOAT_LAYOUT

pytestmark = needs_kernels
IDS = torch.randint(3, 320, (2, 3), generator=torch.Generator().manual_seed(1))
#: Queries with and without low ranks; adjacent and half-split pairs.
LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
GATED = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM")
KINDS = ("fp16", "8bit", "2bit", "paged", "sliding_window")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    names = (*LATENT, *GATED, "KimiLinearForCausalLM")
    return {
        name: tiny.save(tiny.reference(tiny.TINY[name]()), tmp_path_factory.mktemp(name))
        for name in names
    }


def bound(model: Model, kind: str) -> NativeRun:
    cache = CACHES[kind](model, 64, 2)
    model.forward(IDS, cache)
    run = bind(model.units, cache, model.dtype)
    assert isinstance(run, NativeRun)
    return run


def attention_of(model: Model) -> list[object]:
    """Descriptions of the layers that have keys and values."""
    layers = [unit for unit in model.units if unit.spec.layer is not None]
    return [
        describe(unit.module).attention
        for unit in layers
        if not model.config.state(unit.spec.layer)
    ]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LATENT)
def test_latent_attention_is_the_readable_ways_to_the_bit(folders, name, dtype):
    model = loaded(folders[name], dtype)
    assert all(isinstance(each, LatentBlock) for each in attention_of(model))
    kinds = {kind: CACHES[kind] for kind in KINDS}
    assert all(assert_the_readable_ways_bits(model, kinds).values())
    assert not any(bound(model, kind)._questions for kind in KINDS)
    asked = {"kivi": CACHES["kivi"]}  # as a whole
    assert all(assert_the_readable_ways_bits(model, asked).values())
    assert len(bound(model, "kivi")._questions) == model.config.num_hidden_layers


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*GATED, "KimiLinearForCausalLM"])
def test_attention_beside_states_is_the_readable_ways_to_the_bit(folders, name, dtype, monkeypatch):
    """States themselves are left to callbacks here: native sums have another order."""
    monkeypatch.setattr(native_run, "_is_native_state", lambda *given: False)
    model = loaded(folders[name], dtype)
    expected = AttentionBlock if name in GATED else LatentBlock
    found = attention_of(model)
    assert found and all(isinstance(each, expected) for each in found)
    assert name not in GATED or all(each.gated for each in found)
    states = sum(map(bool, map(model.config.state, range(model.config.num_hidden_layers))))
    assert len(bound(model, "fp16")._questions) == states
    kinds = {kind: CACHES[kind] for kind in ("fp16", "4bit", "paged", "kivi")}
    assert all(assert_the_readable_ways_bits(model, kinds).values())


def test_what_makes_each_heads_keys_and_values_stays_in_the_files_format(tmp_path):
    """Q8_0 and Q4_0 in turn: the file's number of bytes, and the readable route's bits."""
    name = "DeepseekV3ForCausalLM"
    theirs = tiny.reference(tiny.TINY[name](**dict.fromkeys(tiny.LATENT, 32)))
    tensors = load_file(tiny.save(theirs, tmp_path / "saved") / "model.safetensors")
    theirs.config.architectures = [name]
    write_gguf(tmp_path / "model.gguf", theirs.config, tensors, in_types("Q8_0", "Q4_0"))
    model = loaded(tmp_path / "model.gguf", torch.bfloat16)
    matrices = [each for block in attention_of(model) for each in (*block.key_up, *block.value_up)]
    assert {each.format.name for each in matrices} == {"gguf Q8_0", "gguf Q4_0"}
    assert {each.size for each in matrices} == {(32, 32)}
    kinds = {kind: CACHES[kind] for kind in ("fp16", "paged")}
    assert all(assert_the_readable_ways_bits(model, kinds).values())
    assert not bound(model, "fp16")._questions


@torch.no_grad()
def test_adapters_of_latent_attention_are_in_the_run(folders, tmp_path):
    """Of some rows of a call, for each projection."""
    name = "DeepseekV3ForCausalLM"
    parts = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    model = on_cpu(folders[name])
    theirs = linears_of(tiny.reference(tiny.TINY[name]()), parts)
    model.load_adapter(write_adapter(tmp_path / "one", theirs), "one")
    first, second, without = (CACHES["fp16"](model, 64) for _ in range(3))
    with bound_runs() as runs:
        found = model.forward(IDS[:1], first, adapter="one")
    assert runs == [len(model.units)]
    assert not torch.equal(found, model.forward(IDS[:1], without))
    with Readable():
        assert torch.equal(found, model.forward(IDS[:1], second, adapter="one"))


def test_any_number_of_threads_gives_the_same_bits(folders):
    before = torch.get_num_threads()
    model = loaded(folders["DeepseekV3ForCausalLM"], torch.bfloat16)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert_the_readable_ways_bits(model, {"paged": CACHES["paged"]})
    finally:
        torch.set_num_threads(before)


def test_latent_attention_that_does_not_fit_is_refused():
    """Two heads of 4 plain and 2 rotated features, of latent vectors of 8; values of 6."""
    hidden = 16
    shapes = [(12, 10), (10, hidden), (hidden, 12), (10, hidden), *[(8, 4)] * 2, *[(6, 8)] * 2]
    whole = {
        "norms": [torch.ones(8), torch.ones(10)],
        "eps": [1e-6, 1e-6],
        "weights": [torch.zeros(shape) for shape in shapes],
        "layouts": [*FLOAT_LAYOUT] * 8,
        "biases": [None] * 8,
        "heads": 2,
        "rotated": 2,
        "interleaved": 2,
        "rotary": 0,
        "scale": 1.0,
        "window": 0,
        "stored": [torch.zeros(1, 8, 1, 10)],
        "format": "float",
        "ring": 0,
        "hadamard": False,
        "paged": False,
    }

    def refused(message: str, **changes: object) -> None:
        with pytest.raises(RuntimeError, match=message):
            torch.ops.exkv.add_latent(new_run(hidden), *{**whole, **changes}.values())

    def with_shape(index: int, *shape: int) -> Sequence[torch.Tensor]:
        weights = list(whole["weights"])
        return [*weights[:index], torch.zeros(shape), *weights[index + 1 :]]

    run = new_run(hidden)
    torch.ops.exkv.add_latent(run, *whole.values())
    with pytest.raises(RuntimeError, match="there is no layer without attention for that over"):
        torch.ops.exkv.add_latent(run, *whole.values())
    refused("2 norms, 8 matrices and 8 biases are not those of .* attention of 3 heads", heads=3)
    refused("8 matrices and 7 biases", biases=[None] * 7)
    refused("12 queries of 2 heads .* don't have 6 rotated ones each", rotated=6)
    refused("don't have 3 rotated ones each", rotated=3)
    refused(r"queries' low ranks is \(10, 15\)", weights=with_shape(3, 10, 15))
    refused(r"output is \(16, 13\)", weights=with_shape(2, hidden, 13))
    refused(r"head 1's keys is \(8, 5\)", weights=with_shape(5, 8, 5))
    refused(r"head 1's values is \(6, 9\)", weights=with_shape(7, 6, 9))
    refused("keys and values take no bias", biases=[*[None] * 7, torch.zeros(6)])
    refused(r"norm of latent vectors is \(7\)", norms=[torch.ones(7), torch.ones(10)])
    refused("stores", stored=[torch.zeros(1, 8, 1, 12)])
    refused("interleaved 3 must be an even part", interleaved=3)


def new_run(hidden: int) -> torch.Tensor:
    """A run with a layer that has only a norm."""
    run = torch.ops.exkv.new_run(torch.empty(0), hidden)
    norms = ([torch.ones(hidden), *[None] * 5], [1e-5] * 6, [0] * 6, [None] * 6)
    rest = (0, "silu", 0, 1.0, False, 0, 1.0, 0, 0.0)
    torch.ops.exkv.add_layer(run, *norms, [], [], [], *rest, [], "", [], "", 0, False)
    return run


ISA_PROGRAM = """
import tempfile
from pathlib import Path
import tiny
import torch
import test_bound_run as t
from exkv.models import native_run
native_run._is_native_state = lambda *given: False  # sums in another order
for name in ("DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"):
    folder = tiny.save(tiny.reference(tiny.TINY[name]()), Path(tempfile.mkdtemp()))
    kinds = {kind: t.CACHES[kind] for kind in ("fp16", "4bit")}
    assert all(t.assert_the_readable_ways_bits(t.loaded(folder, torch.bfloat16), kinds).values())
"""


@each_isa
def test_each_instruction_set_is_right(isa):
    assert_right_on(isa, ISA_PROGRAM)
