"""ExLlamaV2's interface gives the same tokens, logits, placements and errors as exkv's own."""

from __future__ import annotations

import json
import random
import threading

import pytest
import tokenizers
import torch
from tiny import llama, mixtral, reference, save, save_tokenizer
from tokenizers import decoders, models, pre_tokenizers

from exkv import CheckpointError, Generator, SamplingParams
from exkv.compat.exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2CacheBase,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
    Timer,
)
from exkv.compat.exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exkv.compat.exllamav2.generator.filters import ExLlamaV2PrefixFilter

KINDS = [
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
]
PROMPT = "anna put the red ball"
Settings = ExLlamaV2Sampler.Settings


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """transformers' model, and a folder with it and a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    theirs = reference(llama())
    save(theirs, folder)
    return theirs, save_tokenizer(folder)


@pytest.fixture
def folder(pair):
    return pair[1]


@pytest.fixture(scope="module")
def shared(pair):
    """A loaded model and its tokenizer, which tests must not change."""
    return opened(pair[1])


@pytest.fixture
def loaded(shared):
    model, tokenizer = shared
    return model, ExLlamaV2Cache(model, batch_size=2, max_seq_len=64), tokenizer


def opened(folder, **settings) -> tuple[ExLlamaV2, ExLlamaV2Tokenizer]:
    config = ExLlamaV2Config()
    config.model_dir = str(folder)
    config.prepare()
    for name, value in settings.items():
        setattr(config, name, value)
    model = ExLlamaV2(config)
    model.load()
    return model, ExLlamaV2Tokenizer(config)


# Config ---------------------------------------------------------------------------------------


def test_config_has_the_checkpoints_sizes(folder):
    config = ExLlamaV2Config(folder)
    assert (config.vocab_size, config.hidden_size, config.head_dim) == (320, 128, 32)
    assert (config.num_key_value_heads, config.num_key_value_groups) == (2, 4)
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert config.max_seq_len == config.exkv.max_position_embeddings


def test_low_mem_shortens_chunks(folder):
    config = ExLlamaV2Config()
    config.model_dir = str(folder)
    config.low_mem = True
    config.prepare()
    assert ExLlamaV2(config).exkv.max_input_len == 1024
    other = ExLlamaV2Config(folder)
    other.set_low_mem()
    assert other.max_input_len == 1024


@pytest.mark.parametrize(
    ("settings", "rope"),
    [
        ({"scale_pos_emb": 2.0}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ({"scale_alpha_value": 3.0}, {"rope_theta": 10000.0 * 3.0 ** (32 / 30)}),
        (
            {"alt_rope_method": "yarn", "yarn_rope_factor": 4.0},
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                }
            },
        ),
    ],
)
def test_rope_settings_match_transformers(pair, tmp_path, settings, rope):
    theirs, folder = pair
    other = reference(llama(**rope))
    other.load_state_dict(theirs.state_dict())
    model, _ = opened(folder, **settings)
    ids = torch.arange(40)[None]
    logits = model.forward(ids, ExLlamaV2Cache(model, max_seq_len=64))
    torch.testing.assert_close(logits, other(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, theirs(ids).logits, rtol=1e-2, atol=1e-2)


def test_number_of_experts_per_token_can_be_set(tmp_path):
    theirs = reference(mixtral(num_experts_per_tok=2))
    save(theirs, tmp_path)
    save_tokenizer(tmp_path)
    theirs.config.num_experts_per_tok = 1
    for layer in theirs.model.layers:
        layer.mlp.gate.top_k = 1
    model, _ = opened(tmp_path, num_experts_per_token=1)
    ids = torch.arange(12)[None]
    logits = model.forward(ids, ExLlamaV2Cache(model, max_seq_len=64))
    torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_dense_model_ignores_experts_per_token(folder, caplog):
    config = ExLlamaV2Config(folder)
    config.num_experts_per_token = 2
    assert ExLlamaV2(config).exkv.config == ExLlamaV2(ExLlamaV2Config(folder)).exkv.config
    said = "num_experts_per_token has no effect: LlamaForCausalLM has no experts"
    assert caplog.text.count(said) <= 1 and said in caplog.text


def test_missing_factors_are_off(folder):
    config = ExLlamaV2Config(folder)
    config.scale_pos_emb = config.scale_alpha_value = None
    assert ExLlamaV2(config).exkv.config == config.exkv


def test_unknown_config_attributes_are_refused(folder):
    config = ExLlamaV2Config(folder)
    with pytest.raises(AttributeError, match=r"'max_seq_length'; did you mean 'max_seq_len'\?"):
        config.max_seq_length = 1
    with pytest.raises(AttributeError, match="load_in_q4: exkv quantizes while loading"):
        config.load_in_q4 = True
    with pytest.raises(AttributeError, match="image tower"):
        print(config.vision_size)


def test_fixed_config_attributes_are_refused(folder):
    config = ExLlamaV2Config(folder)
    with pytest.raises(AttributeError, match="hidden_size is 128 in config.json"):
        config.hidden_size = 256
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 5, 6, 7
    tokenizer = ExLlamaV2Tokenizer(config)
    assert tokenizer.encode("", add_bos=True, add_eos=True).tolist() == [[5, 6]]
    assert tokenizer.pad_token_id == 7
    with pytest.raises(ValueError, match=r"call config.prepare\(\) before"):
        unprepared = ExLlamaV2Config()
        unprepared.model_dir = str(folder)
        ExLlamaV2Tokenizer(unprepared)


def test_settings_without_effect_warn_once(folder, caplog):
    config = ExLlamaV2Config(folder)
    config.no_xformers = True
    config.no_xformers = True
    assert caplog.text.count("config.no_xformers has no effect") == 1


def test_config_must_be_prepared(tmp_path):
    with pytest.raises(ValueError, match="set config.model_dir before"):
        ExLlamaV2Config().prepare()
    with pytest.raises((FileNotFoundError, CheckpointError), match="nowhere"):
        ExLlamaV2Config(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"call config.prepare\(\) before"):
        ExLlamaV2(ExLlamaV2Config())


# Model ----------------------------------------------------------------------------------------


def test_logits_match_transformers(pair, loaded):
    theirs, _ = pair
    model, cache, _ = loaded
    ids = torch.randint(0, 320, (2, 17))
    logits = model.forward(ids, cache)
    torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert cache.current_seq_len == 17
    torch.testing.assert_close(model.forward(ids), logits, rtol=1e-5, atol=1e-5)


def test_left_padded_rows_match_transformers(pair, loaded):
    theirs, _ = pair
    model, cache, tokenizer = loaded
    ids, offsets = tokenizer.encode([PROMPT, "the key"], return_offsets=True)
    mask = tokenizer.padding_mask(ids)
    pad = -int(offsets[1])
    assert pad > 0
    kept = (mask == 0).long()
    expected = theirs(ids, attention_mask=kept, position_ids=(kept.cumsum(-1) - 1).clamp(min=0))
    first = model.forward(ids[:, :-1], cache, input_mask=mask, position_offsets=offsets)
    last = model.forward(ids[:, -1:], cache, input_mask=mask, position_offsets=offsets)
    logits = torch.cat((first, last), 1)
    torch.testing.assert_close(logits[0], expected.logits[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[1, pad:], expected.logits[1, pad:], rtol=1e-4, atol=1e-4)
    assert not logits[1, :pad].any()
    assert cache.current_seq_len == ids.shape[1]  # padding counts, as in ExLlamaV2
    assert cache.exkv.seq_lens == [ids.shape[1], ids.shape[1] - pad]  # but isn't stored


def test_padded_rows_can_be_truncated_and_run_again(loaded):
    model, cache, tokenizer = loaded
    ids = tokenizer.encode([PROMPT, "the key"])
    mask = tokenizer.padding_mask(ids)
    logits = model.forward(ids, cache, input_mask=mask)
    cache.current_seq_len -= 1
    again = model.forward(ids[:, -1:], cache, input_mask=mask)
    torch.testing.assert_close(again, logits[:, -1:], rtol=1e-4, atol=1e-4)
    cache.current_seq_len = 0
    assert cache.current_seq_len == 0
    torch.testing.assert_close(model.forward(ids, cache, mask), logits)


def test_other_masks_than_left_padding_are_refused(loaded):
    model, cache, _ = loaded
    ids = torch.ones((2, 4), dtype=torch.long)
    holes = torch.tensor([[0.0, -9, 0, 0], [0, 0, 0, 0]])
    with pytest.raises(ValueError, match="after a row's first token"):
        model.forward(ids, cache, input_mask=holes)
    left = torch.tensor([[-9.0, 0, 0, 0], [0, 0, 0, 0]])
    with pytest.raises(ValueError, match=r"begin at \(2, 0\) by position_offsets, but at \(1, 0\)"):
        model.forward(ids, cache, input_mask=left, position_offsets=torch.tensor([[-2], [0]]))
    with pytest.raises(ValueError, match="no input_mask"):
        model.forward(ids, cache, position_offsets=torch.tensor([[-2], [0]]))
    model.forward(ids, cache, input_mask=left)
    with pytest.raises(ValueError, match=r"but \[1, 0\] in the cache"):
        model.forward(ids, cache, input_mask=holes * 0)
    assert cache.current_seq_len == 4


def test_one_cache_per_row(loaded):
    model, _, tokenizer = loaded
    prompts = [tokenizer.encode(text) for text in (PROMPT, "the key", "where is it")]
    caches = [ExLlamaV2Cache(model, max_seq_len=32) for _ in prompts]
    for ids, cache in zip(prompts, caches, strict=True):
        assert model.forward(ids[:, :-1], cache, preprocess_only=True) is None
    logits = model.forward(torch.cat([ids[:, -1:] for ids in prompts]), caches)
    for row, ids in enumerate(prompts):
        expected = model.forward(ids)[0, -1]
        torch.testing.assert_close(logits[row, -1], expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="3 caches for 1 rows"):
        model.forward(prompts[0], caches)


def test_last_id_only_and_abort_event(loaded):
    model, cache, _ = loaded
    ids, event = torch.arange(20)[None], threading.Event()
    logits = model.forward(ids, last_id_only=True)
    model.config.max_input_len = model.exkv.max_input_len = 8
    try:
        found = model.forward(ids, cache, last_id_only=True, abort_event=event, cpu_logits=True)
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
        cache.reset()
        assert model.forward(ids, cache, abort_event=event).shape == (1, 20, 320)
        event.set()
        assert model.forward(ids, cache, abort_event=event) is None
    finally:
        model.config.max_input_len = model.exkv.max_input_len = 2048


def test_max_output_len_is_enforced(folder):
    model, _ = opened(folder, max_output_len=1)
    cache = ExLlamaV2Cache(model, max_seq_len=64)
    with pytest.raises(ValueError, match="5 tokens, but config.max_output_len is 1"):
        model.forward(torch.arange(5)[None], cache)
    assert model.forward(torch.arange(5)[None], cache, last_id_only=True).shape == (1, 1, 320)


@pytest.mark.parametrize("argument", ["return_last_state", "indexed_embeddings"])
def test_forward_refuses_unsupported_arguments(loaded, argument):
    model, cache, _ = loaded
    with pytest.raises(ValueError, match=f"model.forward doesn't take {argument}: "):
        model.forward(torch.ones((1, 1), dtype=torch.long), cache, **{argument: [1]})
    with pytest.raises(TypeError, match="no argument 'input_maks'"):
        model.forward(torch.ones((1, 1), dtype=torch.long), cache, input_maks=None)


def test_loading_callbacks_and_generators(folder):
    config = ExLlamaV2Config(folder)
    model, seen = ExLlamaV2(config), []
    cache = ExLlamaV2Cache(model, lazy=True)
    assert not model.loaded

    def step(index: int, total: int):
        yield index

    steps = model.load_autosplit_gen(
        cache, reserve_vram=[0], callback=lambda i, n: seen.append((i, n)), callback_gen=step
    )
    total = len(model.exkv.units)
    assert list(steps) == list(range(total + 1))
    assert seen == [(i, total) for i in range(total + 1)]
    assert model.loaded
    model.unload()
    assert list(model.load_gen([], callback_gen=step)) == list(range(total + 1))


def test_cache_map(loaded):
    model, _, _ = loaded
    assert model.cache_map == {layer: "cpu" for layer in range(4)}
    model.set_cache_map()
    assert model.get_cache_devices() == ["cpu"]
    assert model.tp_context is None
    with pytest.raises(TypeError, match="layer 0 can't be moved to 'cpu' by cache_map"):
        model.cache_map[0] = "cpu"


@pytest.mark.parametrize("shape", [(5,), (1, 0), (1, 2, 3)])
def test_invalid_input_shapes_are_refused(loaded, shape):
    ids = torch.ones(shape, dtype=torch.long)
    with pytest.raises(ValueError, match=r"input_ids are \(.*\): give \(rows, tokens\)"):
        loaded[0].forward(ids, loaded[1])


def test_last_id_only_load_works_with_ngrams(folder):
    model = ExLlamaV2(ExLlamaV2Config(folder))
    model.load_autosplit(cache := ExLlamaV2Cache(model, max_seq_len=64), last_id_only=True)
    generator = ExLlamaV2StreamingGenerator(model, cache, ExLlamaV2Tokenizer(model.config))
    generator.speculative_ngram = True
    generator.begin_stream_ex(torch.tensor([[5, 6, 7, 5, 6, 7, 5]]), Settings.greedy())
    drain(generator, 8)
    assert generator.get_sd_stats()[3] > 0


@pytest.mark.parametrize("name", ["load_tp", "modules", "archparams", "forward_chunk"])
def test_missing_model_attributes_name_a_replacement(loaded, name):
    with pytest.raises(AttributeError, match=f"exkv has no ExLlamaV2.{name}: "):
        getattr(loaded[0], name)
    assert not hasattr(loaded[0], name)


# Caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_caches_match_exkvs_own(loaded, kind):
    model, _, _ = loaded
    cache = kind(model, batch_size=1, max_seq_len=48, lazy=True)
    assert isinstance(cache, ExLlamaV2CacheBase)
    assert (cache.batch_size, cache.max_seq_len) == (1, 48)
    assert (cache.num_hidden_layers, cache.num_key_value_heads, cache.head_dim) == (4, 2, 32)
    assert cache.has_scales is not (kind is ExLlamaV2Cache)
    own = kind.kind(model.exkv, 48, 1, **kind.properties)
    assert cache.footprint() == [sum(own.nbytes().values())]
    assert sum(tensor.nbytes for tensor in cache.all_tensors()) <= cache.footprint()[0]
    ids = torch.arange(9)[None]
    torch.testing.assert_close(model.forward(ids, cache), model.exkv.forward(ids, own))


def test_cache_length_follows_the_config(loaded):
    model, _, _ = loaded
    assert ExLlamaV2Cache(model).max_seq_len == model.config.max_seq_len


def test_copies_are_independent(loaded):
    model, _, _ = loaded
    cache = ExLlamaV2Cache_Q4(model, max_seq_len=48)
    model.forward(torch.arange(9)[None], cache, preprocess_only=True)
    clone, copy = cache.clone(), ExLlamaV2Cache_Q4(model, copy_from=cache)
    following = torch.tensor([[11]])
    expected = model.forward(following, cache)
    assert torch.equal(model.forward(following, clone), expected)
    assert torch.equal(model.forward(following, copy), expected)
    cache.current_seq_len = 3
    assert clone.current_seq_len == 10
    with pytest.raises(ValueError, match="copies one of its own kind"):
        ExLlamaV2Cache(model, copy_from=cache)


def test_invalid_cache_uses_are_refused(loaded):
    model, cache, _ = loaded
    model.forward(torch.arange(9)[None], cache)
    with pytest.raises(ValueError, match="is 9 and can't be set to 12"):
        cache.current_seq_len = 12
    with pytest.raises(ValueError, match="doesn't take fixed_device"):
        ExLlamaV2Cache(model, fixed_device=0)
    with pytest.raises(AttributeError, match="their own layout"):
        print(cache.key_states)
    with pytest.raises(TypeError, match="build an ExLlamaV2Cache"):
        ExLlamaV2CacheBase(model)


# Tokenizer ------------------------------------------------------------------------------------


def test_encode_returns_rows(loaded):
    tokenizer = loaded[2]
    own = tokenizer.exkv
    ids = tokenizer.encode(PROMPT)
    assert ids.tolist() == [own.encode(PROMPT, add_bos=False, add_special=False)]
    assert tokenizer.encode(PROMPT, add_bos=True, add_eos=True).tolist() == [
        [own.bos_id, *ids[0].tolist(), tokenizer.eos_token_id]
    ]
    assert tokenizer.encode("</s>", encode_special_tokens=True).tolist() == [[2]]
    assert tokenizer.encode("</s>").shape[1] > 1
    assert tokenizer.num_tokens(PROMPT) == ids.shape[1]
    assert tokenizer.cached_encode_str(PROMPT) is tokenizer.cached_encode_str(PROMPT)


def test_padding_and_decode(loaded):
    tokenizer = loaded[2]
    texts = [PROMPT, "the key"]
    ids, offsets = tokenizer.encode(texts, return_offsets=True)
    assert (ids == tokenizer.pad_token_id).sum(-1).tolist() == (-offsets).tolist()
    assert tokenizer.decode(ids) == texts
    assert tokenizer.decode(ids[0]) == PROMPT
    assert tokenizer.decode([ids[0], ids[1]]) == texts
    ended = tokenizer.encode("the key", add_bos=True)
    assert tokenizer.decode(ended) == ["the key"]
    assert tokenizer.decode(ended, decode_special_tokens=True)[0].startswith("<s>")


def test_token_lookups(loaded):
    tokenizer = loaded[2]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer.single_id("</s>") == 2
    assert tokenizer.single_token(7).tolist() == [[7]]
    pieces = tokenizer.get_id_to_piece_list()
    assert len(pieces) == tokenizer.get_vocab_size() == tokenizer.exkv.vocab_size
    assert pieces[1] == ""
    assert tokenizer.get_id_to_piece_list(include_special_tokens=True)[1] == "<s>"
    ids = tokenizer.encode(PROMPT)[0].tolist()
    assert "".join(pieces[i] for i in ids).strip() == PROMPT
    assert tokenizer.get_piece_to_id_dict()[pieces[ids[-1]]] == ids[-1]
    assert tokenizer.newline_token_id == tokenizer.single_id("\n")
    spelled = tokenizer.tokenizer_model
    assert spelled.vocab_size() == len(pieces) == tokenizer.tokenizer.vocab_size()
    assert [spelled.piece_to_id(spelled.id_to_piece(i)) for i in ids] == ids
    assert tokenizer.extended_id_to_piece[2] == "</s>"
    assert tokenizer.extended_piece_to_id["</s>"] == 2


# Settings -------------------------------------------------------------------------------------


def test_settings_are_mutable_and_checked():
    settings = Settings(top_k=7)
    settings.temperature = 0.5
    assert settings.for_exkv() == SamplingParams(top_k=7, temperature=0.5)
    with pytest.raises(AttributeError, match=r"'temprature'; did you mean 'temperature'\?"):
        settings.temprature = 1.0
    with pytest.raises(TypeError, match="temprature"):
        Settings(temprature=1.0)
    settings.top_p = 1.5
    with pytest.raises(ValueError, match="top_p is 1.5"):
        settings.for_exkv()


@pytest.mark.parametrize(
    ("name", "on", "off"),
    [
        ("mirostat", True, False),
        ("post_sampling_hooks", [print], []),
    ],
)
def test_unsupported_steps_must_be_off(name, on, off):
    settings = Settings()
    setattr(settings, name, off)
    with pytest.raises(ValueError, match=f"settings.{name} is .*, which exkv doesn't do: "):
        setattr(settings, name, on)
    with pytest.raises(ValueError, match=name):
        Settings(**{name: on})


def test_settings_convert_to_exkv(shared):
    tokenizer = shared[1]
    steps = {
        "smoothing_factor": 0.3, "min_temp": 0.5, "max_temp": 1.5, "temp_exponent": 0.7,
        "top_a": 0.2, "tfs": 0.9, "skew": 0.1, "dry_multiplier": 0.8, "dry_base": 2.0,
        "dry_allowed_length": 3, "dry_range": 64, "dry_max_ngram": 9, "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
    }  # fmt: skip
    settings = Settings(**steps)
    assert settings.for_exkv() == SamplingParams(**steps)
    newline, params = tokenizer.newline_token_id, settings.for_exkv(tokenizer)
    assert newline in params.dry_sequence_breakers
    assert newline in params.xtc_ignore_tokens
    settings.dry_sequence_breakers = {5}
    assert settings.for_exkv(tokenizer).dry_sequence_breakers == {5}


def test_settings_for_jobs_are_cached_until_they_change(shared):
    tokenizer, settings = shared[1], Settings()
    with torch.inference_mode():
        assert settings.for_jobs(tokenizer) is settings.for_jobs(tokenizer)
        settings.disallow_tokens(tokenizer, [5])
        first = settings.for_jobs(tokenizer)
        assert first.token_bias == {5: float("-inf")} and settings.for_jobs(tokenizer) is first
        settings.token_bias[6] = 2.0  # in place
        assert settings.for_jobs(tokenizer).token_bias == {5: float("-inf"), 6: 2.0}
        settings.top_k = 3
        assert settings.for_jobs(tokenizer).top_k == 3


def test_greedy_settings():
    assert Settings.greedy().for_exkv().is_greedy
    assert Settings.greedy(token_repetition_penalty=1.2).for_exkv().token_repetition_penalty == 1.2
    settings = Settings(token_frequency_penalty=0.5, temperature=0.001)
    assert settings.for_exkv().temperature == 0
    assert settings.greedy_clone().for_exkv().is_greedy
    assert settings.greedy_clone().token_frequency_penalty == 0.5
    clone = settings.clone()
    clone.top_k = 3
    assert settings.top_k == 50


def test_tokens_are_allowed_and_disallowed(loaded):
    tokenizer = loaded[2]
    logits, settings = torch.randn(1, 320), Settings()
    settings.disallow_tokens(tokenizer, [5, 6])
    expected = logits.clone()
    expected[:, [5, 6]] = -torch.inf
    assert torch.equal(settings.prepared(logits), expected)
    only = Settings()
    only.allow_tokens(tokenizer, [3, "</s>"])
    assert only.prepared(logits).isfinite().nonzero()[:, 1].tolist() == [2, 3]
    assert settings.prepared(logits, [9])[0, 9] == -torch.inf
    with pytest.raises(ValueError, match="token 400 is outside of the vocabulary of 320"):
        settings.disallow_tokens(tokenizer, [400])
    with pytest.raises(ValueError, match="there is no token 'Zanzibar'"):
        only.allow_tokens(tokenizer, ["Zanzibar"])


def test_sampler_draws_from_the_reported_distribution(loaded):
    tokenizer, settings = loaded[2], Settings(temperature=1.0, top_k=5, top_p=0.0)
    logits, past = torch.randn(2, 1, 320), torch.zeros((2, 0), dtype=torch.long)
    expected = logits[:, 0].topk(5).values.softmax(-1)
    for draw in (0.0, 0.3, 0.999):
        tokens, top, top_p, p, ends = ExLlamaV2Sampler.sample(
            logits, settings, past, draw, tokenizer, return_top_tokens=3
        )
        torch.testing.assert_close(top_p[:, 0], expected[:, :3])
        assert torch.equal(top[:, 0], logits[:, 0].topk(3).indices)
        column = (expected.cumsum(-1) <= draw).sum(-1, keepdim=True)
        assert torch.equal(tokens, logits[:, 0].topk(5).indices.gather(-1, column))
        torch.testing.assert_close(p, expected.gather(-1, column))
        assert not ends


# Generators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_seeded_tokens_match_exkvs_generator(loaded, kind):
    model, _, tokenizer = loaded
    numbers = {"temperature": 1.2, "top_k": 0, "top_p": 0.95, "token_repetition_penalty": 1.1}
    settings, texts = Settings(**numbers), [PROMPT, "where is"]
    settings.disallow_tokens(tokenizer, [tokenizer.eos_token_id])
    cache = kind(model, batch_size=2, max_seq_len=64)
    generator = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    found = generator.generate_simple(texts, settings, 16, seed=42, add_bos=True)
    own = Generator(model.exkv, kind.kind(model.exkv, 64, 2, **kind.properties), tokenizer.exkv)
    params = SamplingParams(**numbers).disallow_tokens(tokenizer.exkv.eos_ids)
    expected = own.generate_simple(texts, params, 16, seed=42)
    assert own.stats.new_tokens == 32
    assert found == expected


def test_greedy_tokens_match_transformers(pair, loaded):
    theirs, _ = pair
    model, cache, tokenizer = loaded
    generator = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    generator.warmup()
    assert cache.current_seq_len == 0
    ids = tokenizer.encode(PROMPT, add_bos=True)
    expected = theirs.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)
    generator.generate_simple(PROMPT, Settings.greedy(), 20, add_bos=True, stop_token=None)
    assert torch.equal(generator.sequence_ids, expected)


def test_stop_token_ends_a_row_and_is_left_out(loaded):
    model, cache, tokenizer = loaded
    generator = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    greedy, texts = Settings.greedy(), [PROMPT, "where is it"]
    generator.generate_simple(texts, greedy, 8, stop_token=None)
    rows = tokenizer.rows(texts, False, False, False)
    new = [row[-8:] for row in generator.sequence_ids.tolist()]
    stop = next(token for token in new[0] if token not in new[1])
    short = generator.generate_simple(texts, greedy, 8, stop_token=stop, completion_only=True)
    kept = new[0][: new[0].index(stop)]
    for text, row, ids in zip(short, rows, [kept, new[1]], strict=True):
        decoder = tokenizer.exkv.stream(after=row)
        assert text == "".join([*map(decoder.push, ids), decoder.flush()])


def test_long_prompt_is_truncated_with_a_warning(loaded):
    model, cache, tokenizer = loaded
    generator = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    with pytest.warns(UserWarning, match="only the prompt's last 56 are used"):
        generator.generate_simple(PROMPT * 20, Settings.greedy(), 8, stop_token=None)
    assert generator.sequence_ids.shape == (1, 64)
    assert generator.full()
    with pytest.raises(ValueError, match="num_tokens 64, with room for 64"):
        generator.generate_simple(PROMPT, Settings.greedy(), 64)
    with pytest.raises(ValueError, match="each prompt needs at least one token"):
        generator.generate_simple("", Settings.greedy(), 8)
    with pytest.raises(ValueError, match="3 prompts, and the cache has batch_size = 2"):
        generator.generate_simple([PROMPT] * 3, Settings.greedy(), 8)


def test_generators_refuse_unsupported_arguments(loaded):
    generator, tokenizer = ExLlamaV2StreamingGenerator(*loaded), loaded[2]
    with pytest.raises(ValueError, match="generate_simple doesn't take input_embeddings: "):
        generator.generate_simple(PROMPT, Settings(), 1, input_embeddings=[1])
    with pytest.raises(ValueError, match="begin_stream_ex doesn't take input_embeddings: "):
        generator.begin_stream_ex(tokenizer.encode(PROMPT), Settings(), input_embeddings=[1])
    generator.active_loras = []
    with pytest.raises(AttributeError, match="pass loras= to each call"):
        generator.active_loras = [1]


def test_filters_must_be_a_list(loaded):
    generator = ExLlamaV2StreamingGenerator(*loaded)
    for wrong in (True, [1]):
        with pytest.raises(TypeError, match="filter"):
            generator.generate_simple(PROMPT, Settings(), 1, filters=wrong)
        with pytest.raises(TypeError, match="filter"):
            generator.begin_stream_ex(loaded[2].encode(PROMPT), Settings(), filters=wrong)


class After(threading.Event):
    """Set after ``looks`` checks."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_abort_event_ends_a_generation(loaded):
    generator = ExLlamaV2BaseGenerator(*loaded)
    tokens = loaded[2].num_tokens(PROMPT)
    text = generator.generate_simple(PROMPT, Settings(), 8, abort_event=After(2), stop_token=None)
    assert generator.sequence_ids.shape[1] == tokens + 3
    assert text.startswith(PROMPT)
    event = threading.Event()
    event.set()  # cleared at first
    generator.generate_simple(PROMPT, Settings(), 8, abort_event=event, stop_token=None)
    assert generator.sequence_ids.shape[1] == tokens + 8


