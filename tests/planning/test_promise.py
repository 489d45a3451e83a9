"""What a plan promises, on simulated devices that are cut to the planned byte: it is carried out as
planned, calls within it find their memory, and others fail cleanly."""

from __future__ import annotations

import gc
import io
import itertools
import logging
import random

import pytest
import sweep
import torch
from full_length import IDS, work_at_the_edge
from rich.console import Console
from simproc import run_sim
from tiny import llama, reference, save

from exkv import (
    CACHES,
    Cache,
    Draft,
    Generator,
    Model,
    OutOfMemoryError,
    PlacementError,
    SamplingParams,
    Tokenizer,
    place,
    sim,
)
from exkv.cli.picture import draw_bars
from exkv.loading.report import LINES
from exkv.planning import Plan, scenario
from exkv.planning.budgets import without
from exkv.planning.plan import OBJECTIVES
from exkv.planning.workspace import Peak
from exkv.sizes import human

MEBI = 1 << 20

#: Shapes of tiny models: layers like and unlike the head and the embedding in size.
SHAPES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "wide": {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 128},
    "deep": {"num_hidden_layers": 7, "hidden_size": 64, "num_attention_heads": 4},
    "large vocabulary": {"vocab_size": 2000, "num_hidden_layers": 3},
    "biased": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 8},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: str(save(reference(llama(**changes)), tmp_path_factory.mktemp("model")))
        for name, changes in SHAPES.items()
    }


def allocated() -> list[int]:
    return [torch.accelerator.memory_allocated(i) for i in range(torch.accelerator.device_count())]


# The promise ----------------------------------------------------------------------------------


def fuzz(folders, cases):
    """Plan on cards of any size, cut them to the byte, load by the plan, and work at the limit."""
    rng = random.Random(7)
    outcomes: dict[str, int] = {"held": 0, "several devices": 0, "refused at once": 0}
    wrong = []
    cards = torch.accelerator.device_count()
    models = {  # loaded repeatedly, so that most predictions are known from an earlier case
        (name, chunk): Model(folder, max_input_len=chunk, embed_cpu=False)
        for name, folder in folders.items()
        for chunk in (1, 16, 64)
    }
    for case in range(cases):
        name, chunk = rng.choice(sorted(models))
        model = models[name, chunk]
        lengths = (1, 17, 90) if chunk > 1 else (1, 17, 17, 35, 35, 90)  # a token a call is slow
        caches = [
            rng.choice(list(CACHES.values()))(model, rng.choice(lengths), rng.choice([1, 3]))
            for _ in range(rng.choice([1, 1, 2]))
        ]
        options = {
            "objective": rng.choice([name for name in OBJECTIVES if name != "speed"]),
            "order": rng.choice(["listed", "any"]),
            "last_id_only": rng.random() < 0.3,
        }
        sizes = [rng.randrange(200, 5000) << 10 for _ in range(cards)]
        for index, size in enumerate(sizes):
            sim.set_capacity(index, size)
        before = sim.allocation_count()
        try:
            plan = place(model, caches, **options)
        except PlacementError as error:
            refused = error.needed > error.available and sim.allocation_count() == before
            outcomes["refused at once"] += refused
            wrong += [] if refused else [[case, "refused", str(error)]]
            continue
        for ledger in plan.ledgers:
            sim.set_capacity(ledger.device.index, max(ledger.total, 1) if ledger.units else 1)
        try:
            model.load(plan=plan)
            for cache in caches:
                work_at_the_edge(model, cache, options["last_id_only"])
            outcomes["held"] += model.device_map == dict(
                zip((unit.name for unit in plan.units), plan.devices, strict=True)
            )
            outcomes["several devices"] += len(set(plan.devices)) > 1
            surprises = model.report.surprises()
            wrong += [[case, "measured", surprises]] if surprises else []
        except (torch.OutOfMemoryError, PlacementError) as error:
            made = [f"{type(c).__name__} {c!r}" for c in caches]
            wrong.append([case, name, chunk, made, options, str(error)])
        cache = None  # otherwise it would stay with the model, which is used again
        model.unload()
        wrong += [[case, "left behind", allocated()]] if any(allocated()) else []
        fullest = max(plan.ledgers, key=lambda ledger: ledger.total)
        sim.set_capacity(fullest.device.index, fullest.total - 1)
        before = sim.allocation_count()
        try:
            model.load(plan=plan)
            wrong.append([case, "loaded with a byte less"])
            model.unload()
        except PlacementError as error:
            if error.needed - error.available != 1 or sim.allocation_count() != before:
                wrong.append([case, "a byte less", str(error)])
    return outcomes, wrong


