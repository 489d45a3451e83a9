"""What of each architecture is not in the CPU's bound run, and why; and parts that few have, which
compute the readable route's bits there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny
import torch
from native import needs_kernels
from runs import Readable, bound_runs
from test_bound_run import assert_the_readable_ways_bits, loaded
from torch import nn

from exkv import CACHES, ModelConfig
from exkv.layers.descriptions import (
    AttentionBlock,
    ExpertsBlock,
    Layer,
    NotDescribed,
    PlainBlock,
    describe,
)
from exkv.models import unit_specs
from exkv.models.native_run import _can_be_bound, _is_native_mlp

BF16 = torch.bfloat16
#: Architecture -> what runs module by module, a unit or the attention or MLP of one: why.
NOT_BOUND = {
    "ApertusForCausalLM": {"mlp: XIELUMLP"},
    **dict.fromkeys(
        ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        {"unit: CarryingEmbedding", "unit: Gemma3nLayer", "unit: Gemma3nHead"},
    ),
    **dict.fromkeys(
        (
            *("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
            *("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
        ),
        {"unit: Gemma4Layer"},
    ),
    "LagunaForCausalLM": {"mlp: experts by bounded logits"},
    "LongcatFlashForCausalLM": {"unit: _Embedding", "unit: HalfLayer", "unit: _Head"},
    "MiMoV2FlashForCausalLM": {"attention: NarrowValuesAttention"},
    "MiniMaxForCausalLM": {"unit: _Layer"},
    "PhimoeForCausalLM": {"mlp: experts by SparseMixer"},
    "Step3p7ForConditionalGeneration": {"mlp: LimitedMLP", "mlp: experts with bounds"},
}


def reason(module: nn.Module) -> str:
    try:
        return type(describe(module)).__name__
    except NotDescribed as error:
        return str(error)


def missing(name: str) -> Iterator[str]:
    """What of a tiny model's units native code can't run, with weights on the CPU."""
    values = {**tiny.TINY[name]().to_dict(), "architectures": [name.partition(":")[0]]}
    for spec in unit_specs(ModelConfig.from_dict(values), BF16):
        module = spec.build()
        try:
            part = describe(module)
        except NotDescribed as error:
            yield f"unit: {error}"
            continue
        if not _can_be_bound(part, BF16):
            yield f"unit: {type(module).__name__} can't be bound"
        if not isinstance(part, Layer):
            continue
        if isinstance(part.attention, nn.Module):
            yield f"attention: {reason(part.attention)}"
        if part.mlp is not None and not _is_native_mlp(part.mlp, BF16):
            yield f"mlp: {reason(module.get_submodule('mlp'))}"


def test_all_else_of_every_architecture_is_in_the_bound_run():
    found = {name: set(missing(name)) for name in tiny.TINY}
    assert {name: parts for name, parts in found.items() if parts} == NOT_BOUND


# Parts that few have --------------------------------------------------------------------------

#: Attention in chunks, with norms behind the rotation and queries scaled by position, and experts
#: with weights on their inputs; the norms and the factors alone, and these over latent vectors;
#: gates for each feature, and for each head by a sigmoid and by softplus; sinks with clamped
#: experts and without; MLPs without a gate, of every activation.
NAMES = (
    *("Llama4ForCausalLM", "HunYuanDenseV1ForCausalLM", "Ministral3ForCausalLM"),
    *("Mistral4ForCausalLM", "AfmoeForCausalLM", "Step3p7ForConditionalGeneration"),
    *("LagunaForCausalLM", "GptOssForCausalLM", "GraniteSWAForCausalLM", "ArceeForCausalLM"),
    *("Starcoder2ForCausalLM", "GPTNeoXForCausalLM", "PhiForCausalLM", "Jais2ForCausalLM"),
)


@needs_kernels
@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_rare_parts_give_the_readable_routes_bits(tmp_path, name, dtype):
    folder = tiny.save(tiny.reference(tiny.TINY[name]()), tmp_path)
    kinds = {kind: CACHES[kind] for kind in ("fp16", "8bit", "paged", "sliding_window")}
    model = loaded(folder, dtype)
    runs = assert_the_readable_ways_bits(model, kinds)
    assert all(len(model.units) in each for each in runs.values())


@needs_kernels
def test_chunks_of_positions_are_bound_behind_the_first_chunk_too(tmp_path):
    """A token of rows of one length; rows of unlike lengths or more tokens leave the run."""
    theirs = tiny.reference(tiny.TINY["Llama4ForCausalLM"](attention_chunk_size=16))
    model = loaded(tiny.save(theirs, tmp_path))
    ids = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))
    steps = ((20, 1, None), (21, 1, None), (22, 4, None), (26, 1, [1, 0]), (27, 1, None))
    for kind in ("fp16", "paged"):
        found = []
        for context in (bound_runs(), Readable()):
            cache = CACHES[kind](model, 64, 2)
            with context as runs:
                model.forward(ids[:, :20], cache)
                out = [
                    model.forward(ids[:, at : at + tokens], cache, new_lens=new)[:1]
                    for at, tokens, new in steps
                ]
            found.append((out, runs))
        (first, runs), (second, _) = found
        assert all(map(torch.equal, first, second))
        assert runs.count(len(model.units)) == 2


@needs_kernels
def test_weights_of_inputs_sum_in_the_order_of_experts(tmp_path):
    """Of more than two experts, whose order makes a difference."""
    changes = {"num_local_experts": 6, "num_experts_per_tok": 4}
    folder = tiny.save(tiny.reference(tiny.TINY["Llama4ForCausalLM"](**changes)), tmp_path)
    assert_the_readable_ways_bits(loaded(folder, BF16), {"fp16": CACHES["fp16"]})


def test_the_descriptions_say_what_few_have():
    def of(name: str, layer: int = 1) -> Layer:
        values = {**tiny.TINY[name]().to_dict(), "architectures": [name]}
        return describe(unit_specs(ModelConfig.from_dict(values), BF16)[layer].build())

    chunked, scaled = of("Llama4ForCausalLM"), of("Llama4ForCausalLM", 2)
    assert isinstance(chunked.attention, AttentionBlock) and chunked.attention.normed_rotated
    assert chunked.attention.params.chunk and isinstance(chunked.mlp, ExpertsBlock)
    assert chunked.mlp.weighs_inputs
    assert isinstance(scaled.attention, AttentionBlock) and scaled.attention.query_factors
    assert isinstance(of("ArceeForCausalLM").mlp, PlainBlock)
    assert of("FalconH1ForCausalLM").beside is not None
    parts = [of("NemotronHForCausalLM", layer) for layer in range(1, 5)]
    assert all((each.attention is None) != (each.mlp is None) for each in parts)