def test_exkvs_own_objects_are_refused(loaded):
    model, cache, tokenizer = loaded
    with pytest.raises(TypeError, match="cache is a Cache; it must be an ExLlamaV2CacheBase"):
        ExLlamaV2BaseGenerator(model, cache.exkv, tokenizer)
    with pytest.raises(TypeError, match="cache is a Cache; it must be an ExLlamaV2CacheBase"):
        model.load_autosplit(cache.exkv)
    with pytest.raises(TypeError, match="config is a ModelConfig; it must be an ExLlamaV2Config"):
        ExLlamaV2(model.config.exkv)
    for wrong in (model.exkv, model.config):
        with pytest.raises(TypeError, match=r"model is a \w+; it must be an ExLlamaV2"):
            ExLlamaV2Cache(wrong)
    generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    for call in (generator.generate_simple, generator.begin_stream_ex):
        with pytest.raises(TypeError, match=r"must be an ExLlamaV2Sampler.Settings"):
            call(tokenizer.encode(PROMPT), SamplingParams(), *[1] * (call.__name__[0] == "g"))


# Streams --------------------------------------------------------------------------------------


def drain(generator, most: int = 200) -> tuple[str, list[int]]:
    """Text and ids up to the stream's end, or of ``most`` steps."""
    text, ids = "", []
    for _ in range(most):
        found = generator.stream_ex()
        text += found["chunk"]
        ids += found["chunk_token_ids"][0].tolist()
        if found["eos"]:
            break
    return text, ids


