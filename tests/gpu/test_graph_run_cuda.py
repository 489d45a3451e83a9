"""Captured decode steps on a real GPU, held against the readable way there: logits, tokens, memory.
What needs no GPU of it is tested in tests/models/test_graph_run.py."""

from __future__ import annotations

import pytest
import tiny
import torch
from native import ops_of
from runs import Readable

from exkv import CACHES, Model
from exkv.models.graph_run import GraphRun

pytestmark = pytest.mark.cuda

#: Kinds of cache that a graph reads and writes.
KINDS = ("fp16", "dynamic", "hybrid", "8bit", "4bit", "2bit", "sliding_window", "paged")
#: Architectures whose steps ask the host which experts are chosen: these have biases.
ASKING = {"GptOssForCausalLM"}
IDS = torch.randint(3, 320, (2, 60), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _kernels():
    ops_of("cuda")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: tiny.save(tiny.reference(tiny.TINY[name]()), tmp_path_factory.mktemp(name))
        for name in tiny.IN_ALL_WAYS
    }


def loaded(folder, dtype: torch.dtype) -> Model:
    model = Model(folder, dtype=dtype)
    model.load(devices=["cuda:0"])
    return model


def decoded(model: Model, cache) -> torch.Tensor:
    """Logits of thirty steps of two rows of unlike length, beyond their windows."""
    model.forward(IDS[:, :20], cache, new_lens=[20, 13])
    steps = [model.forward(IDS[:, at : at + 1], cache, last_id_only=True) for at in range(20, 50)]
    return torch.cat(steps, 1).cpu()


@pytest.fixture
def replays(monkeypatch):
    """How many units each call of a run went through."""
    counts: list[int] = []
    call = GraphRun.__call__

    def counted(self, *args):
        counts.append(self.count)
        return call(self, *args)

    monkeypatch.setattr(GraphRun, "__call__", counted)
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replays_give_the_readable_ways_logits(folders, dtype, replays):
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    for name, folder in folders.items():
        model = loaded(folder, dtype)
        for kind in KINDS:
            replays.clear()
            found = decoded(model, CACHES[kind](model, 96, 2))
            assert replays == ([] if name in ASKING else [len(model.units)] * 30), (name, kind)
            with Readable():
                expected = decoded(model, CACHES[kind](model, 96, 2))
            worst = (found - expected).abs().max() / expected.abs().max()
            assert worst < tolerance, (folder, kind)
        model.unload()


def test_a_graph_is_captured_and_not_only_run_anew(folders):
    model = loaded(folders["LlamaForCausalLM"], torch.bfloat16)
    cache = CACHES["fp16"](model, 96)
    for at in range(3):
        model.forward(IDS[:1, at : at + 1], cache, last_id_only=True)
    (run,) = model._runs._bound[cache].values()
    assert len(run._recordings) == 1 and not run._refused
    with torch.profiler.profile() as profile:
        model.forward(IDS[:1, 3:4], cache, last_id_only=True)
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert "cudaGraphLaunch" in names and "aten::mm" not in names


def test_generated_tokens_are_the_hosts(folders):
    texts = {}
    for device in ("cpu", "cuda:0"):
        model = Model(folders["Gemma3ForCausalLM"], dtype=torch.float32)
        cache = CACHES["fp16"](model, 96, 2)
        model.load_autosplit(cache, devices=[device])
        texts[device] = model.generate(IDS[:, :12], cache=cache, max_new_tokens=40).tolist()
        model.unload()
    assert texts["cuda:0"] == texts["cpu"]


def test_unloading_gives_the_graphs_memory_back(folders):
    def allocated() -> int:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def use() -> None:
        model = loaded(folders["LlamaForCausalLM"], torch.bfloat16)
        decoded(model, CACHES["fp16"](model, 96, 2))
        model.unload()

    use()
    before = allocated()
    for _ in range(3):
        use()
    assert allocated() <= before
