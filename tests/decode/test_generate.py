"""``Model.generate`` gives transformers' tokens, and refuses invalid arguments."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import sweep
import torch
from cases import small_pages
from generated import PAD, ROWS, WIDTH, check_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from on_cpu import on_cpu
from references import diverse_beams
from simproc import run_sim
from tiny import IN_ALL_WAYS, TINY, llama, longrope, phi3, reference, save, save_tokenizer

from exkv import (
    CACHES,
    Cache,
    GenerationConfig,
    Generator,
    KVCache,
    Model,
    ModelConfig,
    SamplingParams,
    Tokenizer,
)
from exkv.decode import fixed_batch as call
from exkv.decode.runner import Runner
from exkv.decode.scheduler import Scheduler

ENDS = diverse_beams.CHANGES["eos_token_id"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that never ends by itself, with a tokenizer."""
    folder = save(reference(llama(eos_token_id=None)), tmp_path_factory.mktemp("model"))
    return on_cpu(save_tokenizer(folder), max_input_len=16)


# transformers' tokens -------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "ragged"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 3, "repetition_penalty": 0.7},
        {"eos_token_id": 17},
    ],
    ids=str,
)
def test_greedy(pair, rows, options):
    check_equal(pair, rows, **{"max_new_tokens": 20, "do_sample": False, **options})


def test_no_token_twice(pair):
    # With one row only: transformers counts the padding of the others as a token.
    check_equal(pair, ROWS[:1], no_repeat_ngram_size=1, max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "ragged"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 0},
        {"temperature": 0.3, "top_k": 5},
        {"temperature": 1.7, "top_p": 0.7},
        {"top_k": 0, "min_p": 0.2},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "temperature": 1.2},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "top_p": 0.8},
        {"num_return_sequences": 3},
    ],
    ids=str,
)
def test_sampling(pair, rows, options):
    check_equal(pair, rows, do_sample=True, max_new_tokens=20, **options)


@pytest.mark.sweep(20)
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("num_beams", [2, 3, 5])
def test_beams(pair, num_beams, length_penalty, early_stopping):
    check_equal(
        pair,
        ROWS,
        num_beams=num_beams,
        num_return_sequences=num_beams - 1,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_new_tokens=16,
        do_sample=False,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": 17},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"max_new_tokens": 1, "num_return_sequences": 4},
        {"do_sample": True},
        {"do_sample": True, "temperature": 2.0, "top_k": 0, "top_p": 0.5, "min_p": 0.1},
        {"do_sample": True, "top_k": 1},
    ],
    ids=str,
)
def test_beams_with_other_settings(pair, options):
    check_equal(pair, ROWS, **{"num_beams": 4, "max_new_tokens": 12, "do_sample": False, **options})


# Groups of beams ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", diverse_beams.SEEDS)
@pytest.mark.parametrize("index", range(len(diverse_beams.CALLS)))
def test_groups_of_beams(pair, seed, index):
    check_groups(pair, seed, diverse_beams.CALLS[index])


def check_groups(pair, seed: int, options: dict, cache: KVCache | None = None) -> None:
    """Compare with the tokens and scores of transformers 4.48."""
    theirs, ours = pair
    cases = json.loads(diverse_beams.FILE.read_text())
    (case,) = (c for c in cases if (c["seed"], c["options"]) == (seed, options))
    assert case["weights"] == diverse_beams.checksum(theirs), "other weights than the references'"
    prompts = diverse_beams.padded(diverse_beams.rows_of(options))
    found = ours.generate(**prompts, **diverse_beams.call_of(options), cache=cache)
    # transformers 4.48 writes its first end-of-sequence token in place of any.
    found.sequences[:, WIDTH:][found.sequences[:, WIDTH:] == ENDS[1]] = ENDS[0]
    assert found.sequences.tolist() == case["sequences"]
    torch.testing.assert_close(found.sequences_scores, torch.tensor(case["scores"]))


# Criteria and streamers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True}, {"num_beams": 3}, {"num_beams": 3, "early_stopping": True}],
    ids=str,
)
def test_stopping_criteria(pair, options):
    said = []

    def some(ids, scores):
        said.extend((ids[:, -1] > 20).tolist())
        return ids[:, -1] > 20

    call = {"do_sample": False, "max_new_tokens": 20, **options}
    check_equal(pair, ROWS, stopping_criteria=[some], **call)
    assert True in said


def test_criterion_may_return_one_bool_for_all_rows(model):
    ids = model.generate(ROWS, max_new_tokens=9, stopping_criteria=[lambda ids, _: len(ids[0]) > 9])
    assert ids.shape == (3, WIDTH + 3)


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


