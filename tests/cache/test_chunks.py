"""Attention limited to a token's own chunk of positions (Llama 4), in every kind of cache and in
forks, however the text is split into calls."""

from __future__ import annotations

import pytest
import test_composition
import torch
from test_composition import IDS, MAKES, RETENTIONS, STORAGES, TOLERANCES, near
from tiny import TINY, loaded, reference
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from written_out import written_out

from exkv import CACHES, Cache, KVCache
from exkv.ops.attention import AttentionParams
from exkv.ops.attention_parts import chunk_starts

#: Shorter than the texts, longer than the windows and than some of the recent tokens.
CHUNK = 24
CONFIG = TINY["Llama4ForCausalLM"](attention_chunk_size=CHUNK, moe_layers=[], head_dim=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return loaded(CONFIG, tmp_path_factory.mktemp("model"), max_input_len=32)


@pytest.fixture(params=MAKES, ids="-".join)
def names(request):
    return request.param


test_split_into_calls_is_irrelevant = test_composition.test_split_into_calls_is_irrelevant
test_ragged_rows = test_composition.test_ragged_rows_equal_single_rows


@pytest.mark.parametrize("cut", [[60], [1] * 60, [4, 1, 9, 46]], ids=lambda cut: str(cut[:3]))
@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("storage", ["float", "4bit", "8bit but for recent ones"])
def test_queries_see_the_keys_of_the_definition(model, storage, retention, cut):
    properties = STORAGES[storage], RETENTIONS[retention]
    cache = KVCache(model, 64, storage=properties[0], retention=properties[1])
    found = torch.cat([model.forward(part, cache) for part in IDS[:1].split(cut, dim=1)], dim=1)
    expected = written_out(model, IDS[:1], *properties)
    assert near(found, expected, TOLERANCES[storage])


@torch.no_grad()
def test_rows_past_several_chunks_are_transformers(model):
    expected = reference(CONFIG)(IDS).logits
    assert near(model.forward(IDS), expected)
    cache = Cache(model, 64, 3)
    new = [30, 23, 25]
    first = model.forward(IDS[:, :30], cache, new_lens=new, last_id_only=True)
    step = IDS[torch.arange(3), torch.tensor(new)].unsqueeze(-1)
    second = model.forward(step, cache)
    for row, count in enumerate(new):
        assert near(first[row, -1], expected[row, count - 1])
        assert near(second[row, -1], expected[row, count])


def test_forks_share_a_prefix_that_crosses_chunks(model):
    cache = Cache(model, 64)
    model.forward(IDS[:1, :30], cache)
    fork = cache.fork(2)
    parts = [IDS[:2, 30:37], IDS[:2, 37:38], IDS[:2, 38:60]]
    found = torch.cat([model.forward(part, fork) for part in parts], dim=1)
    whole = torch.cat((IDS[:1, :30].expand(2, -1), IDS[:2, 30:]), dim=1)
    assert near(found, model.forward(whole, Cache(model, 64, 2))[:, 30:])


def test_chunks_are_dropped_where_they_make_no_difference(model, monkeypatch):
    """Kernels support windows only, and most texts are shorter than a chunk."""
    asked = []
    within = AttentionParams.within

    def watched(*args, **kwargs):
        asked.append(within(*args, **kwargs))
        return asked[-1]

    monkeypatch.setattr(AttentionParams, "within", watched)
    cache = Cache(model, 64)
    model.forward(IDS[:1, :CHUNK], cache)
    model.forward(IDS[:1, CHUNK : CHUNK + 1], cache)
    assert [(each.chunk, each.window) for each in asked[::2]] == [(0, 0), (0, 1)]
    model.forward(IDS[:1, CHUNK + 1 : CHUNK + 4], cache)
    assert asked[-2].chunk == CHUNK


class _Asked(TorchDispatchMode):
    """Collects the names of exkv's ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "exkv":
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _logits_of_rows(model, kind: str, new: list[int]) -> Tensor:
    """Of a prompt over several chunks, and behind it of a token of rows that are in unlike ones."""
    pages = {"page": 16, "pages": 16} if kind == "paged" else {}
    cache = CACHES[kind](model, 64, batch_size=3, **pages)
    prompt = model.forward(IDS[:, : max(new)], cache, new_lens=new)
    step = model.forward(IDS[torch.arange(3), torch.tensor(new)].unsqueeze(-1), cache)
    parts = [torch.cat((prompt[row, :count], step[row])) for row, count in enumerate(new)]
    return torch.cat(parts)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fp16", "8bit", "4bit", "paged"])
def test_kernels_without_chunks_run_each_chunks_queries(tmp_path, monkeypatch, kind):
    config = TINY["Llama4ForCausalLM"](attention_chunk_size=32, moe_layers=[], head_dim=32)
    model, new = loaded(config, tmp_path, max_input_len=50), [50, 20, 31]
    with _Asked() as asked:
        found = _logits_of_rows(model, kind, new)
    assert "attention_part_since" not in asked.names
    if kind in ("fp16", "paged"):
        exact = reference(config)(IDS).logits
        expected = torch.cat([exact[row, : count + 1] for row, count in enumerate(new)])
    else:  # the op by the definition, over the same bits
        monkeypatch.setattr("exkv.cache.layer.over_chunks", lambda *arguments: None)
        expected = _logits_of_rows(model, kind, new)
    assert near(found, expected, 1e-4 if kind in ("fp16", "paged") else 3e-3)


@pytest.mark.parametrize("past", [[0, 0], [5, 41], [24, 23]])
def test_part_since_a_chunks_start_is_sdpa_with_a_mask(past):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 9, 4, 16, generator=generator)
    k, v = (torch.randn(2, 56, 2, 16, generator=generator) for _ in "kv")
    lens = torch.tensor(past, dtype=torch.int32)
    starts = chunk_starts(lens, 9, CHUNK)
    keys = torch.zeros_like(lens), torch.full_like(lens, 56)
    part = torch.ops.exkv.attention_part_since
    out, _ = part(q, [k], "float", [v], "float", lens, *keys, starts, 56, 0.25)
    for row, before in enumerate(past):
        at = torch.arange(before, before + 9).unsqueeze(-1)
        other = torch.arange(56)
        mask = (other <= at) & (other // CHUNK == at // CHUNK)
        heads = (x[row].transpose(0, 1).repeat_interleave(2, dim=0) for x in (k, v))
        expected = F.scaled_dot_product_attention(q[row].transpose(0, 1), *heads, mask, scale=0.25)
        torch.testing.assert_close(out[row], expected.transpose(0, 1))
    with pytest.raises(ValueError, match="since must be int32"):
        part(q, [k], "float", [v], "float", lens, *keys, starts.long(), 56, 0.25)
