"""Quantized old tokens and float recent ones (as in KIVI), against attention written out, while
rows are copied, trimmed and moved."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import arithmetic
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_cpu import on_cpu
from simproc import run_sim
from tiny import llama, loaded, mistral, reference, save
from torch import Tensor
from written_out import written_out

from exkv import (
    Cache,
    HybridCache,
    KVCache,
    Model,
    PlacementError,
    QuantizedCache,
    make_cache,
    place,
    sim,
)
from exkv.cache import Dynamic, KeepAll, KiviCache, OnHost, Sinks, Static, Storage, Window
from exkv.ops.kv_formats import FORMATS

RECENT, LENGTH = 40, 200
KIVI = Storage(keys="int2c", values="int2", recent=RECENT)
IDS = torch.randint(3, 320, (4, LENGTH), generator=torch.Generator().manual_seed(5))
#: A value's last step may turn over where sums are taken in another order.
TOLERANCE = 3e-3
#: Whole, one by one from before the first group is complete, and in pieces.
CUTS = [[LENGTH], [60, *[1] * 140], [31, 1, 1, 63, 2, 102], [64, 64, 64, 8], [33] * 6 + [2]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return loaded(llama(num_hidden_layers=2), tmp_path_factory.mktemp("model"), max_input_len=64)


def kivi(model, rows: int = 1, length: int = LENGTH + 20, **properties) -> KVCache:
    return KVCache(model, length, rows, **{"storage": KIVI, **properties})


near = functools.partial(arithmetic.near, tolerance=TOLERANCE)


# Beside attention that is written out -----------------------------------------------------------

STORAGES = [
    KIVI,
    Storage(keys="int2c", values="int2", recent=32),
    Storage(keys="int4c", values="int4", recent=64),
    Storage(keys="int4c", values="int2", recent=33, rotate=True),
    Storage(keys="int2c", values="float", recent=199),
    Storage(keys="int8", values="int2", recent=45),
]
RETENTIONS = [
    *(KeepAll(), Window(20), Window(40), Window(41), Window(64), Window(65), Window(100)),
    *(Sinks(20, 5), Sinks(50, 1), Sinks(70, 5), Sinks(64, 40), Sinks(160, 33)),
]


@functools.cache
def definition(model, storage: Storage, retention) -> Tensor:
    """Computed once for all splits."""
    return written_out(model, IDS[:1], storage, retention)


@pytest.mark.sweep(25)
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: str(cut[:3]))
@pytest.mark.parametrize(
    ("storage", "retention"),
    [
        *((storage, KeepAll()) for storage in STORAGES),
        *((storage, Window(100)) for storage in STORAGES),
        *((KIVI, retention) for retention in RETENTIONS),
        (STORAGES[3], Sinks(70, 5)),
    ],
    ids=str,
)
def test_queries_see_the_keys_of_the_definition(model, storage, retention, cut):
    cache = KVCache(model, LENGTH, storage=storage, retention=retention)
    found = torch.cat([model.forward(part, cache) for part in IDS[:1].split(cut, dim=1)], dim=1)
    assert near(found, definition(model, storage, retention))


def test_old_tokens_are_rounded_and_evicted_ones_gone(model):
    """Otherwise the comparison above would be empty."""
    everything = written_out(model, IDS[:1], Storage())
    assert near(everything, model.forward(IDS[:1], Cache(model, LENGTH)), tolerance=1e-5)
    for storage, retention in [(KIVI, KeepAll()), (KIVI, Window(100)), (KIVI, Sinks(70, 5))]:
        found = model.forward(IDS[:1], KVCache(model, LENGTH, storage=storage, retention=retention))
        assert not near(found, everything)
        assert not near(found, written_out(model, IDS[:1], Storage(), retention))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("window", [24, 40, 50, 100])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: str(cut[:3]))
def test_a_models_own_window_cuts_either_tier(tmp_path_factory, window, cut):
    config = mistral(num_hidden_layers=2, sliding_window=window)
    folder = save(reference(config), tmp_path_factory.mktemp("model"))
    model = on_cpu(folder, max_input_len=64)
    expected = written_out(model, IDS[:1], KIVI)
    caches = [
        kivi(model),
        QuantizedCache(model, LENGTH, nbits=2, axis="channel", residual_length=RECENT),
    ]
    for cache in caches:
        found = torch.cat([model.forward(part, cache) for part in IDS[:1].split(cut, dim=1)], 1)
        assert near(found, expected)
    kept = {layer.spec.retention for layer in caches[1].layers}
    assert kept == ({Window(window)} if window <= RECENT else {caches[0].layers[0].spec.retention})


# Whatever is done to rows -----------------------------------------------------------------------


def reach(model, cache, rows: list[list[int]]) -> None:
    """Extend the rows to these tokens in one call."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[3] * (width - len(row))] for row in rows])
    model.forward(ids, cache, new_lens=list(map(len, rows)))


