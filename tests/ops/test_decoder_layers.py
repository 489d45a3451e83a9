"""Whole decoder layers in one call: beside the ops that they are made of, to the bit, and in
models, where they must not be noticed."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import tiny
import torch
from native import needs_kernels
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from exkv import CACHES, Model, ops
from exkv.cache import KVCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HIDDEN, HEADS, KV_HEADS, DIM, INNER, EPS = 48, 4, 2, 16, 88, 1e-5
decoder_layers = torch.ops.exkv.decoder_layers


class Case:
    """Arguments of the op for x (B, T, hidden), behind ``past`` tokens, over stores that have room
    for more rows and tokens; ``turned`` features of a head are turned."""

    def __init__(
        self,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
        *,
        quantized: bool = False,
        biased: tuple[bool, ...] = (False,) * 7,
        past: int = 23,
        windows: tuple[int, ...] = (0, 7, 0),
        softcap: float = 0.0,
        act: str = "silu",
        turned: int = DIM,
    ) -> None:
        self.generator = torch.Generator().manual_seed(rows * 100 + tokens)
        self.dtype = dtype
        self.x = self.normal(rows, tokens, HIDDEN)
        self.weights, self.biases, self.stored = [], [], []
        q, kv = HEADS * DIM, KV_HEADS * DIM
        shapes = [(q, HIDDEN), (kv, HIDDEN), (kv, HIDDEN), (HIDDEN, q)]
        shapes += [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
        for _ in windows:
            self.weights += [self.normal(HIDDEN), self.normal(HIDDEN)]
            self.weights += [self.normal(*shape, scale=shape[1] ** -0.5) for shape in shapes]
            pairs = zip(shapes, biased, strict=True)
            self.biases += [self.normal(shape[0]) if there else None for shape, there in pairs]
            for _ in "kv":
                store = self.normal(rows + 1, past + tokens + 9, KV_HEADS, DIM)
                self.stored += torch.ops.exkv.quantize_kv(store) if quantized else [store]
        angle = torch.rand(rows, tokens, turned // 2, generator=self.generator).repeat(1, 1, 2)
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)
        self.lens = torch.full((rows,), past, dtype=torch.int32), past + tokens
        self.rest = (DIM, EPS, DIM**-0.5, list(windows), softcap, act)

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.dtype)

    def arguments(self, stored: list[torch.Tensor] | None = None, **changes: object) -> tuple:
        """With stores of one's own."""
        given = {"x": self.x, "weights": self.weights, "biases": self.biases, **changes}
        stored = self.copies() if stored is None else stored
        return *given.values(), stored, *self.lens, self.cos, self.sin, *self.rest

    def copies(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.stored]


def assert_like_its_parts(case: Case) -> None:
    mine, theirs, x = case.copies(), case.copies(), case.x.clone()
    found = decoder_layers(*case.arguments(mine))
    expected = ops.REFERENCES["decoder_layers"](*case.arguments(theirs))
    assert torch.equal(found, expected)
    assert all(map(torch.equal, mine, theirs))
    assert not any(map(torch.equal, mine, case.stored))  # every store was written to
    assert torch.equal(case.x, x)


ALL, QKV = (True,) * 7, (True, True, True, False, False, False, False)