def streaming(loaded) -> tuple[ExLlamaV2StreamingGenerator, torch.Tensor, list[int], str]:
    """A generator without stop conditions, a prompt, and its greedy ids and text."""
    model, cache, tokenizer = loaded
    generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    generator.generate_simple(PROMPT, Settings.greedy(), 20, stop_token=None)
    prompt = tokenizer.encode(PROMPT)
    ids = generator.sequence_ids[0, prompt.shape[1] :].tolist()
    generator.set_stop_conditions([])
    decoder = tokenizer.exkv.stream(after=prompt[0].tolist())
    text = "".join([*map(decoder.push, ids), decoder.flush()])
    return generator, prompt, ids, text


def test_stream_matches_generate_simple(loaded):
    generator, prompt, expected, _ = streaming(loaded)
    generator.begin_stream_ex(prompt, Settings.greedy())
    _, ids = drain(generator, 20)
    assert generator.sequence_ids.tolist() == [prompt[0].tolist() + expected]
    assert ids == expected[: len(ids)]
    assert len(ids) > 10


def test_stream_survives_changes_of_the_cache(loaded):
    model, cache, tokenizer = loaded
    generator, prompt, expected, _ = streaming(loaded)
    other = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    generator.begin_stream_ex(prompt, Settings.greedy())
    drain(generator, 5)
    other.begin_stream(tokenizer.encode("where is it"), Settings())
    other.stream()
    drain(generator, 5)
    cache.current_seq_len = 0
    drain(generator, 10)
    assert generator.sequence_ids[0, prompt.shape[1] :].tolist() == expected