@pytest.fixture(params=[KeepAll(), Window(70), Sinks(66, 5)], ids=str)
def retention(request):
    return request.param


def right(model, cache, make=None) -> bool:
    """Whether the rows go on as rows do that were never moved, in a cache of their own each."""
    make = make or (lambda model: kivi(model, retention=cache.layers[0].spec.retention))
    lens = cache.seq_lens
    used = max(i + 1 for i, length in enumerate(lens) if length)
    answers = model.forward(torch.full((used, 1), 7), cache)
    cache.crop(lens)
    for row in range(used):
        alone = make(model)
        if lens[row]:
            model.forward(torch.tensor([cache.sequences[row]]), alone)
        if not near(answers[row], model.forward(torch.tensor([[7]]), alone)[0]):
            return False
    return True


def filled(model, lens=(150, 77, 120), rows: int = 4, **properties) -> KVCache:
    """Rows that share a prefix of 70 tokens and then differ."""
    cache = kivi(model, rows, **properties)
    reach(model, cache, beginnings(lens))
    return cache


def beginnings(lens) -> list[list[int]]:
    return [[*IDS[3, :70], *IDS[row, 70:]][:length] for row, length in enumerate(lens)]


@pytest.mark.sweep(24)
@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 1], [0, 0, 2, 2], [1, 0], [2], [0, 1, 1]])
@pytest.mark.parametrize("lens", [(150, 77, 120), (38, 40, 37), (150, 20, 39), (71, 72, 73)])
def test_reordered_rows(model, retention, rows, lens):
    cache = filled(model, lens, retention=retention)
    expected = [list(cache.sequences[row]) for row in rows]
    cache.reorder(rows)
    assert cache.sequences[: len(rows)] == expected
    assert right(model, cache)


def test_row_becomes_the_prefix_of_a_longer_row(model, retention):
    """Nothing differs in their common tokens but what the ring has overwritten."""
    for short in (39, 40, 41, 70, 96):
        cache = kivi(model, 2, retention=retention)
        reach(model, cache, [IDS[0, :150].tolist(), IDS[0, :short].tolist()])
        cache.reorder([1, 1])
        assert right(model, cache)


def test_common_groups_are_not_moved(model):
    cache = filled(model)
    marked = [
        layer.tensors[name] for layer in cache.layers for name in ("k", "k_scale", "v_offset")
    ]
    for tensor in marked:
        tensor[2, :2] = 0
    cache.reorder([2, 0, 1])
    for tensor in marked:
        assert (tensor[2, :2] == 0).all() and (tensor[0, :2] != 0).any()


def test_crop_and_trim(model, retention):
    for length, kept in [(150, 149), (150, 148), (150, 33), (64, 63), (104, 40), (41, 39), (40, 5)]:
        cache = kivi(model, retention=retention)
        reach(model, cache, [IDS[0, :length].tolist()])
        cache.crop(kept)
        assert bool(cache.stale) == cache.layers[0].spec.arrangement.lost(length, kept)
        beyond = RECENT + retention.sinks
        assert bool(cache.stale) == (
            length > beyond and length - kept > 1 and kept > retention.sinks
        )
        model.forward(IDS[1:2, :40], cache)
        assert cache.stale == set() and right(model, cache)


