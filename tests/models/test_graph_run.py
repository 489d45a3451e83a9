"""The GPU's bound run without a GPU: recordings that rerun their ops stand in for graphs. Graphs
themselves are tested in tests/gpu/test_graph_run_cuda.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import tiny
import torch
from cases import RoomyPagedCache, kinds_for
from hypothesis import given
from hypothesis import strategies as st
from on_cpu import on_cpu
from runs import Readable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from exkv import CACHES, Engine, Job, Model, SamplingParams, Tokenizer
from exkv.batch import Lengths
from exkv.checkpoint.families import FAMILIES
from exkv.decode.paged_group import PagedGroup
from exkv.layers import mlp
from exkv.models import graph_run, runs
from exkv.models.bound_run import Logits
from exkv.models.graph_run import GraphRun, bucket, stretch

GREEDY = SamplingParams.greedy()
IDS = torch.randint(3, 320, (2, 60), generator=torch.Generator().manual_seed(1))


class Tape(TorchDispatchMode):
    """The ops of a step as a graph has them: with their first arguments, and writing where they
    wrote then. Python is not run again."""

    made = 0

    def __init__(self, step, run) -> None:
        super().__init__()
        Tape.made += 1
        self.replays, self._ops = 0, []
        with self:
            step()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in SYNCHRONIZING, f"{func} waits for the device"
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self._ops.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self._ops:
            again = func(*args, **kwargs)
            for there, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(there, torch.Tensor) and new is not there:
                    there.copy_(new)


#: Ops that a capture rejects, since their results are the host's.
SYNCHRONIZING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
}


@pytest.fixture
def bound(monkeypatch):
    """Graph runs on the CPU; yields all that were bound."""
    made: list[GraphRun] = []

    def bind(units, kept, dtype):
        parts = list(stretch(units, kept, dtype))
        if not any(part.store is not None for part in parts):
            return None
        made.append(GraphRun(parts, dtype, Tape))
        return made[-1]

    monkeypatch.setattr(runs, "bind", bind)
    monkeypatch.setattr(graph_run, "LEAST_STEP", 8)
    return made


#: Norms behind the rotation, and gates.
GATED = ("HunYuanDenseV1ForCausalLM", "AfmoeForCausalLM")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: tiny.save(tiny.reference(tiny.TINY[name]()), tmp_path_factory.mktemp(name))
        for name in (*tiny.IN_ALL_WAYS, *GATED)
    }


def loaded(folder) -> Model:
    return on_cpu(folder, dtype=torch.float32)


def decoded(model: Model, cache) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of thirty steps of two rows of unlike length, beyond their windows, and then all that
    is stored."""
    model.forward(IDS[:, :20], cache, new_lens=[20, 13])
    steps = [model.forward(IDS[:, at : at + 1], cache, last_id_only=True) for at in range(20, 50)]
    stored = [tensor for layer in cache.layers for tensor in layer.tensors.values()]
    return torch.cat(steps, 1), stored


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", [*tiny.IN_ALL_WAYS, *GATED])
def test_replays_give_the_readable_ways_logits_and_stores(folders, bound, name):
    model, seen = loaded(folders[name]), {}
    for kind, make in kinds_for(name, FAMILIES).items():
        bound.clear()
        cache = make(model, 96, 2)
        logits, stored = decoded(model, cache)
        replays = sum(each.replays for run in bound for each in run._recordings.values())
        with Readable():
            expected, kept = decoded(model, make(model, 96, 2))
        for one, other in zip((logits, *stored), (expected, *kept), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)
        stays = all(layer.in_place(torch.float32) is not None for layer in cache.layers)
        whole = {run.count for run in bound} == {len(model.units)}
        assert whole == (stays and not tiny.is_mixture(name)), kind
        assert not whole or replays > 20, kind
        seen[kind] = whole
    assert seen["fp16"] == seen.get("4bit", seen["fp16"]) == (not tiny.is_mixture(name))