@pytest.mark.sweep(1)
def test_plans_hold_to_the_byte_and_a_byte_less_is_refused(folders):
    plans = sweep.cases(50, 200)
    outcomes, wrong = run_sim(fuzz, "8M,8M,8M", args=[folders, plans], timeout=900)
    assert wrong == []
    assert outcomes["held"] + outcomes["refused at once"] == plans
    assert outcomes["held"] >= plans / 2
    assert outcomes["several devices"] >= plans / 4
    assert outcomes["refused at once"] >= plans / 20


#: Rows, tokens, and tokens of a chunk, which is at most as long as the text.
SIZES = [(1, 1, 16), *((2, 48, chunk) for chunk in (1, 16, 600))]
SIZES += [(3, 700, chunk) for chunk in (1, 16, 600)]


def predicted_and_measured(folder, kinds):
    """Kinds of cache, each with its options, at shapes that differ in what is largest."""
    rows = []
    for index, (kind_and_options, size) in enumerate(itertools.product(kinds, SIZES)):
        (kind, options), (batch, length, chunk) = kind_and_options, size
        last_id_only = index % 2 == 1  # each kind and each size has both
        model = Model(folder, max_input_len=chunk)
        cache = CACHES[kind](model, length, batch, **options)
        model.load_autosplit(cache, last_id_only=last_id_only)
        for row in model.report.devices:
            for line in LINES:
                pair = getattr(row.ledger, line), row.measured.get(line, 0)
                rows.append([kind, batch, length, chunk, line, *pair])
        model.unload()
    return rows


def test_predicted_is_measured_for_every_kind_of_cache_over_a_table_of_shapes(folders):
    kinds = [(kind, {}) for kind in CACHES]
    rows = run_sim(predicted_and_measured, "1400K,128M", args=[folders["plain"], kinds])
    assert len(rows) == len(CACHES) * len(SIZES) * 2 * len(LINES)
    assert [row for row in rows if row[-1] != row[-2]] == []


def test_predicted_is_measured_where_a_window_is_shorter_than_a_chunk(folders):
    kinds = [(kind, {"window_length": 24}) for kind in ("sliding_window", "sink")]
    rows = run_sim(predicted_and_measured, "1400K,128M", args=[folders["plain"], kinds])
    assert len(rows) == len(kinds) * len(SIZES) * 2 * len(LINES)
    assert [row for row in rows if row[-1] != row[-2]] == []


def overflowing(folder, kinds):
    """A card cut to what a plan needs, and the rest on the host: logits beside the host's."""
    wrong = []
    model = Model(folder, max_input_len=16)
    for kind, options in kinds:
        cache = CACHES[kind](model, 48, 2, **options)
        model.load(devices=["cpu"])
        expected = prompt_and_steps(model, cache)
        model.unload()
        card, units = 1 << 30, len(model.units)
        while units:  # the next card is a byte too small for what the last one held
            sim.set_capacity(0, card)
            plan = place(model, [cache], devices=["sim:0"], cpu=True, margin=0)
            ledger = plan.ledgers[0]
            units = ledger.units
            if not units:
                break
            sim.set_capacity(0, ledger.total)
            try:
                model.load(plan=plan)
                work_at_the_edge(model, cache)
                found = prompt_and_steps(model, cache)
                if any(not torch.equal(*pair) for pair in zip(found, expected, strict=True)):
                    wrong.append([kind, units, "other logits"])
                del found
            except (torch.OutOfMemoryError, RuntimeError) as error:
                wrong.append([kind, units, str(error)[:200]])
            model.unload()
            card = ledger.total - 1
        del cache
        gc.collect()
    return wrong


def prompt_and_steps(model, cache):
    """Logits on the host, of a prompt in chunks and two tokens after it."""
    cache.reset()
    parts = IDS[:2, :34], IDS[:2, 34:35], IDS[:2, 35:36]
    return [model.forward(ids, cache).cpu() for ids in parts]


