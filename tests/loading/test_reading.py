"""From files to devices: every byte arrives, whatever its dtype, and two files are never mixed."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from simproc import run_sim
from tiny import llama, reference, save

from exkv import Cache, CheckpointError, Model, devices
from exkv.checkpoint import Checkpoint
from exkv.weights import read_parameters
from exkv.weights.source import Source, tensor_source

IDS = torch.randint(3, 320, (2, 20), generator=torch.Generator().manual_seed(3))


def saved(folder):
    """Tensors of every dtype, some of several pieces, and none a multiple of a piece."""
    made = torch.Generator().manual_seed(1)
    tensors = {
        "long": torch.randn(3, 1001, generator=made),
        "narrow": torch.randn(777, generator=made).to(torch.bfloat16),
        "half": torch.randn(5, 5, 5, generator=made).to(torch.float16),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(4.5),
    }
    save_file(tensors, folder / "model.safetensors")
    return tensors


def read(folder, device: str, dtype: torch.dtype | None, piece: int) -> dict[str, torch.Tensor]:
    read_parameters.PIECE = piece
    with Checkpoint(folder) as checkpoint:
        shapes = {
            name: torch.empty(checkpoint.info(name).shape, dtype=dtype, device="meta")
            if dtype
            else checkpoint.tensor(name).to("meta")
            for name in checkpoint.names()
        }
        sources = [tensor_source(name, name, like) for name, like in shapes.items()]
        return read_parameters.read_parameters(checkpoint, sources, shapes, torch.device(device))


def wrongly_read(folder, device):
    """Tensors that are read wrongly, in small and large pieces, in stored dtypes and others."""
    from pathlib import Path

    stored, wrong = saved(Path(folder)), []
    before = read_parameters.PIECE
    for piece in (16, 4096, before):
        for dtype in (None, torch.float32, torch.bfloat16):
            for name, found in read(folder, device, dtype, piece).items():
                expected = stored[name].to(dtype or stored[name].dtype)
                same = found.dtype == expected.dtype and found.device.type == device[:3]
                if not (same and torch.equal(found.cpu(), expected)):
                    wrong.append([piece, str(dtype), name])
    read_parameters.PIECE = before
    return wrong


def test_every_byte_arrives_on_the_host(tmp_path):
    assert wrongly_read(str(tmp_path), "cpu") == []


def test_every_byte_arrives_on_an_accelerator(tmp_path):
    assert run_sim(wrongly_read, "8M", args=[str(tmp_path), "sim:0"]) == []


def full_to_the_byte(folder):
    """With no memory left for a conversion on the device, it is made on the host."""
    from pathlib import Path

    from exkv import sim

    stored = saved(Path(folder))
    needed = sum(-(-x.numel() * 2 // 512) * 512 for x in stored.values())
    sim.set_capacity(0, needed)
    found = read(folder, "sim:0", torch.bfloat16, read_parameters.PIECE)
    return [name for name in stored if not torch.equal(found[name].cpu(), stored[name].bfloat16())]


def test_conversion_without_device_memory_runs_on_the_host(tmp_path):
    assert run_sim(full_to_the_byte, "8M", args=[str(tmp_path)]) == []


def test_converted_tensors_arrive_too(tmp_path):
    stored = saved(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        source = Source(
            stored=dict.fromkeys(["long", "one"]),
            parameters=("sum",),
            convert=lambda given: {"sum": given["long"] + given["one"]},
        )
        shapes = {"sum": torch.empty(3, 1001, device="meta")}
        made = read_parameters.read_parameters(checkpoint, [source], shapes, torch.device("cpu"))
    assert torch.equal(made["sum"], stored["long"] + stored["one"])


# What stays in the files -----------------------------------------------------------------------


def lies_in(tensor: torch.Tensor, path) -> bool:
    """Whether a tensor's memory is a mapping of this file."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, *_, name = line.split(maxsplit=5)
        begin, end = (int(bound, 16) for bound in bounds.split("-"))
        if begin <= address < end:
            return name.strip() == str(path)
    return False