def test_what_a_caller_keeps_is_not_written_to_again(folders, bound):
    model = loaded(folders["LlamaForCausalLM"])
    cache = CACHES["fp16"](model, 96)
    model.forward(IDS[:1, :9], cache)
    kept = [model.forward(IDS[:1, at : at + 1], cache) for at in range(9, 14)]
    copies = [logits.clone() for logits in kept]
    model.forward(IDS[:1, 14:15], cache)
    assert all(map(torch.equal, kept, copies))


def test_there_are_few_recordings_and_the_last_used_stay(folders, bound, monkeypatch):
    monkeypatch.setattr(graph_run, "MOST_GRAPHS", 2)
    model = loaded(folders["LlamaForCausalLM"])
    cache = CACHES["fp16"](model, 96)
    for at in range(50):
        model.forward(IDS[:1, at : at + 1], cache, last_id_only=True)
    (run,) = bound
    assert list(run._recordings) == [(1, 48, True), (1, 56, True)]


def test_a_run_takes_one_token_a_row_and_no_huge_logits(folders, bound, monkeypatch):
    model = loaded(folders["LlamaForCausalLM"])
    model.forward(IDS[:, :1], CACHES["fp16"](model, 96, 2))
    (run,) = bound
    assert run.takes(Lengths(past=(5, 3), new=(1, 1)), Logits.LAST)
    assert not run.takes(Lengths(past=(5, 3), new=(1, 0)), Logits.LAST)
    assert not run.takes(Lengths(past=(5, 3), new=(2, 2)), Logits.LAST)
    assert not run.takes(Lengths(past=(5, 3), new=(2, 2)), Logits.EACH)  # of contiguous rows
    monkeypatch.setattr(graph_run, "MOST_LOGITS", 2 * model.config.vocab_size * 4 - 1)
    assert not run.takes(Lengths(past=(5, 3), new=(1, 1)), Logits.LAST)
    assert run.takes(Lengths(past=(5,), new=(1,)), Logits.LAST)


