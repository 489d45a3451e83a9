"""From files to devices: every byte arrives, whatever it is stored as, and no file is mixed."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from simproc import run_sim
from tiny import llama, reference, save

from exkv import Cache, CheckpointError, Model
from exkv.checkpoint import Checkpoint
from exkv.weights import reading
from exkv.weights.source import Source, tensor_source

IDS = torch.randint(3, 320, (2, 20), generator=torch.Generator().manual_seed(3))


def saved(folder):
    """Tensors of every dtype, some of several pieces and none a multiple of one."""
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
    reading.PIECE = piece
    with Checkpoint(folder) as checkpoint:
        shapes = {
            name: torch.empty(checkpoint.info(name).shape, dtype=dtype, device="meta")
            if dtype
            else checkpoint.tensor(name).to("meta")
            for name in checkpoint.names()
        }
        sources = [tensor_source(name, name, like) for name, like in shapes.items()]
        return reading.read_parameters(checkpoint, sources, shapes, torch.device(device))


def all_that_differs(folder, device):
    """Pieces of few bytes and of many; stored dtypes and others."""
    from pathlib import Path

    stored, wrong = saved(Path(folder)), []
    before = reading.PIECE
    for piece in (16, 4096, before):
        for dtype in (None, torch.float32, torch.bfloat16):
            for name, found in read(folder, device, dtype, piece).items():
                expected = stored[name].to(dtype or stored[name].dtype)
                same = found.dtype == expected.dtype and found.device.type == device[:3]
                if not (same and torch.equal(found.cpu(), expected)):
                    wrong.append([piece, str(dtype), name])
    reading.PIECE = before
    return wrong


def test_every_byte_arrives_on_the_host(tmp_path):
    assert all_that_differs(str(tmp_path), "cpu") == []


def test_every_byte_arrives_on_an_accelerator(tmp_path):
    assert run_sim(all_that_differs, "8M", args=[str(tmp_path), "sim:0"]) == []


def full_to_the_byte(folder):
    """No byte is left for a conversion on the device: it is made on the host."""
    from pathlib import Path

    from exkv import sim

    stored = saved(Path(folder))
    needed = sum(-(-x.numel() * 2 // 512) * 512 for x in stored.values())
    sim.set_capacity(0, needed)
    found = read(folder, "sim:0", torch.bfloat16, reading.PIECE)
    return [name for name in stored if not torch.equal(found[name].cpu(), stored[name].bfloat16())]


def test_a_conversion_takes_no_memory_that_is_not_there(tmp_path):
    assert run_sim(full_to_the_byte, "8M", args=[str(tmp_path)]) == []


def test_what_a_format_makes_of_stored_tensors_arrives_too(tmp_path):
    stored = saved(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        source = Source(
            stored=dict.fromkeys(["long", "one"]),
            parameters=("sum",),
            convert=lambda given: {"sum": given["long"] + given["one"]},
        )
        shapes = {"sum": torch.empty(3, 1001, device="meta")}
        made = reading.read_parameters(checkpoint, [source], shapes, torch.device("cpu"))
    assert torch.equal(made["sum"], stored["long"] + stored["one"])


# Files that change ------------------------------------------------------------------------------


def two_models(tmp_path):
    """Folders of two models of one shape."""
    for seed in (1, 2):
        torch.manual_seed(seed)
        save(reference(llama()), tmp_path / str(seed))
    return tmp_path / "1", tmp_path / "2"


def replace_weights(folder, other):
    (other / "model.safetensors").rename(folder / "model.safetensors")


def test_a_file_that_is_replaced_during_a_load_is_told_and_nothing_is_loaded(tmp_path):
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


def test_a_file_that_is_replaced_between_placing_and_a_lazy_read_is_told(tmp_path):
    folder, other = two_models(tmp_path)
    model = Model(folder)
    model.load(lazy=True)
    replace_weights(folder, other)
    with pytest.raises(CheckpointError, match="model.safetensors: the file was replaced"):
        model.forward(IDS)