def test_stop_text_ends_a_stream_and_is_left_out(loaded):
    generator, prompt, ids, text = streaming(loaded)
    at = len(text) // 2
    stop = text[at : at + 4]
    generator.set_stop_conditions([stop, 0])
    generator.begin_stream_ex(prompt, Settings.greedy())
    found, _ = drain(generator)
    assert found == text[: text.index(stop)]
    generator.set_stop_conditions([ids[6]])
    generator.begin_stream_ex(prompt, Settings.greedy())
    _, given = drain(generator)
    assert given == ids[: ids.index(ids[6])]
    with pytest.raises(ValueError, match=r"stop_conditions has \[''\]"):
        generator.set_stop_conditions([""])


def test_banned_text_does_not_appear(loaded):
    generator, prompt, _, text = streaming(loaded)
    banned = text.strip()[3:9].upper()
    suppressed = []
    generator.begin_stream_ex(prompt, Settings.greedy(), banned_strings=[banned])
    found = ""
    for _ in range(25):
        step = generator.stream_ex()
        found += step["chunk"]
        suppressed += [step["suppressed"]] if "suppressed" in step else []
    assert suppressed
    assert banned.lower() in "".join(suppressed).lower()
    assert banned.lower() not in found.lower()
    common = text.lower().index(banned.lower())
    assert found[:common] == text[:common]