FULL = [
    torch.OutOfMemoryError("full"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("rms_norm on cuda:0 failed to launch: out of memory"),
]


@pytest.mark.parametrize("error", [*FULL, RuntimeError("no\nway")], ids=str)
def test_a_step_that_cannot_be_captured_goes_the_readable_way(folders, bound, error, monkeypatch):
    def fails(step, run):
        raise error

    model = loaded(folders["LlamaForCausalLM"])
    cache = CACHES["fp16"](model, 96)
    expected = [model.forward(IDS[:1, at : at + 1], cache) for at in range(4)]
    cache.reset()
    (run,) = bound
    run._recordings.clear()
    run._record = fails
    if error in FULL:
        first = model.forward(IDS[:1, :1], cache)
    else:
        with pytest.warns(RuntimeWarning, match=r"cpu captured no graph .*\(no\)"):
            first = model.forward(IDS[:1, :1], cache)
    found = [first, *(model.forward(IDS[:1, at : at + 1], cache) for at in range(1, 4))]
    assert not run._recordings
    torch.testing.assert_close(torch.cat(found), torch.cat(expected))


@pytest.mark.parametrize("error", FULL, ids=str)
def test_a_run_without_room_for_its_buffers_goes_the_readable_way(
    folders, bound, error, monkeypatch
):
    def full(*args):
        raise error

    model = loaded(folders["LlamaForCausalLM"])
    cache = CACHES["fp16"](model, 96)
    monkeypatch.setattr(graph_run, "Buffers", full)
    found = [model.forward(IDS[:1, at : at + 1], cache) for at in range(4)]
    assert bound and all(run._refused and not run._recordings for run in bound)
    with Readable():
        cache.reset()
        expected = [model.forward(IDS[:1, at : at + 1], cache) for at in range(4)]
    torch.testing.assert_close(torch.cat(found), torch.cat(expected))


def test_released_runs_hold_nothing_and_are_bound_anew(folders, bound):
    model = loaded(folders["LlamaForCausalLM"])
    cache = CACHES["fp16"](model, 96)
    model.forward(IDS[:1, :1], cache)
    model.forward(IDS[:1, 1:2], cache)
    cache.layers[0].room += 0  # whatever it is, it is a change
    (run,) = bound
    assert not (run._parts or run._recordings or run._buffers)
    model.forward(IDS[:1, 2:3], cache)
    assert len(bound) == 2


@given(st.integers(1, 1 << 20))
def test_a_bucket_is_at_most_a_quarter_longer(kv_len):
    assert kv_len <= bucket(kv_len) <= max(kv_len * 5 / 4, kv_len + graph_run.LEAST_STEP - 1)
    assert bucket(bucket(kv_len)) == bucket(kv_len)


@pytest.mark.parametrize("transform", ["none", "hadamard"])
def test_a_quantized_model_is_bound_with_its_head(folders, bound, transform):
    """Whose matrix has tensors with other names."""
    model = on_cpu(folders["LlamaForCausalLM"], weights="int8", transform=transform)
    cache = CACHES["fp16"](model, 96)
    for at in range(3):
        model.forward(IDS[:1, at : at + 1], cache, last_id_only=True)
    assert [run.count for run in bound] == [len(model.units)]


# Pages ----------------------------------------------------------------------------------------


def decoded_in_pages(model: Model, rows: int, **options) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of steps of up to ``rows`` rows of unlike length that grow, while the last one leaves,
    and then the first, and others join; and then all that is stored."""
    cache = RoomyPagedCache(model, 96, 16, pages=128, **options)
    joining = cache.sharing_pool(1)
    draw = torch.Generator().manual_seed(rows)
    logits = []

    def step(count: int) -> None:
        ids = torch.randint(3, 320, (count, 1), generator=draw)
        logits.append(model.forward(ids, cache, last_id_only=True).flatten(0, 1))

    spoil_free_pages(cache)
    ids = torch.randint(3, 320, (rows, 20), generator=draw)
    model.forward(ids, cache, new_lens=[20 - 7 * row % 20 for row in range(rows)])
    for first_leaves in (False, True):
        for _ in range(8):
            step(rows)
        if first_leaves and rows > 1:
            cache.move_row(0, cache, rows - 1)
        else:
            cache.crop([*cache.seq_lens[: rows - 1], *[0] * (17 - rows)])
        spoil_free_pages(cache)
        if rows > 1:
            step(rows - 1)
        assert are_spoiled(free_pages(cache))
        model.forward(ids[:1, :9], joining)
        cache.move_row(rows - 1, joining, 0)
    step(rows)
    return torch.cat(logits), [x for layer in cache.layers for x in layer.tensors.values()]


def free_pages(cache) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Each tensor of a cache, and the pages that no row holds."""
    free = [page for page, holders in enumerate(cache.pages.pool.holders) if not holders]
    return ((tensor, free) for layer in cache.layers for tensor in layer.tensors.values())


def spoil_free_pages(cache) -> None:
    """Write values there that show in logits if read, and are missed if overwritten."""
    for tensor, free in free_pages(cache):
        tensor[free] = math.nan if tensor.is_floating_point() else 113


def are_spoiled(pages) -> bool:
    return all((x[free].isnan() | (x[free] == 113)).all() for x, free in pages)


def buckets_over_pages(bound, model: Model, rows: int, **options) -> set[int]:
    """Row counts of steps over pages, whose logits and pages have the readable route's bits."""
    found, kept = decoded_in_pages(model, rows, **options)
    (run,) = (each for each in bound if each._recordings)
    buckets = set(run._buffers)
    assert run.count == len(model.units) and buckets == {key[0] for key in run._recordings}
    assert sum(each.replays for each in run._recordings.values()) > 12
    with Readable():
        expected, stored = decoded_in_pages(model, rows, **options)
    assert found.isfinite().all() and torch.equal(found, expected)
    for one, other in zip(kept, stored, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    return buckets


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16])
def test_steps_over_pages_have_the_readable_ways_bits(folders, bound, rows):
    """Whichever pages rows have, as they grow, leave and join; with one set of buffers per bucket
    of rows."""
    buckets = {1: {1}, 2: {1, 2}, 3: {2, 4}, 5: {4, 8}, 16: {16}}[rows]
    assert buckets_over_pages(bound, loaded(folders["LlamaForCausalLM"]), rows) == buckets


