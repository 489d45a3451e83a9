"""Layers with a state in place of keys and values, in every kind of cache: what a row holds is what
running its tokens alone gives, whatever happened to it."""

from __future__ import annotations

import pytest
import torch
from tiny import TINY, reference, save, save_tokenizer

from exkv import CACHES, Engine, Job, KVCache, Model, SamplingParams, Tokenizer
from exkv.cache import OnHost, PagedCache

NAMES = [
    *("Qwen3NextForCausalLM", "Lfm2MoeForCausalLM", "KimiLinearForCausalLM"),
    "FalconH1ForCausalLM",
]
#: Kinds whose snapshots are like one of these.
OTHERS = ["OlmoHybridForCausalLM", "NemotronHForCausalLM", "JambaForCausalLM", "MiniMaxForCausalLM"]
GREEDY = SamplingParams.greedy()
IDS = torch.randint(3, 320, (2, 60), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=[*NAMES, *OTHERS])
def pair(request, tmp_path_factory):
    theirs = reference(TINY[request.param]())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-4)  # a state that forgets slowly
    folder = save(theirs, tmp_path_factory.mktemp(request.param))
    save_tokenizer(folder)
    model = Model(folder, max_input_len=16)
    model.load()
    return theirs, model


@pytest.fixture(scope="module", params=list(CACHES))
def kind(request) -> type[KVCache]:
    return CACHES[request.param]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def alone(model: Model, kind: type[KVCache], row: int, start: int, end: int) -> torch.Tensor:
    """Logits (1, V) after a row's tokens, run in a separate cache: up to ``start`` at once, then
    token by token."""
    cache = kind(model, 64)
    model.forward(IDS[row : row + 1, :start], cache)
    for at in range(start, end):
        logits = model.forward(IDS[row : row + 1, at : at + 1], cache)
    return logits[:, -1]


def next_logits(model: Model, cache: KVCache, tokens: list[tuple[int, int]]) -> torch.Tensor:
    """Logits (B, V) of one token per row, each given by its row and position of ``IDS``."""
    ids = torch.stack([IDS[row, at : at + 1] for row, at in tokens])
    return model.forward(ids, cache)[:, -1]


@pytest.fixture
def filled(pair, kind):
    """A cache with 20 tokens of the first row, and 13 of the second."""
    _, model = pair
    pages = {"page": 16, "pages": 16} if kind is PagedCache else {}
    cache = kind(model, 64, batch_size=2, **pages)
    model.forward(IDS[:, :20], cache, new_lens=[20, 13])
    return model, cache


def test_logits_are_transformers_in_chunks_steps_and_unlike_rows(pair):
    theirs, model = pair
    with torch.no_grad():
        expected = theirs(IDS).logits
    assert_close(model.forward(IDS), expected)
    cache = PagedCache(model, 128, batch_size=2, page=16)
    first = model.forward(IDS[:, :33], cache)  # three chunks
    steps = [model.forward(IDS[:, at : at + 1], cache) for at in range(33, 40)]
    assert_close(torch.cat([first, *steps], dim=1), expected[:, :40])
    cache.reset()
    model.forward(IDS[:, :20], cache, new_lens=[20, 0])
    model.forward(IDS[:, :30], cache, new_lens=[0, 30])
    found = next_logits(model, cache, [(0, 20), (1, 30)])
    assert_close(found, torch.stack([expected[0, 20], expected[1, 30]]))


@pytest.mark.sweep(28)
def test_a_cropped_row_goes_on_as_one_that_never_had_more(filled, kind):
    model, cache = filled
    cache.crop([15, 13])
    assert cache.stale == {0}
    found = next_logits(model, cache, [(0, 15), (1, 13)])
    expected = [alone(model, kind, 0, 15, 16), alone(model, kind, 1, 13, 14)]
    assert_close(found, torch.cat(expected))
    assert not cache.stale


@pytest.mark.sweep(28)
def test_rows_that_change_places_take_their_states_with_them(filled, kind):
    model, cache = filled
    cache.reorder([1, 1])
    found = next_logits(model, cache, [(1, 13), (1, 13)])
    assert_close(found, alone(model, kind, 1, 13, 14).expand(2, -1))


@pytest.mark.sweep(28)
def test_copies_forks_and_files_have_the_states(filled, kind, tmp_path):
    model, cache = filled
    again = cache.clone()
    again.reset()
    cache.save(tmp_path / "cache")
    again.load(tmp_path / "cache")
    expected = torch.cat([alone(model, kind, 0, 20, 21), alone(model, kind, 1, 13, 14)])
    for each in (cache.clone(), again, cache.fork(1), cache):
        assert_close(next_logits(model, each, [(0, 20), (1, 13)]), expected)


def test_states_stay_where_a_conversion_moves_keys_and_values(pair):
    _, model = pair
    cache = CACHES["fp16"](model, 64, batch_size=2)
    model.forward(IDS[:, :20], cache)
    states = [dict(layer.tensors) for layer in cache.layers if layer.spec.state]
    cache.convert(residence=OnHost())
    kept = [layer.tensors for layer in cache.layers if layer.spec.state]
    for before, after in zip(states, kept, strict=True):
        assert before.keys() == after.keys() != set()
        assert all(torch.equal(before[name], after[name]) for name in before)
    found = next_logits(model, cache, [(0, 20), (1, 20)])
    assert_close(found[:1], alone(model, CACHES["fp16"], 0, 20, 21))


