"""Generation: the same text alone, in a batch, in chunks, after other prompts, and with a seed."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simproc import run_sim

from exkv import CACHES, CacheUseError, Generator, Model, SamplingParams, Tokenizer, sim
from exkv.decode.completion import StopText

GREEDY = SamplingParams.greedy()
SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)
PROMPTS = ["the key is", "anna put the red ball in the garden, and", "where"]


@pytest.fixture(scope="module")
def model(tiny_folder):
    model = Model(tiny_folder, max_input_len=16)
    model.load(devices=["cpu"])
    return model


@pytest.fixture(params=CACHES)
def generator(request, model, tiny_tokenizer):
    return Generator(
        model, CACHES[request.param](model, max_seq_len=128, batch_size=4), tiny_tokenizer
    )


def fresh(generator: Generator) -> Generator:
    """The same generator with a new cache."""
    cache = generator.cache
    other = type(cache)(cache.model, cache.max_seq_len, cache.batch_size)
    return Generator(generator.model, other, generator.tokenizer)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_each_row_of_a_ragged_batch_gets_the_text_that_it_gets_alone(generator, settings):
    together = generator.generate_simple(PROMPTS, settings, 12, seed=7)
    alone = [
        fresh(generator).generate_simple(prompt, settings, 12, seed=7 + row)
        for row, prompt in enumerate(PROMPTS)
    ]
    assert together == alone
    assert all(text.startswith(prompt) for text, prompt in zip(together, PROMPTS, strict=True))


def test_a_seed_repeats_a_run_and_another_seed_changes_it(generator):
    first = generator.generate_simple(PROMPTS[0], SAMPLED, 16, seed=1)
    assert generator.generate_simple(PROMPTS[0], SAMPLED, 16, seed=1) == first
    assert generator.generate_simple(PROMPTS[0], SAMPLED, 16, seed=2) != first


def test_conversation_reuses_the_common_prefix_with_the_same_text(generator):
    tokenizer = generator.tokenizer
    first = generator.generate_simple(PROMPTS[1], GREEDY, 10)
    longer = first + " where is it"
    expected = fresh(generator).generate_simple(longer, GREEDY, 10)
    held = generator.cache.sequences[0].copy()
    assert generator.generate_simple(longer, GREEDY, 10) == expected
    ids = tokenizer.encode(longer)
    common = next((i for i, (a, b) in enumerate(zip(ids, held, strict=False)) if a != b), None)
    assert generator.stats.cached_tokens == (common or min(len(ids) - 1, len(held)))
    assert generator.stats.cached_tokens >= len(tokenizer.encode(PROMPTS[1]))


def test_a_prompt_that_diverges_early_or_repeats_gets_fresh_answers(generator):
    for prompt in (PROMPTS[1], PROMPTS[1][:10] + " it", PROMPTS[1], "where"):
        expected = fresh(generator).generate_simple(prompt, GREEDY, 8)
        assert generator.generate_simple(prompt, GREEDY, 8) == expected
        # A random model may answer the same to any prompt: compare the cached prompts.
        ids = generator.tokenizer.encode(prompt)
        assert generator.cache.sequences[0][: len(ids)] == ids


def test_completion_continues_the_prompt_with_its_spaces(generator):
    """The text is that of all ids decoded together."""
    text = generator.generate_simple(PROMPTS[0], SAMPLED, 20, seed=11)
    last = generator.cache.sequences[0]
    assert text.startswith(generator.tokenizer.decode(last))


def test_stream_yields_the_text_of_generate_simple_in_pieces(generator):
    whole = generator.generate_simple(PROMPTS[0], SAMPLED, 20, seed=3, completion_only=True)
    pieces = list(fresh(generator).stream(PROMPTS[0], SAMPLED, 20, seed=3))
    assert "".join(pieces) == whole
    assert len(pieces) > 1 and "" not in pieces


def test_dropped_stream_leaves_a_usable_cache(generator):
    stream = generator.stream(PROMPTS[1], GREEDY, 20)
    next(stream)
    stream.close()
    expected = fresh(generator).generate_simple(PROMPTS[1], GREEDY, 20)
    assert generator.generate_simple(PROMPTS[1], GREEDY, 20) == expected


def test_a_stop_text_ends_the_completion_and_is_left_out(generator):
    whole = generator.generate_simple(PROMPTS[0], SAMPLED, 20, seed=5, completion_only=True)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    cut = generator.generate_simple(
        PROMPTS[0], SAMPLED, 20, seed=5, stop=[stop], completion_only=True
    )
    assert cut == whole[: whole.index(stop)]
    assert generator.stats.stop_reasons == ("stop",)


def test_a_stop_token_ends_the_completion(generator):
    ids = generator.tokenizer.encode(PROMPTS[0])
    list(generator.stream(ids, GREEDY, 6))
    token = generator.cache.sequences[0][len(ids) + 2]
    list(generator.stream(ids, GREEDY, 6, stop=[token]))
    assert generator.stats.stop_reasons == ("eos",)
    assert generator.stats.new_tokens <= 3


def test_generation_ends_where_the_cache_ends(model, tiny_tokenizer):
    cache = CACHES["fp16"](model, max_seq_len=24)
    generator = Generator(model, cache, tiny_tokenizer)
    ids = tiny_tokenizer.encode(PROMPTS[0])
    generator.generate_simple(PROMPTS[0], GREEDY, 100)
    assert generator.stats.stop_reasons == ("cache_full",)
    assert cache.current_seq_len == 24
    # One more than the cache holds: the last token isn't stored.
    assert generator.stats.new_tokens == 24 - len(ids) + 1


def test_a_prompt_past_the_limit_is_refused_with_both_numbers(generator):
    with pytest.raises(ValueError, match=r"129 tokens.*max_seq_len = 128"):
        generator.generate_simple([5] * 129, GREEDY, 1)


def test_invalid_arguments_of_a_generator_are_refused(generator):
    with pytest.raises(ValueError, match="5 prompts.*batch_size = 4"):
        generator.generate_simple(["a"] * 5)
    with pytest.raises(ValueError, match="num_tokens is 0"):
        generator.generate_simple("a", num_tokens=0)
    with pytest.raises(ValueError, match="empty"):
        generator.generate_simple([[]])
    with pytest.raises(ValueError, match="token id 99999 is outside the vocabulary"):
        generator.generate_simple([99999])


def test_warmup_leaves_the_cache_as_it_was(generator):
    before = generator.generate_simple(PROMPTS[0], GREEDY, 5)
    held = [list(row) for row in generator.cache.sequences]
    generator.warmup()
    assert generator.cache.sequences == held
    assert generator.generate_simple(PROMPTS[0], GREEDY, 5) == before


def test_an_error_inside_a_forward_leaves_the_cache_usable(generator, monkeypatch):
    expected = fresh(generator).generate_simple(PROMPTS[1], GREEDY, 8)
    head = generator.model.units[-1].module
    calls = iter([True, True, False])

    def fail_at_the_third(*args):
        if next(calls, True):
            return type(head).forward(head, *args)
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(head, "forward", fail_at_the_third)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        generator.generate_simple(PROMPTS[1], GREEDY, 8)
    assert generator.generate_simple(PROMPTS[1], GREEDY, 8) == expected


@settings(deadline=None)
@given(
    text=st.text("ab", max_size=30),
    cuts=st.lists(st.integers(0, 30)),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_text_is_found_however_the_text_is_cut(text, cuts, stops):
    filter_ = StopText(stops)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    out = ""
    for start, end in zip(bounds, bounds[1:], strict=False):
        out += filter_.push(text[start:end])
    out += filter_.flush()
    assert out == text[: _first_stop(text, stops)]


def _first_stop(text: str, stops: list[str]) -> int:
    """Where the first stop text to be complete begins; the end if there is none."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return len(text)


