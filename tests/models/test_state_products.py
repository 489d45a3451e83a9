"""Any two things that are done to rows with recurrent states, one after the other, on one device,
split over two and over two hosts: what follows is what transformers makes of the text that is then
there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache as cache_results
from pathlib import Path

import pytest
import torch
from cluster_hosts import cluster_of
from on_cpu import on_cpu
from simproc import run_sim
from tiny import TINY, reference, save
from transformers import AutoModelForCausalLM

from exkv import Cache, KVCache, Model, PagedCache
from exkv.cluster import ClusterModel

#: The gated delta rule, Mamba 1 and 2, a decay per channel, a convolution, lightning attention.
NAMES = (
    *("Qwen3NextForCausalLM", "JambaForCausalLM", "NemotronHForCausalLM"),
    *("KimiLinearForCausalLM", "Lfm2ForCausalLM", "MiniMaxForCausalLM"),
)
IDS = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(11)).tolist()
Texts = list[list[int]]
Done = tuple[KVCache, Texts]


def room(model: Model, paged: bool) -> KVCache:
    """An empty cache of two rows."""
    if paged:
        return PagedCache(model, 64, 2, page=16, pages=32, snapshots=True)
    return Cache(model, 64, 2, snapshots=True)


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
    other = room(model, cache.pages is not None)
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


def preempt(model: Model, cache: KVCache, texts: Texts, file: Path) -> Done:
    """Rows go to host memory, and come back in each other's places, as an engine's jobs do: those
    whose states were cropped as far as their snapshots, from which they run again."""
    assert cache.pages is not None
    kept = [
        text[: cache.snapshot_lens[row]] if row in cache.stale else text
        for row, text in enumerate(texts)
    ]
    away = [cache.swap_out(cache.pages.rows[row][: pages(kept[row])], row) for row in (0, 1)]
    cache.reset()
    for row, (past, old) in enumerate(zip(kept[::-1], away[::-1], strict=True)):
        cache.set_row(row, past)
        cache.pages.reserve([*[0] * row, 0], [*[0] * row, len(past)], cache)
        cache.swap_in(old, cache.pages.rows[row][: pages(past)], 0, row)
    texts = texts[::-1]
    lost = [text[len(past) :] for text, past in zip(texts, kept[::-1], strict=True)]
    if longest := max(map(len, lost)):
        ids = torch.tensor([each + [0] * (longest - len(each)) for each in lost])
        model.forward(ids, cache, new_lens=list(map(len, lost)))
    return cache, texts


def pages(text: list[int]) -> int:
    return -(-len(text) // 16)


WAYS: list[Callable[..., Done]] = [fork, clone, saved, edit, reorder, speculate]


def placed(folder: str, where: str) -> Model:
    if where == "whole":
        return on_cpu(folder, max_input_len=16, dtype=torch.float32)
    if where == "hosts":
        model = ClusterModel(
            folder, cluster_of("24M", "24M"), max_input_len=16, dtype=torch.float32
        )
    else:
        model = Model(folder, max_input_len=16, dtype=torch.float32)
    model.load_autosplit(room(model, False), objective="balance")
    apart = model.host_map if where == "hosts" else model.device_map
    assert len(set(apart.values())) == 2
    return model


def wrong(folder: str, file: str, where: str, paged: bool) -> list[str]:
    """Pairs of changes after which logits differ from transformers'."""
    model = placed(folder, where)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @cache_results
    def expected(*text: int) -> torch.Tensor:
        return theirs(torch.tensor([text])).logits[0, -1].detach()

    found = []
    for pair in itertools.product([*WAYS, preempt] if paged else WAYS, repeat=2):
        cache = room(model, paged)
        texts = [IDS[0][:20], IDS[1][:20]]
        model.forward(torch.tensor(texts), cache)
        for way in pair:
            cache, texts = way(model, cache, texts, Path(file))
        made = model.forward(torch.tensor([[7], [9]]), cache).cpu()[:, -1]
        for row, (text, token) in enumerate(zip(texts, (7, 9), strict=True)):
            if not torch.allclose(made[row], expected(*text, token), atol=1e-4):
                found.append(" ".join(each.__name__ for each in pair))
    return found


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("where", ["whole", "split", "hosts"])
def test_any_two_ways_of_changing_rows_go_together(tmp_path, name, where, paged):
    folder = save(reference(TINY[name](eos_token_id=None)), tmp_path / "model")
    arguments = [str(folder), str(tmp_path / "file"), where, paged]
    if where == "whole":
        assert wrong(*arguments) == []
    else:
        assert run_sim(wrong, "" if where == "hosts" else "24M,24M", args=arguments) == []
