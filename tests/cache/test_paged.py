"""Rows in pages of a pool: contents, sharing, copying, freeing, and the same results as in other
caches."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import llama, loaded, reference, save

from exkv import Cache, KVCache, Model, Paged, PagedCache, Plan, SinkCache, place
from exkv.cache import HostTier, OutOfPagesError, Sinks, Storage, Window
from exkv.cache.paging.host_tiers import HostPages
from exkv.cache.paging.pool import PagePool, PageTable
from exkv.decode.runner import Runner

PAGE = 16
IDS = torch.randint(3, 320, (3, 60), generator=torch.Generator().manual_seed(4))
STORAGES = {
    "float": Storage(),
    "8bit": Storage(keys="int8", values="int8"),
    "4bit": Storage(keys="int4", values="int4", rotate=True),
    "float keys, 2bit values": Storage(values="int2", rotate=True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return loaded(llama(num_hidden_layers=2), tmp_path_factory.mktemp("model"), max_input_len=32)


@pytest.fixture(params=STORAGES)
def storage(request):
    return STORAGES[request.param]


def ids(length: int, first: int = 0) -> torch.Tensor:
    return IDS[:, first : first + length]


def pool_of(cache: KVCache) -> PagePool:
    assert cache.pages is not None
    return cache.pages.pool


# What a cache in pages is -----------------------------------------------------------------------


def test_paged_is_bit_identical_to_static(model, storage):
    paged = KVCache(model, 64, 3, growth=Paged(PAGE), storage=storage)
    static = KVCache(model, 64, 3, storage=storage)
    for new in ([21, 2, 0], [1, 1, 1], [2, 30, 1], [1, 0, 1], [7, 7, 9], [1, 1, 1]):
        found, expected = (
            model.forward(ids(max(new)), cache, new_lens=new, last_id_only=True)
            for cache in (paged, static)
        )
        real = torch.tensor(new) > 0
        assert torch.equal(found[real], expected[real])
    assert torch.equal(paged.layers[1].keys, static.layers[1].keys)


def test_decoding_in_pages_is_a_bound_run(model, storage, monkeypatch):
    cache = KVCache(model, 64, 2, growth=Paged(PAGE), storage=storage)
    model.forward(ids(20)[:2], cache)
    monkeypatch.setattr(type(cache.layers[0]), "attend", None)  # nobody asks a layer
    model.forward(ids(1, 20)[:2], cache)


def test_row_is_independent_of_other_rows(model, storage):
    lens = [3, 50, 17, 33]
    together = KVCache(model, 64, 4, growth=Paged(PAGE), storage=storage)
    alone = [KVCache(model, 64, 1, growth=Paged(PAGE), storage=storage) for _ in lens]
    one = together.sharing_pool(1)
    for row, length in enumerate(lens):
        model.forward(IDS[:1, :length], one)
        together.move_row(row, one, 0)
        model.forward(IDS[:1, :length], alone[row])
    for step in range(4):
        found = model.forward(IDS[:1, step : step + 1].repeat(4, 1), together)
        for row, cache in enumerate(alone):
            assert torch.equal(found[row], model.forward(IDS[:1, step : step + 1], cache)[0])


def test_forks_beams_and_copies_share_pages_until_they_write(model, storage):
    cache = KVCache(model, 64, 4, growth=Paged(PAGE, pages=12), storage=storage)
    model.forward(ids(40)[:1], cache)
    pool = pool_of(cache)
    assert pool.available == 12 - 3
    fork = cache.fork(2)
    cache.repeat_interleave(3)
    assert pool.available == 12 - 3 and sum(fork.nbytes().values()) == 0
    assert pool.holders[cache.pages.rows[0][0]] == 5
    static = KVCache(model, 64, 4, storage=storage)
    model.forward(ids(40)[:1], static)
    static.repeat_interleave(3)
    expected = model.forward(ids(2, 40), static)
    assert torch.equal(model.forward(ids(2, 40)[:2], fork), expected[:2])
    assert pool.available == 12 - 3 - 2  # the page in which they go on, and no other
    assert torch.equal(model.forward(ids(2, 40), cache), expected)
    assert pool.available == 12 - 3 - 4
    del fork
    cache.reset()
    assert pool.available == 12 and not any(pool.holders)


def test_files_and_copies_go_between_pages_and_other_growths(model, storage, tmp_path):
    paged = KVCache(model, 64, 3, growth=Paged(PAGE), storage=storage)
    model.forward(ids(40), paged, new_lens=[40, 33, 7])
    paged.reorder([1, 2, 1])
    paged.trim(2)
    paged.save(tmp_path / "cache")
    others = [paged.clone(), KVCache(model, 64, 3, storage=storage)]
    others += [KVCache(model, 64, 3, growth=Paged(32), storage=storage)]
    for other in others[1:]:
        other.load(tmp_path / "cache")
    expected = model.forward(ids(3, 50), paged)
    for other in others:
        assert torch.equal(model.forward(ids(3, 50), other), expected)
    paged.load(tmp_path / "cache")
    assert torch.equal(model.forward(ids(3, 50), paged), expected)


def test_a_plan_counts_pages_to_the_byte(model):
    bare = Model(model.config)
    for kind, pages, page in ((PagedCache, None, 256), (PagedCache, 7, 32)):
        cache = kind(bare, 1000, 2, lazy=True, page=page, pages=pages)
        plan = place(bare, cache, ["cpu"])
        count = pages or 2 * 4
        item = 2 * count * page * cache.layers[0].spec.num_heads * cache.layers[0].spec.head_dim * 4
        assert isinstance(plan, Plan) and sum(u.cache for u in plan.units) == 2 * item
    static, paged = (place(bare, kind(bare, 1024, 1), ["cpu"]) for kind in (Cache, PagedCache))
    assert [u.cache for u in static.units] == [u.cache for u in paged.units]


def test_out_of_pages_error_has_numbers_and_changes_nothing(model):
    cache = KVCache(model, 64, 3, growth=Paged(PAGE, pages=5))
    model.forward(ids(30)[:2], cache)
    with pytest.raises(OutOfPagesError, match="needs 2 more pages, and 1 of the pool's 5 of 16"):
        model.forward(ids(20), cache, new_lens=[20, 2, 0])
    assert cache.seq_lens == [30, 30, 0] and pool_of(cache).available == 1
    model.forward(ids(2), cache, new_lens=[2, 2, 2])
    with pytest.raises(ValueError, match="more than its max_seq_len of 64"):
        model.forward(ids(40), cache)


@pytest.mark.parametrize(
    "properties", [{"retention": Sinks(8, 2)}, {"storage": Storage(keys="int4c", recent=32)}]
)
def test_unsupported_properties_with_pages_are_refused(model, properties):
    with pytest.raises(ValueError, match="can't be paged"):
        KVCache(model, 64, growth=Paged(PAGE), **properties)


def test_invalid_page_sizes_are_refused(model):
    with pytest.raises(ValueError, match="pages of 20 tokens: it must be a multiple of 16"):
        Paged(20)
    with pytest.raises(ValueError, match="0 pages: there must be at least 1"):
        Paged(pages=0)
    with pytest.raises(ValueError, match="change to or from pages"):
        Cache(model, 64).convert(growth=Paged())
    with pytest.raises(ValueError, match="is not paged: give it growth"):
        SinkCache(model, 64).sharing_pool(2)


def test_a_window_over_pages_sees_what_a_ring_does(model):
    paged, ring = (
        KVCache(model, 64, 1, retention=Window(9), **growth)
        for growth in ({"growth": Paged(PAGE)}, {})
    )
    for first, last in ((0, 20), (20, 21), (21, 40), (40, 41)):
        found, expected = (model.forward(IDS[:1, first:last], each) for each in (paged, ring))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_cropped_row_continues_like_a_fresh_one(model):
    cache = Runner(model, KVCache(model, 64, 2, growth=Paged(PAGE))).cache
    model.forward(ids(40)[:2], cache)
    cache.crop([17, 5])
    model.forward(ids(9, 50)[:2], cache)
    fresh = KVCache(model, 64, 2, growth=Paged(PAGE))
    for part, new in ((ids(17)[:2], [17, 5]), (ids(9, 50)[:2], [9, 9])):
        model.forward(part, fresh, new_lens=new)
    a, b = (model.forward(ids(1, 59)[:2], each) for each in (cache, fresh))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


# Host memory ------------------------------------------------------------------------------------


def test_a_plan_counts_tiers_in_host_memory_to_the_byte(tmp_path):
    config = llama(num_hidden_layers=2)
    folder = save(reference(config), tmp_path / "model")
    model = Model(folder, max_input_len=32)
    tiers = {"page": PAGE, "host_tokens": 120, "rounded_tokens": 256}
    cache = PagedCache(model, 64, **tiers)
    plain = PagedCache(Model(model.config), 64, page=PAGE)
    model.load_autosplit(cache)
    spec, device = cache.layers[0].spec, torch.device("cpu")
    heads = 2 * spec.num_heads * PAGE  # of keys and of values in a page
    assert spec.head_dim <= 32  # which share a scale
    expected = 8 * heads * spec.head_dim * 4 + 16 * heads * (spec.head_dim + 2)
    assert HostPages.nbytes(spec) == cache.layers[0].tier_bytes() == expected
    plans = [place(Model(model.config), each, ["cpu"]) for each in (cache, plain)]
    with_tiers, without = (sum(u.cache for u in plan.units) for plan in plans)
    assert with_tiers - without == 2 * expected  # of which a step reads nothing
    pool = sum(x.nbytes for layer in cache.layers for x in layer.tensors.values())
    assert cache.nbytes() == {device: pool + 2 * expected}
    fork = cache.sharing_pool(2)
    assert not any(fork.nbytes().values()) and fork.layers[0].tier_bytes() == 0
    cache.free()
    assert not any(cache.nbytes().values())


def remembered(cache: KVCache, text: list[int]) -> None:
    """Run a text in row 0, register its full pages for reuse, and clear the row."""
    model = cache.model
    model.forward(torch.tensor([text]), cache)
    before = None
    for at in range(len(text) // PAGE):
        tokens = text[at * PAGE : (at + 1) * PAGE]
        before = pool_of(cache).remember(cache.pages.rows[0][at], before, tokens)
    cache.crop(0)


def found(cache: KVCache, text: list[int]) -> list:
    chain = []
    for at in range(0, len(text) - PAGE + 1, PAGE):
        known = pool_of(cache).find(chain[-1] if chain else None, text[at : at + PAGE])
        if known is None:
            break
        chain.append(known)
    return chain


def test_pages_return_from_host_memory_unchanged(model, storage):
    cache = KVCache(model, 64, growth=Paged(PAGE, 4, (HostTier(pages=6),)), storage=storage)
    texts = [row[:48].tolist() for row in IDS]
    remembered(cache, texts[0])
    cache.set_row(0, texts[0], known=found(cache, texts[0]))
    expected = cache.layers[1].keys.clone()
    cache.crop(0)
    for text in texts[1:]:
        remembered(cache, text)
    assert pool_of(cache).in_tiers == [5]
    assert [known.tier for known in found(cache, texts[0])] == [1, 1, 1]
    cache.set_row(0, texts[0], known=found(cache, texts[0]))
    assert torch.equal(cache.layers[1].keys, expected) and pool_of(cache).in_tiers == [5]
    cache.crop(0)
    cache.convert(storage=Storage(keys="int8", values="int8"))  # what lies there is no such thing
    assert pool_of(cache).in_tiers == [0]
    remembered(cache, texts[1])
    remembered(cache, texts[2])
    assert len(found(cache, texts[1])) == 3
    cache.set_row(0, texts[1], known=found(cache, texts[1]))
    assert cache.layers[1].keys.isfinite().all()


def test_last_tier_rounds_pages_and_marks_them(model):
    tiers = (HostTier(pages=1), HostTier(pages=4, storage=STORAGES["8bit"]))
    cache = KVCache(model, 64, growth=Paged(PAGE, 4, tiers))
    texts = [row[:48].tolist() for row in IDS]
    remembered(cache, texts[0])
    cache.set_row(0, texts[0], known=found(cache, texts[0]))
    expected = cache.layers[1].keys.clone()
    cache.crop(0)
    remembered(cache, texts[1])
    chain = found(cache, texts[0])
    assert [(known.tier, known.exact) for known in chain] == [(0, True), (1, True), (2, False)]
    cache.set_row(0, texts[0], known=chain)
    keys = cache.layers[1].keys
    assert torch.equal(keys[:, :, :32], expected[:, :, :32])
    error = (keys - expected).abs().max()
    assert 0 < error <= expected.abs().max() / 127
    cache.crop(0)
    remembered(cache, texts[0])  # run once more: what is exact takes the place of what isn't
    assert all(known.exact for known in found(cache, texts[0]))


def test_invalid_tiers_are_refused(model):
    with pytest.raises(ValueError, match="a tier of 0 pages"):
        HostTier(pages=0)
    with pytest.raises(ValueError, match="a tier of -1 pages"):
        PagedCache(model, 64, page=PAGE, host_tokens=-16)
    with pytest.raises(ValueError, match="rounded_bits is 8: it must be less than the 4 bits"):
        PagedCache(model, 64, nbits=4, rounded_tokens=64)
    with pytest.raises(ValueError, match="no format of 3 bits"):
        PagedCache(model, 64, rounded_tokens=64, rounded_bits=3)


# The pool ---------------------------------------------------------------------------------------


class Memory:
    """What the pages of a pool hold, by tier and number."""

    def __init__(self) -> None:
        self.held = {}

    def copy_page(self, to, page):
        self.held[0, to] = list(self.held[0, page])

    def move_page(self, page, tier, to, to_tier):
        assert tier != to_tier
        self.held[to_tier, to] = list(self.held[tier, page])


def check_places(pool: PagePool) -> None:
    """Every page of every tier is free, held, or registered under one key, exactly once."""
    known = list(pool._found.values())
    for number, tier in enumerate(pool._tiers):
        mine = {each.page: each for each in known if each.tier == number}
        assert mine == tier.known
        held = {page for page in range(pool.pages) if pool.holders[page]} if not number else set()
        assert sorted([*tier.free, *(mine.keys() | held)]) == list(range(tier.pages))
        for each in mine.values():
            after = [other for other in known if other.before is each and other.tier == number]
            assert each.following[number] == len(after)
            if not after and each.page not in held:  # or it would never make place
                assert any(leaf[1:] == (each.page, each) for leaf in tier.leaves)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([(), (3,), (5, 4)]))
def test_reference_counts_are_exact_and_no_page_leaks(seed, tiers):
    """Random rows that grow, shrink, replace each other, and register and find pages."""
    rng, size = random.Random(seed), 4
    pool = PagePool(rng.randint(3, 20), size, [(pages, i == 1) for i, pages in enumerate(tiers)])
    tables = [PageTable(pool, 3), PageTable(pool, 2)]
    texts = {(t, row): [] for t, table in enumerate(tables) for row in range(len(table.rows))}
    memory = Memory()

    for _ in range(40):
        t = rng.randrange(2)
        table, row = tables[t], rng.randrange(len(tables[t].rows))
        text, act = texts[t, row], rng.random()
        if act < 0.5:
            more = [rng.randrange(2) for _ in range(rng.randint(1, 6))]
            starts = [len(text) if i == row else 0 for i in range(row + 1)]
            ends = [len(text) + len(more) if i == row else 0 for i in range(row + 1)]
            try:
                table.reserve(starts, ends, memory)
            except OutOfPagesError:
                continue
            for at, token in enumerate(more, len(text)):
                memory.held.setdefault((0, table.rows[row][at // size]), [None] * size)
                memory.held[0, table.rows[row][at // size]][at % size] = token
            text += more
        elif act < 0.65:
            del text[rng.randint(0, len(text)) :]
            table.cut(row, len(text))
        elif act < 0.75:
            source = [rng.randrange(len(table.rows)) for _ in table.rows]
            table.reorder(source)
            new = [list(texts[t, other]) for other in source]
            for i, each in enumerate(new):
                texts[t, i] = each
        elif act < 0.88:
            before, exact = None, rng.random() < 0.7
            for at in range(len(text) // size):
                before = pool.remember(
                    table.rows[row][at], before, text[at * size : (at + 1) * size], exact
                )
                if before.tier == 0 and before.page != table.rows[row][at]:
                    table.replace(row, at, before.page)
        else:
            other = list(texts[rng.choice(list(texts))])
            del text[:]
            table.cut(row, 0)
            chain, at = [], 0
            while at + size <= len(other):
                known = pool.find(chain[-1] if chain else None, other[at : at + size])
                if known is None:
                    break
                chain.append(known)
                at += size
            needed, left = pool.needed_for(chain), pool.available
            if needed > left:
                with pytest.raises(
                    OutOfPagesError, match=f"need {needed} pages of the pool, and {left}"
                ):
                    table.hold_known(row, chain, memory)
            else:
                table.hold_known(row, chain, memory)
                assert pool.available == left - needed
                text += other[:at]
        held = [page for each in tables for pages in each.rows for page in pages]
        assert pool.holders == [held.count(page) for page in range(pool.pages)]
        assert pool.available == pool.pages - len(set(held))
        check_places(pool)
        for (which, each), tokens in texts.items():
            pages = tables[which].rows[each]
            assert len(pages) == -(-len(tokens) // size)
            found = [token for page in pages for token in memory.held[0, page]]
            assert found[: len(tokens)] == tokens
        for known in pool._found.values():
            assert tuple(memory.held[known.tier, known.page]) == known.tokens
    for table in tables:
        table.release()
    pool.forget_tiers()
    taken = [pool.take(memory) for _ in range(pool.pages)]
    assert sorted(taken) == list(range(pool.pages))


@pytest.mark.parametrize(("released", "order"), [((0, 1), "bac"), ((1, 0), "cba")])
def test_eviction_is_leaf_first_and_least_recently_used(released, order):
    pool = PagePool(5, 2)
    table = PageTable(pool, 2)
    for row, tokens in enumerate(([1, 2, 3, 4], [5, 6])):
        table.reserve([0] * (row + 1), [0] * row + [len(tokens)])
        before = None
        for at in range(0, len(tokens), 2):
            before = pool.remember(table.rows[row][at // 2], before, tokens[at : at + 2])
    names = {page: name for name, page in zip("abc", (*table.rows[0], *table.rows[1]), strict=True)}
    for row in released:
        table.cut(row, 0)
    assert pool.available == 5
    assert pool.find(None, [1, 2]) and pool.find(None, [5, 6]) and not pool.find(None, [3, 4])
    taken = [pool.take() for _ in range(5)]
    assert [names.get(page, "") for page in taken] == ["", "", *order]
    assert pool.find(None, [1, 2]) is None
    with pytest.raises(OutOfPagesError, match="all 5 pages of 2 tokens are in use"):
        pool.take()


def test_hash_collisions_are_resolved(monkeypatch):
    monkeypatch.setattr("exkv.cache.paging.pool._key", lambda before, tokens: 7)
    pool = PagePool(3, 2)
    table = PageTable(pool, 2)
    table.reserve([0, 0], [2, 2])
    (first,), (second,) = table.rows
    known = pool.remember(first, None, [1, 2])
    assert pool.find(None, [3, 4]) is None
    pool.remember(second, None, [3, 4])  # nobody finds it
    assert pool.find(None, [1, 2]) is known and pool.find(None, [3, 4]) is None
    table.release()
    assert sorted(pool.take() for _ in range(3)) == [0, 1, 2]
