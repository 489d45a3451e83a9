"""Experts stacked in one tensor of a layer are used in place in the mapped file if their layout is
the kernels': loading such a model takes memory for its other weights only."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from simproc import run_sim
from tiny import TINY, reference, save

from exkv import Model, devices
from exkv.models.units import expert_of

#: Sizes that make everything but the experts small, for floats and for MXFP4.
LARGE = {"hidden_size": 256, "num_hidden_layers": 2}
FLOATS = {**LARGE, "num_experts": 32, "moe_intermediate_size": 384, "decoder_sparse_step": 1}
PACKED = {**LARGE, "num_local_experts": 32, "intermediate_size": 2048}
IDS = torch.randint(3, 300, (2, 7), generator=torch.Generator().manual_seed(43))
#: Bytes by which a process's memory fluctuates.
NOISE = 8 << 20


def packed(folder: Path) -> Path:
    """A gpt-oss whose experts have random codes."""
    theirs = reference(TINY["GptOssForCausalLM"](**PACKED)).bfloat16()
    theirs.config.quantization_config = {"quant_method": "mxfp4"}
    file = save(theirs, folder) / "model.safetensors"
    tensors, rng = load_file(file), torch.Generator().manual_seed(47)
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=rng)
        scales = torch.randint(115, 121, codes.shape[:-1], generator=rng)
        tensors |= {f"{name}_blocks": codes.byte(), f"{name}_scales": scales.byte()}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def floats(folder: Path) -> Path:
    """A Qwen 3 VL mixture whose layers store their experts in two tensors, outputs first."""
    config = TINY["Qwen3VLMoeForConditionalGeneration"](**FLOATS)
    return save(reference(config).bfloat16(), folder)


MADE = {"floats": (floats, ("w1", "w2", "w3")), "packed": (packed, ("w2",))}


def resident() -> int:
    """Bytes of this process's anonymous memory."""
    gc.collect()
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if "RssAnon" in line)


def opened(folder: str) -> dict:
    """Bytes of a loaded model: planned, in mapped files, and the growth of the process."""
    Model(folder).unload()  # triggers late imports
    model, before = Model(folder), resident()
    model.load(devices=["cpu"])
    found = {"grown": resident() - before, "mapped": devices.mapped_memory()}
    found["sizes"] = {
        f"{unit.index} {name}": tensor.nbytes
        for unit in model.units
        for name, tensor in unit.module.named_parameters()
    }
    found["planned"] = sum(ledger.weights for ledger in model.plan.ledgers)
    return found


@pytest.mark.parametrize("kind", MADE)
def test_stacked_experts_stay_mapped_and_take_no_memory(tmp_path, kind):
    make, matrices = MADE[kind]
    found = run_sim(opened, "", args=[str(make(tmp_path))], fresh=True)
    sizes = found["sizes"]
    mapped = sum(
        nbytes
        for name, nbytes in sizes.items()
        if expert_of(name.split()[1]) is not None
        and name.split(".")[-2] in matrices
        and not name.endswith("bias")
    )
    whole = sum(sizes.values())
    assert whole <= found["planned"] < 1.01 * whole
    assert mapped > 16 << 20 and found["mapped"] >= mapped
    assert found["grown"] < whole - mapped + NOISE


@pytest.mark.parametrize("kind", MADE)
def test_mapped_experts_compute_the_same_as_copies(tmp_path, kind, monkeypatch):
    folder = MADE[kind][0](tmp_path)
    model = Model(folder, dtype="bfloat16")
    model.load(devices=["cpu"])
    logits = model.forward(IDS)
    copies = Model(folder, dtype="bfloat16")
    monkeypatch.setattr("exkv.weights.read_parameters._is_mapped", lambda *_: False)
    copies.load(devices=["cpu"])
    assert torch.equal(copies.forward(IDS), logits)


def test_non_finite_number_is_named_by_its_index_in_the_tensor(tmp_path):
    file = floats(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    name = next(each for each in tensors if each.endswith("down_proj") and "experts" in each)
    count = tensors[name][0].numel()
    tensors[name][5].view(-1)[11] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{name}: number {5 * count + 11} is NaN"):
        Model(tmp_path).load(devices=["cpu"])