def test_streamer_gets_the_same_calls_as_from_transformers(pair):
    streams = Recorder(), Recorder()
    for model, streamer in zip(pair, streams, strict=True):
        call = {"do_sample": False, "max_new_tokens": 8, "streamer": streamer}
        model.generate(**diverse_beams.padded(ROWS), **call)
    assert streams[0].seen == streams[1].seen
    assert streams[1].seen[-1] == "end"


# Prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}],
    ids=str,
)
def test_each_row_gets_what_it_gets_alone_and_lists_need_no_padding(pair, options):
    ours = pair[1]
    call = {"do_sample": False, "max_new_tokens": 12, **options}
    together = ours.generate(ROWS, **call)
    aligned = ours.generate(**diverse_beams.padded(ROWS), **call)
    for index, row in enumerate(ROWS):
        alone = ours.generate(row, **call)[0].tolist()
        filled = alone + [PAD] * 2 * WIDTH
        assert together[index].tolist() == filled[: together.shape[1]]
        in_columns = aligned[index, WIDTH - len(row) :].tolist()
        assert in_columns == filled[: len(in_columns)]


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.1},
        {"num_beams": 3, "repetition_penalty": 1.1},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_padding_may_be_outside_of_the_vocabulary(pair, options):
    ours = pair[1]
    call = {"max_new_tokens": 20, "early_stopping": True, "eos_token_id": list(range(9, 18))}
    found = ours.generate(ROWS, pad_token_id=9999, **call, **options)
    expected = ours.generate(ROWS, pad_token_id=0, **call, **options)
    assert (found == 9999).any()
    assert torch.where(found == 9999, 0, found).tolist() == expected.tolist()


@pytest.mark.parametrize("name", [*IN_ALL_WAYS, "DeepseekV3ForCausalLM", "phi3-outgrown"])
def test_beams_of_every_architecture(tmp_path, name):
    """Beyond the sliding windows, and beyond longrope's training length."""
    make, changes = (phi3, longrope(trained=34)) if name == "phi3-outgrown" else (TINY[name], {})
    theirs = reference(make(**{"pad_token_id": PAD, **changes}))
    ours = on_cpu(save(theirs, tmp_path), max_input_len=16)
    prompt = torch.arange(5, 35).tolist()
    check_equal((theirs, ours), [prompt], num_beams=3, max_new_tokens=12, do_sample=False)


def test_texts_continue_as_with_a_generator(model):
    texts = ["the key is", "anna put the red ball in the garden, and", "where"]
    tokenizer = Tokenizer(model.config)
    cache = Cache(model, max_seq_len=64, batch_size=3)
    generator = Generator(model, cache, tokenizer)
    found = model.generate(texts, max_new_tokens=12, return_dict_in_generate=True)
    simple = generator.generate_simple(texts, SamplingParams.greedy(), 12, completion_only=True)
    assert found.sequences_scores is None
    for row, text in enumerate(texts):
        ids = tokenizer.encode(text)
        assert found.sequences[row, : len(ids)].tolist() == ids
        assert found.texts[row] == tokenizer.decode(ids) + simple[row]
    (one,) = model.generate(texts[2], max_new_tokens=12, return_dict_in_generate=True).texts
    assert one == found.texts[2]


def test_checkpoint_recommendation_applies(tmp_path):
    theirs = reference(llama(**diverse_beams.CHANGES))
    recommended = {"do_sample": True, "temperature": 0.7, "top_k": 7, "top_p": 0.9}
    recommended |= {"repetition_penalty": 1.1, "eos_token_id": 17, "pad_token_id": PAD}
    theirs.generation_config.update(**recommended)
    ours = on_cpu(save(theirs, tmp_path))
    check_equal((theirs, ours), ROWS[:1], max_new_tokens=20, eos_token_id=17)
    config = GenerationConfig.from_pretrained(tmp_path)
    assert config == GenerationConfig(**recommended)
    assert GenerationConfig.from_pretrained(tmp_path / "nowhere") == GenerationConfig()
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_h": 0.5}))
    with pytest.raises(ValueError, match="top_h = 0.5"):
        ours.generate(ROWS[0])


def test_a_seed_repeats_a_run_whatever_was_drawn_before(model):
    def draws(seed):
        return model.generate(ROWS, do_sample=True, seed=seed, max_new_tokens=12).tolist()

    torch.manual_seed(3)
    expected = model.generate(ROWS, do_sample=True, max_new_tokens=12).tolist()
    assert draws(3) == draws(3) == expected != draws(4)


