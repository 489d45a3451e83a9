"""longrope: a row that outgrows the trained length, or falls back below it, has the keys of the
text that it holds, whatever way it got there."""

from __future__ import annotations

import pytest
import torch
from on_cpu import on_cpu
from tiny import longrope, phi3, reference, save

from exkv import Cache

TRAINED = 40
IDS = torch.randint(3, 320, (3, 90), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    theirs = reference(phi3(**longrope(trained=TRAINED)))
    ours = on_cpu(save(theirs, tmp_path_factory.mktemp("phi3")), max_input_len=16)
    return theirs, ours


@torch.no_grad()
def check(theirs, logits: torch.Tensor, text: torch.Tensor) -> None:
    """``logits`` (1, T, N) equal those of the last T tokens of ``text`` (1, S) run alone."""
    expected = theirs(text).logits[:, -logits.shape[1] :]
    assert ((logits - expected).abs().max() / expected.abs().max()).item() < 1e-4


def test_the_two_sets_of_frequencies_differ_enough_to_be_told_apart(pair):
    theirs, ours = pair
    cache = Cache(ours)
    ours.forward(IDS[:1, :50], cache)
    mixed = cache.layers[0].tensors["k"][:, :30].clone()
    cache.reset()
    ours.forward(IDS[:1, :30], cache)
    assert (cache.layers[0].tensors["k"][:, :30] - mixed).abs().max() > 0.1


@pytest.mark.parametrize("step", [1, 3, 25])
def test_a_text_that_outgrows_the_trained_length(pair, step):
    theirs, ours = pair
    cache = Cache(ours)
    ours.forward(IDS[:1, :TRAINED], cache)
    end = TRAINED + step
    check(theirs, ours.forward(IDS[:1, TRAINED:end], cache), IDS[:1, :end])
    check(theirs, ours.forward(IDS[:1, end : end + 1], cache), IDS[:1, : end + 1])
    assert cache.sequences == [IDS[0, : end + 1].tolist()]


def test_a_text_that_is_cut_back_below_it(pair):
    theirs, ours = pair
    cache = Cache(ours)
    ours.forward(IDS[:1, :60], cache)
    cache.crop(20)
    check(theirs, ours.forward(IDS[:1, 20:25], cache), IDS[:1, :25])
    check(theirs, ours.forward(IDS[:1, 25:60], cache), IDS[:1, :60])


def test_rows_go_by_their_own_length(pair):
    theirs, ours = pair
    cache = Cache(ours, batch_size=3)
    ours.forward(IDS[:, :38], cache, new_lens=[38, 10, 38])
    logits = ours.forward(IDS[:2, 38:41], cache, new_lens=[3, 1])  # the third row rests
    check(theirs, logits[:1], IDS[:1, :41])
    check(theirs, logits[1:, :1], torch.cat((IDS[1:2, :10], IDS[1:2, 38:39]), dim=1))
    logits = ours.forward(IDS[:, 41:44], cache)
    check(theirs, logits[:1], IDS[:1, :44])
    check(theirs, logits[2:], torch.cat((IDS[2:, :38], IDS[2:, 41:44]), dim=1))


def test_a_clone_is_not_taken_for_granted(pair):
    theirs, ours = pair
    cache = Cache(ours)
    ours.forward(IDS[:1, :60], cache)
    cache.crop(20)
    check(theirs, ours.forward(IDS[:1, 20:25], cache.clone()), IDS[:1, :25])


def test_an_error_on_the_way_leaves_the_tokens_and_no_half_truth(pair, monkeypatch):
    theirs, ours = pair
    cache = Cache(ours)
    ours.forward(IDS[:1, :TRAINED], cache)
    calls, forward_chunk = [], ours.forward_chunk

    def fails_at_the_second(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return forward_chunk(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ours, "forward_chunk", fails_at_the_second)
        ours.forward(IDS[:1, TRAINED:45], cache)
    assert cache.sequences == [IDS[0, :TRAINED].tolist()]
    cache.crop(38)
    check(theirs, ours.forward(IDS[:1, 38:40], cache), IDS[:1, :40])


def test_rows_that_change_places_take_their_variant_with_them(pair, tmp_path):
    """The second row's keys are those of a long text, the first one's of a short one that begins
    alike."""
    theirs, ours = pair
    cache = Cache(ours, batch_size=3)
    ids = IDS[:1].expand(2, 90)
    ours.forward(ids[:, :60], cache, new_lens=[30, 60])
    cache.reorder([1, 0, 0])
    assert cache.seq_lens == [60, 30, 30]
    logits = ours.forward(torch.full((3, 1), 9), cache)
    for row, length in enumerate((60, 30, 30)):
        text = torch.cat((IDS[:1, :length], torch.tensor([[9]])), dim=1)
        check(theirs, logits[row : row + 1], text)
    cache.save(tmp_path / "cache")
    other = Cache(ours, batch_size=3)
    other.load(tmp_path / "cache")
    text = torch.cat((IDS[:1, :60], torch.tensor([[9, 8]])), dim=1)
    check(theirs, ours.forward(torch.full((3, 1), 8), other)[:1], text)
