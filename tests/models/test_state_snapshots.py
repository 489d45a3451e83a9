"""Snapshots of recurrent states: rows that return to one run again from there alone, and what
speculation rejects costs no more."""

from __future__ import annotations

import pytest
import torch
from test_states import GREEDY, IDS, alone, theirs_greedy
from tiny import TINY, reference, save, save_tokenizer

from exkv import CACHES, Draft, Engine, Job, KVCache, Model, NGrams, Tokenizer
from exkv.cache import PagedCache
from exkv.models import Transformer


@pytest.fixture(
    scope="module", params=["Qwen3NextForCausalLM", "Lfm2MoeForCausalLM", "FalconH1ForCausalLM"]
)
def models(request, tmp_path_factory):
    """transformers' model, exkv's with the same weights, and exkv's with almost the same."""
    theirs = reference(TINY[request.param]())
    found = [theirs]
    for share in (0.0, 0.05):
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                if name.endswith("A_log"):
                    parameter.fill_(-4)  # a state that forgets slowly
                elif share:
                    parameter.add_(torch.randn_like(parameter) * parameter.std() * share)
        folder = save(theirs, tmp_path_factory.mktemp(request.param))
        save_tokenizer(folder)
        model = Model(folder, max_input_len=16)
        model.load()
        found.append(model)
    found[0] = reference(TINY[request.param]())
    found[0].load_state_dict(type(theirs).from_pretrained(found[1].config.path).state_dict())
    return found


@pytest.fixture(scope="module", params=list(CACHES))
def kind(request) -> type[KVCache]:
    return CACHES[request.param]


def assert_close(found: torch.Tensor, expected: torch.Tensor, kind: type[KVCache]) -> None:
    """With few bits, sums in another order round to other codes."""
    few = {CACHES[name]: 1e-2 for name in ("4bit", "2bit", "kivi")} | {CACHES["8bit"]: 1e-3}
    allowed = few.get(kind, 1e-4)
    torch.testing.assert_close(found, expected, rtol=allowed, atol=allowed)


def cache_of(kind: type[KVCache], model: Model, rows: int = 1) -> KVCache:
    pages = {"page": 16, "pages": 16} if kind is PagedCache else {}
    return kind(model, 64, batch_size=rows, snapshots=True, **pages)


@pytest.fixture
def ran(monkeypatch) -> list[int]:
    """Tokens of each chunk that any model runs."""
    counts: list[int] = []
    stock = Transformer.forward_chunk

    def counted(self, ids, cache, lengths, **options):
        counts.append(sum(lengths.new))
        return stock(self, ids, cache, lengths, **options)

    monkeypatch.setattr(Transformer, "forward_chunk", counted)
    return counts


def verified(model: Model, kind: type[KVCache]) -> KVCache:
    """Rows of 20 and 13 tokens, after which 5 and 3 were verified."""
    cache = cache_of(kind, model, 2)
    model.forward(IDS[:, :20], cache, new_lens=[20, 13])
    ids = torch.stack([IDS[0, 20:25], torch.cat((IDS[1, 13:16], torch.zeros(2).long()))])
    model.forward(ids, cache, new_lens=[5, 3], each_token=True)
    assert cache.snapshot_lens == [21, 14] and not cache.stale
    return cache


@pytest.mark.sweep(36)
@pytest.mark.parametrize("kept", [(25, 16), (21, 14), (23, 15)])
def test_rejected_tokens_run_again_together_with_the_next_ones(models, kind, ran, kept):
    _, model, _ = models
    cache = verified(model, kind)
    cache.crop(kept)
    assert cache.stale == {row for row, n in enumerate(kept) if n < (25, 16)[row]}
    ran.clear()
    following = torch.stack([IDS[row, end : end + 2] for row, end in enumerate(kept)])
    found = model.forward(following, cache)
    if all(layer.spec.is_exact(64) for layer in cache.layers):
        both = zip(kept, (25, 16), (21, 14), strict=True)
        assert ran == [4 + sum(n - settled for n, had, settled in both if n < had)]
    expected = [alone(model, kind, 0, 20, kept[0] + 2), alone(model, kind, 1, 13, kept[1] + 2)]
    assert found.shape[1] == 2
    assert_close(found[:, -1], torch.cat(expected), kind)
    assert not cache.stale and cache.seq_lens == [kept[0] + 2, kept[1] + 2]