def test_steps_over_pages_of_few_bits_and_windows(folders, bound):
    model = loaded(folders["Gemma2ForCausalLM"])
    assert buckets_over_pages(bound, model, 3, nbits=4) == {2, 4}


@pytest.fixture
def choosing(monkeypatch):
    """The choice is one op, which may read the routing on the host on a CPU."""
    monkeypatch.setattr(mlp, "chooses_on", lambda device, tokens, codes=False: tokens <= 16)


@pytest.mark.parametrize(
    ("name", "weights", "rows"),
    [
        ("MixtralForCausalLM", None, 5),
        ("Qwen2MoeForCausalLM", "int4", 16),
        ("MixtralForCausalLM", "int4", 5),
        ("GptOssForCausalLM", None, 3),
        ("GptOssForCausalLM", "int8", 3),
    ],
)
def test_experts_are_chosen_anew_in_every_replay(folders, bound, choosing, name, weights, rows):
    """As floats, in few bits, with biases and beside a shared one."""
    model = on_cpu(folders[name], dtype=torch.bfloat16, weights=weights)
    buckets = {3: {2, 4}, 5: {4, 8}, 16: {16}}[rows]
    assert buckets_over_pages(bound, model, rows) == buckets


def test_experts_that_no_kernel_chooses_among_are_not_captured(folders, bound, choosing):
    """Kernels choose among codes for 16-bit floats only; a hook must see its expert."""
    for dtype, hooked in ((torch.float32, False), (torch.bfloat16, True)):
        model = on_cpu(folders["MixtralForCausalLM"], dtype=dtype, weights="int4")
        if hooked:
            model.units[2].module.mlp.experts[3].w1.register_forward_hook(lambda *args: None)
        bound.clear()
        model.forward(IDS[:1, :1], CACHES["paged"](model, 96, 1))
        assert [run.count for run in bound] == ([2, 3] if hooked else [])


def test_a_shared_expert_is_captured_unless_it_has_a_hook(folders, choosing):
    mixture = loaded(folders["Qwen2MoeForCausalLM"]).units[1].module.mlp
    parts = (mixture.shared_expert, mixture.shared_expert.up_proj, mixture.shared_expert_gate)
    for part in parts:
        assert mixture.chooses_on_device
        handle = part.register_forward_hook(lambda *args: None)
        assert not mixture.chooses_on_device
        handle.remove()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_proposed_tokens_are_verified_by_the_same_recordings(folders, bound, name):
    """As rows that share pages, however many each row has and however few are accepted: the bits of
    one token at a time."""
    model = loaded(folders[name])

    def verified(together: bool) -> list[torch.Tensor]:
        cache, found = RoomyPagedCache(model, 96, 16, nbits=8), []
        spoil_free_pages(cache)
        model.forward(IDS[:, :20], cache, new_lens=[20, 13])
        for step in range(9):
            counts = (1 + step % 4, 1 + (step + 2) % 3)
            ids = IDS[:, 20 + step : 20 + step + max(counts)]
            if together:
                logits = model.forward(ids, cache, new_lens=list(counts), each_token=True)
                found += logits.flatten(0, 1).split(list(counts))
            else:
                found += [torch.cat(each, 1)[0] for each in one_by_one(model, cache, ids, counts)]
            cache.crop([max(length - step % 2, 0) for length in cache.seq_lens])
        return found

    found = verified(together=True)
    (run,) = (each for each in bound if each._recordings)
    assert run.count == len(model.units) and set(run._buffers) <= {2, 4, 8}
    replayed = sum(each.replays for each in run._recordings.values())
    assert replayed + len(run._recordings) == 9 and replayed > 2
    with Readable():
        expected = verified(together=False)
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