def test_every_kind_of_cache_runs_on_a_card_and_the_host_within_the_plan(folders):
    kinds = [(kind, {}) for kind in CACHES]
    kinds += [(kind, {"window_length": 24}) for kind in ("sliding_window", "sink")]
    assert run_sim(overflowing, "1G", args=[folders["plain"], kinds]) == []


# By plan --------------------------------------------------------------------------------------


def by_plan(folder):
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 48, 2)
    model.load(devices=["sim:2"])
    expected = model.forward(IDS[:2, :40], cache).cpu()
    model.unload()
    seen = {}
    for objective in OBJECTIVES:
        model.load_autosplit(cache, objective=objective)
        seen[objective] = [str(device) for device in model.plan.devices]
        same = torch.equal(model.forward(IDS[:2, :40], cache).cpu(), expected)
        seen[f"{objective} logits"] = same
        model.unload()
    plan = place(model, cache, objective="balance")
    copy = Plan.from_json(plan.to_json())
    other = Model(folder, max_input_len=16)
    again = Cache(other, 48, 2)
    other.load(plan=copy)
    seen["from JSON"] = [str(device) for device in other.plan.devices]
    seen["from JSON logits"] = torch.equal(other.forward(IDS[:2, :40], again).cpu(), expected)
    seen["same plan"] = other.plan == plan
    other.unload()
    messages = []
    for change in ("cache", "chunk", "argument", "layers"):
        wrong = Model(folder, max_input_len=32 if change == "chunk" else 16)
        kept = Cache(wrong, 49 if change == "cache" else 48, 2)
        units = plan.units[:-1] if change == "layers" else plan.units
        bad = Plan(**{**fields_of(plan), "units": units})
        try:
            wrong.load([1] if change == "argument" else None, plan=bad)
            messages.append("loaded")
        except ValueError as error:
            messages.append(str(error))
        del kept
    seen["refusals"] = messages
    seen["left"] = allocated()
    return seen


def fields_of(plan: Plan) -> dict:
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


def test_load_follows_the_plan(folders):
    seen = run_sim(by_plan, "4M,8M,16M", args=[folders["plain"]])
    assert seen["pack"] == ["sim:0"] * 6
    assert seen["fewest"] == ["sim:2"] * 6 or set(seen["fewest"]) == {seen["fewest"][0]}
    assert seen["balance"].count("sim:2") > seen["balance"].count("sim:0")
    assert seen["from JSON"] == seen["balance"]
    assert seen["same plan"]
    assert all(seen[f"{name} logits"] for name in (*OBJECTIVES, "from JSON"))
    cache, chunk, argument, layers = seen["refusals"]
    assert "other caches" in cache and "cache=" in cache
    assert "max_input_len" in chunk
    assert "leave out gpu_split" in argument
    assert "5 units, and the model 6" in layers
    assert seen["left"] == [0, 0, 0]


def rolled_back_under_an_objective(folder):
    """Something takes the second card's memory after the plan was made."""
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 48, 2)
    thieves = []

    def steal(index: int, total: int) -> None:
        if not thieves and model.cache_map and str(model.plan_so_far[index]) != "sim:0":
            thieves.append(torch.empty(16 * MEBI - (300 << 10), dtype=torch.int8, device="sim:1"))

    model.plan_so_far = place(model, cache, objective="balance").devices
    planned = [str(device) for device in model.plan_so_far]
    model.load_autosplit(cache, objective="balance", callback=steal)
    return planned, [str(device) for device in model.device_map.values()], model.plan.fits


def test_load_continues_after_a_full_device(folders):
    planned, got, fits = run_sim(
        rolled_back_under_an_objective, "16M,16M,16M", args=[folders["plain"]]
    )
    assert set(planned) == {"sim:0", "sim:1", "sim:2"}
    first = planned.count("sim:0")
    assert got == ["sim:0"] * first + ["sim:2"] * (len(planned) - first)
    assert fits


