"""Weights that the driver sends: the same tensors, one unit at a time, and no others."""

from __future__ import annotations

import threading

import pytest
import torch
from on_cpu import on_cpu
from packers.gguf import in_types, write_gguf
from tiny import llama, reference, save
from torch import distributed

from exkv import Model, ModelConfig
from exkv.checkpoint import CheckpointError, mount, open_checkpoint, unmount
from exkv.cluster.streaming import StreamedCheckpoint, describe, serving
from exkv.cluster.wire import Wire

IDS = torch.arange(3, 15)[None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model as safetensors, and in a quantized GGUF file with Llama's row order."""
    top = tmp_path_factory.mktemp("models")
    theirs = reference(
        llama(hidden_size=64, intermediate_size=96, architectures=["LlamaForCausalLM"])
    )
    file = top / "model.gguf"
    write_gguf(file, theirs.config, theirs.state_dict(), in_types("Q4_0", "Q8_0"))
    return {"safetensors": save(theirs, top / "folder"), "gguf": file}


@pytest.fixture(scope="module")
def wires():
    """The driver's end and a host's, both in this process."""
    store, made = distributed.HashStore(), {}

    def make(rank: int) -> None:
        made[rank] = Wire(store, rank, 2, "127.0.0.1", 20.0)

    threads = [threading.Thread(target=make, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made[0], made[1]


class Watched(StreamedCheckpoint):
    """Records the most bytes that it held."""

    most = 0

    def tensor(self, name):
        found = super().tensor(name)
        Watched.most = max(Watched.most, sum(each.nbytes for each in self._held.values()))
        return found


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_host_without_a_copy_receives_the_model_unit_by_unit(folders, wires, kind):
    folder, (driver, host) = folders[kind], wires
    elsewhere = folder.parent / "not here" / folder.name
    expected = on_cpu(folder)
    tensors = describe(folder)
    mount(elsewhere, lambda: Watched(elsewhere, tensors, lambda: host))
    Watched.most = 0
    try:
        model = Model(ModelConfig.from_pretrained(folder).replace(path=elsewhere))
        with serving(folder, driver, [1]):
            model.load(devices=["cpu"])
            with open_checkpoint(elsewhere) as streamed, open_checkpoint(folder) as own:
                assert streamed.fingerprint == own.fingerprint
                assert streamed.names() == own.names()
                streamed.expect(model.stored_tensors())
    finally:
        unmount(elsewhere)
    assert torch.equal(model.forward(IDS), expected.forward(IDS))
    sizes = {each.name: each.nbytes for each in tensors}
    units = [sum(sizes[n] for s in u.spec.sources for n in s.stored) for u in model.units]
    assert 0 < Watched.most <= max(units) < sum(units)


def test_tensors_that_differ_from_their_description_are_refused(folders, wires, tmp_path):
    driver, host = wires
    told = describe(folders["safetensors"])
    other = save(reference(llama(hidden_size=64, intermediate_size=96), seed=5), tmp_path / "other")
    name = "model.layers.0.mlp.up_proj.weight"
    with serving(other, driver, [1]):
        with pytest.raises(CheckpointError, match=f"'{name}' is not what it announced"):
            StreamedCheckpoint(other, told, lambda: host).tensor(name)
        with open(other / "model.safetensors", "ab") as file:
            file.write(b"more")
        with pytest.raises(CheckpointError, match=f"can't send '{name}'.*changed"):
            StreamedCheckpoint(other, told, lambda: host).tensor(name)
