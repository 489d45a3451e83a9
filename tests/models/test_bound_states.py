"""Layers with a state in bound runs: the readable route's logits and states for any rows."""

from __future__ import annotations

import pytest
import tiny
import torch
from adapters import write_adapter
from native import assert_right_on, each_isa, needs_kernels
from runs import Readable, bound_runs
from test_bound_run import bound, loaded

from exkv import CACHES, Model
from exkv.layers.linear import TransposedLinear, linear_at
from exkv.layers.recurrent import GatedDelta
from exkv.models.native_run import BoundLayer, _stretch

pytestmark = needs_kernels
#: The gated delta rule with fused projections, separate ones, and separate everything; with a decay
#: per channel; state space duality; in layers of nothing else; beside attention, with factors; a
#: selective scan; a convolution alone.
NAMES = (
    *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "OlmoHybridForCausalLM"),
    *("KimiLinearForCausalLM", "BambaForCausalLM", "GraniteMoeHybridForCausalLM"),
    *("NemotronHForCausalLM", "FalconH1ForCausalLM", "JambaForCausalLM", "Lfm2ForCausalLM"),
)
#: Variants: gates without norms, and norms before gates; experts of few features.
VARIANTS = {
    "FalconH1ForCausalLM": (
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
        {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
        {"mamba_rms_norm": False},
    ),
    "NemotronHForCausalLM": ({"moe_latent_size": 32},),
}
#: New tokens of rows after a prompt: few and many, none, and a whole chunk of the recurrences.
LENGTHS = ((1,), (8, 5), (2, 1, 0, 2, 1, 2), (16,))
IDS = torch.randint(3, 320, (8, 64), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: tiny.save(tiny.reference(tiny.TINY[name]()), tmp_path_factory.mktemp(name))
        for name in NAMES
    }


def states_of(cache) -> list[torch.Tensor]:
    return [
        tensor.float()
        for layer in cache.layers
        if layer.spec.state
        for tensor in layer.tensors.values()
    ]


def answers(model: Model) -> list[torch.Tensor]:
    """Logits of real tokens and all states: of rows that begin with the call, and after a
    prompt."""
    found = []
    for lengths in LENGTHS:
        rows, longest = len(lengths), max(lengths)
        cache = CACHES["fp16"](model, 64, rows)
        model.forward(IDS[:rows, :20], cache, new_lens=[20 - row for row in range(rows)])
        for start in (20, 20 + longest, 0):
            if not start:
                cache.reset()
            out = model.forward(IDS[:rows, start : start + longest], cache, new_lens=list(lengths))
            found += [row[:new].float() for row, new in zip(out, lengths, strict=True)]
        found += states_of(cache)
    return found


def bound_layers(model: Model) -> list[bool]:
    """For each layer with a state, whether native code runs it."""
    cache = CACHES["fp16"](model, 64)
    parts = _stretch(model.units, cache, model.dtype)
    layers = [part for part in parts if isinstance(part, BoundLayer)]
    with_states = [kept.spec.state for kept in cache.layers if kept.spec.beside is None]
    hybrid = [kept.beside is not None for kept in cache.layers if kept.spec.beside is None]
    return [
        part.state is not None
        for part, state, both in zip(layers, with_states, hybrid, strict=True)
        if state or both
    ]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], dtype) -> None:
    """To float32's last places, of which a few sums have another order; roundings of the others
    hide these, but for one in some thousands."""
    near = 2e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=near, atol=near)


def assert_bound(model: Model) -> list[torch.Tensor]:
    with bound_runs() as runs:
        found = answers(model)
    with Readable():
        assert_close(found, answers(model), model.dtype)
    most = bound(model, CACHES["fp16"](model, 64))._most_tokens
    taken = sum(len(lengths) * max(lengths) <= most for lengths in LENGTHS)
    assert set(runs) == {len(model.units)} and len(runs) >= 3 * taken
    assert all(native := bound_layers(model)) and native
    return found


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_states_are_those_of_the_readable_way(folders, name, dtype):
    assert_bound(loaded(folders[name], dtype))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("name", "changes"), [(name, each) for name, some in VARIANTS.items() for each in some], ids=str
)
def test_variants_too(tmp_path, name, changes):
    theirs = tiny.reference(tiny.TINY[name](**changes))
    assert_bound(loaded(tiny.save(theirs, tmp_path), torch.bfloat16))


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_projections_of_integers_too(folders, weights):
    model = Model(folders["Qwen3NextForCausalLM"], dtype=torch.bfloat16, weights=weights)
    model.load(devices=["cpu"])
    assert_bound(model)