def test_copies_and_forks_go_their_own_way(model, retention):
    cache = filled(model, retention=retention)
    copies = [cache.clone(), copy.deepcopy(cache), cache.fork(2), cache.fork(1, max_seq_len=190)]
    assert copies[2].sequences[:2] == [cache.sequences[0]] * 2
    cache.crop(3)
    model.forward(IDS[:, :60], cache)
    for other in copies:
        assert max(other.seq_lens) == 150 and right(model, other)
        model.forward(IDS[: other.batch_size, :35], other)
        assert right(model, other)
    assert right(model, cache)


@pytest.mark.parametrize("lens", [(150, 77, 120), (31, 32, 20), (40, 41, 12)])
def test_a_file_goes_into_a_cache_of_another_size(model, retention, tmp_path, lens):
    cache = filled(model, lens, retention=retention)
    cache.save(tmp_path / "cache")
    for other in (
        kivi(model, 3, max(lens) + 1, retention=retention),
        kivi(model, 5, residence=OnHost(), retention=retention),
    ):
        model.forward(IDS[:1, :50], other) if other.max_seq_len > 60 else None
        other.load(tmp_path / "cache")
        assert other.sequences[:3] == cache.sequences[:3]
        assert right(model, other)
    with pytest.raises(ValueError, match="the last 40 tokens as floats.*the last 64 tokens"):
        KiviCache(model, 200, 4).load(tmp_path / "cache")


@pytest.mark.sweep(12)
@pytest.mark.parametrize("growth", [Static(), Dynamic(16)], ids=str)
@pytest.mark.parametrize("lens", [(150, 77, 120), (31, 32, 20), (40, 41, 12)])
@pytest.mark.parametrize("values", ["int2", "int8"])
def test_conversion_to_tiers_and_back(model, retention, lens, growth, values):
    """Recent tokens and sinks are what they were, and old ones what the formats give back."""
    storage = replace(KIVI, values=values)
    cache = filled(model, lens, storage=Storage(), growth=growth, retention=retention)
    exact = [dict(layer.tensors) for layer in cache.layers]
    cache.convert(storage=storage)
    native = filled(model, lens, storage=storage, growth=growth, retention=retention)
    assert cache.nbytes() == native.nbytes()
    before = go_on(model, cache)
    for properties in ({"residence": OnHost()}, {"growth": Dynamic(64)}, {"growth": Static()}):
        cache.convert(**properties)
        assert near(go_on(model, cache), before, tolerance=1e-5)
    cache.convert(storage=Storage())
    for layer, was in zip(cache.layers, exact, strict=True):
        for name, kind in (("k", storage.keys), ("v", storage.values)):
            for row, length in enumerate(lens):
                stored = layer.tensors[name][row], was[name][row]
                assert_rounded_where_old(*stored, kind, retention, length)


def assert_rounded_where_old(found, was, kind: str, retention, length: int) -> None:
    """found and was (S, H_kv, D), as the retention lays them."""
    sinks, form = retention.sinks, FORMATS[kind]
    oldest = max(length, sinks) - min(retention.size or length, max(length - sinks, 0))
    for first in range(sinks, length - RECENT, 32):
        at = torch.arange(first, min(first + 32, length))
        kept = retention.place(at.clamp(min=oldest))  # of those that are gone, the next one
        rounded = form.widen(form.encode(was[kept].unsqueeze(0)), torch.float32, was.shape[-1])[0]
        old = (at >= oldest) & (at < length - RECENT)
        assert torch.equal(found[retention.place(at[old])], rounded[old])
    recent = torch.arange(max(length - RECENT, oldest), length)
    for exact in (torch.arange(min(sinks, length)), recent):
        assert torch.equal(found[retention.place(exact)], was[retention.place(exact)])


def test_tiers_are_converted_to_others(model, retention):
    cache = filled(model, retention=retention)
    expected = go_on(model, cache, 1)
    other = Storage(keys="int4c", values="int8", rotate=True, recent=64)
    cache.convert(storage=other)
    assert cache.layers[1].spec.storage == other
    # 4 and 8 bits keep what 2 bits left; the one that leaves the window is then rounded to 4.
    assert near(go_on(model, cache, 1), expected, tolerance=0.06)


def go_on(model, cache, tokens: int = 20) -> Tensor:
    other = cache.clone()
    return model.forward(IDS[: cache.batch_size, 100 : 100 + tokens], other)