@needs_kernels
@pytest.mark.parametrize("quantized", [False, True], ids=["floats", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "tokens", "options"),
    [
        (1, 1, {}),
        (1, 1, {"past": 0, "biased": QKV}),
        (1, 1, {"past": 2500, "act": "gelu_pytorch_tanh"}),  # keys in several splits
        (3, 1, {"biased": ALL, "softcap": 3.0, "turned": 8}),
        (2, 5, {"windows": (0,)}),
        (1, 16, {"windows": (4, 0, 4, 4)}),
    ],
)
def test_results_and_stores_are_the_parts_to_the_bit(rows, tokens, options, dtype, quantized):
    assert_like_its_parts(Case(rows, tokens, dtype, quantized=quantized, **options))


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 5])  # as few and more than any machine here has
def test_any_number_of_threads_gives_the_same_bits(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            assert_like_its_parts(Case(2, 2, torch.bfloat16, past=300))
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_what_does_not_fit_is_refused_and_nothing_written():
    case = Case(1, 2, torch.float32)
    stored = case.copies()

    def refused(message: str, arguments: tuple) -> None:
        with pytest.raises(RuntimeError, match=message):
            decoder_layers(*arguments)

    changed = lambda index, value, of: [*of[:index], value, *of[index + 1 :]]  # noqa: E731
    down = case.weights[17]
    wrong = changed(17, down[:, :-1], case.weights)
    refused(
        r"layer 1's down is \(48, 87\), and not contiguous; .*\(48, 88\)",
        case.arguments(stored, weights=wrong),
    )
    wrong = changed(17, down.half(), case.weights)
    refused("x is .*Float.* and down .*Half", case.arguments(stored, weights=wrong))
    refused("weights are 26; 3 layers have 27", case.arguments(stored, weights=case.weights[1:]))
    wrong = changed(9, torch.zeros(3), case.biases)
    refused(r"layer 1's v is \(3\)", case.arguments(stored, biases=wrong))
    short = changed(5, stored[5][:, :20], stored)
    refused("layer 2's v_stored .* has no room for 25 tokens in 1 rows", case.arguments(short))
    case.lens = case.lens[0] + 1, case.lens[1]
    refused("row 0 has 24 tokens and gets 2, but kv_len is 25", case.arguments(stored))
    refused("must be silu or gelu_pytorch_tanh", (*case.arguments(stored)[:-1], "relu"))
    refused(r"x must be \(B, T, hidden\)", case.arguments(stored, x=case.x[0]))
    assert all(map(torch.equal, stored, case.stored))


def test_opcheck_finds_nothing():
    for quantized in (False, True):
        case = Case(2, 3, torch.float32, quantized=quantized, biased=QKV)
        torch.library.opcheck(decoder_layers.default, case.arguments())
        layers = hold(case, case.copies(), "op")
        torch.library.opcheck(torch.ops.exkv.held_layers.default, (case.x, layers, *rows_of(case)))


# Held layers ----------------------------------------------------------------------------------


def native(way: str) -> SimpleNamespace:
    """The ops that hold layers, by way of the dispatcher or as they are in Python."""
    names = ("hold_layers", "held_layers", "release_layers")
    space = torch.ops.exkv
    return SimpleNamespace(
        **{name: getattr(space, name) if way == "op" else ops.REFERENCES[name] for name in names}
    )


def hold(case: Case, stored: list[torch.Tensor], way: str) -> torch.Tensor:
    return native(way).hold_layers(case.weights, case.biases, stored, *case.rest)


def rows_of(case: Case) -> tuple:
    return *case.lens, case.cos, case.sin


@pytest.mark.parametrize("way", ["op", "reference"])
@pytest.mark.parametrize("quantized", [False, True], ids=["floats", "int8"])
def test_held_layers_do_the_same_until_they_are_released(way, quantized):
    case = Case(2, 3, torch.float32, quantized=quantized, biased=QKV)
    mine, theirs, of = case.copies(), case.copies(), native(way)
    layers, others = hold(case, mine, way), hold(case, case.copies(), way)
    for x in (case.x, -case.x):
        found = of.held_layers(x, layers, *rows_of(case))
        assert torch.equal(found, decoder_layers(*case.arguments(theirs, x=x)))
        assert all(map(torch.equal, mine, theirs))

    case.weights[3].mul_(0.5)  # they are held, not copied
    again = of.held_layers(case.x, layers, *rows_of(case))
    assert torch.equal(again, decoder_layers(*case.arguments(theirs)))

    gone = [weakref.ref(tensor) for tensor in mine]
    of.release_layers(layers)
    mine.clear()
    assert not any(ref() is not None for ref in gone)
    with pytest.raises(RuntimeError, match=f"no layers are held by the number {int(layers)}"):
        of.held_layers(case.x, layers, *rows_of(case))
    with pytest.raises(RuntimeError, match="until release_layers takes it"):
        of.release_layers(layers)
    of.release_layers(others)


@needs_kernels
def test_what_is_not_a_number_of_layers_is_refused():
    case = Case(1, 1, torch.float32)
    layers = hold(case, case.copies(), "op")
    with pytest.raises(RuntimeError, match=r"an int64 number; this is \(3\) of Float"):
        torch.ops.exkv.held_layers(case.x, torch.zeros(3), *rows_of(case))
    with pytest.raises(RuntimeError, match="hidden"):  # as decoder_layers does
        torch.ops.exkv.held_layers(case.x[0], layers, *rows_of(case))
    torch.ops.exkv.release_layers(layers)


# In models ------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counts calls of exkv's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.name()] += func.namespace == "exkv"
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tiny.reference(tiny.llama()), tmp_path_factory.mktemp("llama"))


