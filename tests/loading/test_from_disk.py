"""A mixture with more experts than fit in memory runs from disk: planned to the byte, with the same
tokens, without copies of what stays in the file, and with a message that says so."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import random
import re
import time
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from packers.gguf import in_types, write_gguf
from safetensors.torch import load_file
from simproc import run_sim
from tiny import TINY, mixtral, reference, save, save_tokenizer

from exkv import Cache, GenerationConfig, Model, PlacementError, devices, place
from exkv.checkpoint import disk
from exkv.cli import main
from exkv.layers.mlp import mixtures
from exkv.models.units import expert_of
from exkv.planning import Plan
from exkv.planning.expected_time import DISK, OnDisk, on_disk

#: Sizes that make everything but the experts small.
LARGE = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_experts": 32,
    "moe_intermediate_size": 384,
    "decoder_sparse_step": 1,
}
#: Bytes by which a process's memory fluctuates.
NOISE = 8 << 20
IDS = torch.randint(3, 300, (1, 9), generator=torch.Generator().manual_seed(53))
#: Bytes that a plan of these models leaves on disk.
LEFT = 12 << 20


def mixture(folder: Path) -> Path:
    """A Qwen 3 that is nearly all experts."""
    config = TINY["Qwen3MoeForCausalLM"](**LARGE)
    config.eos_token_id = None
    return save_tokenizer(save(reference(config).bfloat16(), folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """A gpt-oss in MXFP4, whose experts are partly mapped."""
    from test_mapped_experts import packed

    return packed(tmp_path_factory.mktemp("packed"))


def beside_disk(model: Model, cache: Cache, left: int = LEFT, **options) -> Plan:
    """A plan for ``left`` bytes fewer than the model takes."""
    whole = place(model, cache, devices=["cpu"]).ledgers[0].total
    options = {"disk_bandwidth": 3e9, **options}
    return place(model, cache, devices=["cpu"], cap=whole - left, **options)


def tokens(model: Model, cache: Cache) -> list[int]:
    return model.generate(IDS, GenerationConfig(max_new_tokens=12), cache=cache).tolist()


def test_plan_leaves_on_disk_what_does_not_fit_to_the_byte(folder):
    model = Model(folder)
    cache = Cache(model, max_seq_len=64)
    usual = place(model, cache, devices=["cpu"], disk_experts=False)
    assert place(model, cache, devices=["cpu"]).from_disk == 0
    with pytest.raises(PlacementError, match=r"12,.* too few.*no experts are to be read from disk"):
        beside_disk(model, cache, disk_experts=False)
    plan = beside_disk(model, cache)
    (ledger,) = plan.ledgers
    experts = sum(sum(unit.expert_bytes) for unit in model.units)
    assert ledger.from_disk == plan.from_disk == LEFT and ledger.mapped == experts
    assert ledger.weights == usual.ledgers[0].weights - LEFT and ledger.headroom == 0
    assert plan.fitted == () and Plan.from_json(plan.to_json()) == plan
    most = usual.ledgers[0].total - experts  # what isn't experts
    with pytest.raises(PlacementError, match="even with all .* of experts read from disk"):
        place(model, cache, devices=["cpu"], cap=most // 8)


def opened(folder: str) -> dict:
    """Load a model with experts on disk -> bytes and tokens."""
    Model(folder).unload()  # triggers late imports
    model, before = Model(folder), resident()
    cache = Cache(model, max_seq_len=64, lazy=True)
    plan = beside_disk(model, cache)
    in_files = resident("RssFile")
    model.load(plan=plan)
    found = {"read": resident("RssFile") - in_files, "mapped": devices.mapped_memory()}
    others = (
        tensor.nbytes
        for unit in model.units
        for name, tensor in unit.module.named_parameters()
        if expert_of(name) is None and not tensor.untyped_storage().resizable()
    )
    (ledger,) = plan.ledgers
    found["planned"] = ledger.mapped - ledger.from_disk + sum(others)
    found["experts"], found["said"] = ledger.mapped, model.report.from_disk
    found["reported"] = str(model.report).endswith(model.report.from_disk)
    ahead: list[int] = []
    with mock.patch("exkv.layers.mlp.read_ahead", lambda _: ahead.append(1)):
        found["tokens"] = tokens(model, cache)
    layers = sum(bool(unit.expert_bytes) for unit in model.units)
    found["ahead"] = len(ahead) >= 12 * layers * model.config.specific.num_experts_per_tok
    found["grown"] = resident() - before
    found["more"] = Cache(model, max_seq_len=512).batch_size  # its memory is that of experts
    model.unload()
    found["left"] = devices.mapped_memory()
    model.load(devices=["cpu"])
    ahead.clear()
    with mock.patch("exkv.layers.mlp.read_ahead", lambda _: ahead.append(1)):
        found["expected"] = tokens(model, Cache(model, max_seq_len=64))
    found["needless"] = len(ahead)
    return found


def resident(kind: str = "RssAnon") -> int:
    """Bytes of this process in memory: anonymous, or of files."""
    gc.collect()
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if kind in line)


def test_mapped_experts_give_the_same_tokens_without_copies(folder):
    found = run_sim(opened, "", args=[str(folder)], fresh=True)
    assert found["tokens"] == found["expected"]
    assert found["mapped"] == pytest.approx(found["planned"], abs=1024)
    assert found["left"] == found["needless"] == 0 and found["ahead"]
    assert found["grown"] < NOISE < found["experts"] / 3
    assert found["read"] < found["experts"] / 2, "experts are read by calls"
    assert found["more"] == 1
    assert found["reported"]
    assert re.fullmatch(
        r"12.00 MiB of experts are read from disk as they are chosen: about [\d,.]+ tokens/s "
        r"predicted at 3 GB/s\.",
        found["said"],
    )


def beside_card(folder: str, share_of_host: float) -> dict:
    """Load with layers on a card, and exchange experts -> tokens and bytes."""
    model = Model(folder, max_input_len=32)
    cache = Cache(model, max_seq_len=64, lazy=True)
    whole = place(model, cache, devices=["sim:0"], allocator="exact").ledgers[0].total
    caps = [whole // 2, round(share_of_host * whole)]
    plan = place(
        model, cache, devices=["sim:0", "cpu"], cap=caps, disk_bandwidth=3e9, allocator="exact"
    )
    card, host = plan.ledgers
    model.load(plan=plan)
    model.exchange.every, model.exchange._worthwhile_swaps = 1 << 30, pairs(model)
    once, before = tokens(model, cache), resident()
    model.exchange.every = 1
    found = {"disk": host.from_disk, "free": card.headroom, "room": [host.total, caps[1]]}
    found["tokens"] = [once, *(tokens(model, cache) for _ in range(3))]
    found["swaps"], found["grown"] = model.exchange.swaps, resident() - before
    found["measured"] = model.report.surprises()
    found["copied"] = sorted(copied(model))
    model.unload()
    model.load(devices=["cpu"])
    found["expected"] = [tokens(model, Cache(model, max_seq_len=64))] * 4
    return found


def copied(model: Model) -> set[str]:
    """Matrices of which an expert in host memory has a copy of its own."""
    return {
        name.split(".")[0]
        for unit in model.units
        for mixture in mixtures(unit.module)
        for expert in unit.host_experts
        for name, tensor in mixture.experts[expert].named_parameters()
        if tensor.untyped_storage().resizable()
    }


def pairs(model: Model):
    """Random exchanges between experts of equal sizes."""
    from exkv.models.exchange import Swap

    exchange, draw = model.exchange, random.Random(7)

    def found():
        for name, mixture in exchange._counter.experts.items():
            unit = exchange._units[name]
            there = sorted(set(range(mixture.count)) - unit.host_experts)
            to_card, to_host = draw.choice(sorted(unit.host_experts)), draw.choice(there)
            yield Swap(unit=unit, mixture=mixture, to_card=to_card, to_host=to_host, gain=1.0)

    return found


@pytest.mark.parametrize(("kind", "room"), [("floats", 0.25), ("packed", 0.45)])
def test_disk_experts_are_exchanged_with_those_on_a_card(folder, packed, kind, room):
    of = {"floats": folder, "packed": packed}[kind]
    found = run_sim(beside_card, "256M", args=[str(of), room], fresh=True)
    assert found["tokens"] == found["expected"] and found["swaps"] >= 24
    assert found["disk"] > 0 and found["room"][0] <= found["room"][1]
    assert 0 <= found["free"] < 2 << 20, "the card is full before anything is left on disk"
    assert found["grown"] < NOISE / 4 and found["measured"] == []
    assert found["copied"] == ([] if kind == "floats" else ["w1", "w3"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layouts_without_kernels_are_refused_with_a_remedy(folder, packed, dtype):
    of, said = (folder, r"0 B of \d") if dtype == "float32" else (packed, r"\d.* of \d")
    model = Model(of, dtype=dtype)
    total = sum(sum(unit.expert_bytes) for unit in model.units)
    with pytest.raises(PlacementError, match=f"{said}.* of experts can be read.* GGUF file of K"):
        beside_disk(model, Cache(model, max_seq_len=64), int(0.9 * total))


def test_experts_may_be_partly_mapped(packed):
    model = Model(packed, dtype="bfloat16")
    cache = Cache(model, max_seq_len=64)
    plan = beside_disk(model, cache, 4 << 20)
    (ledger,) = plan.ledgers
    down = sum(n for u in model.units for name, n in u.nbytes.items() if ".w2." in name)
    assert ledger.mapped == down and ledger.from_disk == 4 << 20
    model.load(plan=plan)
    got = tokens(model, cache)
    model.unload()
    model.load(devices=["cpu"])
    assert tokens(model, Cache(model, max_seq_len=64)) == got


def test_a_second_model_takes_its_memory_from_experts_of_the_first(folder):
    model, second = Model(folder), Model(Path(__file__).parents[2] / "examples" / "demo-model")
    plan = beside_disk(model, Cache(model, max_seq_len=64))
    beside = place(second, beside=plan, disk_experts=False).ledgers[0]
    assert beside.weights > 0 and beside.headroom >= 0 and beside.from_disk == 0
    room = plan.ledgers[0].budget.cap - plan.ledgers[0].held + plan.ledgers[0].resident
    assert beside.limit == room
    with pytest.raises(PlacementError):
        place(Model(folder), beside=plan, disk_experts=False)


def test_k_types_of_a_gguf_file_run_from_disk(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    theirs = reference(mixtral(**sizes, num_local_experts=8))
    kinds = in_types("Q4_K", "Q6_K", "Q3_K")
    tensors = load_file(save(theirs, tmp_path / "floats") / "model.safetensors")
    write_gguf(tmp_path / "model.gguf", theirs.config, tensors, kinds)
    model = Model(tmp_path / "model.gguf")
    cache = Cache(model, max_seq_len=64)
    plan = beside_disk(model, cache, 1 << 20)
    assert plan.ledgers[0].mapped == sum(sum(unit.expert_bytes) for unit in model.units)
    model.load(plan=plan)
    got = tokens(model, cache)
    model.unload()
    model.load(devices=["cpu"])
    assert tokens(model, Cache(model, max_seq_len=64)) == got


def test_a_plan_for_other_files_is_refused(folder, tmp_path):
    model = Model(folder)
    plan = beside_disk(model, Cache(model, max_seq_len=64))
    config = TINY["Qwen3MoeForCausalLM"](**LARGE)
    other = Model(save(reference(config).float(), tmp_path), dtype="bfloat16")
    other_cache = Cache(other, max_seq_len=64)
    with pytest.raises(ValueError, match="other files: it leaves .* each expert of .* a new plan"):
        other.load(plan=plan)
    assert not other.loaded and other_cache.batch_size == 1


# How slow ---------------------------------------------------------------------------------------


def of(plan: Plan, costs, shares=None) -> OnDisk:
    changed = [replace(c, chosen=shares) if shares and c.experts else c for c in costs]
    found = on_disk(plan, changed)
    assert found is not None
    return found


def costs_of(model: Model, plan: Plan, cache: Cache):
    from exkv.planning import Workload

    workload = Workload.under(plan, model, [cache])
    return workload.costs(workload.peaks([each.budget for each in plan.ledgers]))


def test_step_reads_what_an_lru_page_cache_misses(folder):
    model = Model(folder)
    cache = Cache(model, max_seq_len=64)
    plan = beside_disk(model, cache)
    costs = costs_of(model, plan, cache)
    taken = model.config.specific.num_experts_per_tok
    predicted = of(plan, costs, (taken / 32,) * 32)
    layers = [i for i, unit in enumerate(model.units) if unit.expert_bytes]
    (size,) = {nbytes for i in layers for nbytes in model.units[i].expert_bytes}
    held, draw = OrderedDict(), random.Random(3)
    room, missed, steps = (plan.ledgers[0].mapped - LEFT) // size, 0, 3000
    for step in range(steps):
        for layer in layers:
            for expert in draw.sample(range(32), taken):
                missed += (step > 500) * ((layer, expert) not in held)
                held[layer, expert] = held.pop((layer, expert), None)
                if len(held) > room:
                    held.popitem(last=False)  # the least recently used one
    assert predicted.read == pytest.approx(missed * size / (steps - 501), rel=0.05)
    assert predicted.seconds == predicted.read / 3e9 and not predicted.assumed


def test_least_chosen_experts_are_on_disk(folder):
    model = Model(folder)
    cache = Cache(model, max_seq_len=64)
    plan = beside_disk(model, cache)
    costs = costs_of(model, plan, cache)
    (size,) = {nbytes for unit in model.units for nbytes in unit.expert_bytes}
    layers = sum(bool(unit.expert_bytes) for unit in model.units)
    cold = LEFT / size / layers  # experts of each layer
    shares = tuple(0.01 if expert < 25 else 0.9 for expert in range(32))
    assert cold < 25 and of(plan, costs, shares).read == pytest.approx(0.01 * LEFT)
    budget = replace(plan.ledgers[0].budget, disk_bandwidth=None)
    unknown = replace(plan, ledgers=(replace(plan.ledgers[0], budget=budget),))
    assert of(unknown, costs).rate == DISK and "assumed 1 GB/s" in of(unknown, costs).sentence(2.0)


def test_a_disk_is_read_ahead_and_measured(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(24 << 20))
    rate = disk.measured_rate(file)
    assert rate is None or 1e6 < rate < 1e12
    assert disk.measured_rate(Path("/proc/self/status")) is None
    with open(file, "rb") as opened:
        memory = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=2)
        tensor = torch.frombuffer(memory, dtype=torch.float32)[1000 : (4 << 20) + 1000]
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_there(tensor) > 0.5:
        pytest.skip("a file system in memory")
    disk.read_ahead([tensor, torch.zeros(100)])
    for _ in range(500):
        if (found := pages_there(tensor)) == 1:
            break
        time.sleep(0.02)
    assert found == 1


def pages_there(tensor: torch.Tensor) -> float:
    """The share of a tensor's pages that is in memory."""
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - first
    flags = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None).mincore
    assert mincore(ctypes.c_void_p(first), ctypes.c_size_t(size), flags) == 0
    return sum(flag & 1 for flag in flags) / len(flags)


def test_report_and_errors_mention_experts_on_disk(folder, capsys):
    model = Model(folder)
    whole = place(model, Cache(model, max_seq_len=64), devices=["cpu"]).ledgers[0].total
    asked = ["plan", str(folder), "--devices", "cpu", "--max-seq-len", "64", "--cap"]
    asked += [str(whole - LEFT), "--disk-bandwidth", "2"]
    assert main([*asked, "--no-disk-experts"]) == 1
    assert "no experts are to be read from disk" in " ".join(capsys.readouterr().out.split())
    assert main(asked) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "12.00 MiB of experts are read from disk as they are chosen: about" in printed
    assert "tokens/s predicted at 2 GB/s." in printed
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["from_disk"][0].startswith("12.00 MiB of experts")
    assert answer["plans"]["model"]["ledgers"][0]["from_disk"] == LEFT
    with pytest.raises(ValueError, match="disk_bandwidth is -1"):
        place(model, devices=["cpu"], disk_bandwidth=-1.0)
