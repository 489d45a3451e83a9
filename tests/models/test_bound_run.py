"""Bound runs compared with the readable route, their oracle: the same bits of logits and of what is
stored, for every architecture over every cache."""

from __future__ import annotations

import gc
import weakref
from itertools import accumulate

import pytest
import tiny
import torch
from cases import kinds_for
from native import assert_right_on, each_isa, needs_kernels
from on_cpu import on_cpu
from runs import Readable, bound_runs
from torch.profiler import ProfilerActivity, profile

from exkv import CACHES, Model, epochs
from exkv.batch import Lengths
from exkv.cache import KVCache
from exkv.cache.presets import QuantizedCache
from exkv.checkpoint.families import FAMILIES
from exkv.models.bound_run import MOST_TOKENS, Logits
from exkv.models.native_run import NativeRun
from exkv.models.runs import Runs, bind
from exkv.ops.bound_run import RunHandle
from exkv.planning.dry_run import DryRun
from exkv.planning.workspace import CacheShape, Promise, predict_workspaces

pytestmark = needs_kernels
OTHERS = (torch.float32, torch.float16)
IDS = torch.randint(3, 320, (2, 60), generator=torch.Generator().manual_seed(1))
#: A step of each kind: tokens per row, new_lens, last_id_only.
STEPS = (
    *((1, None, last) for last in (True, False)),
    (3, [3, 1], True),
    (2, [2, 2], False),
    (8, [8, 5], False),
    (1, [1, 0], True),
    *((1, None, True) for _ in range(6)),  # past the windows
)