def test_a_layer_with_a_state_has_no_keys(pair):
    _, model = pair
    layer = next(layer for layer in CACHES["fp16"](model, 64).layers if layer.spec.state)
    with pytest.raises(ValueError, match="a state, and neither keys nor values"):
        _ = layer.keys


def test_a_state_takes_the_same_bytes_at_any_length(pair):
    _, model = pair
    short, long = (CACHES["4bit"].layer_specs(model, tokens) for tokens in (64, 4096))
    for a, b in zip(short, long, strict=True):
        assert (a.nbytes(a.capacity) == b.nbytes(b.capacity)) == (a.state is not None)


def theirs_greedy(theirs, prompt: list[int], tokens: int) -> list[int]:
    out = theirs.generate(
        torch.tensor([prompt]),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.sweep(8)
@pytest.mark.parametrize("room", [512, 144])
def test_jobs_of_an_engine_get_the_tokens_that_each_gets_alone(pair, room):
    """Also if pages run out, and jobs are swapped out and in with their states."""
    theirs, model = pair
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 40, 33, 17, 60, 9)
    prompts = [torch.randint(3, 320, (n,), generator=generator).tolist() for n in lengths]
    cache = PagedCache(model, room, page=16)
    with Engine(model, cache, Tokenizer(model.config.path), max_running=4) as engine:
        jobs = [
            Job(prompt=prompt, max_new_tokens=20, settings=GREEDY, ignore_eos=True)
            for prompt in prompts
        ]
        handles = [engine.submit(job) for job in jobs]
        while engine.busy:
            engine.iterate()
        assert (engine.stats.put_away > 0) == (room == 144)
    for handle, prompt in zip(handles, prompts, strict=True):
        assert handle.tokens == theirs_greedy(theirs, prompt, 20)


def completed(engine: Engine, prompt: list[int]) -> tuple[list[int], int]:
    """A job's tokens, and how many of its prompt were found in the prefix cache."""
    job = Job(prompt=prompt, max_new_tokens=6, settings=GREEDY, ignore_eos=True)
    handle = engine.submit(job)
    while engine.busy:
        engine.iterate()
    return handle.tokens, handle.cached_tokens


def test_a_chats_next_turn_goes_on_behind_the_last_full_page_of_the_one_before(pair):
    theirs, model = pair
    with Engine(model, PagedCache(model, 256, page=16), Tokenizer(model.config.path)) as engine:
        first = IDS[0, :41].tolist()
        answer, found = completed(engine, first)
        assert answer == theirs_greedy(theirs, first, 6) and found == 0
        second = [*first, *answer, *IDS[1, :20].tolist()]
        tokens, found = completed(engine, second)
        assert tokens == theirs_greedy(theirs, second, 6) and found == 32
        third = [*first[:32], 7]  # whose one new token sees the state as it was found
        tokens, found = completed(engine, third)
        assert tokens == theirs_greedy(theirs, third, 6) and found == 32


def test_a_beginning_that_two_prompts_share_is_found_by_the_third(pair):
    theirs, model = pair
    with Engine(model, PagedCache(model, 512, page=16), Tokenizer(model.config.path)) as engine:
        shared, found = IDS[0, :37].tolist(), []
        for row in ([5] * 30, [6] * 30, [7] * 30):
            tokens, cached = completed(engine, shared + row)
            assert tokens == theirs_greedy(theirs, shared + row, 6)
            found.append(cached)
    assert found == [0, 0, 32]


def test_no_more_states_are_kept_than_jobs_run(pair):
    _, model = pair
    cache, tokenizer = PagedCache(model, 512, page=16), Tokenizer(model.config.path)
    with Engine(model, cache, tokenizer, max_running=2) as engine:
        prompts = [[at] * 20 for at in (5, 6, 7)]
        for prompt in prompts:
            completed(engine, prompt)
        found = [completed(engine, prompt)[1] for prompt in (prompts[1], prompts[2], prompts[0])]
    assert found == [16, 16, 0]


def test_beams_are_transformers(pair):
    theirs, model = pair
    how = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    how |= {"eos_token_id": None, "pad_token_id": 0}
    # MiniMax's cache there reorders no states of lightning attention.
    cached = theirs.config.model_type != "minimax"
    expected = theirs.generate(IDS[:, :9], **how, use_cache=cached)
    found = model.generate(IDS[:, :9], **how)
    assert found.tolist() == expected.tolist()


def test_a_second_prompt_runs_again_from_where_it_leaves_the_first(pair):
    theirs, model = pair
    cache = CACHES["fp16"](model, 64)
    for end in (30, 30, 45, 20):
        prompt = IDS[0, :end].tolist() if end != 20 else IDS[0, :10].tolist() + [7] * 10
        found = model.generate(
            torch.tensor([prompt]), past_key_values=cache, max_new_tokens=8, eos_token_id=None
        )
        assert found[0, len(prompt) :].tolist() == theirs_greedy(theirs, prompt, 8)
