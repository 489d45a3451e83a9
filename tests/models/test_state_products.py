"""Any two things that are done to rows with recurrent states, one after the other, on one device
and split over two: what follows is what transformers makes of the text that is then there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from on_cpu import on_cpu
from simproc import run_sim
from tiny import TINY, reference, save
from transformers import AutoModelForCausalLM

from exkv import Cache, KVCache, Model

NAMES = ("Qwen3NextForCausalLM", "NemotronHForCausalLM", "KimiLinearForCausalLM")
IDS = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(11)).tolist()
Texts = list[list[int]]
Done = tuple[KVCache, Texts]


def run(model: Model, cache: KVCache, texts: Texts, count: int, **options: bool) -> None:
    """Run some more tokens of each row."""
    new = [IDS[row][len(text) % 20 :][:count] for row, text in enumerate(texts)]
    model.forward(torch.tensor(new), cache, **options)
    for text, tokens in zip(texts, new, strict=True):
        text += tokens


def cut(cache: KVCache, texts: Texts, *dropped: int) -> None:
    for text, count in zip(texts, dropped, strict=True):
        del text[len(text) - count :]
    cache.crop([len(text) for text in texts])


def fork(model: Model, cache: KVCache, texts: Texts, file: Path) -> Done:
    return cache.fork(1), texts


def clone(model: Model, cache: KVCache, texts: Texts, file: Path) -> Done:
    return cache.clone(), texts


def saved(model: Model, cache: KVCache, texts: Texts, file: Path) -> Done:
    cache.save(file)
    other = Cache(model, 64, 2, snapshots=True)
    other.load(file)
    return other, texts


def edit(model: Model, cache: KVCache, texts: Texts, file: Path) -> Done:
    cut(cache, texts, 7, 3)
    run(model, cache, texts, 2)
    return cache, texts


def reorder(model: Model, cache: KVCache, texts: Texts, file: Path) -> Done:
    cache.reorder([1, 0])
    return cache, texts[::-1]


def speculate(model: Model, cache: KVCache, texts: Texts, file: Path) -> Done:
    run(model, cache, texts, 5, each_token=True)
    cut(cache, texts, 3, 1)
    return cache, texts


WAYS: list[Callable[..., Done]] = [fork, clone, saved, edit, reorder, speculate]


def wrong(folder: str, file: str, split: bool) -> list[str]:
    """Pairs of changes after which logits differ from transformers'."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if split:
        model = Model(folder, max_input_len=16, dtype=torch.float32)
        model.load_autosplit(Cache(model, 64, 2, snapshots=True), objective="balance")
        assert len(set(model.device_map.values())) == 2
    else:
        model = on_cpu(folder, max_input_len=16, dtype=torch.float32)
    found = []
    for pair in itertools.product(WAYS, repeat=2):
        cache: KVCache = Cache(model, 64, 2, snapshots=True)
        texts = [IDS[0][:20], IDS[1][:20]]
        model.forward(torch.tensor(texts), cache)
        for way in pair:
            cache, texts = way(model, cache, texts, Path(file))
        made = model.forward(torch.tensor([[7], [9]]), cache).cpu()[:, -1]
        for row, (text, token) in enumerate(zip(texts, (7, 9), strict=True)):
            expected = theirs(torch.tensor([[*text, token]])).logits[0, -1].detach()
            if not torch.allclose(made[row], expected, atol=1e-4):
                found.append(" ".join(each.__name__ for each in pair))
    return found


@pytest.mark.sweep(2)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", NAMES)
def test_any_two_ways_of_changing_rows_go_together(tmp_path, name, split):
    folder = save(reference(TINY[name](eos_token_id=None)), tmp_path / "model")
    arguments = [str(folder), str(tmp_path / "file"), split]
    if split:
        assert run_sim(wrong, "24M,24M", args=arguments) == []
    else:
        assert wrong(*arguments) == []