#: Types of their layers: a recurrence with one step per head, one per channel, another rule, none.
WITH_STATES = (
    *("Qwen3NextForCausalLM", "KimiLinearForCausalLM", "BambaForCausalLM", "Lfm2ForCausalLM"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: tiny.save(tiny.reference(tiny.TINY[name]()), tmp_path_factory.mktemp(name))
        for name in dict.fromkeys((*tiny.IN_ALL_WAYS, "DeepseekV3ForCausalLM", *WITH_STATES))
    }


def loaded(folder, dtype: torch.dtype = torch.float32) -> Model:
    return on_cpu(folder, dtype=dtype)


def taken(model: Model, cache: KVCache) -> list[torch.Tensor]:
    """Logits of :data:`STEPS` after a prompt of unlike rows, and then all that is stored."""
    model.forward(IDS[:, :20], cache, new_lens=[20, 13])
    logits, at = [], 20
    for tokens, new_lens, last in STEPS:
        ids = IDS[:, at : at + tokens]
        out = model.forward(ids, cache, new_lens=new_lens, last_id_only=last)
        lens = new_lens or [tokens] * 2
        logits += [row[: 1 if last else new] for row, new in zip(out, lens, strict=True) if new]
        at += tokens
    stored = [tensor.clone() for layer in cache.layers for tensor in layer.tensors.values()]
    return [*logits, *stored]


def assert_the_readable_ways_bits(model: Model, kinds) -> dict[str, list[int]]:
    """Return the runs for each kind of cache."""
    runs = {}
    for kind, make in kinds.items():
        with bound_runs() as runs[kind]:
            found = taken(model, make(model, 96, 2))
        with Readable():
            expected = taken(model, make(model, 96, 2))
        assert all(map(torch.equal, found, expected)), kind
    return runs


CASES = [
    *((name, torch.bfloat16) for name in tiny.IN_ALL_WAYS),
    *((name, dtype) for name in ("Gemma2ForCausalLM", "Qwen3ForCausalLM") for dtype in OTHERS),
]


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_logits_and_stores_are_those_of_the_readable_way_to_the_bit(folders, name, dtype):
    model = loaded(folders[name], dtype)
    some = dtype in OTHERS or name in tiny.RELATIVES
    kinds = kinds_for(name, FAMILIES) if some else CACHES
    for kind, runs in assert_the_readable_ways_bits(model, kinds).items():
        one_by_one = sum(tokens == 1 for tokens, *_ in STEPS)  # all that rings take
        assert runs.count(len(model.units)) in (one_by_one, len(STEPS)), kind


def test_every_choice_of_formats_is_bound(folders):
    model = loaded(folders["Gemma3ForCausalLM"])
    choices = {
        f"{keys} {values} {rotate}": (keys, values, rotate)
        for keys in (16, 8, 4, 2)
        for values in (16, 8, 4, 2)
        for rotate in (False, True)
        if (keys, values, rotate) not in ((16, 16, False), (8, 8, False))
    }

    def kind(keys: int, values: int, rotate: bool):
        return lambda model, length, rows: QuantizedCache(
            model, length, rows, key_bits=keys, value_bits=values, rotate=rotate
        )

    kinds = {name: kind(*choice) for name, choice in choices.items()}
    for name, runs in assert_the_readable_ways_bits(model, kinds).items():
        assert set(runs) == {len(model.units)}, name


@pytest.mark.parametrize("threads", [1, 2, 5])  # as few and more than any machine here has
def test_any_number_of_threads_gives_the_same_bits(folders, threads):
    before = torch.get_num_threads()
    model = loaded(folders["Gemma2ForCausalLM"], torch.bfloat16)
    expected = taken(model, CACHES["4bit"](model, 96, 2))
    torch.set_num_threads(threads)
    try:
        for _ in range(3):
            found = taken(model, CACHES["4bit"](model, 96, 2))
            assert all(map(torch.equal, found, expected))
    finally:
        torch.set_num_threads(before)


def test_preprocessing_and_chunks_of_few_tokens_are_bound_too(folders):
    model = on_cpu(folders["LlamaForCausalLM"], max_input_len=4)
    first, second = (CACHES["fp16"](model, 64) for _ in range(2))
    with bound_runs() as runs:
        assert model.forward(IDS[:1, :10], first, preprocess_only=True) is None
        found = model.forward(IDS[:1, 10:12], first)
    assert runs == [6, 6, 6, 6]
    with Readable():
        model.forward(IDS[:1, :10], second, preprocess_only=True)
        assert torch.equal(model.forward(IDS[:1, 10:12], second), found)


def test_long_calls_and_calls_without_a_cache_go_module_by_module(folders):
    model = loaded(folders["LlamaForCausalLM"])
    with bound_runs() as runs:
        model.forward(IDS[:1, : MOST_TOKENS + 1], CACHES["fp16"](model, 64))
        model.forward(IDS[:1, :2])
        assert not runs
        model.forward(IDS[:1, :MOST_TOKENS], CACHES["fp16"](model, 64))
        assert runs == [6]


def test_layers_with_unlike_stores_are_one_run(folders):
    model = loaded(folders["LlamaForCausalLM"])
    kinds = [[layer.spec for layer in CACHES[kind](model, 64).layers] for kind in ("fp16", "4bit")]
    cache = KVCache.of(model, [*kinds[0][:1], *kinds[1][1:3], *kinds[0][3:]])
    with bound_runs() as runs:
        model.forward(IDS[:1, :3], cache)
    assert runs == [6]


def test_a_run_asks_for_what_it_does_not_know(folders, monkeypatch):
    """Attention over another kind of store, and an MLP of another type; hooks there fire."""
    model = loaded(folders["LlamaForCausalLM"])
    kinds = [[layer.spec for layer in CACHES[kind](model, 64).layers] for kind in ("fp16", "kivi")]
    specs = [*kinds[0][:1], *kinds[1][1:3], *kinds[0][3:]]
    seen = []
    for unit in (model.units[1], model.units[3]):
        unit.module.mlp.register_forward_hook(lambda module, args, out: seen.append(module))
    first, second = (KVCache.of(model, specs) for _ in range(2))
    with bound_runs() as runs:
        found = model.forward(IDS[:1, :3], first)
    assert runs == [6] and seen == [model.units[1].module.mlp, model.units[3].module.mlp]
    with Readable():
        assert torch.equal(model.forward(IDS[:1, :3], second), found)


def test_an_answer_that_does_not_fit_is_refused(folders):
    model = loaded(folders["LlamaForCausalLM"])
    cache = CACHES["sink"](model, 64)
    model.forward(IDS[:1, :3], cache)
    run = bound(model, cache)
    factors = list(model.rotary(Lengths.uniform(1, 3, 1), model.dtype)["main"])
    past = torch.tensor([3], dtype=torch.int32)
    call = (run._handle.tensor, IDS[:1, :1], past, None, 4, factors, 1)
    space, q, k, v = torch.ops.exkv.bound_run(*call)
    assert q.shape == (1, 1, 256) and k.shape == v.shape == (1, 1, 64)

    def refused(message: str, *rest) -> None:
        with pytest.raises(RuntimeError, match=message):
            torch.ops.exkv.bound_run(*call, *rest)

    refused("there is no question 5; there are 4", space, q, 5)
    refused("question 1 needs an answer", None, None, 1)
    refused(
        r"the answer for layer 0 must be contiguous \(1, 1, 256\); it is \(1, 1, 64\)", space, k, 1
    )
    refused("the space of this call is", space[1:], q, 1)


# Handles --------------------------------------------------------------------------------------


def test_a_run_that_was_released_does_nothing_and_holds_nothing(folders):
    model = loaded(folders["LlamaForCausalLM"])
    cache = CACHES["fp16"](model, 64)
    model.forward(IDS[:1, :3], cache)
    one = Lengths.uniform(1, 3, 1)
    run = model._runs.find(model.units, 0, cache, one, model.dtype, Logits.ALL)
    handle = run._handle.tensor
    kept = [weakref.ref(weight) for unit in model.units for weight in unit.module.parameters()]
    with bound_runs() as runs:
        model.unload()
        gc.collect()
        assert not any(ref() is not None for ref in kept)
        assert run(IDS[:1, :1], Lengths.uniform(1, 3, 1), model.rotary, 1) is None
    assert runs == [6]
    with pytest.raises(RuntimeError, match="there is none with the handle"):
        torch.ops.exkv.release_run(handle)


def test_a_run_is_released_in_the_middle_of_a_dry_run():
    """The garbage collector may find the last model's remains while another is planned."""
    handle = RunHandle(torch.float32, 64)
    run = handle.tensor
    with DryRun("cpu"):
        del handle
    with pytest.raises(RuntimeError, match="there is none with the handle"):
        torch.ops.exkv.release_run(run)


def test_a_run_that_is_released_between_two_looks_goes_the_readable_way(folders, monkeypatch):
    model = loaded(folders["LlamaForCausalLM"])
    cache, other = (CACHES["fp16"](model, 64) for _ in range(2))
    expected = model.forward(IDS[:1, :3], other)
    find = Runs.find

    def found_and_released(*args):
        run = find(*args)
        epochs.advance()  # as another thread may
        return run

    monkeypatch.setattr(Runs, "find", found_and_released)
    assert torch.equal(model.forward(IDS[:1, :3], cache), expected)


def bound(model: Model, cache: KVCache) -> NativeRun:
    return bind(model.units, cache, model.dtype)


def test_what_does_not_fit_is_refused_and_nothing_is_written(folders):
    model = loaded(folders["LlamaForCausalLM"])
    cache = CACHES["fp16"](model, 20, 2)
    model.forward(IDS[:, :17], cache)
    stored = [tensor.clone() for layer in cache.layers for tensor in layer.tensors.values()]
    run = bound(model, cache)
    numbers = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    factors = list(model.rotary(Lengths.uniform(2, 17, 1), model.dtype)["main"])
    good = {
        "x": IDS[:, :1].contiguous(),
        "past": numbers(17, 17),
        "new": None,
        "kv_len": 18,
        "factors": factors,
        "logits": 1,
    }

    def refused(message: str, **changes: object) -> None:
        with pytest.raises(RuntimeError, match=message):
            torch.ops.exkv.bound_run(run._handle.tensor, *{**good, **changes}.values())

    refused("x must be token ids, int64", x=torch.zeros(2, 1))
    refused("token id 320 is outside the vocabulary of 320", x=torch.tensor([[3], [320]]))
    refused(r"past_lens must be int32 \(2,\)", past=numbers(17))
    refused("row 1 has 18 tokens and gets 1 of 1, but kv_len is 18", past=numbers(17, 18))
    refused("row 0 has -1 tokens", past=numbers(-1, 17))
    refused("row 0 has 17 tokens and gets 2 of 1", new=numbers(2, 1), kv_len=30)
    refused("layer 0 has no room for 21 tokens in 2 rows: it has 2 of 20", kv_len=21)
    with pytest.raises(RuntimeError, match="no room for row 1, which is its row 2: it has 2 rows"):
        torch.ops.exkv.bound_run(run._handle.tensor, *good.values(), store_rows=numbers(0, 2))
    refused("by table 0 of 0", factors=[])
    refused("cos and sin must be", factors=[factor[:, :0] for factor in factors])
    refused("cos or sin", factors=[factor.half() for factor in factors])
    found = [tensor for layer in cache.layers for tensor in layer.tensors.values()]
    assert all(map(torch.equal, found, stored))


def test_what_is_bound_is_checked_then_and_when_its_memory_moves(folders):
    model = loaded(folders["LlamaForCausalLM"])
    cache = CACHES["fp16"](model, 20)
    model.forward(IDS[:1, :3], cache)
    weight = model.units[2].module.mlp.down_proj.weight
    right = weight.data
    weight.data = right[:, :-1].contiguous()  # behind everybody's back
    with pytest.raises(RuntimeError, match=r"layer 1's down is \(128, 223\); .* \(128, 224\)"):
        model.forward(IDS[:1, :1], cache)
    with pytest.raises(RuntimeError, match="layer 1's down"):
        bound(model, cache)
    weight.data = right
    assert len(cache.sequences[0]) == 3
    model.forward(IDS[:1, :1], cache)


# Memory ---------------------------------------------------------------------------------------


def taken_at_most(call) -> int:
    """Peak bytes that torch's host allocator gives during a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


@pytest.mark.parametrize("kind", ["fp16", "4bit", "sink"])
@pytest.mark.parametrize(
    "name",
    [
        *("Qwen3ForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM"),
        *("Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM", *WITH_STATES),
    ],
)
def test_a_plan_promises_no_less_than_a_run_takes(folders, name, kind):
    model = on_cpu(folders[name], max_input_len=3)
    cache = CACHES[kind](model, 64, 2)
    for _ in range(8):
        model.forward(IDS[:, :3].clone(), cache)
    promise = Promise(max_input_len=3, caches=(CacheShape.of(cache),), last_id_only=False)
    predicted = max(peak.workspace for peak in predict_workspaces(model, promise, "cpu"))
    with bound_runs() as runs:
        found = taken_at_most(lambda: model.forward(IDS[:, :3], cache))
    assert runs == [len(model.units)] and 0 < found <= predicted


# Every instruction set ------------------------------------------------------------------------

ISA_PROGRAM = """
import tempfile
from pathlib import Path
import tiny
import torch
import test_bound_run as t
for name, dtype in (("Gemma3ForCausalLM", torch.bfloat16), ("Qwen2ForCausalLM", torch.float32)):
    folder = tiny.save(tiny.reference(tiny.TINY[name]()), Path(tempfile.mkdtemp()))
    kinds = {kind: t.CACHES[kind] for kind in ("fp16", "8bit", "4bit", "hybrid")}
    assert all(t.assert_the_readable_ways_bits(t.loaded(folder, dtype), kinds).values())
"""


@each_isa
def test_each_instruction_set_is_right(isa):
    assert_right_on(isa, ISA_PROGRAM)