def surprised(folder, believed):
    """What is logged if the prediction is only this share of the truth."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("exkv.loading.loader").addHandler(handler)
    truth = scenario.predict_workspaces

    def wrong(*args):
        return [Peak(int(peak.workspace * believed), peak.output) for peak in truth(*args)]

    scenario.predict_workspaces = wrong
    model = Model(folder, max_input_len=16)
    model.load_autosplit(Cache(model, 48, 2))
    return lines, model.report.surprises()


def test_wrong_prediction_is_logged_with_both_numbers(folders):
    lines, surprises = run_sim(surprised, "64M", args=[folders["wide"], 0.5])
    assert lines == surprises
    assert len(lines) == 1 and lines[0].startswith("sim:0: workspace took")
    assert "and the plan has" in lines[0]
    assert run_sim(surprised, "64M", args=[folders["wide"], 1]) == [[], []]


# Beside what is loaded -------------------------------------------------------------------------


def second_model(folders):
    """The second is planned around what the first one's calls will need, not only around what it
    holds between calls."""
    first = Model(folders["wide"], max_input_len=64)
    cache = Cache(first, 90, 3)
    first.load_autosplit(cache)
    (one,) = first.plan.ledgers
    draft = Model(folders["plain"], max_input_len=16, embed_cpu=False)
    small = Cache(draft, 90, 3)
    plan = place(draft, small)
    (two,) = plan.ledgers
    together = one.total - one.workspace + two.total
    seen = {
        "in use": two.budget.in_use == one.weights + one.cache + one.logits,
        "shared": two.workspace == max(one.workspace, draft_peak(plan)),
        "counted": two.budget.models == {folders["wide"]: one.total},
        "gone when it is unloaded": without([first], two.budget).models == {},
        "kept in JSON": Plan.from_json(plan.to_json()) == plan,
    }
    line = f"another model ({folders['wide']}): {human(one.total)} on sim:0"
    picture = io.StringIO()
    draw_bars(Console(file=picture, width=400), [plan], ["model"])
    seen["in the picture"] = line in picture.getvalue()
    sim.set_capacity(0, together - 1)
    try:
        draft.load_autosplit(small)
        seen["a byte less"] = "loaded"
    except PlacementError as error:
        seen["a byte less"] = error.needed - error.available
        seen["in the refusal"] = line in str(error)
    try:
        draft.load(plan=plan)
    except PlacementError as error:
        seen["in that of a plan"] = line in str(error)
    try:
        Cache(first, 100_000)
    except PlacementError as error:
        seen["in that of its own cache"] = "another model" in str(error)
    sim.set_capacity(0, together)
    draft.load_autosplit(small)
    kept = first.forward(IDS[:3, :60], cache)
    cache.reset()
    work_at_the_edge(draft, small)
    kept_too = draft.forward(IDS[:3, :1], small) if small.seq_lens[0] < 90 else None
    work_at_the_edge(first, cache)
    del kept, kept_too
    first.unload()
    return {**seen, "draft stays": draft.loaded and set(map(str, draft.device_map.values()))}


def draft_peak(plan: Plan) -> int:
    return max(unit.workspace for unit in plan.units)


def test_second_model_leaves_memory_for_the_firsts_calls(folders):
    seen = run_sim(second_model_as_json, "64M", args=[folders])
    assert seen == {
        "in use": True,
        "shared": True,
        "counted": True,
        "gone when it is unloaded": True,
        "kept in JSON": True,
        "in the picture": True,
        "in the refusal": True,
        "in that of a plan": True,
        "in that of its own cache": False,
        "a byte less": 1,
        "draft stays": ["sim:0"],
    }


def second_model_as_json(folders):
    seen = second_model(folders)
    return {**seen, "draft stays": sorted(seen["draft stays"] or [])}


def with_draft(folders):
    """A model and its draft, on devices that are cut to the planned byte."""

    def built():
        main = Model(folders["wide"], max_input_len=64, embed_cpu=False)
        small = Model(folders["plain"], max_input_len=2048, embed_cpu=False)
        return main, Cache(main, 90, 2), small, Cache(small, 90, 2)

    model, cache, small, small_cache = built()
    model.load_autosplit(cache, draft=small_cache)
    (one,), (two,) = (each.report.devices for each in (model, small))
    exact = [
        getattr(row.ledger, line) == row.measured.get(line, 0)
        for row, lines in ((one, LINES), (two, ("weights", "cache", "logits")))
        for line in lines
    ]
    seen = {"exact": all(exact)}
    needed = two.ledger.budget.in_use + two.ledger.total
    for each in (small, model):
        each.unload()
    seen["left"] = allocated()
    sim.set_capacity(0, needed)
    model, cache, small, small_cache = built()
    model.load_autosplit(cache, draft=small_cache)
    draft = Draft(small, small_cache, tokens=4, confidence=0)
    prompts = [IDS[0, :40].tolist(), IDS[1, :33].tolist()]
    options = {"max_new_tokens": 50, "cache": cache, "on_oom": "raise"}
    found = model.generate(prompts, assistant_model=draft, **options)
    cache.reset()
    seen["tokens"] = found.tolist() == model.generate(prompts, **options).tolist()
    for each in (small, model):
        each.unload()
    sim.set_capacity(0, needed - 1)
    model, cache, small, small_cache = built()
    try:
        model.load_autosplit(cache, draft=small_cache)
        seen["a byte less"] = "loaded"
    except PlacementError as error:
        seen["a byte less"] = error.needed - error.available
    seen["none is loaded"] = not (model.loaded or small.loaded) and allocated() == seen["left"]
    return seen


def test_a_draft_is_placed_with_its_model_and_what_both_promise_holds_to_the_byte(folders):
    seen = run_sim(with_draft, "64M", args=[folders])
    assert seen == {
        "exact": True,
        "left": [0],
        "tokens": True,
        "a byte less": 1,
        "none is loaded": True,
    }


def second_cache(folder):
    model = Model(folder, max_input_len=16)
    first = Cache(model, 48, 2)
    model.load_autosplit(first)
    room = [ledger.headroom for ledger in model.plan.ledgers]
    before = allocated()
    try:
        Cache(model, 100_000, 2)
        return "built"
    except PlacementError as error:
        message, fits = str(error), error.suggestions
        unchanged = allocated() == before and len(model.caches) == 1
    length = int(fits[0].split("=")[1].split()[0])
    try:
        Cache(model, length + 1, 2)
        return "one token more was built"
    except PlacementError:
        second = Cache(model, length, 2)
    for cache in (first, second):
        work_at_the_edge(model, cache)
    planned = sum(ledger.cache for ledger in model.plan.ledgers)
    held = sum(sum(cache.nbytes().values()) for cache in (first, second))
    return [message, unchanged, room, length, planned == held]


def test_a_second_cache_is_planned_around_what_is_loaded_and_its_calls_hold(folders):
    message, unchanged, room, length, counted = run_sim(
        second_cache, "2M,4M", args=[folders["plain"]]
    )
    assert "no room for Cache(max_seq_len=100000" in message
    assert "too few" in message and f"max_seq_len={length} would fit" in message
    assert unchanged and counted
    assert min(room) >= 0 and length > 100


# When memory shrinks --------------------------------------------------------------------------


def shrunk(folder):
    model = Model(folder)
    cache = Cache(model, 600)
    model.load_autosplit(cache)
    tokenizer = Tokenizer(model.config)
    generator = Generator(model, cache, tokenizer)
    greedy = SamplingParams.greedy()
    story = "Anna put the key in the kitchen. Where is the key? "
    expected = generator.generate_simple(story, greedy, 12, completion_only=True)
    long = tokenizer.encode(story * 30)
    cache.reset()
    generator.generate_simple(story, greedy, 5)
    before = [list(row) for row in cache.sequences]
    free, _ = torch.accelerator.get_memory_info(0)
    thief = torch.empty(free - (300 << 10), dtype=torch.int8, device="sim:0")
    seen = {"long enough": 300 < len(long) <= 600}
    try:
        generator.generate_simple(long, greedy, 12)
        seen["error"] = "it went on"
    except OutOfMemoryError as error:
        seen["error"] = str(error)
        seen["is torch's"] = isinstance(error, torch.OutOfMemoryError)
    seen["taken"] = thief.untyped_storage().nbytes()
    seen["cache"] = [list(row) for row in cache.sequences] == [
        row[: len(kept)] for row, kept in zip(before, cache.sequences, strict=True)
    ]
    seen["shorter"] = generator.generate_simple(story, greedy, 12, completion_only=True) == expected
    del thief
    generator.generate_simple(long, greedy, 12)
    return seen


def test_oom_in_a_call_reports_changes_and_allows_shorter_calls():
    seen = run_sim(shrunk, "64M", args=["examples/demo-model"])
    assert seen["long enough"] and seen["is torch's"] and seen["cache"] and seen["shorter"]
    taken = -(-seen["taken"] // 512) * 512
    assert f"Since loading, on sim:0: this process {taken:+,} bytes" in seen["error"]
    assert "others +0" in seen["error"] and "a shorter call can continue" in seen["error"]
    assert "sim out of memory" in seen["error"]
