"""What a card does while its host computes experts: nothing waits for it, its own pairs take few
calls, and the next layer's cache arrives."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import torch
from host_experts import load
from simproc import run_sim
from tiny import TINY, reference, save

from exkv import Cache, Model, OffloadedCache, sim
from exkv.layers import mlp
from exkv.layers.split_experts import MOST_ROWS, _blocks
from exkv.models import runs

#: Of a row of an expert, in the calls below.
ROWS, TAKEN, EXPERTS = 16, 8, 64
IDS = torch.randint(3, 300, (ROWS, 9), generator=torch.Generator().manual_seed(41))


def test_blocks_have_all_rows_of_an_expert_and_are_few():
    chosen = torch.rand(ROWS, EXPERTS, generator=torch.Generator().manual_seed(1))
    pairs = chosen.topk(TAKEN).indices.flatten().tolist()
    blocks = _blocks(pairs, TAKEN, range(len(pairs)), worst=False)
    assert sorted(pair for block in blocks for pair in block.pairs) == list(range(len(pairs)))
    assert all(len(block.pairs) <= MOST_ROWS for block in blocks)
    assert all(one.experts[-1] < two.experts[0] for one, two in pairwise(blocks))
    assert all(a + b > MOST_ROWS for a, b in pairwise(len(each.pairs) for each in blocks))
    for block in blocks:
        tokens, places, numbers = block.rows.tolist()
        assert [block.experts[place] for place in places] == [pairs[each] for each in numbers]
        assert tokens == [number // TAKEN for number in numbers]
        assert [places.count(place) for place in range(len(block.experts))] == list(block.counts)


def with_and_without_kernels(folder: str) -> list:
    """Ops of a step of all rows, and its logits, on devices with kernels for whole calls, and on
    devices without them."""
    found = []
    for kernels in (True, False):
        model = Model(folder, max_input_len=16, dtype="bfloat16", weights="int4")
        cache = Cache(model, 16, ROWS)
        load(model, cache, "half")
        model.forward(IDS[:, :8], cache)
        clock = sim.Clock({"sim:0": 1e9}, host=1e9, link=1e9)
        with mock.patch.object(mlp, "takes_whole_calls", lambda x, its=kernels: its), clock:
            logits = model.forward(IDS[:, 8:], cache)
        model.unload()
        layers = model.config.num_hidden_layers
        count = {name: 0 for name in ("exkv::chosen_experts", "exkv::read_tally")}
        for span in clock.spans:
            count[span.op] = count.get(span.op, 0) + 1
        found.append((logits.float().cpu().tolist(), layers, count))
    return found


def all_or_none_on_the_card(folder: str) -> list:
    """Calls for experts in a step of all rows, and its logits, with all experts on the card and
    with none there; by the readable route, as on other cards, and then as it comes."""
    found = []
    for placement, bind in (("all", runs.bind), ("none", lambda *_: None), ("none", runs.bind)):
        model = Model(folder, max_input_len=16, dtype="bfloat16", weights="int4")
        cache = Cache(model, 16, ROWS)
        load(model, cache, placement)
        model.forward(IDS[:, :8], cache)
        run = mock.Mock(wraps=mlp.run_experts)
        host = mock.Mock(wraps=torch.ops.exkv.chosen_of_run.default)
        with (
            mock.patch.object(mlp, "run_experts", run),
            mock.patch.object(torch.ops.exkv.chosen_of_run, "default", host),
            mock.patch.object(runs, "bind", bind),
        ):
            logits = model.forward(IDS[:, 8:], cache)
        devices = [call.args[0].device.type for call in run.call_args_list]
        devices += [call.args[1].device.type for call in host.call_args_list]
        found.append((logits.float().cpu().tolist(), devices))
        model.unload()
    return found


def test_where_all_experts_are_on_the_host_one_call_makes_their_sum(tmp_path):
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": TAKEN, "num_hidden_layers": 2}
    folder = save(reference(TINY["Qwen3MoeForCausalLM"](**sizes)), tmp_path)
    (logits, on_card), *others = run_sim(all_or_none_on_the_card, args=[str(folder)])
    assert set(on_card) == {"sim"}
    assert others == [[logits, ["cpu"] * len(on_card)]] * 2


def test_a_step_of_many_rows_is_few_calls_and_waits_for_no_tally(tmp_path):
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": TAKEN, "num_hidden_layers": 2}
    folder = save(reference(TINY["Qwen3MoeForCausalLM"](**sizes)), tmp_path)
    run = run_sim(with_and_without_kernels, args=[str(folder)])
    (logits, layers, count), (same, _, others) = run
    # Blocks are at least half full, of each layer's pairs, on the card and on the host.
    assert 2 * layers <= count["exkv::chosen_experts"] <= layers * (ROWS * TAKEN / 8 + 2)
    assert count["exkv::read_tally"] == others["exkv::read_tally"] == 0
    assert others["exkv::chosen_experts"] == 0
    assert logits == same


def in_flight(folder: str) -> list[list[int]]:
    """Layers whose tokens are on their way to the card, each time the host computes experts."""
    sim.let_streams_lag()
    model = Model(folder, max_input_len=16)
    cache = OffloadedCache(model, 32, 2)
    load(model, cache, "none")
    model.forward(IDS[:2, :8], cache)
    seen, host = [], torch.ops.exkv.chosen_of_run.default

    def watched(*args):
        seen.append([i for i, layer in enumerate(cache.layers) if layer.prefetched])
        return host(*args)

    with mock.patch.object(torch.ops.exkv.chosen_of_run, "default", watched):
        model.forward(IDS[:2, 8:], cache)
    model.unload()
    return [*seen, sim.lifetime_errors()]


def test_the_next_layers_cache_is_on_its_way_while_the_host_computes(tmp_path):
    folder = save(reference(TINY["Qwen3MoeForCausalLM"](num_hidden_layers=4)), tmp_path)
    # Layers 1 and 3 have experts.
    assert run_sim(in_flight, args=[str(folder)]) == [[2], [], 0]
