"""What every architecture owes beside its logits (test_parity.py), its ledger and its bits over two
devices (test_architectures.py) and its quantized weights (tests/weights/test_formats_by_family.py):
with any cache the bound run gives the readable route's logits, and jobs of an engine get the tokens
that transformers gives each alone."""

from __future__ import annotations

import pytest
import torch
from cases import small_pages
from native import needs_kernels
from on_cpu import on_cpu
from runs import Readable, bound_runs
from test_bound_architectures import NOT_BOUND
from tiny import TINY, reference, save, save_tokenizer

from exkv import CACHES, Engine, Job, KVCache, Model, PagedCache, SamplingParams, Tokenizer
from exkv.checkpoint.families import FAMILIES

IDS = torch.randint(3, 300, (2, 60), generator=torch.Generator().manual_seed(5))
#: New tokens of two rows, call after call: prompts, a token, a few, past the windows.
CALLS = ([20, 13], [1, 1], [3, 1], [8, 5], [1, 1], [1, 0])


def answers(model: Model, cache: KVCache) -> list[torch.Tensor]:
    """Logits of all tokens."""
    found, start = [], 0
    for lengths in CALLS:
        ids = IDS[:, start : start + max(lengths)]
        out = model.forward(ids, cache, new_lens=lengths)
        found += [row[:new] for row, new in zip(out, lengths, strict=True)]
        start += max(lengths)
    return found


@needs_kernels
@pytest.mark.sweep(16)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", FAMILIES)
def test_bound_run_gives_the_readable_routes_logits_with_any_cache(tmp_path, name, kind):
    model = on_cpu(save(reference(TINY[name]()), tmp_path))

    def made() -> KVCache:
        return CACHES[kind](model, 96, 2, **small_pages(kind))

    with bound_runs() as runs:
        found = torch.cat(answers(model, made()))
    with Readable():
        expected = torch.cat(answers(model, made()))
    whole = not any(part.startswith("unit: ") for part in NOT_BOUND.get(name, ()))
    assert (max(runs, default=0) == len(model.units)) == whole
    if not model.config.has_states:
        assert torch.equal(found, expected)
        return
    # States are summed in another order, by which a code of keys or values may be another.
    lossless = all(layer.spec.storage.lossless for layer in made().layers)
    near = 2e-5 if lossless else 0.05
    assert (found - expected).abs().max() <= near * expected.abs().max()


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_engines_jobs_get_transformers_tokens_of_each_alone(tmp_path, name):
    """With fewer pages than they need together, so that one is preempted."""
    theirs = reference(TINY[name](eos_token_id=None))
    model = on_cpu(save_tokenizer(save(theirs, tmp_path)), max_input_len=16)
    prompts = [IDS[0, :14].tolist(), IDS[1, :12].tolist(), IDS[1, 20:60].tolist()]
    jobs = [
        Job(prompt=each, max_new_tokens=24, settings=SamplingParams.greedy(), ignore_eos=True)
        for each in prompts
    ]
    cache, tokenizer = PagedCache(model, 64, page=16), Tokenizer(tmp_path)
    with Engine(model, cache, tokenizer, max_running=2) as engine:
        handles = [engine.submit(job) for job in jobs]
        while engine.busy:
            engine.iterate()
        assert engine.stats.put_away > 0
    for handle, prompt in zip(handles, prompts, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert handle.tokens == expected[0, len(prompt) :].tolist()
