"""Every combination of storage, retention, residence and growth against full attention under the
same mask, however the text is split into calls."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from arithmetic import near
from tiny import llama, loaded
from torch import Tensor
from written_out import written_out

from exkv import KVCache
from exkv.cache import Dynamic, KeepAll, OnDevice, OnHost, Paged, Sinks, Static, Storage, Window

SIZE, SINKS = 8, 3
IDS = torch.randint(3, 320, (3, 60), generator=torch.Generator().manual_seed(4))
STORAGES = {
    "float": Storage(),
    "8bit": Storage(keys="int8", values="int8"),
    "4bit": Storage(keys="int4", values="int4", rotate=True),
    "8bit keys, 4bit values": Storage(keys="int8", values="int4"),
    "float keys, 2bit values": Storage(values="int2", rotate=True),
    "2bit by channel": Storage(keys="int2c", values="int2", recent=32),
    "4bit by channel, rotated": Storage(keys="int4c", values="int8", rotate=True, recent=37),
    "8bit but for recent ones": Storage(keys="int8", values="int8", recent=40),
}
RETENTIONS = {"all": KeepAll(), "window": Window(SIZE), "sinks": Sinks(SIZE, SINKS)}
RESIDENCES = {"device": OnDevice(), "host": OnHost()}
GROWTHS = {"static": Static(), "dynamic": Dynamic(16), "paged": Paged(16)}
AXES = (STORAGES, RETENTIONS, RESIDENCES, GROWTHS)


def goes_together(storage: str, retention: str, residence: str, growth: str) -> bool:
    """Pages store single tokens: no sinks, and no group of recent ones."""
    if growth != "paged":
        return True
    return retention != "sinks" and not STORAGES[storage].recent


MAKES = [names for names in itertools.product(*AXES) if goes_together(*names)]
#: A value's last step may turn over where sums are taken in another order.
TOLERANCES = dict.fromkeys(STORAGES, 3e-3) | {"float": 1e-4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return loaded(llama(num_hidden_layers=2), tmp_path_factory.mktemp("model"), max_input_len=32)


@pytest.fixture(params=MAKES, ids="-".join)
def names(request):
    return request.param


def make(model, names, rows: int = 1, length: int = 64) -> KVCache:
    values = (axis[name] for axis, name in zip(AXES, names, strict=True))
    axes = ("storage", "retention", "residence", "growth")
    return KVCache(model, length, rows, **dict(zip(axes, values, strict=True)))


@pytest.mark.sweep(30)
def test_split_into_calls_is_irrelevant(model, names):
    expected = model.forward(IDS[:1], make(model, names))
    for cut in ([1, 1, 38, 1, 1, 1, 17], [2, 5, 6, 1, 46]):
        cache = make(model, names)
        parts = [model.forward(part, cache) for part in IDS[:1].split(cut, dim=1)]
        assert near(torch.cat(parts, dim=1), expected, TOLERANCES[names[0]])


@pytest.mark.sweep(30)
def test_ragged_rows_equal_single_rows(model, names):
    together, alone = make(model, names, 3), [make(model, names) for _ in range(3)]
    for new in ([21, 2, 0], [1, 1, 1], [2, 30, 1], [1, 0, 1], [7, 7, 9], [1, 1, 1]):
        ids = IDS[:, : max(new)]
        logits = model.forward(ids, together, new_lens=new, last_id_only=True)
        for row, count in enumerate(new):
            if count:
                expected = model.forward(ids[row : row + 1, :count], alone[row], last_id_only=True)
                assert near(logits[row], expected[0], TOLERANCES[names[0]])


# Beside attention that is written out -----------------------------------------------------------


def in_calls(model, storage: Storage, retention, cut) -> Tensor:
    """Logits of a text that is split into calls of these lengths."""
    cache = KVCache(model, 64, storage=storage, retention=retention)
    return torch.cat([model.forward(part, cache) for part in IDS[:1].split(cut, dim=1)], dim=1)


@functools.cache
def definition(model, storage: Storage, retention) -> Tensor:
    """Computed once for all splits."""
    return written_out(model, IDS[:1], storage, retention)


@pytest.mark.parametrize("cut", [[60], [1] * 60, [4, 1, 9, 46]], ids=lambda cut: str(cut[:3]))
@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("storage", STORAGES)
def test_queries_see_the_keys_of_the_definition(model, storage, retention, cut):
    properties = STORAGES[storage], RETENTIONS[retention]
    found = in_calls(model, *properties, cut)
    assert near(found, definition(model, *properties), TOLERANCES[storage])
