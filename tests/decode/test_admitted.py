"""Admitted calls have their memory: many rows a prompt, with any kind of cache and after any
fallback step, on simulated devices cut to the planned byte."""

from __future__ import annotations

import random

import pytest
import sweep
import torch
from on_cpu import on_cpu
from simproc import run_sim
from tiny import gemma2, llama, reference, save

from exkv import CACHES, Cache, KVCache, Model, PlacementError, sim
from exkv.decode import fixed_batch as entry
from exkv.planning.workspace import CacheShape, Promise, predict_workspaces

MODELS = {
    "llama": lambda: llama(num_hidden_layers=3, eos_token_id=None),
    "gemma2": lambda: gemma2(num_hidden_layers=4, eos_token_id=None),
}
#: Ways to decode, with one row a prompt to many, whose sequences end at different lengths.
WAYS = [
    {},
    {"num_beams": 9, "num_return_sequences": 2},
    {"num_beams": 12, "num_beam_groups": 6, "diversity_penalty": 1.0, "num_return_sequences": 6},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"num_beams": 3, "do_sample": True, "num_return_sequences": 3, "seed": 5},
    {"do_sample": True, "num_return_sequences": 16, "seed": 3},
]
LADDERS = [[], ["offload"], ["8bit"], ["4bit"], ["offload", "8bit"], ["8bit", "4bit", "offload"]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: str(save(reference(make()), tmp_path_factory.mktemp(name)))
        for name, make in MODELS.items()
    }


def sized(model: Model, more: dict[str, int] | None = None) -> None:
    """Give each device the planned bytes, and ``more`` bytes by device."""
    for ledger in model.plan.ledgers:
        extra = (more or {}).get(str(ledger.device), 0)
        sim.set_capacity(ledger.device.index, max(ledger.total + extra, 1))


def random_call(rng: random.Random) -> tuple[list[list[int]], dict[str, object]]:
    """Random prompts, and how to continue them."""
    prompts = [
        [rng.randrange(3, 320) for _ in range(rng.choice([1, 9, 40, 150]))]
        for _ in range(rng.choice([1, 1, 2, 3]))
    ]
    ends = rng.choice([(), list(range(3, 320, 9))])
    new = rng.choice([1, 2, 12, 30])
    return prompts, {**rng.choice(WAYS), "max_new_tokens": new, "eos_token_id": ends}


def random_model(rng: random.Random, models: dict[str, list[Model]]) -> tuple[str, Model, list]:
    """One of the models, not yet loaded, and one or two devices for it."""
    for index in range(2):
        sim.set_capacity(index, 64 << 20)
    name = rng.choice(sorted(models))
    return name, rng.choice(models[name]), rng.choice([["sim:0"], ["sim:1", "sim:0"]])


def load(model: Model, devices: list[str], cache: KVCache) -> None:
    objective = "balance" if len(devices) > 1 else "pack"
    model.load_autosplit(cache, last_id_only=True, devices=devices, objective=objective)


def opened(folders: dict[str, str]) -> dict[str, list[Model]]:
    """Models that are loaded repeatedly, so that most predictions are known from earlier cases."""
    return {
        name: [Model(folder, max_input_len=chunk) for chunk in (1, 16, 64)]
        for name, folder in folders.items()
    }


def nothing(cache: KVCache) -> None:
    """A step that changes nothing."""


# A call's own cache ---------------------------------------------------------------------------


def until_admitted(model: Model, prompts: list, call: dict) -> list[str]:
    """Generate on devices that grow by just the missing bytes after each refusal -> what the final
    fallback steps were taken during."""
    more: dict[str, int] = {}
    while True:
        sized(model, more)
        told: list[str] = []
        try:
            model.generate(
                prompts, **call, on_fallback=lambda step, told=told: told.append(step.during)
            )
            return told
        except PlacementError as error:
            assert error.needed > error.available
            more[error.device] = more.get(error.device, 0) + error.needed - error.available


def own_caches(folders, cases, seed):
    rng, wrong, seen = random.Random(seed), [], {}
    entry.WORTH_SHARING, models = 0, opened(folders)
    for case in range(cases):
        name, model, devices = random_model(rng, models)
        load(model, devices, Cache(model, max_seq_len=1))
        prompts, call = random_call(rng)
        call |= {"cache_implementation": rng.choice(list(CACHES)), "on_oom": rng.choice(LADDERS)}
        try:
            during = until_admitted(model, prompts, call)
        except torch.OutOfMemoryError as error:
            during = [str(error)]
        if set(during) - {"building the cache", "forking the prompt"}:
            wrong.append([case, name, model.max_input_len, list(map(len, prompts)), call, during])
        for each in during or ["at once"]:
            seen[each] = seen.get(each, 0) + 1
        model.unload()
    return wrong, seen