on_linux = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="Linux has such tables")


@on_linux
def test_only_unconverted_tensors_stay_mapped(tmp_path):
    saved(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        shapes = {
            "long": torch.empty(3, 1001, device="meta"),
            "half": torch.empty(5, 5, 5, device="meta"),
        }
        sources = [tensor_source(name, name, like) for name, like in shapes.items()]
        made = read_parameters.read_parameters(checkpoint, sources, shapes, torch.device("cpu"))
    file = tmp_path / "model.safetensors"
    assert lies_in(made["long"], file) and not lies_in(made["half"], file)


@on_linux
def test_unaligned_tensor_is_copied(tmp_path):
    """The format allows it, but no kernel reads unaligned floats."""
    values = torch.arange(6, dtype=torch.float32)
    header = {
        "byte": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]},
        "after": {"dtype": "F32", "shape": [6], "data_offsets": [1, 25]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" + values.numpy().tobytes())
    like = torch.empty(6, device="meta")
    with Checkpoint(tmp_path) as checkpoint:
        source = tensor_source("after", "after", like)
        where = torch.device("cpu")
        made = read_parameters.read_parameters(checkpoint, [source], {"after": like}, where)
    assert torch.equal(made["after"], values) and not lies_in(made["after"], file)


def test_writing_to_mapped_weights_changes_no_file(tmp_path):
    save(reference(llama()), tmp_path)
    model, other = Model(tmp_path), Model(tmp_path)
    model.load()
    before = model.forward(IDS[:1])
    with torch.no_grad():
        for weight in model.units[1].module.parameters():
            weight.zero_()
    other.load()
    assert torch.equal(other.forward(IDS[:1]), before)


def test_mapped_weights_count_as_in_use_while_they_live(tmp_path):
    """To the system they are reclaimable pages; a plan must not offer them again."""
    save(reference(llama()), tmp_path)
    model = Model(tmp_path)
    before = devices.mapped_memory()
    model.load()
    held = sum(tensor.nbytes for unit in model.units for tensor in unit.module.parameters())
    assert devices.mapped_memory() - before == held > 0
    memory = devices.memory(torch.device("cpu"))
    assert memory.in_use >= held
    model.unload()
    gc.collect()
    assert devices.mapped_memory() == before


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of pages that can't be read")
def test_unreadable_page_raises_an_error_not_a_signal(tmp_path):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.tensor("long")
        os.truncate(file, 100)
        with pytest.raises(CheckpointError, match=r"model.safetensors: bytes \d+ to \d+ can't be"):
            checkpoint.fetch("long", 8192, 16)


# Files that change ------------------------------------------------------------------------------


def two_models(tmp_path):
    """Folders of two models of one shape."""
    for seed in (1, 2):
        torch.manual_seed(seed)
        save(reference(llama()), tmp_path / str(seed))
    return tmp_path / "1", tmp_path / "2"


def replace_weights(folder, other):
    (other / "model.safetensors").rename(folder / "model.safetensors")


def test_file_replaced_during_a_load_is_an_error_and_nothing_is_loaded(tmp_path):
    folder, other = two_models(tmp_path)
    model = Model(folder)
    cache = Cache(model, 32)

    def meanwhile(index: int, total: int) -> None:
        if index == 2:
            replace_weights(folder, other)

    with pytest.raises(CheckpointError, match="model.safetensors: the file was replaced"):
        model.load_autosplit(cache, devices=["cpu"], callback=meanwhile)
    assert not model.loaded and model.device_map == {}
    model.load_autosplit(cache, devices=["cpu"])  # the other one, whole
    logits = model.forward(IDS[:1], cache)
    again = Model(folder)
    again.load()
    assert torch.equal(again.forward(IDS[:1]), logits)


def test_file_replaced_before_a_lazy_read_is_an_error(tmp_path):
    folder, other = two_models(tmp_path)
    model = Model(folder)
    model.load(lazy=True)
    replace_weights(folder, other)
    with pytest.raises(CheckpointError, match="model.safetensors: the file was replaced"):
        model.forward(IDS)