@pytest.mark.sweep(12)
def test_a_second_verification_goes_on_from_the_first(models, kind):
    _, model, _ = models
    cache = verified(model, kind)
    cache.crop([23, 14])
    ids = torch.stack([IDS[0, 23:26], IDS[1, 14:17]])
    found = model.forward(ids, cache, each_token=True)
    assert cache.snapshot_lens == [24, 15] and len(found) == 6
    for row, (start, settled) in enumerate([(20, 23), (13, 14)]):
        for at in range(3):
            expected = alone(model, kind, row, start, settled + at + 1)
            assert_close(found[3 * row + at], expected, kind)
    cache.crop([25, 17])
    found = model.forward(torch.stack([IDS[0, 25:26], IDS[1, 17:18]]), cache)[:, -1]
    expected = [alone(model, kind, 0, 20, 26), alone(model, kind, 1, 13, 18)]
    assert_close(found, torch.cat(expected), kind)


def test_a_long_tail_runs_in_a_call_before(models, ran):
    _, model, _ = models
    cache = CACHES["fp16"](model, 64, snapshots=True)
    model.forward(IDS[:1, :20], cache, snapshot_at=[18])
    model.forward(IDS[:1, 20:40], cache)
    assert cache.snapshot_lens == [18]
    cache.crop(30)
    ran.clear()
    found = model.forward(IDS[:1, 30:40], cache, last_id_only=True)
    assert ran == [12, 10]
    assert_close(found[:, -1], alone(model, CACHES["fp16"], 0, 20, 40), KVCache)


@pytest.mark.sweep(12)
def test_what_came_before_a_snapshot_runs_from_the_start(models, kind):
    _, model, _ = models
    cache = verified(model, kind)
    cache.crop([12, 14])
    assert cache.snapshot_lens == [0, 14]
    found = model.forward(torch.stack([IDS[0, 12:13], IDS[1, 14:15]]), cache)[:, -1]
    assert_close(
        found, torch.cat([alone(model, kind, 0, 12, 13), alone(model, kind, 1, 13, 15)]), kind
    )


@pytest.mark.sweep(12)
def test_rows_take_their_snapshots_along(models, kind, tmp_path):
    _, model, _ = models
    expected = alone(model, kind, 0, 20, 23), alone(model, kind, 1, 13, 16)
    following = torch.stack([IDS[0, 22:23], IDS[1, 15:16]])

    def cropped() -> KVCache:
        cache = verified(model, kind)
        cache.crop([22, 15])
        return cache

    for cache in (cropped().clone(), cropped().fork(1), cropped()):
        assert_close(model.forward(following, cache)[:, -1], torch.cat(expected), kind)
    turned = cropped()
    turned.reorder([1, 0])
    assert_close(model.forward(following.flip(0), turned)[:, -1], torch.cat(expected).flip(0), kind)
    cropped().save(tmp_path / "cache")
    for snapshots in (True, False):
        pages = {"page": 16, "pages": 16} if kind is PagedCache else {}
        read = kind(model, 64, batch_size=2, snapshots=snapshots, **pages)
        read.load(tmp_path / "cache")
        assert_close(model.forward(following, read)[:, -1], torch.cat(expected), kind)


