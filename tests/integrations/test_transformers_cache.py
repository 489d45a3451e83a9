"""exkv's caches and attention under stock transformers models and their own ``generate``."""

from __future__ import annotations

import copy
import functools
import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hf_families import given
from on_cpu import on_cpu
from tiny import TINY, llama, reference, save
from transformers import DynamicCache, StaticCache

import exkv
from exkv import CACHES
from exkv.batch import pad_rows
from exkv.cache import CacheLayer, make_cache
from exkv.cache.layer import InPlace
from exkv.integrations.transformers import HFCache, disable, enable, resilient_generate
from exkv.integrations.transformers.versions import SINCE_5

#: Different lengths, all longer than the tiny models' windows.
ROWS = [torch.arange(3, 43).tolist(), torch.arange(60, 27, -1).tolist()]
NEW = 6
#: Kind -> settings with which it rounds or evicts something in these tests.
OPTIONS = {"sliding_window": {"window_length": 16}, "sink": {"window_length": 20}}
LOSSLESS = ("dynamic", "static", "hybrid", "offloaded", "offloaded_static", "paged")
#: Kinds of exkv that round, or keep fewer tokens than a stock cache.
OTHERS = ("8bit", "4bit", "2bit", "kivi", "quantized", "sliding_window", "sink")
KINDS = (*LOSSLESS, *OTHERS)


def hf_cache(model, kind, **options):
    return HFCache(model.config, kind, **OPTIONS.get(kind, {}), **options)


def padded(rows=ROWS):
    ids, lengths = pad_rows(rows, left=True)
    mask = torch.tensor([[0] * (ids.shape[1] - n) + [1] * n for n in lengths])
    return {"input_ids": ids, "attention_mask": mask}


def generated(model, **options):
    torch.manual_seed(3)
    call = {**padded(), "do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **options}
    return model.generate(**call).tolist()


@pytest.fixture(scope="module")
def models():
    """Tiny models by architecture, made on demand, with the attention "eager"."""
    made = {}

    def model(name):
        if name not in made:
            made[name] = reference(TINY[name]())
            made[name].generation_config.eos_token_id = None
        made[name].set_attn_implementation("eager")
        return made[name]

    return model


# Tokens -------------------------------------------------------------------------------------

WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 5},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    # (4.57 asks for an end.)
    "prompt lookup": {**padded(ROWS[:1]), "prompt_lookup_num_tokens": 3, "eos_token_id": 0},
}