def test_token_can_be_banned_for_one_step(loaded):
    generator, prompt, ids, _ = streaming(loaded)
    generator.begin_stream_ex(prompt, Settings.greedy())
    generator.stream_ex(ban_tokens=[ids[0]])
    assert int(generator.sequence_ids[0, -1]) != ids[0]


def test_stream_returns_probabilities_and_logits(pair, loaded):
    theirs, _ = pair
    generator, prompt, *_ = streaming(loaded)
    settings = Settings(temperature=0.7, top_k=8, top_p=0.0, token_repetition_penalty=1.0)
    generator.begin_stream_ex(
        prompt, settings, return_probabilities=True, return_top_tokens=3, return_logits=True
    )
    chunks = [generator.stream_ex() for _ in range(8)]
    ids, probs, logits = (
        torch.cat([chunk[name] for chunk in chunks], 1)
        for name in ("chunk_token_ids", "probs", "logits")
    )
    expected = theirs(torch.cat((prompt, ids), 1)).logits[:, prompt.shape[1] - 1 : -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    best = (expected / 0.7).topk(8)
    chances = best.values.softmax(-1)
    chosen = (chances * (best.indices == ids[..., None])).sum(-1)
    torch.testing.assert_close(probs, chosen, rtol=1e-4, atol=1e-4)
    top = torch.cat([chunk["top_probs"] for chunk in chunks], 1)
    torch.testing.assert_close(top, chances[..., :3], rtol=1e-4, atol=1e-4)
    tokens = torch.cat([chunk["top_tokens"] for chunk in chunks], 1)
    assert torch.equal(tokens, best.indices[..., :3])


def test_guidance_matches_transformers(pair, loaded):
    theirs, _ = pair
    model, cache, tokenizer = loaded
    texts = [PROMPT, "the key"]
    ids, offsets = tokenizer.encode(texts, return_offsets=True)
    mask = tokenizer.padding_mask(ids)
    generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    generator.set_stop_conditions([])
    settings = Settings.greedy(cfg_scale=1.7)
    generator.begin_stream_ex(ids, settings, input_mask=mask, position_offsets=offsets)
    drain(generator, 12)
    expected = theirs.generate(
        tokenizer.encode(PROMPT),
        negative_prompt_ids=tokenizer.encode("the key"),
        guidance_scale=1.7,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
    )
    assert generator.sequence_ids[0].tolist() == expected[0].tolist()
    with pytest.raises(ValueError, match=r"a stream takes \(1, tokens\), or"):
        generator.begin_stream_ex(ids, Settings())
    with pytest.raises(ValueError, match="generate_simple takes no cfg_scale"):
        generator.generate_simple(texts, settings, 4)


def test_speculation_changes_no_stream(folder, loaded):
    model, cache, tokenizer = loaded
    _, prompt, expected, _ = streaming(loaded)
    other, _ = opened(folder)
    drafting = ExLlamaV2StreamingGenerator(
        model, cache, tokenizer, other, ExLlamaV2Cache(other, max_seq_len=64), 3
    )
    looking = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    looking.speculative_ngram = True
    for generator in (drafting, looking):
        generator.set_stop_conditions([])
        generator.begin_stream_ex(prompt, Settings.greedy())
        _, ids = drain(generator, 20)
        assert ids == expected[: len(ids)] and len(ids) > 10
    efficiency, accuracy, *numbers = drafting.get_sd_stats()
    assert numbers[0] >= 20 and 0 < numbers[2] <= numbers[1]
    assert (efficiency, accuracy) == (numbers[2] / numbers[0], numbers[2] / numbers[1])
    drafting.reset_sd_stats()
    assert drafting.get_sd_stats() == (0, 0, 0, 0, 0)
    with pytest.raises(TypeError, match="draft_cache is a NoneType"):
        ExLlamaV2StreamingGenerator(model, cache, tokenizer, other)


def test_stream_supports_healing_and_filters(loaded):
    model, cache, tokenizer = loaded
    generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    generator.set_stop_conditions([])
    filters = [ExLlamaV2PrefixFilter(model, tokenizer, ["ball", "wall"])]
    for options in ({"token_healing": True}, {"filters": filters}):
        call = {"completion_only": True, "stop_token": None, **options}
        expected = generator.generate_simple(PROMPT, Settings.greedy(), 16, **call)
        generator.begin_stream_ex(tokenizer.encode(PROMPT), Settings.greedy(), **options)
        text, _ = drain(generator, 16)  # half a character may be held back
        assert text == expected.rstrip("\ufffd") and len(text) > 5


def test_banning_none_is_ignored(loaded):
    generator, prompt, ids, _ = streaming(loaded)
    generator.begin_stream_ex(prompt, Settings.greedy())
    generator.stream_ex(ban_tokens=[None])
    assert int(generator.sequence_ids[0, -1]) == ids[0]


def test_stream_repeats_with_pythons_seed(loaded):
    generator, prompt, *_ = streaming(loaded)
    found = []
    for _ in range(2):
        random.seed(11)
        generator.begin_stream(prompt, Settings(temperature=2.0, top_k=0, top_p=0.0))
        drain(generator, 12)
        found.append(generator.sequence_ids.tolist())
    assert found[0] == found[1]


def test_stream_as_a_tuple(loaded):
    generator, prompt, ids, _ = streaming(loaded)
    generator.begin_stream(prompt, Settings.greedy())
    chunk, eos, tokens = generator.stream()
    assert (eos, tokens.tolist()) == (False, [ids[:1]])
    assert isinstance(chunk, str)
    generator.begin_stream_ex(prompt, Settings.greedy(), return_top_tokens=2)
    with pytest.raises(ValueError, match="use stream_ex"):
        generator.stream()
    generator.generate_simple(PROMPT, Settings(), 2)
    with pytest.raises(ValueError, match="call begin_stream_ex before"):
        generator.stream_ex()
    with pytest.raises(ValueError, match="call begin_stream_ex before"):
        ExLlamaV2StreamingGenerator(*loaded).stream_ex()


def test_byte_vocabulary_streams_whole_characters(tmp_path):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", "<|end|>"]
    vocabulary = {piece: i for i, piece in enumerate(["pad", *names, *letters])}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(names)
    save(reference(llama(eos_token_id=[2, 3])), tmp_path)
    library.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    model, tokenizer = opened(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.unk_token) == (2, None)
    assert tokenizer.decode(tokenizer.encode("caf\u00e9 </s>")) == ["caf\u00e9 </s>"]
    assert tokenizer.single_id(" ") == tokenizer.space_token_id == vocabulary["\u0120"]
    cache = ExLlamaV2Cache(model, max_seq_len=128)
    generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    generator.set_stop_conditions([])
    only = Settings(temperature=2.0)
    only.allow_tokens(tokenizer, tokenizer.encode("\u00e9\u20ac").flatten().tolist())
    generator.begin_stream_ex(tokenizer.encode("hello"), only)
    chunks = [generator.stream_ex() for _ in range(100)]
    ids = [i for chunk in chunks for i in chunk["chunk_token_ids"][0].tolist()]
    made = generator.sequence_ids[0, 5:].tolist()
    assert ids == made[: len(ids)] and len(ids) > 90
    text = "".join(chunk["chunk"] for chunk in chunks)  # half a character may be held back
    assert text.rstrip("\ufffd") == tokenizer.exkv.decode(ids).rstrip("\ufffd")


def test_timer_measures_seconds():
    with Timer() as timer:
        sum(range(1000))
    assert 0 < timer.interval < 60