def test_shared_rows_cannot_be_converted_to_tiers(model):
    cache = Cache(model, LENGTH)
    model.forward(IDS[:1, :50], cache)
    fork = cache.fork(2)
    expected = model.forward(torch.tensor([[7]]), cache.clone())
    with pytest.raises(ValueError, match="2 caches share storage.*delete the forks"):
        cache.convert(storage=KIVI)
    assert torch.equal(model.forward(torch.tensor([[7]]), cache), expected)
    assert fork.seq_lens == [50, 50]


#: A step of 4 bits that turns over among the few keys of a window stays within the tolerance.
FOUR = Storage(keys="int4c", values="int4", recent=RECENT)
MAKES = {
    "device": {},
    "host": {"residence": OnHost(), "growth": Dynamic(48)},
    "rotated": {"storage": Storage(keys="int4c", values="int4", rotate=True, recent=64)},
    "window": {"storage": FOUR, "retention": Window(70)},
    "window on the host": {
        **{"storage": FOUR, "retention": Window(41)},
        **{"residence": OnHost(), "growth": Dynamic(16)},
    },
    "sinks": {"storage": FOUR, "retention": Sinks(66, 5)},
}


@pytest.fixture(params=MAKES)
def make(request):
    return lambda model, rows=1: kivi(model, rows, **MAKES[request.param])


steps = st.one_of(
    st.tuples(st.just("run"), st.lists(st.integers(0, 70), min_size=3, max_size=3)),
    st.tuples(st.just("decode"), st.integers(1, 34)),
    st.tuples(st.just("reorder"), st.permutations(range(3))),
    st.tuples(st.just("repeat"), st.integers(0, 2)),
    st.tuples(st.just("trim"), st.integers(1, 50)),
)


@pytest.mark.sweep(2)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(steps, min_size=2, max_size=7))
def test_rows_match_their_tokens_after_any_operations(model, make, done):
    cache = make(model, 3)
    reach(model, cache, [[5], [5, 6], [5, 6, 8]])
    for what, how in done:
        room = LENGTH - max(cache.seq_lens)
        if what == "run" and 0 < max(how) < room:
            model.forward(IDS[:3, : max(how)], cache, new_lens=how)
        elif what == "decode" and how < room:
            for token in range(how):
                model.forward(IDS[:3, token : token + 1], cache)
        elif what == "reorder":
            cache.reorder(how)
        elif what == "repeat":
            cache.reorder([how] * 3)
        elif what == "trim":
            cache.crop([max(length - how, 1) for length in cache.seq_lens])
    assert right(model, cache, make)


# Memory and work --------------------------------------------------------------------------------


def test_decoding_encodes_a_group_once_in_32_steps(model, monkeypatch):
    tokens, encode = [], type(FORMATS["int2c"]).encode

    def spy(self, x):
        tokens.append(x.shape[1])
        return encode(self, x)

    cache = kivi(model)
    monkeypatch.setattr(type(FORMATS["int2c"]), "encode", spy)
    model.forward(IDS[:1, :60], cache)
    assert tokens == [32, 32]  # one group in each of two layers
    for token in range(60, 130):
        model.forward(IDS[:1, token : token + 1], cache)
    assert tokens == [32, 32] * 4


