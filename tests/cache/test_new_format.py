"""Adding a format of keys and values in plain PyTorch takes one class and one table entry, and
every cache guarantee then holds for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from arithmetic import near
from simproc import run_sim
from tiny import llama, loaded, reference, save
from written_out import written_out

import exkv_ext
from exkv import KVCache, Model, sim
from exkv.cache import Dynamic, OnHost, Sinks, Storage, Window
from exkv.ops import REFERENCES
from exkv.ops.kv_formats import FORMATS
from exkv.ops.registry import text_number

IDS = torch.randint(3, 320, (2, 60), generator=torch.Generator().manual_seed(4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format:
    """e4m3 with a float16 scale for each head of each token."""

    name: ClassVar[str] = "fp8"
    lossless: ClassVar[bool] = False
    has_kernels: ClassVar[bool] = False
    group: ClassVar[int] = 1
    names: ClassVar[tuple[str, ...]] = ("", "scale")

    def layout(self, shape, dtype):
        return {"": (tuple(shape), torch.float8_e4m3fn), "scale": ((*shape[:-1], 1), torch.float16)}

    def encode(self, x):
        wide = x.float()
        scale = (wide.abs().amax(-1, keepdim=True) / 448).clamp(2.0**-14, 65504).half()
        return {"": (wide / scale.float()).to(torch.float8_e4m3fn), "scale": scale}

    def widen(self, stored, dtype, head_dim=None):
        return (stored[""].float() * stored["scale"].float()).to(dtype)


@contextlib.contextmanager
def entered() -> Iterator[None]:
    FORMATS["fp8"] = Fp8Format()
    try:
        yield
    finally:
        del FORMATS["fp8"]


@pytest.fixture(autouse=True)
def fp8():
    with entered():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return loaded(llama(num_hidden_layers=2), tmp_path_factory.mktemp("model"), max_input_len=32)


#: Alone, beside formats that have kernels, rotated, and behind recent tokens as floats.
STORAGES = {
    "alone": {"keys": "fp8", "values": "fp8"},
    "with int8": {"keys": "fp8", "values": "int8", "rotate": True},
    "old ones": {"keys": "int4c", "values": "fp8", "recent": 32},
}
MAKES = {
    "all": {},
    "window on the host": {"retention": Window(8), "residence": OnHost()},
    "sinks, growing": {"retention": Sinks(8, 3), "growth": Dynamic(16)},
}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("storage", STORAGES)
def test_new_format_combines_with_every_property(model, storage, make):
    stored, ids = Storage(**STORAGES[storage]), IDS[:1]
    expected = written_out(model, ids, stored, MAKES[make].get("retention"))
    for cut in ([60], [2, 5, 1, 1, 51]):
        cache = KVCache(model, 64, storage=stored, **MAKES[make])
        found = torch.cat([model.forward(part, cache) for part in ids.split(cut, dim=1)], dim=1)
        assert near(found, expected, 3e-3)


def test_new_format_is_saved_loaded_forked_and_converted(model, tmp_path):
    ids, storage = IDS[:1], Storage(keys="fp8", values="fp8")
    cache = KVCache(model, 64, storage=storage)
    model.forward(ids[:, :40], cache)
    fork, clone = cache.fork(2), cache.clone()
    cache.save(tmp_path / "cache")
    expected = model.forward(ids[:, 40:41], cache)
    other = KVCache(model, 80, 2, storage=storage)
    other.load(tmp_path / "cache")
    for same in (clone, other):
        assert torch.equal(model.forward(ids[:, 40:41], same), expected)
    assert near(model.forward(ids[:, 40:41].expand(2, 1), fork), expected)
    for floats in (KVCache(model, 64), KVCache(model, 64, storage=Storage(keys="int8"))):
        model.forward(ids[:, :40], floats)
        floats.convert(storage=storage)
        found = model.forward(ids[:, 40:41], floats)
        assert near(found, expected, 0.1)
        floats.convert(storage=Storage())
        assert near(model.forward(ids[:, 41:42], floats), found, 10)


def test_new_format_generates(model):
    cache = KVCache(model, 64, storage=Storage(keys="fp8", values="fp8"))
    ids = IDS[:1, :20]
    tokens = model.generate(ids, cache=cache, max_new_tokens=8, do_sample=False)
    seen = written_out(model, tokens[:, :-1], Storage(keys="fp8", values="fp8"))
    assert seen[0, 19:].argmax(-1).tolist() == tokens[0, 20:].tolist()


# Native code ------------------------------------------------------------------------------------


def parts(dtype: torch.dtype) -> list:
    """Arguments of attention_part over keys in the new format and values in 4 bits."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, n, h, 32, generator=generator).to(dtype)
               for n, h in ((3, 4), (40, 2), (40, 2)))  # fmt: skip
    stores = [list(FORMATS[kind].encode(x).values()) for kind, x in (("fp8", k), ("int4", v))]
    past, start, count = torch.tensor([[37, 20], [0, 0], [40, 23]], dtype=torch.int32)
    return [q, stores[0], "fp8", stores[1], "int4", past, start, count, 40, 0.2, 0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_a_new_format_falls_back_to_the_reference(dtype):
    args = parts(dtype)
    found = torch.ops.exkv.attention_part(*args)
    expected = REFERENCES["attention_part"](*args)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    by_number = [text_number(x) if isinstance(x, str) else x for x in args]
    again = torch.ops.exkv.attention_part_reference(*by_number)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_append_to_a_new_format_falls_back_to_the_reference():
    k, v = torch.randn(2, 2, 5, 3, 32).unbind()
    stores = [
        [torch.zeros(shape, dtype=dtype) for shape, dtype in FORMATS[kind].layout((2, 16, 3, 32),
                                                                                 k.dtype).values()]
        for kind in ("int4", "fp8")
    ]  # fmt: skip
    past = torch.tensor([0, 7], dtype=torch.int32)
    torch.ops.exkv.append_kv(k, v, None, None, stores[0], "int4", stores[1], "fp8", past)
    for x, kind, stored in ((k, "int4", stores[0]), (v, "fp8", stores[1])):
        for tensor, new in zip(stored, FORMATS[kind].encode(x).values(), strict=True):
            assert torch.equal(tensor[0, :5], new[0]) and torch.equal(tensor[1, 7:12], new[1])


def test_unknown_format_names_are_refused():
    args = parts(torch.float32)
    args[2] = "int5"
    with pytest.raises((ValueError, RuntimeError), match="k_format is 'int5'.*float, int8"):
        torch.ops.exkv.attention_part(*args)


def test_what_the_kernels_know_of_formats_is_what_the_table_says():
    native = exkv_ext.kv_formats()
    if native is None:
        pytest.skip("the CPU kernels aren't loaded")
    assert list(native) == [name for name, kind in FORMATS.items() if kind.has_kernels]
    for name, (bits, tensors, tokens) in native.items():
        layout = FORMATS[name].layout((1, 64, 1, 32), torch.bfloat16)
        (*_, size), dtype = layout[""]
        assert (len(layout), FORMATS[name].group) == (tensors, tokens)
        assert bits == (0 if dtype.is_floating_point else size * dtype.itemsize * 8 // 32)


def test_a_format_says_whether_it_loses_anything():
    x = torch.randn(1, 64, 2, 32)
    for name, kind in FORMATS.items():
        same = torch.equal(kind.widen(kind.encode(x), x.dtype, 32), x)
        assert same == kind.lossless, name


# The promise ------------------------------------------------------------------------------------


def promised_and_measured(folder, storages):
    """On cards that are cut to the planned byte: what was not as planned, and the workspace that
    was; every call up to the edge finds its memory."""
    surprises, workspaces = [], []
    with entered():
        model = Model(folder, max_input_len=64)
        for options in storages:
            for properties in ({}, {"retention": Window(20)}, {"residence": OnHost()}):
                sim.set_capacity(0, 64 << 20)
                cache = KVCache(model, 300, 2, storage=Storage(**options), **properties)
                model.load_autosplit(cache)
                surprises += model.report.surprises()
                (ledger,) = model.plan.ledgers
                workspaces.append(ledger.workspace)
                sim.set_capacity(0, ledger.total)
                ids = IDS.repeat(1, 5)
                kept = None
                for new in ([299, 300], [300, 300], [1, 1]):
                    cache.reset()
                    kept = model.forward(ids[:, : max(new)], cache, new_lens=new)
                del kept
                model.unload()
                model.forget_cache(cache)
    return surprises, workspaces


def test_a_plan_counts_what_the_reference_takes_and_simulated_devices_charge_it(tmp_path):
    folder = str(save(reference(llama(num_hidden_layers=2)), tmp_path / "model"))
    storages = [*STORAGES.values(), {"keys": "int8", "values": "int4"}]
    surprises, workspaces = run_sim(promised_and_measured, "64M", args=[folder, storages])
    assert surprises == []
    alone, _, _, with_kernels = (workspaces[at : at + 3] for at in range(0, 12, 3))
    assert all(ours > 2 * theirs for ours, theirs in zip(alone, with_kernels, strict=True))