def one_by_one(model: Model, cache, ids: torch.Tensor, counts: tuple[int, ...]):
    """Each row's logits of so many of its tokens (B, T), all other rows having none."""
    rows = range(len(counts))
    for row in rows:
        alone = [int(each == row) for each in rows]
        steps = (ids[:, at : at + 1] for at in range(counts[row]))
        yield [model.forward(x, cache, new_lens=alone)[row : row + 1] for x in steps]


def test_a_run_before_others_gives_them_the_tokens_of_each_row(folders, bound):
    model = loaded(folders["LlamaForCausalLM"])
    ids, counts = IDS[:, 20:24], [4, 2]

    def logits() -> torch.Tensor:
        cache = RoomyPagedCache(model, 96, 16)
        model.forward(IDS[:, :20], cache, new_lens=[20, 13])
        return model.forward(ids, cache, new_lens=counts, each_token=True)

    with Readable():
        expected = logits()
    handle = model.units[3].module.register_forward_hook(lambda *args: None)
    torch.testing.assert_close(logits(), expected)
    assert [run.count for run in bound if run._buffers] == [3, 2]
    handle.remove()


def test_no_call_has_more_rows_than_its_cache(folders, bound):
    """Plans leave room for no more."""
    model = loaded(folders["LlamaForCausalLM"])
    cache = CACHES["paged"](model, 96, 3)
    model.forward(IDS[0, :3, None], cache, last_id_only=True)
    (run,) = bound
    assert list(run._buffers) == [3]


def test_forks_in_pages_are_captured(folders, bound):
    model = loaded(folders["LlamaForCausalLM"])

    def forked() -> torch.Tensor:
        cache = RoomyPagedCache(model, 96, 1)
        model.forward(IDS[:1, :21], cache)
        fork = cache.fork(2)
        return torch.cat([model.forward(IDS[:, at : at + 1], fork) for at in range(21, 40)], 1)

    found = forked()
    (run,) = (each for each in bound if each._recordings)
    assert sum(each.replays for each in run._recordings.values()) > 12
    with Readable():
        assert torch.equal(found, forked())


def test_an_engines_steps_are_captured(tmp_path, bound, monkeypatch):
    """However many jobs there are: for as many rows, or slightly more."""
    weights = tiny.reference(tiny.llama(eos_token_id=None, num_hidden_layers=2))
    folder = tiny.save_tokenizer(tiny.save(weights, tmp_path))
    model, tokenizer, decoding, replayed = loaded(folder), Tokenizer(folder), [], []
    monkeypatch.setattr(Tape, "made", 0)
    prompts = [IDS[0, at : 2 * at + 9].tolist() for at in range(7)]
    for owner, name, seen in ((PagedGroup, "decode", decoding), (Tape, "replay", replayed)):
        monkeypatch.setattr(owner, name, noted(getattr(owner, name), seen))

    def answers() -> tuple[list[list[int]], list[tuple]]:
        cache = RoomyPagedCache(model, 256, pages=40)
        with Engine(model, cache, tokenizer, max_running=5) as engine:
            jobs = [
                Job(prompt=prompt, settings=GREEDY, max_new_tokens=12 + 7 * at)
                for at, prompt in enumerate(prompts)
            ]
            handles = [engine.submit(job) for job in jobs]
            for handle in handles:
                handle.result()
            captured = [(run.count, sorted(run._buffers)) for run in bound if run._recordings]
            return [handle.tokens for handle in handles], captured

    found, captured = answers()
    assert captured == [(len(model.units), [1, 2, 4, 5])]
    assert len(decoding) == len(replayed) + Tape.made
    assert len(replayed) > 2 * Tape.made
    with Readable():
        bound.clear()
        assert answers() == (found, [])


def noted(function, calls):
    """A function that records its calls."""

    def call(self, *args):
        calls.append(self)
        return function(self, *args)

    return call