def loaded(folder, cache_of) -> tuple[Model, KVCache]:
    model = Model(folder, dtype=torch.float32)
    cache = cache_of(model)
    model.load_autosplit(cache, devices=["cpu"])
    return model, cache


PROMPT = torch.arange(3, 40).unsqueeze(0)


def steps(model: Model, cache: KVCache, count: int = 3) -> tuple[torch.Tensor, Counter[str]]:
    """Logits of a few steps after the prompt, and what was called in them."""
    model.forward(PROMPT, cache, preprocess_only=True)
    with Calls() as calls:
        found = [model.forward(torch.tensor([[5 + i]]), cache) for i in range(count)]
    return torch.cat(found), calls.count


@needs_kernels
def test_a_step_over_a_plain_cache_is_one_call(folder):
    for kind in ("dynamic", "8bit"):
        _, calls = steps(*loaded(folder, lambda model, kind=kind: CACHES[kind](model, 64)))
        assert calls["exkv::decoder_layers"] == 3, kind
        assert not any("attend" in name or "attention" in name for name in calls)


@needs_kernels
def test_layers_that_store_otherwise_or_are_watched_go_on_their_own(folder):
    model, cache = loaded(folder, lambda model: CACHES["dynamic"](model, 64))
    whole, _ = steps(model, cache)
    seen = []
    hook = model.units[2].module.register_forward_hook(lambda *call: seen.append(call[0]))
    cache.reset()
    watched, calls = steps(model, cache)
    assert seen == [model.units[2].module] * 4  # the prompt's too
    assert calls["exkv::decoder_layers"] == 2 * 3  # before it, and after it
    assert torch.equal(watched, whole)
    hook.remove()

    specs = [layer.spec for layer in cache.layers]
    other = [layer.spec for layer in CACHES["8bit"](model, 64).layers]
    model, mixed = loaded(
        folder, lambda model: KVCache.of(model, [*specs[:1], *other[1:3], *specs[3:]])
    )
    _, calls = steps(model, mixed)
    assert calls["exkv::decoder_layers"] == 3 * 3


@needs_kernels
def test_many_tokens_and_ragged_rows_take_the_usual_way(folder):
    model, cache = loaded(folder, lambda model: CACHES["dynamic"](model, 64, batch_size=2))
    with Calls() as calls:
        model.forward(torch.arange(3, 20).unsqueeze(0), cache)
        model.forward(torch.full((2, 4), 7), cache, new_lens=[4, 2])
    assert calls.count["exkv::decoder_layers"] == 0


@needs_kernels
def test_a_layer_that_is_changed_is_so_at_once(folder):
    model, cache = loaded(folder, lambda model: CACHES["dynamic"](model, 64))
    before, _ = steps(model, cache)
    layer = model.units[1].module
    layer.self_attn.o_proj.weight = torch.nn.Parameter(
        torch.zeros_like(layer.self_attn.o_proj.weight)
    )
    cache.reset()
    after, calls = steps(model, cache)
    assert calls["exkv::decoder_layers"] == 3
    assert not torch.allclose(before, after, atol=1e-3)


@needs_kernels
def test_unwatched_steps_hold_their_layers_as_long_as_they_are_known(folder):
    model, cache = loaded(folder, lambda model: CACHES["8bit"](model, 64))
    watched, _ = steps(model, cache)
    cache.crop(PROMPT.shape[1])
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        found = [model.forward(torch.tensor([[5 + i]]), cache) for i in range(3)]
    assert torch.equal(torch.cat(found), watched)
    calls = Counter(event.name for event in seen.events())
    assert calls["exkv::held_layers"] == 3 and calls["exkv::hold_layers"] == 1
    assert not calls["exkv::decoder_layers"]

    held = model._runs._found[cache][1].held
    kept = [weakref.ref(weight) for weight in model.units[1].module.parameters()]
    model.unload()
    gc.collect()
    assert not any(ref() is not None for ref in kept)
    with pytest.raises(RuntimeError, match="no layers are held"):
        torch.ops.exkv.release_layers(held)