# Caches ---------------------------------------------------------------------------------------


class Recomputing(Runner):
    """Keeps nothing between steps: the rows run again from their first token."""

    def prefill(self, prompts):
        with self.using():
            self.cache.reset()
        self.rows = [list(ids) for ids in prompts]
        return super().prefill(prompts)

    def repeat(self, prompts, repeats):
        self.rows = [list(ids) for ids in self.rows for _ in range(repeats)]
        super().repeat(prompts, repeats)

    def step(self, tokens, going, placed=None):
        for row, token, goes in zip(self.rows, tokens, going, strict=True):
            row += [token] if goes else []
        with self.using():
            self.cache.reset()
        with self.using():
            return self._forward(self.rows)

    def reorder(self, rows):
        self.rows = [list(self.rows[row]) for row in rows]


@pytest.mark.sweep(24)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "num_return_sequences": 4},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    ],
    ids=str,
)
def test_every_cache_matches_full_recomputation(pair, monkeypatch, kind, options):
    ours = pair[1]
    call_options = {"max_new_tokens": 12, "seed": 1, **options}
    cache = CACHES[kind](ours, max_seq_len=32, batch_size=13)
    found = ours.generate(ROWS, cache=cache, **call_options)
    again = ours.generate(ROWS, cache=cache, **call_options)
    monkeypatch.setattr(call, "Runner", Recomputing)
    assert ours.generate(ROWS, cache=cache, **call_options).tolist() == found.tolist()
    assert again.tolist() == found.tolist()


def is_exact(kind: str, tokens: int) -> bool:
    """Whether a cache of this kind is lossless for a text of ``tokens``."""
    tiny_model = SimpleNamespace(
        config=ModelConfig.from_dict(llama().to_dict()), dtype=torch.float32
    )
    return all(spec.is_exact(tokens) for spec in CACHES[kind].layer_specs(tiny_model, tokens))


EXACT = [kind for kind in CACHES if is_exact(kind, 32)]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("kind", EXACT)
def test_every_lossless_cache_gives_transformers_tokens(pair, seed, kind):
    cache = CACHES[kind](pair[1], max_seq_len=32, batch_size=13)
    for options in (
        {"do_sample": False},
        {"do_sample": True, "top_k": 9, "num_return_sequences": 3},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 4},
    ):
        check_equal(pair, ROWS, cache=cache, max_new_tokens=12, **options)
    for options in diverse_beams.CALLS[:2]:
        check_groups(pair, seed, options, cache)


def test_given_cache_continues_from_its_contents(model, monkeypatch):
    cache = Cache(model, max_seq_len=64, batch_size=2)
    first = model.generate(ROWS[:2], cache=cache, max_new_tokens=10)
    longer = [[*row, 5, 6] for row in (first[0, :17].tolist(), first[1, :13].tolist())]
    expected = model.generate(longer, max_new_tokens=10)
    calls = spied(monkeypatch, model)
    assert model.generate(longer, cache=cache, max_new_tokens=10).tolist() == expected.tolist()
    assert calls[0] == [3, 3]  # the last token was never run, and two are new


def spied(monkeypatch, model: Model) -> list[list[int]]:
    """Record the number of each row's tokens, a list for each later forward call."""
    calls: list[list[int]] = []
    forward = model.forward

    def spy(*args, **kwargs):
        calls.append(kwargs["new_lens"])
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", spy)
    return calls


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_logits_of_ended_rows_do_not_matter(pair, monkeypatch, options):
    ours = pair[1]
    call = {"do_sample": True, "seed": 1, "max_new_tokens": 20, "early_stopping": True, **options}
    ends = {"eos_token_id": list(range(9, 18))}
    expected = ours.generate(ROWS, **call, **ends)
    forward, idle = ours.forward, []

    def broken(*args, **kwargs):
        logits = forward(*args, **kwargs)
        rows = [row for row, new in enumerate(kwargs["new_lens"]) if new == 0]
        idle.extend(rows)
        logits[rows] = torch.nan
        return logits

    monkeypatch.setattr(ours, "forward", broken)
    assert ours.generate(ROWS, **call, **ends).tolist() == expected.tolist()
    assert idle


