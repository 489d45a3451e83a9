"""Tokens that lie in pages, out of order: a growth and an arrangement that are written here answer
with indices and a block table, and such a cache is like any other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import test_composition as composition
import torch
from tiny import llama, reference, save

from exkv import Cache, KVCache, Model
from exkv.batch import real_tokens
from exkv.cache import OnHost, Storage
from exkv.cache.arrangement import OneStore
from exkv.cache.views import Segment, SegmentedView

PAGE = 16


@dataclass(frozen=True, slots=True)
class PagePairs:
    """Room in steps of two pages, of which the second is used first."""

    def room_for(self, tokens, capacity):
        return -(-max(tokens, 1) // (2 * PAGE)) * 2 * PAGE

    def last_room(self, capacity):
        return (capacity - 1) // (2 * PAGE) * 2 * PAGE

    def arranged(self, arrangement):
        return Paged(arrangement.storage, arrangement.retention)


@dataclass(frozen=True, slots=True)
class Paged(OneStore):
    """Token p of a row lies in that row's page p / 16 with its last bit turned over."""

    def place(self, positions):
        return (positions // PAGE ^ 1) * PAGE + positions % PAGE

    def slots(self, name, first, last):
        return self.place(torch.arange(first, last))

    def stays(self, longest):
        return False

    def write(self, stored, new, lengths):
        row, token, position = real_tokens(lengths)
        for name, value in new.items():
            stored[name][row, self.place(position)] = value[row, token]

    def store(self, stored, new, batch, params):
        self.write(stored, new, batch.lengths)
        rows = len(batch.lengths.past)
        pages = next(iter(stored.values())).shape[1] // PAGE
        table = torch.arange(rows).unsqueeze(-1) * pages + (torch.arange(pages) ^ 1)
        start = torch.zeros_like(batch.past_lens)
        segment = Segment(
            stored={name: x[:rows].reshape(-1, PAGE, *x.shape[2:]) for name, x in stored.items()},
            start=start,
            count=start + batch.lengths.kv_len,
            kv_len=batch.lengths.kv_len,
            window=params.window,
            block_table=table.int(),
        )
        return new, SegmentedView(past_lens=batch.past_lens, segments=(segment,))

    def read(self, stored, span, dtype, head_dim):
        row = torch.arange(len(span.lens)).unsqueeze(-1)
        place = self.place(span.nearest_stored())
        return self.storage.decode({n: x[row, place] for n, x in stored.items()}, dtype, head_dim)

    def put(self, stored, span, k, v, dtype):
        row, column = span.are_stored().nonzero().unbind(1)
        place = self.place(span.positions())[row, column]
        for name, value in self.storage.encode(k, v, dtype).items():
            stored[name][row, place] = value[row, column]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save(reference(llama(num_hidden_layers=2)), tmp_path_factory.mktemp("model"))
    model = Model(folder, max_input_len=32)
    model.load(devices=["cpu"])
    return model


MAKES = {
    "float": {},
    "host": {"residence": OnHost()},
    "4bit": {"storage": Storage(keys="int4", values="int8", rotate=True)},
}


@pytest.fixture(params=MAKES)
def properties(request):
    return MAKES[request.param]


def ids(length: int, first: int = 0) -> torch.Tensor:
    return composition.IDS[:, first : first + length]


def test_logits_are_those_of_tokens_in_order(model, properties):
    paged = KVCache(model, 64, 3, growth=PagePairs(), **properties)
    plain = KVCache(model, 64, 3, **properties)
    for new in ([21, 2, 0], [1, 1, 1], [2, 30, 1], [1, 0, 1], [7, 7, 9], [1, 1, 1]):
        logits = [model.forward(ids(max(new)), cache, new_lens=new, last_id_only=True)
                  for cache in (paged, plain)]  # fmt: skip
        real = torch.tensor(new) > 0
        assert composition.near(logits[0][real], logits[1][real], 3e-3 if properties else 1e-5)
    assert not torch.equal(
        paged.layers[0].tensors["k"][0, :16], plain.layers[0].tensors["k"][0, :16]
    )


def test_rows_move_and_are_cloned_forked_saved_and_converted(model, properties, tmp_path):
    paged = KVCache(model, 64, 3, growth=PagePairs(), **properties)
    plain = KVCache(model, 64, 3, **properties)
    for cache in (paged, plain):
        model.forward(ids(40), cache, new_lens=[40, 33, 7])
        cache.reorder([1, 2, 1])
        cache.trim(2)
    paged.save(tmp_path / "cache")
    loaded = [
        KVCache(model, 64, 3, growth=PagePairs(), **properties),
        KVCache(model, 64, 3, **properties),
    ]
    for cache in loaded:
        cache.load(tmp_path / "cache")
    converted = paged.clone()
    converted.convert(growth=plain.layers[0].spec.growth)
    back = plain.clone()
    back.convert(growth=PagePairs())
    expected = model.forward(ids(3, 50), plain)
    forked = model.forward(ids(3, 50), paged.fork())
    for found in (
        forked,
        *(model.forward(ids(3, 50), c) for c in (paged.clone(), paged, *loaded, converted, back)),
    ):
        assert composition.near(found, expected, 3e-3 if properties else 1e-5)


def test_a_paged_cache_of_floats_becomes_another_kind(model):
    paged = Cache.of(
        model, [replace(layer.spec, growth=PagePairs()) for layer in Cache(model, 64).layers]
    )
    plain = Cache(model, 64)
    for cache in (paged, plain):
        model.forward(ids(40)[:1], cache)
        cache.convert(storage=Storage(keys="int8", values="int8"))
    found, expected = (model.forward(ids(1, 40)[:1], cache) for cache in (paged, plain))
    assert composition.near(found, expected, 3e-3)