#: Gemma's has windows, soft caps and grouped heads.
NAMES = ["LlamaForCausalLM", pytest.param("Gemma2ForCausalLM", marks=pytest.mark.older)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_lossless_kinds_match_stock_caches(models, name, way):
    """Including windows, soft caps, grouped heads and left padding."""
    model = models(name)
    expected = generated(model, **WAYS[way])
    for implementation in ("eager", "exkv"):
        model.set_attn_implementation(implementation)
        kinds = LOSSLESS if way == "greedy" else ("dynamic", "hybrid", "offloaded")
        for kind in kinds:
            cache = hf_cache(model, kind)
            found = generated(model, **WAYS[way], **given(model, cache))
            assert found == expected, (implementation, kind)
        assert generated(model, **WAYS[way], **given(model, DynamicCache())) == expected


def test_sdpa_works_with_the_caches(models):
    model = models("MistralForCausalLM")
    expected = generated(model)
    model.set_attn_implementation("sdpa")
    for kind in ("dynamic", "hybrid"):
        assert generated(model, **given(model, hf_cache(model, kind))) == expected


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """transformers' model with exkv's attention, and exkv's own with the same weights."""
    theirs = reference(TINY["Gemma2ForCausalLM"](eos_token_id=None))
    ours = on_cpu(save(theirs, tmp_path_factory.mktemp("pair")))
    theirs.set_attn_implementation("exkv")
    return theirs, ours


def share_of_other_codes(ours, theirs) -> float:
    """The share of bytes that differ among the codes that both caches hold."""
    differ = []
    for own, other in zip(ours.layers, theirs.layers, strict=True):
        for name in ("k", "v"):
            pairs = zip(own.tensors[name], other.store.tensors[name], ours.seq_lens, strict=True)
            differ += [(a[:n] != b[:n]).flatten() for a, b, n in pairs]
    return torch.cat(differ).double().mean().item()


@pytest.mark.parametrize("kind", OTHERS)
def test_lossy_kinds_match_exkvs_own_model(pair, kind):
    theirs, ours = pair
    cache = make_cache(kind, ours, max_seq_len=64, batch_size=2, **OPTIONS.get(kind, {}))
    call = {**padded(), "max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
    call |= {"return_dict_in_generate": True, "output_logits": True}
    expected = ours.generate(**call, cache=cache)
    stored = hf_cache(theirs, kind)
    found = theirs.generate(**call, **given(theirs, stored))
    assert found.sequences.tolist() == expected.sequences.tolist()
    # Another order of summation, which differs by 1e-6, may change a value's 4-bit code.
    others = share_of_other_codes(cache, stored) if kind in ("4bit", "quantized") else 0.0
    assert others < 0.002
    atol = 4e-3 if others else 2e-4
    for mine, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=atol)


@pytest.mark.older
@pytest.mark.parametrize("kind", ["hybrid", "kivi", "sink", "8bit"])
def test_assisted_generation_crops_every_kind(pair, kind):
    """Rings are restored; the assistant is wrong often enough to need that."""
    model, _ = pair
    assistant = reference(TINY["Gemma2ForCausalLM"](eos_token_id=None, num_hidden_layers=1), seed=4)
    one = padded(ROWS[:1])
    plain = generated(model, **one, max_new_tokens=12, **given(model, hf_cache(model, kind)))
    cache = hf_cache(model, kind)
    found = generated(
        model, **one, max_new_tokens=12, assistant_model=assistant, **given(model, cache)
    )
    assert found == plain


def looking_ahead(model, input_ids, **call):
    """Custom code as on the Hub: choose between two tokens by the next step's confidence."""
    (name,) = given(model, None)
    cache, attention_mask = call[name], call["attention_mask"]
    rows, new = len(input_ids), input_ids
    for _ in range(NEW):
        logits = model(new, **{name: cache}, attention_mask=attention_mask).logits[:, -1]
        candidates = logits.topk(2).indices.view(-1, 1)
        cache.batch_repeat_interleave(2)
        longer = F.pad(attention_mask, (0, 1), value=1)
        twice = longer.repeat_interleave(2, dim=0)
        ahead = model(candidates, **{name: cache}, attention_mask=twice)
        surest = ahead.logits[:, -1].amax(-1).view(rows, 2).argmax(-1)
        chosen = torch.arange(rows) * 2 + surest
        cache.batch_select_indices(chosen)
        cache.crop(-1)
        new, attention_mask = candidates[chosen], longer
        input_ids = torch.cat((input_ids, new), dim=1)
    return input_ids


@pytest.mark.parametrize("name", NAMES)
def test_custom_generation_repeats_selects_and_crops(models, name):
    model = models(name)
    expected = generated(model, custom_generate=looking_ahead, **given(model, DynamicCache()))
    assert expected != generated(model)
    model.set_attn_implementation("exkv")
    for kind in ("dynamic", "offloaded"):
        cache = hf_cache(model, kind)
        assert generated(model, custom_generate=looking_ahead, **given(model, cache)) == expected


@pytest.mark.older
def test_both_cache_arguments_work_in_every_version(pair):
    """Without a warning of transformers, which would be an error (pyproject.toml)."""
    model, _ = pair
    expected = generated(model, **given(model, hf_cache(model, "8bit")))
    call = {**padded(), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    resilient = functools.partial(resilient_generate, model)
    enable()
    try:
        for generate in (model.generate, resilient):
            names = {name: hf_cache(model, "8bit") for name in ("cache", "past_key_values")}
            for name, cache in names.items():
                assert generate(**call, **{name: cache}).tolist() == expected, name
            with pytest.raises(ValueError, match="are the same"):
                generate(**call, **names)
    finally:
        disable()


def test_stock_generate_warns_about_the_older_argument(pair):
    model, _ = pair
    expected = generated(model, cache=hf_cache(model, "8bit"))
    with pytest.warns(FutureWarning, match="past_key_values.*Use `cache`"):
        assert generated(model, past_key_values=hf_cache(model, "8bit")) == expected


@pytest.mark.older
def test_custom_code_may_use_the_older_argument(pair):
    """``generate``'s signature decides, not that of the model's ``forward``."""

    class OfTheHub(type(pair[0])):
        def forward(self, input_ids=None, past_key_values=None, **call):
            call |= {} if past_key_values is None else given(self, past_key_values)
            return super().forward(input_ids, **call)

    model = OfTheHub(pair[0].config).eval()
    model.load_state_dict(pair[0].state_dict())
    call = {**padded(), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    assert resilient_generate(model, **call).tolist() == generated(pair[0])


@pytest.mark.older
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("float16", "float32")])
def test_different_dtypes_of_keys_and_values_are_kept(pair, dtypes):
    chance = torch.Generator().manual_seed(0)
    draw = lambda dtype: torch.randn(1, 2, 5, 32, generator=chance).to(getattr(torch, dtype))  # noqa: E731
    layer = HFCache(pair[0].config).layers[0]
    chunks = [tuple(map(draw, dtypes)) for _ in range(2)]
    for chunk in chunks:
        found = layer.update(*chunk)
    for held, new in zip(found, zip(*chunks, strict=True), strict=True):
        expected = torch.cat(new, dim=2)
        assert held.dtype == expected.dtype and torch.equal(held + 0, expected)


@pytest.mark.older
def test_second_turn_continues_the_cache(pair):
    """A further chunk, with padded rows."""
    model, _ = pair
    for kind in ("8bit", "hybrid", "kivi"):
        cache = hf_cache(model, kind)
        call = {**padded(), "max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
        first = model.generate(**call, **given(model, cache))
        more = torch.arange(100, 108).view(2, 4)
        ids = torch.cat((first, more), dim=1)
        mask = torch.cat((padded()["attention_mask"], torch.ones(2, 6, dtype=torch.long)), dim=1)
        again = {**call, "input_ids": ids, "attention_mask": mask}
        found = model.generate(**again, **given(model, cache)).tolist()
        assert found == model.generate(**again, **given(model, hf_cache(model, kind))).tolist(), (
            kind
        )


# Names, compilation, full devices -----------------------------------------------------------


@pytest.mark.older
def test_enable_adds_cache_implementations(pair):
    """Removed names, exkv's own, and transformers' own, which are unchanged."""
    model, _ = pair
    stock = generated(model)
    enable("quantized", nbits=8)
    try:
        assert generated(model, cache_implementation="dynamic") == stock
        assert generated(model, cache_implementation="hybrid") == stock
        for name, kind, settings in (
            ("exkv", "8bit", {}),
            ("exkv", "4bit", {"nbits": 4}),
            ("sink", "sink", OPTIONS["sink"]),
            ("sliding_window", "sliding_window", OPTIONS["sliding_window"]),
            ("kivi", "kivi", {}),
        ):
            found = generated(model, cache_implementation=name, cache_config=settings)
            assert found == generated(model, **given(model, hf_cache(model, kind))), name
        config = copy.deepcopy(model.generation_config)
        config.cache_implementation, config.max_new_tokens = "hybrid", NEW
        found = model.generate(**padded(), generation_config=config)
        assert found.tolist() == stock and config.cache_implementation == "hybrid"
    finally:
        disable()
    with pytest.raises(ValueError, match="Invalid `cache_implementation`"):
        generated(model, cache_implementation="exkv")


def test_compiled_model_runs_with_the_cache():
    model = reference(llama(num_hidden_layers=1, eos_token_id=None))
    call = {"input_ids": torch.tensor([ROWS[0]]), "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**call).tolist()
    model.set_attn_implementation("exkv")
    model.forward = torch.compile(model.forward, backend="eager")
    cache = hf_cache(model, "static", max_seq_len=64)
    assert model.generate(**call, **given(model, cache)).tolist() == expected
    stock = StaticCache(config=model.config, max_cache_len=64)
    assert model.generate(**call, **given(model, stock)).tolist() == expected


class Full:
    """A layer's MLP that runs out of memory at certain calls."""

    def __init__(self, module, at):
        self.calls, self.at = 0, at
        self.handle = module.register_forward_pre_hook(self)

    def __call__(self, *_):
        self.calls += 1
        if self.calls in self.at:
            raise torch.OutOfMemoryError(f"call {self.calls}")


@pytest.mark.older
@pytest.mark.parametrize("beams", [1, 3])
def test_resilient_generate_continues_after_out_of_memory(pair, beams):
    """In the prompt and in a decode step, when half of the layers have stored the call's tokens."""
    model, _ = pair
    expected = generated(model, num_beams=beams)
    taken = []
    full = Full(model.model.layers[2].mlp, at=(1, 4))
    call = {**padded(), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    cache = hf_cache(model, "hybrid")
    try:
        found = resilient_generate(
            model, **call, num_beams=beams, **given(model, cache), on_fallback=taken.append,
            on_oom=["offload", "8bit"],
        )  # fmt: skip
    finally:
        full.handle.remove()
    assert [step.step for step in taken] == ["offload", "8bit"]
    assert [step.token for step in taken] == [0, 41]
    assert sum(taken[1].after.values()) < 0.3 * sum(taken[1].before.values())
    assert cache.layers[1].store.spec.storage.keys == "int8"
    width = len(ROWS[0]) + 2  # from here on tokens may differ
    assert [row[:width] for row in found.tolist()][:1] == [row[:width] for row in expected][:1]
    assert "forward" not in vars(model)


def test_error_is_raised_without_steps_left(pair):
    model, _ = pair
    full = Full(model.model.layers[0].mlp, at=range(1, 9))
    try:
        with pytest.raises(torch.OutOfMemoryError, match="call 2"):
            resilient_generate(model, **padded(), max_new_tokens=2, on_oom=["offload"])
    finally:
        full.handle.remove()
    with pytest.raises(TypeError, match="it must be an HFCache"):
        resilient_generate(model, **padded(), **given(model, DynamicCache()))


@pytest.mark.parametrize("version", [None, "4.56.2", "5.19.0"])
def test_import_names_the_required_version(monkeypatch, version):
    ours = [name for name in sys.modules if name.startswith("exkv.integrations.transformers")]
    for name in ours:
        monkeypatch.delitem(sys.modules, name)
    there = None if version is None else SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "transformers", there)
    with pytest.raises(ImportError, match=r"needs transformers 4.57, or 5.20 or .*'exkv\[hf\]'"):
        importlib.import_module("exkv.integrations.transformers")


def test_exkv_does_not_import_transformers():
    root = Path(exkv.__file__).parent
    imports = re.compile(r"^\s*(?:from|import) (?:transformers|exkv\.integrations)\b", re.M)
    files = [file for file in root.rglob("*.py") if imports.search(file.read_text())]
    others = [file.name for file in files if file.parent.name != "transformers"]
    assert files and others == ["foreign.py"]  # the command, which imports it late


# Cache methods ------------------------------------------------------------------------------


def states(rows=3, tokens=40, seed=0):
    """Keys and values, (B, H_kv, N, D)."""
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, 2, tokens, 32, generator=made) for _ in range(2))


def filled(kind, rows=3, tokens=40, past_recorded=False, **options):
    """A cache of two layers with these keys and values, eight tokens per call."""
    config = llama(num_hidden_layers=2)
    cache = HFCache(config, kind, **OPTIONS.get(kind, {}), **options)
    if past_recorded:
        cache.activate_past_recording()
    for layer in (0, 1):
        for start in range(0, tokens, 8):
            feed(cache, start, min(start + 8, tokens), layer, rows)
    return cache


def feed(cache, start, end, layer, rows=3):
    k, v = (x[:, :, start:end] for x in states(rows))
    cache.update(k, v, layer)
    cache.layers[layer].settle()


def contents_of(cache):
    return [(layer.keys + 0, layer.values + 0) for layer in cache.layers]


def check_same(found, expected):
    for mine, theirs in zip(contents_of(found), contents_of(expected), strict=True):
        for x, y in zip(mine, theirs, strict=True):
            assert torch.equal(x, y)
    assert found.get_seq_length() == expected.get_seq_length()


@pytest.mark.older
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_copies_of_every_kind(kind):
    cache, original = filled(kind), filled(kind)
    copied = copy.deepcopy(cache)
    index = torch.tensor([2, 0, 0])
    cache.reorder_cache(index)
    for (k, v), (old_k, old_v) in zip(contents_of(cache), contents_of(original), strict=True):
        assert torch.equal(k, old_k[index]) and torch.equal(v, old_v[index])
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 6
    assert torch.equal(cache.layers[1].keys + 0, contents_of(original)[1][0][[2, 2, 0, 0, 0, 0]])
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert torch.equal(cache.layers[1].keys + 0, contents_of(original)[1][0][[0, 2]])
    check_same(copied, original)
    feed(copied, 0, 8, 0)
    assert original.get_seq_length() == 40 and copied.get_seq_length() == 48


@pytest.mark.older
@pytest.mark.parametrize("kind", KINDS)
def test_crop_and_reset_of_every_kind(kind):
    """After a crop, new tokens lead to the same contents as without the cropped ones."""
    cache = filled(kind, past_recorded=True)
    cache.crop(0 if SINCE_5 else 40)  # the prompt stays
    for layer in (0, 1):
        feed(cache, 0, 5, layer)
    cache.crop(-3)
    expected = filled(kind)
    for layer in (0, 1):
        feed(expected, 0, 2, layer)
    check_same(cache, expected)
    for layer in (0, 1):
        feed(cache, 10, 20, layer)
        feed(expected, 10, 20, layer)
    check_same(cache, expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    for layer in (0, 1):
        feed(cache, 0, 8, layer)
    check_same(cache, filled(kind, tokens=8))


@pytest.mark.older
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_round_trips_through_a_file(kind, tmp_path):
    cache, again = filled(kind), filled(kind, rows=1, tokens=8)
    cache.save(tmp_path / "cache")
    again.load(tmp_path / "cache")
    check_same(again, cache)
    for each in (again, cache):
        feed(each, 3, 9, 1)
    check_same(again, cache)


def test_files_of_other_caches_are_refused(tmp_path):
    filled("8bit").save(tmp_path / "cache")
    with pytest.raises(ValueError, match=r"cache: its layer 0 is .*: make the cache for the same"):
        filled("4bit").load(tmp_path / "cache")
    with pytest.raises(ValueError, match="it has 2 layers, but this cache has 4"):
        HFCache(llama(), "8bit").load(tmp_path / "cache")
    with pytest.raises(ValueError, match="40 tokens, but this cache holds 16"):
        HFCache(llama(num_hidden_layers=2), "8bit", max_seq_len=16).load(tmp_path / "cache")
    (tmp_path / "cache").write_bytes(b"no cache")
    with pytest.raises(ValueError, match="cache: "):
        filled("8bit").load(tmp_path / "cache")


def test_ring_goes_back_to_a_snapshot():
    cache, expected = filled("sliding_window"), filled("sliding_window")
    cache.snapshot()
    for start in (0, 16):
        for layer in (0, 1):
            feed(cache, start, start + 16, layer)
    cache.crop(-32)
    check_same(cache, expected)
    assert cache.snapshots == [40]


def test_positive_crop_is_the_number_to_keep():
    cache = filled("8bit")
    cache.crop(16)
    check_same(cache, filled("8bit", tokens=16))


@pytest.mark.older
@pytest.mark.parametrize(
    ("kind", "room", "options"),
    [("sliding_window", 16, {}), ("sink", 20, {}), ("kivi", 32, {"residual_length": 32})],
)
def test_layer_within_its_ring_can_be_cropped(kind, room, options):
    fits, larger = (
        filled(kind, tokens=0, max_seq_len=size, **options) for size in (room, room + 1)
    )
    assert fits.layers[0].is_croppable and not larger.layers[0].is_croppable
    larger.activate_past_recording()
    assert larger.layers[0].is_croppable
    for layer in (0, 1):
        feed(fits, 0, room, layer)
    fits.crop(-10)
    check_same(fits, filled(kind, tokens=room - 10, **options))


def test_static_windows_can_be_cropped_like_stock_ones():
    config = TINY["Gemma2ForCausalLM"]()
    for size in (config.sliding_window, config.sliding_window + 1):
        cache = HFCache(config, "hybrid", max_cache_len=size)
        stock = StaticCache(config=config, max_cache_len=size)
        assert cache.is_croppable == stock.is_croppable == (size == config.sliding_window)


def test_crop_of_evicted_tokens_is_refused():
    with pytest.raises(ValueError, match="10 tokens can't be cropped .* last 16 tokens"):
        filled("sliding_window").crop(-10)


@pytest.mark.parametrize("tokens", [1, 4])
def test_ring_is_reused_after_a_failed_call_only_if_complete(monkeypatch, tokens):
    """One token overwrites one that is no longer visible; four overwrite visible ones."""

    def full(self, *args):
        raise torch.OutOfMemoryError("no room")

    cache = filled("sliding_window")
    for stores in (CacheLayer, InPlace):
        monkeypatch.setattr(stores, "append", full)
    with pytest.raises(torch.OutOfMemoryError):
        feed(cache, 0, tokens, 0)
    monkeypatch.undo()
    if tokens == 1:
        cache.rollback(40)
        check_same(cache, filled("sliding_window"))
    else:
        with pytest.raises(ValueError, match="4 tokens can't be cropped"):
            cache.rollback(40)


@pytest.mark.older
def test_legacy_interface():
    cache = filled("dynamic")
    k, v = states()
    legacy = cache.to_legacy_cache()
    assert torch.equal(legacy[1][0], k) and torch.equal(cache.value_cache[0] + 0, v)
    again = HFCache.from_legacy_cache(legacy, llama(num_hidden_layers=2), kind="8bit")
    check_same(again, filled("8bit"))
    assert torch.equal(cache[0][1] + 0, v)
    assert len(cache) == 2 and cache.get_max_cache_shape() == -1
    assert HFCache(llama(), "static", max_cache_len=64).get_max_cache_shape() == 64
    new_k, new_v = (x[:, :, :1] for x in (k, v))
    keys, _ = cache.update(new_k, new_v, 0, {"cache_position": torch.tensor([40])})
    assert torch.equal(keys, torch.cat((k, new_k), dim=2))
    assert len(DynamicCache(iter(cache))) == 2


@pytest.mark.older
def test_memory_matches_the_kind():
    """Growing kinds begin with 32 tokens; 8 bits take 8.5 bits per value."""
    for tokens, room in ((8, 32), (33, 64)):
        floats, rounded = (filled(kind, 4, tokens).nbytes() for kind in ("dynamic", "8bit"))
        assert floats == 2 * 2 * 4 * room * 2 * 32 * 4
        assert rounded * 32 == floats * 8.5


@pytest.mark.older
@pytest.mark.parametrize("kind", ["dynamic", "4bit"])
def test_decode_step_copies_nothing_and_counts_once(kind):
    """Also the step after a prompt that fills the storage's first step."""
    cache = HFCache(llama(num_hidden_layers=2), kind)
    for layer in range(2):
        feed(cache, 0, 32, layer, rows=2)
    before = [layer.store.tensors for layer in cache.layers]
    for layer in range(2):
        feed(cache, 32, 33, layer, rows=2)
    for layer, tensors in zip(cache.layers, before, strict=True):
        assert layer.store.tensors is tensors and layer.lens == (33, 33)
    assert cache.layers[0].rows is cache.layers[1].rows


def test_every_kind_is_tested_here():
    assert set(CACHES) - {"fp16"} <= set(KINDS)


# Refusals -----------------------------------------------------------------------------------


@pytest.mark.older
def test_invalid_uses_are_refused(models):
    config = llama()
    with pytest.raises(ValueError, match="'nonsense' is none of"):
        HFCache(config, "nonsense")
    with pytest.raises(TypeError, match="QuantizedCache has no 'nbit'"):
        HFCache(config, "quantized", nbit=4)
    with pytest.raises(ValueError, match="3 pairs of keys and values for 4"):
        HFCache.from_legacy_cache([states()] * 3, config)
    cache = filled("dynamic")
    with pytest.raises(ValueError, match="holds 3 rows, but the call has 1"):
        cache.update(*states(rows=1), 0)
    with pytest.raises(ValueError, match="made for 44: make it with a larger max_seq_len"):
        short = HFCache(llama(num_hidden_layers=1), "static", max_cache_len=44)
        short.update(*states(), 0)
        short.update(*states(), 0)
    model = models("LlamaForCausalLM")
    for kind in ("sink", "sliding_window"):
        with pytest.raises(ValueError, match=r'set_attn_implementation\("exkv"\)'):
            generated(model, **given(model, hf_cache(model, kind)))
    model.set_attn_implementation("exkv")
    with pytest.raises(ValueError, match="has no gradients"):
        model.train()(torch.tensor([[3, 4]]))
    model.eval()


def test_sinks_work_for_models_that_exkv_does_not_run():
    config = TINY["StableLmForCausalLM"](qk_layernorm=True)
    assert HFCache(config, "sink", **OPTIONS["sink"]).get_seq_length() == 0
