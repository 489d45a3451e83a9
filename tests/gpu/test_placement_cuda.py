"""Placement, caches and logits on one real GPU; ``tests/gpu/check.sh`` runs it and more.

Figures go into pytest's junit file as properties, from where ``report.py`` collects them.
``EXKV_CHECK_DEVICE=sim:0`` runs the same on a simulated device, where only CUDA's own kernels,
caching allocator and libraries are missing.
"""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path

import pytest
import torch
from bench.shapes import Shape, write_checkpoint
from tiny import cast, llama, reference, save
from torch import Tensor

from exkv import Cache, Cache8bit, Model, sim
from exkv.loading.report import LINES
from exkv.ops import REFERENCES, has_kernel

DEVICE = torch.device(os.environ.get("EXKV_CHECK_DEVICE", "cuda:0"))
ON_CUDA = DEVICE.type == "cuda"

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(ON_CUDA and not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MEBI = 1 << 20
#: 340 MiB in fp32. Every tensor is small or a multiple of 2 MiB, the size in which CUDA's
#: caching allocator hands out large blocks, so that its books can be held to the byte.
SIZES = {"vocab": 8192, "hidden": 1024, "intermediate": 3072, "heads": 16, "kv_heads": 4}
#: On the host the same shape would take minutes.
SMALL = {"vocab": 512, "hidden": 256, "intermediate": 768, "heads": 4, "kv_heads": 2}
SHAPE = Shape(layers=6, **(SIZES if ON_CUDA else SMALL))
#: 11.35 MiB an MLP matrix: between two of the allocator's sizes.
ODD_SHAPE = Shape(layers=2, **{**SIZES, "hidden": 960, "intermediate": 3100})
LENGTH, NEW = 90, 32


def prompt(vocab: int, rows: int = 1, length: int = LENGTH) -> Tensor:
    return torch.randint(3, vocab, (rows, length), generator=torch.Generator().manual_seed(1))


def greedy(model: Model, cache: Cache, ids: Tensor, steps: int = NEW) -> list[int]:
    tokens = []
    cache.reset()
    for _ in range(steps):
        ids = model.forward(ids, cache, last_id_only=True)[:, 0].argmax(-1, keepdim=True).cpu()
        tokens.append(ids.item())
    return tokens


def relative_error(ours: Tensor, exact: Tensor) -> float:
    ours, exact = ours.cpu().float(), exact.cpu().float()
    return ((ours - exact).abs().max() / exact.abs().max()).item()


def allocated() -> int:
    """Bytes in live tensors, without what cuBLAS keeps for itself once it has run."""
    gc.collect()
    if ON_CUDA:
        torch._C._cuda_clearCublasWorkspaces()
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_allocated(DEVICE)


@pytest.fixture(autouse=True)
def exact_arithmetic():
    """No TF32, whatever the environment says."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), SHAPE, torch.float32)


class Squeeze:
    """Leaves the device little more memory than it holds, as another program would."""

    def __init__(self) -> None:
        self.before = 0 if ON_CUDA else sum(torch.accelerator.get_memory_info(DEVICE)[1:])

    def leave(self, nbytes: int) -> None:
        if ON_CUDA:
            torch.cuda.empty_cache()
            most = torch.cuda.memory_reserved(DEVICE) + nbytes
            total = torch.cuda.mem_get_info(DEVICE)[1]
            torch.cuda.set_per_process_memory_fraction(most / total, DEVICE)
        else:
            most = torch.accelerator.memory_allocated(DEVICE) + nbytes
            sim.set_capacity(DEVICE.index, most)

    def release(self) -> None:
        if ON_CUDA:
            torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
        else:
            sim.set_capacity(DEVICE.index, self.before)


@pytest.fixture
def squeeze():
    squeeze = Squeeze()
    yield squeeze
    squeeze.release()


# Placement ------------------------------------------------------------------------------------


def load_and_run(folder: Path, **options) -> tuple[list[int], dict[str, torch.device]]:
    """Load over the device with the host as overflow; greedy tokens and where the units are."""
    model = Model(folder, max_input_len=64)
    cache = Cache(model, max_seq_len=256)
    model.load_autosplit(cache, devices=[DEVICE, "cpu"], **options)
    tokens, where = greedy(model, cache, prompt(SHAPE.vocab)), model.device_map
    model.unload()
    return tokens, where


def test_memory_that_vanishes_in_mid_load_sends_the_rest_to_the_host_and_changes_no_token(
    folder, squeeze, caplog, record_property
):
    free = allocated()
    whole, where = load_and_run(folder)
    assert set(where.values()) == {DEVICE}
    assert allocated() == free
    layer = sum(
        torch.Size(size).numel() * 4
        for name, size in SHAPE.tensors().items()
        if name.startswith("model.layers.0.")
    )

    def take_memory(index: int, total: int) -> None:
        if index == 3:
            squeeze.leave(layer * 3 // 2)

    with caplog.at_level(logging.WARNING, logger="exkv.loading.loader"):
        tokens, where = load_and_run(folder, callback=take_memory)
    squeeze.release()
    record_property("units_on_device_after_oom", sum(d == DEVICE for d in where.values()))
    assert "was rolled back" in caplog.text, "no real out-of-memory error was met"
    devices = list(where.values())
    on_host = devices.index(torch.device("cpu"))
    assert on_host >= 3
    assert devices == [DEVICE] * on_host + [torch.device("cpu")] * (len(devices) - on_host)
    assert tokens == whole
    assert allocated() == free


def measured(folder: Path, kind: type[Cache], dtype: torch.dtype):
    """The device's line of the report of one load, after the libraries have set themselves up."""
    for _ in range(2 if ON_CUDA else 1):
        model = Model(folder, max_input_len=128, dtype=dtype)
        cache = kind(model, max_seq_len=512, batch_size=2)
        model.load_autosplit(cache, devices=[DEVICE])
        (line,) = model.report.devices
        reserved = torch.accelerator.memory_reserved(DEVICE)
        model.unload()
    return line, reserved


@pytest.mark.parametrize("kind", [Cache, Cache8bit])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_was_predicted_is_what_is_measured(folder, kind, dtype, record_property):
    line, reserved = measured(folder, kind, dtype)
    ratio = line.measured["workspace"] / line.ledger.workspace
    for name in LINES:
        record_property(f"predicted_{name}", getattr(line.ledger, name))
        record_property(f"measured_{name}", line.measured[name])
    record_property("workspace_ratio", round(ratio, 4))
    record_property("reserved_by_allocator", reserved)
    for name in ("weights", "cache", "logits"):
        assert line.measured[name] == getattr(line.ledger, name)
    # cuBLAS may choose to need a workspace of its own (32 MiB on Hopper); the margin that
    # a plan leaves on GPUs is for that. Attention may not take more than was promised.
    slack = 32 * MEBI if ON_CUDA else 0
    assert line.measured["workspace"] <= 1.5 * line.ledger.workspace + slack


def test_the_margin_covers_what_no_arithmetic_sees(folder, record_property):
    """What the device loses in a load and a call beyond the plan's lines: library workspaces,
    kernels that the driver loads late, the allocator's rounding. It calibrates the margin."""
    allocated()  # hands back what is idle
    before, _ = torch.accelerator.get_memory_info(DEVICE)
    model = Model(folder, max_input_len=128)
    cache = Cache(model, max_seq_len=512, batch_size=2)
    model.load_autosplit(cache, devices=[DEVICE])
    kept = model.forward(prompt(SHAPE.vocab, rows=2, length=512), cache)
    after, _ = torch.accelerator.get_memory_info(DEVICE)
    (ledger,) = model.plan.ledgers
    beyond = before - after - ledger.total
    record_property("beyond_the_plan", beyond)
    record_property("margin", ledger.budget.margin)
    assert beyond <= ledger.budget.margin
    del kept


@pytest.mark.skipif(not ON_CUDA, reason="only CUDA's caching allocator rounds like this")
def test_tensors_between_the_allocators_sizes_take_at_most_one_mebibyte_more(
    tmp_path, record_property
):
    """A block of the large pool is split only if more than 1 MiB would be left over."""
    folder = write_checkpoint(tmp_path / "odd", ODD_SHAPE, torch.float32)
    line, _ = measured(folder, Cache, torch.float32)
    large = [n for n in map(nbytes_of, ODD_SHAPE.tensors().values()) if n > MEBI]
    record_property("predicted_weights", line.ledger.weights)
    record_property("measured_weights", line.measured["weights"])
    assert (
        line.ledger.weights <= line.measured["weights"] <= line.ledger.weights + MEBI * len(large)
    )


def nbytes_of(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * 4


@pytest.mark.parametrize("embed_cpu", [False, True])
def test_hidden_states_cross_between_device_and_host(folder, embed_cpu):
    """Half of the model on the device by hand, and the embedding on the host if asked."""
    ids = prompt(SHAPE.vocab)
    whole = Model(folder, max_input_len=64)
    whole.load(devices=["cpu"])
    exact = whole.forward(ids, Cache(whole, max_seq_len=256))
    half = sum(map(nbytes_of, SHAPE.tensors().values())) / 2
    split = Model(folder, max_input_len=64, embed_cpu=embed_cpu)
    cache = Cache(split, max_seq_len=256)
    split.load([half / (1 << 30), 1], devices=[DEVICE, "cpu"])
    assert set(split.cache_map.values()) == {DEVICE, torch.device("cpu")}
    assert (split.units[0].device == torch.device("cpu")) == embed_cpu
    assert relative_error(split.forward(ids, cache), exact) < 1e-4
    assert greedy(split, cache, ids) == greedy(whole, Cache(whole, max_seq_len=256), ids)


# Logits ---------------------------------------------------------------------------------------


def on_device(folder: Path, **options) -> Model:
    model = Model(folder, **options)
    model.load(devices=[DEVICE])
    return model


def their_logits(theirs, ids: Tensor) -> Tensor:
    """transformers' own, on the GPU; where the device is simulated, on the host."""
    place = DEVICE if ON_CUDA else torch.device("cpu")
    with torch.no_grad():
        return theirs.to(place)(ids.to(place)).logits.cpu()


@pytest.mark.parametrize("rope", ["default", "llama3", "yarn"])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_fp32_logits_are_transformers_own(tmp_path, rope, kv_heads, record_property):
    theirs = reference(llama(rope, num_key_value_heads=kv_heads))
    ours = on_device(save(theirs, tmp_path), max_input_len=32)
    ids = prompt(320, rows=2)
    error = relative_error(ours.forward(ids, Cache(ours, batch_size=2)), their_logits(theirs, ids))
    record_property("relative_error", error)
    assert error < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_near_to_fp32_as_transformers_is(tmp_path, dtype, record_property):
    """The plain low-precision path sets the tolerance: twice its own error."""
    theirs = reference(llama("llama3"), dtype)
    ours = on_device(save(theirs, tmp_path))
    ids = prompt(320)
    plain = their_logits(theirs, ids)
    exact = their_logits(cast(theirs, torch.float32), ids)
    error, allowed = (
        relative_error(ours.forward(ids, Cache(ours)), exact),
        2 * relative_error(plain, exact),
    )
    record_property("relative_error", error)
    record_property("twice_transformers_error", allowed)
    assert error <= allowed


@pytest.mark.parametrize("seed", range(3))
def test_bf16_greedy_tokens_are_transformers_best_or_tied_with_it(tmp_path, seed):
    theirs = reference(llama(), torch.bfloat16, seed)
    ours = on_device(save(theirs, tmp_path))
    tokens = greedy(ours, Cache(ours), prompt(320), 64)
    text = torch.cat((prompt(320), torch.tensor([tokens])), dim=1)
    logits = their_logits(theirs, text)[0, LENGTH - 1 : -1].float()
    best, chosen = logits.max(-1).values, logits[torch.arange(64), tokens]
    assert ((best - chosen) / best.abs()).max().item() <= 2 * torch.finfo(torch.bfloat16).eps


# The 8-bit cache ------------------------------------------------------------------------------


def eight_bit_error(model: Model, ids: Tensor) -> float:
    """What 8 bits change in the logits, on the model's device."""
    eight = model.forward(ids, Cache8bit(model, batch_size=2))
    return relative_error(eight, model.forward(ids, Cache(model, batch_size=2)))


def test_eight_bits_cost_on_the_device_what_they_cost_on_the_host(tmp_path, record_property):
    """The host's reference sets the tolerance: twice its own error."""
    folder, ids = save(reference(llama()), tmp_path), prompt(320, rows=2)
    host = Model(folder)
    host.load(devices=["cpu"])
    on_host, there = eight_bit_error(host, ids), eight_bit_error(on_device(folder), ids)
    record_property("relative_error", there)
    record_property("relative_error_on_the_host", on_host)
    assert 0 < there <= 2 * on_host


@pytest.mark.skipif(not ON_CUDA, reason="the simulated device has no kernels of its own")
@pytest.mark.parametrize(
    "op",
    [
        *("quantize_kv", "dequantize_kv", "attention", "attention_int8", "attention_part"),
        "append_kv",
        *("rms_norm", "add_rms_norm", "silu_mul_", "gelu_mul_"),
    ],
)
def test_the_cuda_kernels_are_built(op):
    assert has_kernel(op, "cuda")


def values(dtype: torch.dtype, head_dim: int) -> Tensor:
    """Ordinary values, zero groups, and magnitudes at which a scale over- or underflows."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(3, 5, 2, head_dim, generator=generator)
    magnitudes = torch.tensor([1.0, 0.0, 1e-7, 6e4, 30.0]).view(1, 5, 1, 1)
    return (x * magnitudes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 100, 128])
def test_quantizing_gives_the_references_bits(dtype, head_dim):
    x = values(dtype, head_dim)
    q, scale = torch.ops.exkv.quantize_kv(x.to(DEVICE))
    expected_q, expected_scale = REFERENCES["quantize_kv"](x)
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(q.cpu(), expected_q)
    back = torch.ops.exkv.dequantize_kv(q, scale, dtype)
    assert torch.equal(back.cpu(), REFERENCES["dequantize_kv"](expected_q, expected_scale, dtype))