def test_columns_in_the_order_of_a_files_blocks_too(folders):
    """Qwen 3.5's output projection in GGUF files."""
    model = loaded(folders["Qwen3_5ForCausalLM"])
    for unit in model.units[1:-1]:
        delta = unit.module.self_attn
        if not isinstance(delta, GatedDelta):
            continue
        sizes, own = delta.settings, delta.out_proj
        groups, heads = sizes.linear_num_key_heads, sizes.linear_num_value_heads
        assert 1 < groups < heads
        outputs, inputs = own.size
        each = {"groups": groups, "heads": heads // groups, "dtype": model.dtype}
        delta.out_proj = TransposedLinear(inputs, outputs, **each)
        delta.out_proj.weight.data = own.weight.data
    assert_bound(model)


@pytest.mark.parametrize("threads", [2, 5])
def test_any_number_of_threads_gives_the_same_bits(folders, threads):
    before = torch.get_num_threads()
    model = loaded(folders["KimiLinearForCausalLM"], torch.bfloat16)
    torch.set_num_threads(1)
    try:
        expected = answers(model)
        torch.set_num_threads(threads)
        assert all(map(torch.equal, answers(model), expected))
    finally:
        torch.set_num_threads(before)


def test_rows_are_as_alone(folders):
    """To the bit, since the work for each row and head is the same."""
    model = loaded(folders["Qwen3NextForCausalLM"], torch.bfloat16)
    together = CACHES["fp16"](model, 64, 3)
    model.forward(IDS[:3, :20], together, new_lens=[20, 20, 20])
    found = [model.forward(IDS[:3, at : at + 1], together) for at in range(20, 24)]
    for row in range(3):
        alone = CACHES["fp16"](model, 64)
        model.forward(IDS[row : row + 1, :20], alone)
        for at, logits in enumerate(found, 20):
            expected = model.forward(IDS[row : row + 1, at : at + 1], alone)
            assert torch.equal(logits[row : row + 1], expected)


def test_a_layer_with_a_hook_or_an_adapter_is_asked_for(folders, tmp_path):
    model = loaded(folders["Qwen3NextForCausalLM"])
    linears = {"model.layers.0.linear_attn.out_proj": None}
    path = "self_attn.out_proj"
    linears = dict.fromkeys(linears, tuple(linear_at(model.units[1].module, path).size))
    adapter = write_adapter(tmp_path / "adapter", linears, rank=3, target_modules=["out_proj"])
    model.load_adapter(adapter, "one")
    first, second, without = (CACHES["fp16"](model, 64) for _ in range(3))
    with bound_runs() as runs:
        found = model.forward(IDS[:1, :3], first, adapter="one")
    assert runs == [len(model.units)]
    assert not torch.equal(found, model.forward(IDS[:1, :3], without))
    with Readable():
        expected = model.forward(IDS[:1, :3], second, adapter="one")
    assert_close([found], [expected], torch.float32)
    seen = []
    model.units[1].module.self_attn.register_forward_hook(lambda *args: seen.append(args))
    with bound_runs() as runs:
        model.forward(IDS[:1, :3], CACHES["fp16"](model, 64))
    assert seen and runs == [len(model.units)] and not all(bound_layers(model))


# What does not fit ----------------------------------------------------------------------------

HIDDEN, HEADS, SIZE, TAPS = 48, 2, 8, 3


def whole() -> dict[str, object]:
    """A layer by the gated delta rule with two value heads per key head."""
    channels, inner = 2 * SIZE + HEADS * SIZE, HEADS * SIZE
    outputs = (channels, inner, HEADS, HEADS)
    sizes = [(each, HIDDEN) for each in outputs] + [(HIDDEN, inner)]
    named = [(-1, 0, 1, 0, 0), *((i, 0, outputs[i], 0, 1) for i in (1, 2, 3, 0))]
    return {
        "rule": "delta",
        "weights": [torch.randn(*size) for size in sizes],
        "layouts": [0] * 4 * 5,
        "biases": [None] * 5,
        "sources": [-1] * 4,
        "outputs": [number for each in named for number in each],
        "conv": torch.randn(channels, 1, TAPS),
        "conv_bias": None,
        "step_bias": torch.randn(HEADS),
        "rates": torch.randn(HEADS),
        "skip": None,
        "norms": [torch.ones(SIZE)],
        "eps": 1e-6,
        "gating": "norm_then_gate",
        "sigmoid": False,
        "groups": 1,
        "order": 1,
        "largest_beta": 1.0,
        "least_step": 0.0,
        "most_step": 0.0,
        "inputs": torch.zeros(2, TAPS - 1, channels),
        "state": torch.zeros(2, HEADS, SIZE, SIZE),
        "factors": [1.0] * 5,
        "input_scale": 1.0,
        "beside": False,
    }


def new_run() -> torch.Tensor:
    run = torch.ops.exkv.new_run(torch.empty(0), HIDDEN)
    none = [None] * 6
    nothing = ([], [], [], 0, "silu", 0, 1.0, False, 0, 1.0, 0, 0.0, [], "", [], "", 0, False)
    torch.ops.exkv.add_layer(run, none, [0.0] * 6, [0] * 6, none, *nothing)
    return run


def test_what_does_not_fit_is_refused():
    def add(run: torch.Tensor | None = None, **changes: object) -> torch.Tensor:
        run = new_run() if run is None else run
        torch.ops.exkv.add_mixer(run, *{**whole(), **changes}.values())
        return run

    def refused(message: str, **changes: object) -> None:
        with pytest.raises(RuntimeError, match=message):
            add(**changes)

    added, given = add(), whole()
    weights, outputs = given["weights"], given["outputs"]
    refused("no layer without attention for a state", run=added)
    refused("there is no attention for a state beside it", beside=True)
    refused("rule is rwkv; it must be delta, ssd, scan or conv", rule="rwkv")
    refused("gating is none; it must be norm_then_gate, gate_then_norm", gating="none")
    refused("has 5 projections, 4 biases, 5 factors and 4 sources", biases=[None] * 4)
    refused("has 5 projections, 5 biases, 1 factors and 4 sources", factors=[1.0])
    refused("a source of all but the last 3", rule="scan")
    refused("projection 1 of projection 1 must come behind it", sources=[-1, 1, -1, -1])
    refused("layer 0's projection 1", sources=[-1, 0, -1, -1])
    refused("24 numbers are not 5 of each", outputs=outputs[:-1])
    refused("2 heads of 16 from 0, 1 apart, are not among the 16 outputs of projection 1",
            outputs=[*outputs[:8], 1, 2, *outputs[10:]])  # fmt: skip
    refused("steps are 1 outputs, and must be 2", outputs=[*outputs[:12], 1, *outputs[13:]])
    refused(r"convolution must be \(C, 1, K\)", conv=torch.randn(4, 3))
    refused("inputs of the convolution are 32 outputs, and must be 31",
            conv=torch.randn(31, 1, TAPS), inputs=torch.zeros(2, TAPS - 1, 31))  # fmt: skip
    refused("inputs of the convolution are .* and must be Float", inputs=torch.zeros(2, 2, 31))
    refused("states are Double", state=torch.zeros(2, HEADS, SIZE, SIZE, dtype=torch.float64))
    refused("states are Float", state=torch.zeros(3, HEADS, SIZE, SIZE))
    refused("2 heads are not those of 3 groups", groups=3)
    refused("rates are 3 numbers, and must be 2", rates=torch.randn(3))
    refused("recurrence needs a state", norms=[])
    refused("recurrence needs a state", gating="gate")
    refused("recurrence needs what skips it", rule="ssd")
    refused("2 heads have no order by 3", order=3)
    refused(r"layer 0's output is \(48, 15\)", weights=[*weights[:-1], torch.randn(HIDDEN, 15)])
    x, lens = torch.randn(3, 1, HIDDEN), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="layer 0 has states of 2 rows, and the call 3"):
        torch.ops.exkv.bound_run(added, x, lens, None, 1, [], 0)
    torch.ops.exkv.release_run(added)


# Every instruction set ------------------------------------------------------------------------

ISA_PROGRAM = """
import tempfile
from pathlib import Path
import tiny
import torch
import test_bound_states as t
for name, dtype in (("KimiLinearForCausalLM", torch.bfloat16), ("BambaForCausalLM", torch.float32)):
    folder = tiny.save(tiny.reference(tiny.TINY[name]()), Path(tempfile.mkdtemp()))
    t.assert_bound(t.loaded(folder, dtype))
"""


@each_isa
def test_each_instruction_set_is_right(isa):
    assert_right_on(isa, ISA_PROGRAM)