def test_beams_prefill_once_and_never_move_the_prompt(model, monkeypatch):
    prompts = [torch.arange(5, 105).tolist(), torch.arange(7, 107).tolist()]
    cache = Cache(model, max_seq_len=128, batch_size=8)
    moved = []
    layer = cache.layers[0]
    move_rows = layer.move_rows
    monkeypatch.setattr(layer, "move_rows", lambda *args: (moved.append(args[1]), move_rows(*args)))
    calls = spied(monkeypatch, model)
    model.generate(prompts, cache=cache, num_beams=4, max_new_tokens=12)
    assert calls == [[100, 100]] + [[1] * 8] * 11
    first_fill, *steps = moved
    assert first_fill == slice(0, 100)
    assert steps  # beams were reordered
    assert all(part.start >= 100 and part.stop <= 112 for part in steps)


@settings(max_examples=20)
@given(
    rows=st.lists(st.lists(st.integers(0, 319), min_size=1, max_size=9), min_size=1, max_size=3),
    num_beams=st.integers(2, 4),
    new=st.integers(1, 8),
)
def test_after_a_beam_search_the_cache_holds_the_beams(model, rows, num_beams, new):
    cache = Cache(model, max_seq_len=32, batch_size=12)
    found = model.generate(
        rows,
        cache=cache,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=new,
        return_dict_in_generate=True,
    )
    for index, ids in enumerate(found.sequences.tolist()):
        prompt = rows[index // num_beams]
        ids = ids[: len(prompt) + new]
        first = index // num_beams * num_beams
        assert ids[: len(prompt)] == prompt
        assert ids[:-1] in cache.sequences[first : first + num_beams]
        # The score is the mean log-probability by one call over the whole sequence.
        log_probs = model.forward(torch.tensor([ids]))[0, len(prompt) - 1 : -1].log_softmax(-1)
        mean = log_probs.gather(1, torch.tensor(ids[len(prompt) :])[:, None]).mean()
        torch.testing.assert_close(found.sequences_scores[index], mean, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"num_beam_groups": 2, "diversity_penalty": 0.5}], ids=str)
def test_rows_fork_with_their_tokens(model, monkeypatch, options):
    """The loop's tokens of a beam are those that its row of the cache holds."""
    cache, steps, decode = Cache(model, max_seq_len=32, batch_size=8), [], Scheduler._decode

    def spy(scheduler):
        decode(scheduler)
        going = [at for at, row in enumerate(scheduler.rows.jobs) if not row.idle and row.tokens]
        rows = [scheduler.rows.jobs[at] for at in going]
        steps.append([row.prompt + row.tokens for row in rows])
        assert steps[-1] == [cache.sequences[at] for at in going]

    monkeypatch.setattr(Scheduler, "_decode", spy)
    model.generate(ROWS[:2], cache=cache, num_beams=4, max_new_tokens=9, **options)
    assert len(steps) == 9 and len(steps[4]) == 8


def test_cache_built_for_a_call_is_freed_afterwards(model):
    before = len(model.caches)
    model.generate(ROWS, num_beams=2)
    assert len(model.caches) == before


def over_two_devices(folder: str):
    """Tokens for each way to decode and each kind of cache, and the model's devices."""
    tokens = []
    for kind, ways in ways_of_kinds().items():
        model = Model(folder)
        cache = CACHES[kind](model, 32, batch_size=12, **small_pages(kind))
        model.load_autosplit(cache)
        tokens += [model.generate(ROWS, cache=cache, **call).tolist() for call in ways]
        placed = sorted({str(device) for device in model.device_map.values()})
        model.unload()
    return tokens, placed


#: Ways to decode that together use every loop.
WAYS = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 12, "do_sample": True, "seed": 1, "num_return_sequences": 3},
    {"max_new_tokens": 12, "num_beams": 4},
    {"max_new_tokens": 12, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
]


def ways_of_kinds() -> dict[str, list[dict]]:
    """Each kind of cache decodes in one way; the first, and in a sweep every one, in all ways."""
    every = sweep.cases(1, len(WAYS))
    return {
        kind: WAYS if index == 0 else [WAYS[(index + i) % len(WAYS)] for i in range(every)]
        for index, kind in enumerate(CACHES)
    }


def test_tokens_over_two_devices_match_the_cpu(tmp_path):
    folder = save(reference(llama(num_hidden_layers=4, eos_token_id=None)), tmp_path)
    expected = []
    model = on_cpu(folder)
    for kind, ways in ways_of_kinds().items():
        cache = CACHES[kind](model, 32, batch_size=12, **small_pages(kind))
        expected += [model.generate(ROWS, cache=cache, **call).tolist() for call in ways]
    found, placed = run_sim(over_two_devices, "2M,8M", args=[str(folder)])
    assert placed == ["sim:0", "sim:1"]
    assert found == expected