def test_bytes_are_those_of_the_shapes(model):
    """2 bits and a scale and an offset of 16 for every 32 values; and the recent ones as floats."""
    assert KVCache(model, 2048, 3, storage=KIVI).nbytes() == {
        torch.device("cpu"): 2 * 3 * 2 * 2 * 32 * (2048 * 3 // 8 + RECENT * 4)
    }
    short = KVCache(model, 30, storage=KIVI)  # no group is ever complete
    assert short.nbytes() == {torch.device("cpu"): 2 * 2 * 2 * 32 * 30 * 4}
    expected = model.forward(IDS[:1, :30], Cache(model, 30))
    assert near(model.forward(IDS[:1, :30], short), expected, tolerance=1e-6)


EDGES = {
    "all": (KeepAll(), (33, 64, 79, 95, 96, 97, 140)),
    "window": (Window(70), (64, 97, 128, 150)),
    "sinks": (Sinks(66, 5), (64, 103, 134, 150)),
}


def at_the_edge(folder, edge):
    """Cards that are cut to the planned byte, and every way in which a group becomes complete."""
    (retention, lengths), wrong, held = EDGES[edge], [], 0
    for chunk in (1, 16, 20, 45):
        model = Model(folder, max_input_len=chunk)
        for length in lengths:
            for rows in (1, 3):
                cache = kivi(model, rows, length, retention=retention)
                sim.set_capacity(0, 64 << 20)
                plan = place(model, cache)
                sim.set_capacity(0, plan.ledgers[0].total)
                try:
                    model.load(plan=plan)
                    # Alignments to groups: three rows have three neighbouring ones, so all of them.
                    alignments = range(min(chunk, length - 1, 32))
                    for first in alignments[:: -5 if rows == 1 else -3]:
                        cache.reset()
                        new = [max(first - row, 0) for row in range(rows)]
                        if max(new):
                            model.forward(IDS[:rows, : max(new)], cache, new_lens=new)
                        rest = length - max(cache.seq_lens)
                        model.forward(IDS[:rows, :rest], cache)
                    held += 1
                    wrong += model.report.surprises()
                except (torch.OutOfMemoryError, PlacementError) as error:
                    wrong.append([chunk, length, rows, str(error)])
                cache = None
                model.unload()
    return held, wrong


@pytest.mark.sweep(1)
@pytest.mark.parametrize("edge", EDGES)
def test_growth_has_room_for_each_completed_group(tmp_path, edge):
    """With so narrow a model and so long a text, attention is what takes most."""
    shape = {"intermediate_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 8}
    folder = save(reference(llama(**shape)), tmp_path)
    held = run_sim(at_the_edge, "64M", args=[str(folder), edge])
    assert held == [4 * len(EDGES[edge][1]) * 2, []]


# What users get wrong ---------------------------------------------------------------------------


def test_invalid_options_are_refused_with_a_remedy(model):
    def refused(match: str, **options) -> None:
        with pytest.raises(ValueError, match=match):
            QuantizedCache(model, 100, **options)

    refused("axis is 'token': it must be 'head' or 'channel'", axis="token")
    refused(
        "no format of 8 bits by channel: choose 4 or 2 for keys, or axis='head'",
        axis="channel",
        nbits=8,
    )
    refused("no format of 3 bits", axis="channel", nbits=3)
    refused("residual_length is -1: it must be at least 0", residual_length=-1)
    with pytest.raises(TypeError, match="residual_length is 64.0"):
        QuantizedCache(model, 100, residual_length=64.0)
    with pytest.raises(ValueError, match="0 recent tokens.*at least 32.*int2c encodes 32 tokens"):
        Storage(keys="int2c")
    with pytest.raises(ValueError, match="-1 recent tokens.*at least 32, or 0|at least 32"):
        Storage(recent=-1)
    cache = HybridCache(model, 50)
    assert cache.layers[0].spec.storage == Storage()


@pytest.mark.parametrize(
    "axis, asked, stored",
    [("head", 0, 0), ("head", 5, 32), ("channel", 0, 32), ("channel", 40, 40)],
)
def test_residual_length_is_at_least_a_group(model, axis, asked, stored):
    cache = QuantizedCache(model, 100, axis=axis, residual_length=asked)
    assert cache.layers[0].spec.storage.recent == stored


def test_kivi_by_the_names_that_users_know(model):
    channel = {"nbits": 2, "axis": "channel", "residual_length": 64}
    by_name = make_cache("quantized", model, max_seq_len=90, **channel)
    specs = [layer.spec for layer in by_name.layers]
    assert specs == [layer.spec for layer in KiviCache(model, 90).layers]
    assert specs[0].storage == Storage(keys="int2c", values="int2", recent=64)
    four = QuantizedCache(model, 90, axis="channel", value_bits=8, rotate=True).layers[0].spec
    assert four.storage == Storage(keys="int4c", values="int8", rotate=True, recent=64)
    head = QuantizedCache(model, 90, nbits=8, residual_length=32).layers[0].spec.storage
    assert head == Storage(keys="int8", values="int8", recent=32)