@pytest.mark.sweep(1)
def test_admitted_calls_never_run_out_of_memory(folders):
    calls = sweep.cases(6, 40)
    wrong, seen = run_sim(own_caches, "64M,64M", args=[folders, calls, 1], timeout=900)
    assert wrong == []
    reached = [seen[each] for each in ("at once", "building the cache", "forking the prompt")]
    assert min(reached) >= calls / 10


def forty_beams(folder, kind):
    """Fallback steps of forty diverse beams over a long prompt, on a card that is cut to the bytes
    that admit them."""
    model = Model(folder)
    model.load_autosplit(Cache(model, max_seq_len=481), last_id_only=True)
    prompt = torch.randint(3, 320, (481,), generator=torch.Generator().manual_seed(2)).tolist()
    call = {"num_beams": 40, "num_beam_groups": 20, "diversity_penalty": 1.0, "on_oom": []}
    call |= {"cache_implementation": kind, "max_new_tokens": 60, "eos_token_id": ()}
    return until_admitted(model, [prompt], call)


@pytest.mark.parametrize(("name", "kind"), [("llama", "offloaded"), ("gemma2", "sliding_window")])
def test_forty_beams_over_a_long_prompt_fit_where_they_are_admitted(folders, name, kind):
    assert run_sim(forty_beams, "64M", args=[folders[name], kind]) == []


def test_prompt_in_host_memory_counts_on_a_gpu_without_torch_support(folders):
    """Predictions for it run on the host, to which nothing has to be copied."""
    model = on_cpu(folders["llama"])
    peaks = []
    for kind in ("fp16", "offloaded_static"):
        cache = CACHES[kind](model, 200)
        model.forward(torch.full((1, 200), 5), cache, preprocess_only=True)
        fork = CacheShape.of(cache.fork(2, 202, call_len=1))
        promise = Promise(max_input_len=16, caches=(fork,), last_id_only=True)
        peaks.append(predict_workspaces(model, promise, "cuda")[1].workspace)
    prompt = 200 * 2 * model.config.num_key_value_heads * model.config.head_dim * 4
    assert peaks[1] - peaks[0] >= prompt


# A given cache --------------------------------------------------------------------------------


def failing(model: Model, rng: random.Random, times: int):
    """``model.forward`` with an allocation that fails in ``times`` of its next calls."""
    forward, due = type(model).forward, [rng.randrange(1, 6) for _ in range(times)]

    def call(*args, **kwargs):
        if due:
            due[0] -= 1
        if due and due[0] <= 0:
            due.pop(0)
            sim.fail_allocation(rng.choice([1, 2, 9]))
        try:
            return forward(model, *args, **kwargs)
        finally:
            sim.fail_allocation(None)

    return call


def given_caches(folders, cases, seed):
    rng, wrong, steps, models = random.Random(seed), [], {}, opened(folders)
    for case in range(cases):
        name, model, devices = random_model(rng, models)
        prompts, call = random_call(rng)
        ladder, kind = rng.choice(LADDERS), rng.choice(list(CACHES))
        rows = len(prompts) * max(call.get("num_beams", 1), call.get("num_return_sequences", 1))
        cache = CACHES[kind](model, max(map(len, prompts)) + call["max_new_tokens"], rows)
        load(model, devices, cache)
        sized(model)
        model.forward = failing(model, rng, len(ladder))

        def cut(fallback, model=model):
            steps[fallback.step] = steps.get(fallback.step, 0) + 1
            sized(model)

        tries = [*ladder, nothing, nothing]  # for failures in which no step of the list helps
        try:
            model.generate(prompts, cache=cache, on_oom=tries, on_fallback=cut, **call)
        except torch.OutOfMemoryError as error:
            what = [list(map(len, prompts)), call, ladder, str(error)]
            wrong.append([case, name, model.max_input_len, kind, rows, *what])
        del model.forward, cache
        model.unload()
    return wrong, steps


@pytest.mark.sweep(1)
def test_calls_after_a_fallback_step_have_room(folders):
    calls = sweep.cases(15, 60)
    wrong, steps = run_sim(given_caches, "64M,64M", args=[folders, calls, 5], timeout=900)
    assert wrong == []
    assert {"offload", "8bit", "4bit"} <= set(steps)