# Users of one cache -----------------------------------------------------------------------------


def test_a_second_stream_on_a_cache_is_refused_and_the_first_goes_on(generator):
    expected = "".join(fresh(generator).stream(PROMPTS[0], SAMPLED, 8, seed=3))
    first = generator.stream(PROMPTS[0], SAMPLED, 8, seed=3)
    text = next(first)
    with pytest.raises(CacheUseError, match="a Generator is using"):
        next(generator.stream(PROMPTS[1], GREEDY, 4))
    with pytest.raises(CacheUseError, match="model.generate wants"):
        generator.model.generate([[5, 6]], cache=generator.cache, max_new_tokens=2)
    with pytest.raises(CacheUseError, match=r"cache.reset wants"):
        generator.cache.reset()
    assert text + "".join(first) == expected
    assert generator.generate_simple(PROMPTS[1], GREEDY, 2)  # it is free again


def test_threads_on_one_cache_do_not_mix_their_texts(model, tiny_tokenizer):
    generator = Generator(model, CACHES["fp16"](model, max_seq_len=128), tiny_tokenizer)
    expected = fresh(generator).generate_simple(PROMPTS[1], GREEDY, 12)
    said = []

    def work() -> None:
        try:
            said.append(generator.generate_simple(PROMPTS[1], GREEDY, 12))
        except CacheUseError:
            said.append(None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(said) <= {expected, None} and expected in said


def test_a_stream_whose_model_is_unloaded_says_so(tiny_folder, tiny_tokenizer):
    model = Model(tiny_folder)
    model.load(devices=["cpu"])
    stream = Generator(model, CACHES["fp16"](model), tiny_tokenizer).stream(PROMPTS[0], GREEDY, 20)
    next(stream)
    model.unload()
    with pytest.raises(CacheUseError, match=r"model.unload freed .* a Generator"):
        list(stream)


# Copies between devices ---------------------------------------------------------------------------


def copied_by_steps(folder, seed):
    """Bytes that a step of greedy and of sampled decoding copies between devices, by their names,
    and the tokens."""
    found = {}
    for name, choice in (("greedy", GREEDY), ("sampled", SAMPLED), ("default", SamplingParams())):
        model = Model(folder)
        cache = CACHES["fp16"](model, max_seq_len=64)
        model.load_autosplit(cache, last_id_only=True)
        stream = Generator(model, cache, Tokenizer(folder))._run(
            [list(range(5, 20))], choice, 12, seed, {}
        )
        next(stream)
        next(stream)
        sim.reset_transfer_bytes()
        next(stream)
        copies = {f"{a}>{b}": nbytes for (a, b), nbytes in sim.transfer_bytes().items()}
        list(stream)
        found[name] = copies, list(cache.sequences[0]), sorted(map(str, model.device_map.values()))
        model.unload()
    return found


def test_a_step_copies_no_logits_to_the_host_and_few_bytes_to_the_devices(tiny_folder):
    found = run_sim(copied_by_steps, "1400K,8M", args=[str(tiny_folder), 3])
    on_cpu = Model(tiny_folder)
    on_cpu.load(devices=["cpu"])
    factors = 2 * on_cpu.config.head_dim * on_cpu.dtype.itemsize  # cos and sin
    for name, choice in (("greedy", GREEDY), ("sampled", SAMPLED), ("default", SamplingParams())):
        copies, tokens, placed = found[name]
        assert set(placed) == {"sim:0", "sim:1"}
        assert copies.pop("sim:1>cpu") == 8, name  # the token
        assert copies.pop("cpu>sim:0") == factors
        assert copies.pop("cpu>sim:1") == factors + (0 if name == "greedy" else 8)
        hidden = on_cpu.config.hidden_size * on_cpu.dtype.itemsize
        assert copies == {"sim:0>sim:1": hidden, "sim:1>sim:0": 8}, name
        cache = CACHES["fp16"](on_cpu, max_seq_len=64)
        generator = Generator(on_cpu, cache, Tokenizer(tiny_folder))
        list(generator._run([list(range(5, 20))], choice, 12, 3, {}))
        assert cache.sequences[0] == tokens
