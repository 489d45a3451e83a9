"""exkv's caches in encoder-decoders and in models with states of fixed size."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from hf_families import ENCODER_DECODERS, WITH_STATES, given
from transformers import EncoderDecoderCache

from exkv.integrations.transformers import HFCache, HFLayer, resilient_generate
from exkv.integrations.transformers.versions import SINCE_5

NEW = 6
IDS = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(1))
#: The second row has right padding, as in encoders.
MASK = torch.ones_like(IDS).index_put((torch.tensor(1), torch.arange(14, 20)), torch.tensor(0))


def tiny(name):
    """A model with weights that are large enough for different answers."""
    config = {**ENCODER_DECODERS, **WITH_STATES}[name]()
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    model.generation_config.eos_token_id = None
    return model


def sound():
    """Features of one second of a rising tone."""
    time = torch.arange(16000) / 16000
    tone = torch.sin(2 * torch.pi * 440 * time * (1 + time))
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    found = extractor(tone.numpy(), sampling_rate=16000, return_tensors="pt")
    return {"input_features": found.input_features}


def generated(model, **options):
    call = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(**call).tolist()


# Encoder-decoder ----------------------------------------------------------------------------

#: Lossless kinds of the decoder's own cache and of the encoder's.
EXACT = [("dynamic", "dynamic"), ("offloaded", "static")]


@pytest.fixture(scope="module", params=ENCODER_DECODERS)
def encoder_decoder(request):
    model = tiny(request.param)
    whisper = request.param.startswith("Whisper")
    return model, sound() if whisper else {"input_ids": IDS, "attention_mask": MASK}


def pair_of(model, own, cross):
    return EncoderDecoderCache(
        HFCache(model.config, own), HFCache(model.config, cross, max_seq_len=64)
    )


@pytest.mark.parametrize("beams", [1, pytest.param(3, marks=pytest.mark.older)])
def test_encoder_decoders_match_stock_caches(encoder_decoder, beams):
    model, inputs = encoder_decoder
    model.set_attn_implementation("eager")
    call = {**inputs, "num_beams": beams}
    expected = generated(model, **call)
    for implementation in ("eager", "exkv"):
        model.set_attn_implementation(implementation)
        for kinds in EXACT:
            found = generated(model, **call, **given(model, pair_of(model, *kinds)))
            assert found == expected, (implementation, kinds)


@pytest.mark.older
def test_encoder_keys_may_be_quantized(encoder_decoder):
    """8 bits change logits by less than 1 % of their range, and take 8.5 bits per value."""
    model, inputs = encoder_decoder
    model.set_attn_implementation("exkv")
    call = {**inputs, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    call |= {"return_dict_in_generate": True, "output_logits": True}
    rounded = pair_of(model, "dynamic", "8bit")
    found, exact = (
        model.generate(**call, **given(model, cache))
        for cache in (rounded, pair_of(model, "dynamic", "dynamic"))
    )
    reach = exact.logits[0].abs().max().item()
    torch.testing.assert_close(found.logits[0], exact.logits[0], rtol=0, atol=reach / 100)
    layer = rounded.cross_attention_cache.layers[0]
    stored = layer.store.spec
    # One float16 scale per 32 values, or per head if that is smaller.
    values = stored.batch_size * 64 * stored.num_heads * 2
    assert layer.nbytes() == values * (stored.head_dim + 2)


# States -------------------------------------------------------------------------------------


@pytest.mark.older
def test_models_with_states_need_transformers_5():
    for name, config in WITH_STATES.items():
        if SINCE_5:
            assert HFCache(config()).is_linear
        else:
            with pytest.raises(ValueError, match=rf"{name} has states besides .* 5\.20 or later"):
                HFCache(config())


@pytest.fixture(scope="module", params=WITH_STATES)
def with_state(request):
    return tiny(request.param)


@pytest.mark.parametrize("beams", [1, 3])
def test_models_with_states_match_stock_caches(with_state, beams):
    model = with_state
    expected = generated(model, input_ids=IDS, num_beams=beams)
    for kind in ("dynamic", "offloaded"):
        cache = HFCache(model.config, kind)
        found = generated(model, input_ids=IDS, num_beams=beams, **given(model, cache))
        assert found == expected, kind


@torch.no_grad()
def test_states_are_copied_and_follow_their_rows(with_state):
    model = with_state
    cache = HFCache(model.config, "8bit")
    model(IDS, **given(model, cache))
    step = torch.tensor([[5], [6]])
    kept = copy.deepcopy(cache)
    expected = model(step, **given(model, cache)).logits
    again = copy.deepcopy(kept)
    torch.testing.assert_close(model(step, **given(model, again)).logits, expected)
    again = copy.deepcopy(kept)
    again.batch_repeat_interleave(2)
    again.batch_select_indices(torch.tensor([3, 0]))
    again.reorder_cache(torch.tensor([1, 0]))
    found = model(step, **given(model, again)).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    kept.reset()
    model(IDS, **given(model, kept))
    found = model(step, **given(model, kept)).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_crop_of_recurrent_states_is_refused(with_state):
    model = with_state
    cache = HFCache(model.config, "dynamic")
    model(IDS, **given(model, cache))
    with pytest.raises(RuntimeError, match="recurrent states can't go back"):
        cache.crop(-1)


@torch.no_grad()
def test_rewind_goes_back_to_snapshots_only(with_state):
    """Also with rings besides states."""
    model = with_state
    cache = HFCache(model.config, "kivi")
    model(IDS, **given(model, cache))
    cache.snapshot(20)
    steps = [torch.tensor([[5], [6]]), torch.tensor([[7], [8]]), torch.tensor([[9], [3]])]
    run = lambda: [model(step, **given(model, cache)).logits for step in steps]  # noqa: E731
    expected = run()
    has_attention = bool(cache.attention_layers)
    for go_back in (lambda: cache.rewind(20), lambda: cache.crop(-3)):
        if has_attention:
            with pytest.raises(RuntimeError, match="to 22 of 23 tokens: .* snapshots of 20;"):
                cache.crop(-1)
        if has_attention or go_back.__code__.co_names[0] == "rewind":
            go_back()
            for found, logits in zip(run(), expected, strict=True):
                assert torch.equal(found, logits)
    with pytest.raises(ValueError, match="no snapshot of 21 tokens"):
        cache.rewind(21)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.snapshots == []


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "kivi"])
def test_states_round_trip_through_a_file(with_state, kind, tmp_path):
    model = with_state
    cache, again = (HFCache(model.config, kind) for _ in range(2))
    model(IDS, **given(model, cache))
    cache.save(tmp_path / "cache")
    again.load(tmp_path / "cache")
    for token in (5, 7):
        step = torch.tensor([[token], [token + 1]])
        found, expected = (model(step, **given(model, each)).logits for each in (again, cache))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["JambaForCausalLM", "FalconH1ForCausalLM"])
def test_states_are_restored_after_out_of_memory(name):
    """In a step whose first layers have already advanced their states."""
    model = tiny(name)
    expected = generated(model, input_ids=IDS)
    calls, taken = [], []

    def full(*_):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")

    model.model.final_layernorm.register_forward_pre_hook(full)
    call = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    found = resilient_generate(model, IDS, **call, on_oom=["offload"], on_fallback=taken.append)
    assert found.tolist() == expected
    assert [step.token for step in taken] == [21]


def test_attention_layers_of_hybrids_are_exkvs():
    cache = HFCache(WITH_STATES["JambaForCausalLM"](), "8bit")
    assert [isinstance(layer, HFLayer) for layer in cache.layers] == [False, True, False, True]
