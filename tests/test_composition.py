"""Any storage with any retention, residence and growth: what a cache of such a make answers is
what full attention answers under the same mask, however the text is cut into calls."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny import llama, reference, save

from exkv import Cache, KVCache, Model, SinkCache, SlidingWindowCache
from exkv.cache import Dynamic, KeepAll, OnDevice, OnHost, Sinks, Static, Storage, Window

SIZE, SINKS = 8, 3
IDS = torch.randint(3, 320, (3, 60), generator=torch.Generator().manual_seed(4))
STORAGES = {
    "float": Storage(),
    "8bit": Storage(keys="int8", values="int8"),
    "4bit": Storage(keys="int4", values="int4", rotate=True),
    "8bit keys, 4bit values": Storage(keys="int8", values="int4"),
    "float keys, 2bit values": Storage(values="int2", rotate=True),
    "2bit by channel": Storage(keys="int2c", values="int2", recent=32),
    "4bit by channel, turned": Storage(keys="int4c", values="int8", rotate=True, recent=37),
    "8bit but for recent ones": Storage(keys="int8", values="int8", recent=40),
}
RETENTIONS = {"all": KeepAll(), "window": Window(SIZE), "sinks": Sinks(SIZE, SINKS)}
RESIDENCES = {"device": OnDevice(), "host": OnHost()}
GROWTHS = {"static": Static(), "dynamic": Dynamic(16)}
AXES = (STORAGES, RETENTIONS, RESIDENCES, GROWTHS)
#: Tiers keep all tokens.
MAKES = [
    make for make in itertools.product(*AXES) if make[1] == "all" or not STORAGES[make[0]].recent
]
#: A value's last step may turn over where sums are taken in another order.
TOLERANCES = dict.fromkeys(STORAGES, 3e-3) | {"float": 1e-4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save(reference(llama(num_hidden_layers=2)), tmp_path_factory.mktemp("model"))
    model = Model(folder, max_input_len=32)
    model.load(devices=["cpu"])
    return model


@pytest.fixture(params=MAKES, ids="-".join)
def names(request):
    return request.param


def make(model, names, rows: int = 1, length: int = 64) -> KVCache:
    values = (axis[name] for axis, name in zip(AXES, names, strict=True))
    axes = ("storage", "retention", "residence", "growth")
    return KVCache(model, length, rows, **dict(zip(axes, values, strict=True)))


def near(logits: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return ((logits - expected).abs().max() / expected.abs().max()).item() < tolerance


def test_however_a_text_is_cut_into_calls(model, names):
    expected = model.forward(IDS[:1], make(model, names))
    for cut in ([1, 1, 38, 1, 1, 1, 17], [2, 5, 6, 1, 46]):
        cache = make(model, names)
        parts = [model.forward(part, cache) for part in IDS[:1].split(cut, dim=1)]
        assert near(torch.cat(parts, dim=1), expected, TOLERANCES[names[0]])


def test_rows_of_unlike_length_are_what_each_is_alone(model, names):
    together, alone = make(model, names, 3), [make(model, names) for _ in range(3)]
    for new in ([21, 2, 0], [1, 1, 1], [2, 30, 1], [1, 0, 1], [7, 7, 9], [1, 1, 1]):
        ids = IDS[:, : max(new)]
        logits = model.forward(ids, together, new_lens=new, last_id_only=True)
        for row, count in enumerate(new):
            if count:
                expected = model.forward(ids[row : row + 1, :count], alone[row], last_id_only=True)
                assert near(logits[row], expected[0], TOLERANCES[names[0]])


# Beside attention that is written out -----------------------------------------------------------


class WrittenOut:
    """A cache layer that keeps every key and value and goes by the words of the definition: which
    keys a query sees, and at which position each stands for it. In float64."""

    def __init__(self, model, seen) -> None:
        self.table, self.seen = model.rotary.tables["main"], seen
        self.k, self.v = [], []

    def turned(self, x: torch.Tensor, by: int) -> torch.Tensor:
        """x (H, D) from one position to another; pairs of features are D / 2 apart."""
        angle = by * self.table.inverse_frequencies.double()
        first, second = x.chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def attend(self, q, k, v, batch, params):
        self.k += list(k[0].double())
        self.v += list(v[0].double())
        last = len(self.k) - q.shape[1]
        outs = [self.one(query, last + t, params) for t, query in enumerate(q[0].double())]
        return torch.stack(outs).unsqueeze(0).to(q.dtype)

    def one(self, q, position, params):
        keys = self.seen(position)  # (position in the text, position within the cache)
        moved = keys[-1][1] - position  # the query is the last of them
        k = torch.stack([self.turned(self.k[p], at - p - moved) for p, at in keys])
        k = k.repeat_interleave(q.shape[0] // k.shape[1], dim=1)
        v = torch.stack([self.v[p] for p, _ in keys]).repeat_interleave(k.shape[1] // 2, dim=1)
        weights = (torch.einsum("hd,shd->hs", q, k) * params.scale).softmax(-1)
        return torch.einsum("hs,shd->hd", weights, v)


def window(size: int, sinks: int):
    def seen(position: int) -> list[tuple[int, int]]:
        kept = [p for p in range(position + 1) if p < sinks or p > position - size]
        return [(p, at) for at, p in enumerate(kept)] if sinks else [(p, p) for p in kept]

    return seen


@pytest.mark.parametrize("cut", [[60], [1] * 60, [4, 1, 9, 46]], ids=str)
@pytest.mark.parametrize(
    ("cache", "seen"),
    [
        (lambda m: SlidingWindowCache(m, 64, window_length=SIZE), window(SIZE, 0)),
        (
            lambda m: SinkCache(m, 64, window_length=SIZE + SINKS, num_sink_tokens=SINKS),
            window(SIZE, SINKS),
        ),
        (lambda m: Cache(m, 64), window(99, 0)),
    ],
    ids=["window", "sinks", "all"],
)
def test_a_query_sees_what_the_definition_says(model, cache, seen, cut):
    written = Cache(model, 64)
    for index in range(len(written.layers)):
        written.layers[index].attend = WrittenOut(model, seen).attend
    cache = cache(model)
    for part in IDS[:1].split(cut, dim=1):
        assert near(model.forward(part, cache), model.forward(part, written))
