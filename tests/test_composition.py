"""Any storage with any retention, residence and growth: what a cache of such a make answers is
what full attention answers under the same mask, however the text is cut into calls."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny import llama, reference, save

from exkv import KVCache, Model
from exkv.cache import Dynamic, KeepAll, OnDevice, OnHost, Sinks, Static, Storage, Window

IDS = torch.randint(3, 320, (3, 90), generator=torch.Generator().manual_seed(4))
STORAGES = {
    "float": Storage(),
    "8bit": Storage(keys="int8", values="int8"),
    "4bit": Storage(keys="int4", values="int4", rotate=True),
    "8bit keys, 4bit values": Storage(keys="int8", values="int4"),
    "float keys, 2bit values": Storage(keys="float", values="int2", rotate=True),
}
RETENTIONS = {"all": KeepAll(), "window": Window(11), "sinks": Sinks(8, 3)}
RESIDENCES = {"device": OnDevice(), "host": OnHost()}
GROWTHS = {"static": Static(), "dynamic": Dynamic(16)}
MAKES = list(itertools.product(STORAGES, RETENTIONS, RESIDENCES, GROWTHS))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = Model(save(reference(llama()), tmp_path_factory.mktemp("model")), max_input_len=32)
    model.load(devices=["cpu"])
    return model


def make(model, names, rows: int = 1, length: int = 96) -> KVCache:
    storage, retention, residence, growth = names
    return KVCache(
        model,
        length,
        rows,
        storage=STORAGES[storage],
        retention=RETENTIONS[retention],
        residence=RESIDENCES[residence],
        growth=GROWTHS[growth],
    )


def near(logits: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return ((logits - expected).abs().max() / expected.abs().max()).item() < tolerance


@pytest.mark.parametrize("names", MAKES, ids="-".join)
def test_however_a_text_is_cut_into_calls(model, names):
    expected = model.forward(IDS[:1], make(model, names))
    for cut in ([1] * 90, [5, 1, 60, 1, 23], [2, 9, 79]):
        cache = make(model, names)
        parts = [model.forward(part, cache) for part in IDS[:1].split(cut, dim=1)]
        assert near(torch.cat(parts, dim=1), expected, 2e-3 if "2bit" in names[0] else 5e-4)