def test_a_call_that_fails_leaves_no_half_taken_snapshot(models, monkeypatch):
    _, model, _ = models
    cache = verified(model, CACHES["fp16"])
    cache.crop([23, 15])
    unit = model.units[2].module
    with monkeypatch.context() as patch:
        patch.setattr(unit, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.forward(torch.stack([IDS[0, 23:26], IDS[1, 15:18]]), cache, each_token=True)
    assert cache.seq_lens == [23, 15] and cache.snapshot_lens == [0, 0]
    found = model.forward(torch.stack([IDS[0, 23:24], IDS[1, 15:16]]), cache)[:, -1]
    expected = [alone(model, CACHES["fp16"], row, n, n + 1) for row, n in enumerate((23, 15))]
    assert_close(found, torch.cat(expected), KVCache)


# Speculation ----------------------------------------------------------------------------------

PROMPTS = [IDS[0, :21].tolist(), [*[5, 6, 7, 8] * 6], IDS[1, :9].tolist()]


@pytest.mark.sweep(9)
@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("how", ["lookup", "itself", "alike"])
def test_generate_verifies_proposals(models, ran, how, prompts):
    theirs, model, alike = models
    options = {
        "lookup": {"prompt_lookup_num_tokens": 4},
        "itself": {"assistant_model": model},
        "alike": {"assistant_model": alike},
    }[how]
    out = model.generate(
        PROMPTS[:prompts],
        **{"assistant_confidence_threshold": 0.0, "num_assistant_tokens": 4, **options},
        max_new_tokens=30, do_sample=False, eos_token_id=None, return_dict_in_generate=True,
    )  # fmt: skip
    for found, prompt in zip(out.sequences.tolist(), PROMPTS, strict=False):
        assert found[len(prompt) :][:30] == theirs_greedy(theirs, prompt, 30)
    assert out.proposed_tokens > 0
    if how != "lookup":
        assert out.accepted_tokens > 0
    if how == "alike" and prompts > 1:
        assert out.accepted_tokens < out.proposed_tokens


@pytest.mark.sweep(4)
@pytest.mark.parametrize("room", [512, 96])
def test_jobs_of_an_engine_verify_proposals(models, room):
    """Also if jobs are swapped out with rejected tokens, and come back."""
    theirs, model, alike = models
    draft = Draft(alike, KVCache(alike, 128, 4, snapshots=True), tokens=4, confidence=0.0)
    cache = PagedCache(model, room, page=16, snapshots=True)
    with Engine(
        model, cache, Tokenizer(model.config.path), max_running=4, draft=draft, ngrams=NGrams()
    ) as engine:
        prompts = [prompt[:9] for prompt in (*PROMPTS, IDS[1, 30:].tolist())]
        jobs = [
            Job(prompt=prompt, max_new_tokens=40, settings=GREEDY, ignore_eos=True)
            for prompt in prompts
        ]
        handles = [engine.submit(job) for job in jobs]
        while engine.busy:
            engine.iterate()
        assert 0 < engine.stats.accepted_tokens < engine.stats.proposed_tokens
        assert (engine.stats.put_away > 0) == (room == 96)
    for handle, prompt in zip(handles, prompts, strict=True):
        assert handle.tokens == theirs_greedy(theirs, prompt, 40)


def test_a_cache_without_room_for_snapshots_is_refused(models):
    _, model, alike = models
    tokenizer = Tokenizer(model.config.path)
    with pytest.raises(ValueError, match="make it with snapshots=True"):
        Engine(model, PagedCache(model, 128, page=16), tokenizer, ngrams=4)
    with pytest.raises(ValueError, match="make it with snapshots=True"):
        Draft(alike, KVCache(alike, 64))
    with pytest.raises(ValueError, match="make it with snapshots=True"):
        model.generate(PROMPTS[:1], cache=KVCache(model, 64), prompt_lookup_num_tokens=3)


def test_snapshots_take_the_bytes_of_the_states_once_more(models):
    _, model, _ = models
    without, with_them = (
        CACHES["4bit"].layer_specs(model, 64, snapshots=each) for each in (False, True)
    )
    for a, b in zip(without, with_them, strict=True):
        assert b.nbytes(b.capacity) == a.nbytes(a.capacity) * (2 if a.state else 1)


def test_another_answer_to_a_prompt_begins_behind_it(models, ran):
    """And a next turn, whose prompt tokenizes the last answer differently, too."""
    theirs, model, _ = models
    cache = KVCache(model, 64, snapshots=True)
    prompt = IDS[0, :21].tolist()

    def answered(ids: list[int]) -> int:
        """Tokens that ran in chunks of several."""
        ran.clear()
        found = model.generate([ids], cache=cache, max_new_tokens=6, eos_token_id=None)
        assert found[0, len(ids) :].tolist() == theirs_greedy(theirs, ids, 6)
        return sum(count for count in ran if count > 1)

    assert answered(prompt) == 20
    assert answered(prompt) == 0
    answer = cache.sequences[0][21:]
    assert answered([*prompt, *answer[:2], 7, 8, 9]) == 1 + 2 + 2
