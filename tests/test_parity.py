"""exkv against transformers on random Llama checkpoints: logits and greedy tokens."""

from __future__ import annotations

import pytest
import torch
from tiny import cast, llama, reference, save

from exkv import Cache, Model
from exkv.models import ARCHITECTURES

#: Architecture -> a tiny config of it.
TINY = {"LlamaForCausalLM": llama}

CONFIGS = {
    "mha": {"num_key_value_heads": 8},
    "gqa4": {"num_key_value_heads": 2},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "linear": {"rope": "linear"},
    "llama3": {"rope": "llama3"},
    "yarn": {"rope": "yarn"},
    "wide_heads": {"head_dim": 80},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
}
PROMPT, NEW = 90, 64


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    """transformers' model and exkv's, of one checkpoint."""
    theirs = reference(llama(**CONFIGS[request.param]))
    folder = save(theirs, tmp_path_factory.mktemp(request.param))
    ours = Model(folder, max_input_len=32)
    ours.load(devices=["cpu"])
    return theirs, ours


def prompt(rows: int = 1, length: int = PROMPT) -> torch.Tensor:
    return torch.randint(3, 320, (rows, length), generator=torch.Generator().manual_seed(1))


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def greedy(model: Model, cache: Cache, ids: torch.Tensor, steps: int) -> list[int]:
    tokens = []
    for _ in range(steps):
        ids = model.forward(ids, cache, last_id_only=True)[:, 0].argmax(-1, keepdim=True).cpu()
        tokens.append(ids.item())
    return tokens


@torch.no_grad()
def test_fp32_logits_agree_with_a_cache_in_chunks_and_without_one(pair):
    theirs, ours = pair
    ids = prompt(rows=2)
    expected = theirs(ids).logits
    cache = Cache(ours, batch_size=2)
    assert relative_error(ours.forward(ids, cache), expected) < 1e-4
    assert relative_error(ours.forward(ids), expected) < 1e-4
    cache.reset()
    parts = [ours.forward(part, cache) for part in ids.split([1, 40, 7, 42], dim=1)]
    assert relative_error(torch.cat(parts, dim=1), expected) < 1e-4


def test_64_greedy_tokens_are_transformers_own(pair):
    theirs, ours = pair
    expected = theirs.generate(
        prompt(), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert greedy(ours, Cache(ours), prompt(), NEW) == expected[0, PROMPT:].tolist()


@torch.no_grad()
def test_bf16_is_as_near_to_fp32_as_transformers_bf16(tmp_path):
    """The plain low-precision path sets the tolerance, twice its own error at most."""
    config = llama("llama3")
    theirs = reference(config, torch.bfloat16)
    ours = Model(save(theirs, tmp_path))
    assert ours.dtype == torch.bfloat16
    ours.load(devices=["cpu"])
    ids = prompt()
    plain = theirs(ids).logits.float()
    exact = cast(theirs, torch.float32)(ids).logits
    mine = ours.forward(ids, Cache(ours)).float()
    assert relative_error(mine, exact) <= 2 * relative_error(plain, exact)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(6))
def test_bf16_greedy_tokens_are_transformers_own(tmp_path, seed):
    """Two logits can be one unit in the last place apart, and then the order of summation, which
    is the kernels' own, decides. So the rule is that each token must be transformers' best, or
    tied with it, given the same text, and that ties are rare."""
    theirs = reference(llama(), torch.bfloat16, seed)
    ours = Model(save(theirs, tmp_path))
    ours.load(devices=["cpu"])
    tokens = greedy(ours, Cache(ours), prompt(), NEW)
    text = torch.cat((prompt(), torch.tensor([tokens])), dim=1)
    logits = theirs(text).logits[0, PROMPT - 1 : -1].float()
    best, chosen = logits.max(-1).values, logits[torch.arange(NEW), tokens]
    behind = (best - chosen) / best.abs()
    assert behind.max().item() <= 2 * torch.finfo(torch.bfloat16).eps
    assert behind.count_nonzero().item() <= NEW // 16


@torch.no_grad()
def test_fp16_checkpoint_and_a_dtype_of_ones_own(tmp_path):
    theirs = reference(llama(), torch.float16)
    folder = save(theirs, tmp_path)
    assert Model(folder).dtype == torch.float16
    wide = Model(folder, dtype=torch.float32)
    wide.load(devices=["cpu"])
    expected = cast(theirs, torch.float32)(prompt()).logits
    assert relative_error(wide.forward(prompt(), Cache(wide)), expected) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_of_the_table_gives_transformers_logits(tmp_path, name):
    """A new line of the table fails here until it has a tiny config of its own."""
    theirs = reference(TINY[name]())
    ours = Model(save(theirs, tmp_path), max_input_len=32)
    assert ours.config.architecture == name
    assert [unit.spec.layer for unit in ours.units] == [None, 0, 1, 2, 3, None]
    ours.load(devices=["cpu"])
    assert relative_error(ours.forward(prompt(), Cache(ours)), theirs(prompt()).logits) < 1e-4


@torch.no_grad()
def test_a_sharded_checkpoint_gives_the_same_logits(tmp_path):
    theirs = reference(llama())
    folder = save(theirs, tmp_path, max_shard_size="300KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ours = Model(folder)
    ours.load(devices=["cpu"])
    assert relative_error(ours.forward(prompt(), Cache(ours)), theirs(prompt()).logits) < 1e-4


@torch.no_grad()
def test_rows_of_unlike_length_give_what_each_gives_alone(pair):
    theirs, ours = pair
    lengths = [70, 1, 33]
    ids = prompt(rows=3, length=70)
    cache = Cache(ours, batch_size=4)
    last = ours.forward(ids, cache, new_lens=lengths, last_id_only=True)
    assert cache.seq_lens == [*lengths, 0]
    follow = torch.tensor([[5], [6], [7]])
    then = ours.forward(follow, cache)
    for row, length in enumerate(lengths):
        alone = torch.cat((ids[row : row + 1, :length], follow[row : row + 1]), dim=1)
        expected = theirs(alone).logits[0]
        assert relative_error(last[row, 0], expected[-2]) < 1e-4
        assert relative_error(then[row, 0], expected[-1]) < 1e-4