def bytes_to_the_host(folder: str):
    """Bytes that one more step copies to the host, for each way to decode."""
    from exkv import sim

    model = Model(folder)
    cache = CACHES["fp16"](model, 32, batch_size=12)
    model.load_autosplit(cache)
    found = []
    for way in WAYS[:3]:
        totals = []
        for new in (5, 6):
            sim.reset_transfer_bytes()
            options = {**way, "max_new_tokens": new, "repetition_penalty": 1.1, "top_p": 0.9}
            model.generate(ROWS, cache=cache, **options)
            totals.append(sum(n for (_, to), n in sim.transfer_bytes().items() if to == "cpu"))
        found.append(totals[1] - totals[0])
    return found


def test_step_copies_tokens_but_no_scores_to_the_host(tmp_path):
    """A token and two numbers to check for each row; for beams twice as many candidates as beams,
    each a token and its score, and a number for each beam and each prompt."""
    folder = save(reference(llama(eos_token_id=None)), tmp_path)
    found = run_sim(bytes_to_the_host, "16M", args=[str(folder)])
    rows = len(ROWS)
    sampled = 3 * rows
    beams = 2 * (2 * 4) * rows + 4 * rows + rows
    assert found == [4 * 3 * rows, 4 * 3 * sampled, 4 * beams]


# User errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": "1"}, "top_p is '1'"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"no_repeat_ngram_size": 1.5}, "no_repeat_ngram_size is 1.5"),
        ({"num_beams": 0}, "num_beams is 0"),
        ({"num_beams": True}, "num_beams is True"),
        ({"do_sample": 1}, "do_sample is 1"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences is 3, more than the 2"),
        ({"num_return_sequences": 2}, "num_return_sequences is 2, but greedy"),
        ({"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0}, "num_beams is 4, not a"),
        ({"num_beams": 4, "diversity_penalty": 0.5}, "diversity_penalty is 0.5, but"),
        ({"num_beams": 4, "num_beam_groups": 2}, "diversity_penalty of 0"),
        (
            {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 1.0, "do_sample": True},
            "groups don't sample",
        ),
        ({"early_stopping": "always"}, "early_stopping is 'always'"),
        ({"early_stopping": 1}, "early_stopping is 1"),
        ({"length_penalty": float("inf")}, "length_penalty is inf"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"pad_token_id": -1}, "pad_token_id is -1"),
        ({"top_n": 3}, "'top_n': did you mean top_"),
        ({"num_beams": 2, "streamer": Recorder()}, "streamer"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_bad_argument_is_named(model, options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        model.generate(ROWS, **options)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([], "no prompt"),
        ([[]], "prompt 0 is empty"),
        ([[1], []], "prompt 1 is empty"),
        (torch.empty((1, 0), dtype=torch.int64), "prompt 0 is empty"),
        ([[1, 320]], "token id 320, outside the vocabulary of 320"),
        (torch.tensor([[-1]]), "token id -1"),
        (torch.ones(2, 2), "float32"),
        (torch.ones((1, 1, 1), dtype=torch.int64), r"\(1, 1, 1\)"),
    ],
    ids=str,
)
def test_a_bad_prompt_is_named(model, prompts, said):
    with pytest.raises(ValueError, match=said):
        model.generate(prompts)


def test_padding_on_the_right_is_refused(model):
    with pytest.raises(ValueError, match="row 1 .*pad on the left"):
        mask = torch.tensor([[1, 1], [1, 0]])
        model.generate(torch.ones((2, 2), dtype=torch.int64), attention_mask=mask)
    with pytest.raises(ValueError, match=r"\(1, 2\), and input_ids \(2, 2\)"):
        model.generate(torch.ones((2, 2), dtype=torch.int64), attention_mask=mask[:1])


def test_a_cache_that_is_too_small_is_refused_before_anything_runs(pair, model, monkeypatch):
    calls = spied(monkeypatch, model)
    cache = Cache(model, max_seq_len=16, batch_size=4)
    with pytest.raises(ValueError, match="3 prompts of 2 sequences each need 6 rows.* = 4"):
        model.generate(ROWS, cache=cache, num_beams=2)
    with pytest.raises(ValueError, match="7 tokens and max_new_tokens = 11 need 17 .* = 16"):
        model.generate(ROWS, cache=cache, max_new_tokens=11)
    with pytest.raises(ValueError, match="another model"):
        model.generate(ROWS, cache=Cache(pair[1], 16))
    assert not calls
    assert model.generate(ROWS, cache=cache, max_new_tokens=10).shape == (3, 17)


def test_a_model_that_is_not_loaded_is_refused(model):
    with pytest.raises(ValueError, match="not loaded"):
        Model(model.config).generate(ROWS)
