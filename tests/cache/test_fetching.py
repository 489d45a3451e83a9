"""A cache in host memory: what is copied, in which pieces, and that computation doesn't wait for
it."""

from __future__ import annotations

import pytest
import torch
from simproc import run_sim
from tiny import llama, reference, save
from torch.utils._python_dispatch import TorchDispatchMode

from exkv import KVCache, Model, sim
from exkv.batch import Lengths
from exkv.cache import OnHost, Sinks, Storage, Window
from exkv.cache.fetching import Prefetch, WriteBack

IDS = torch.randint(3, 320, (3, 60), generator=torch.Generator().manual_seed(4))
MAKES = {
    "float": {},
    "kivi": {"storage": Storage(keys="int4c", values="int4", recent=32)},
    "8bit window": {"storage": Storage(keys="int8", values="int8"), "retention": Window(20)},
    "sinks": {"retention": Sinks(16, 3)},
}


class Copies(TorchDispatchMode):
    """Copies between devices while it is on: whether both ends are in one piece, and if they
    block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            to, source = (
                (args[0], args[1]) if func is torch.ops.aten.copy_.default else (out, args[0])
            )
            if to.device != source.device:
                waits = not (kwargs or {}).get("non_blocking", args[2:] == (True,))
                whole = to.is_contiguous() and source.is_contiguous()
                self.seen.append((f"{source.device.type} to {to.device.type}", whole, waits))
        return out


def ragged_calls(model, cache):
    logits = []
    for new in ([21, 2, 0], [1, 1, 1], [2, 30, 1], [1, 0, 1], [7, 7, 9], [1, 1, 1]):
        out = model.forward(IDS[:, : max(new)], cache, new_lens=new, last_id_only=True)
        logits += [out[row].cpu() for row, count in enumerate(new) if count]
    return torch.cat(logits)


def host_and_device(folder, make):
    """Logits with both residences, copies of whole keys and values, and the storage afterwards."""
    model = Model(folder, max_input_len=32)
    caches = [KVCache(model, 64, 3, residence=residence, **MAKES[make])
              for residence in (OnHost(), KVCache(model, 4).layers[0].spec.residence)]  # fmt: skip
    model.load_autosplit(caches[0])
    away, here = (ragged_calls(model, cache) for cache in caches)
    same = []
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        for name, tensor in one.tensors.items():
            used = one.spec.arrangement.slots(name, 0, min(caches[0].seq_lens))
            same.append(torch.equal(tensor[:, used], other.tensors[name][:, used].cpu()))
    copies = Copies()
    with copies:
        model.forward(IDS[:, :1], caches[0])
    sim.reset_transfer_bytes()
    model.forward(IDS[:, :1], caches[0])
    return [
        (away - here).abs().max().item(),
        all(same),
        copies.seen,
        sim.transfer_bytes()["cpu", "sim:0"],
    ]


@pytest.mark.parametrize("make", MAKES)
def test_prefetch_and_write_back_round_trip_without_synchronization(tmp_path, make):
    folder = str(save(reference(llama(num_hidden_layers=2)), tmp_path / "model"))
    difference, same, copies, _ = run_sim(host_and_device, "64M", args=[folder, make])
    assert difference == 0 and same
    for way in ("cpu to sim", "sim to cpu"):
        kept = [seen for seen in copies if seen[0] == way and not seen[2]]
        assert len(kept) >= 2 * 2 and all(whole for _, whole, _ in kept)


def test_only_stored_tokens_are_copied(tmp_path):
    folder = str(save(reference(llama(num_hidden_layers=2)), tmp_path / "model"))
    *_, sent = run_sim(host_and_device, "64M", args=[folder, "float"])
    tokens = [21 + 1 + 2 + 1 + 7 + 1 + 1, 2 + 1 + 30 + 0 + 7 + 1 + 1, 0 + 1 + 1 + 1 + 9 + 1 + 1]
    kept = sum(tokens) * 2 * 32 * 4 * 2 * 2  # 2 heads of 32 floats, keys and values, 2 layers
    assert kept <= sent < kept + 2000  # ids, lengths and rotary factors besides


def test_pending_write_backs_finish_on_access():
    """As on a device, whose copies finish later."""
    finished = []
    back = WriteBack({"k": torch.ones(1, 1, 2, 4)}, Lengths.uniform(1, 0, 1), torch.device("cpu"))
    back._copies.synchronize = lambda: finished.append(True)
    assert not finished
    back.arrive()
    assert finished


def test_slots_after_a_rows_tokens_are_zero():
    class Stored:
        @staticmethod
        def slots(name, first, last):
            return slice(first, last)

    stored = {"k": torch.full((2, 9, 1, 2), torch.nan)}
    stored["k"][0, :5], stored["k"][1, :2] = 1, 2
    lengths = Lengths(past=(5, 2), new=(1, 3))
    here = Prefetch.start(stored, Stored, torch.device("cpu"), lengths).arrive()["k"]
    assert here.shape == (2, 6, 1, 2)
    assert here[..., 0, 0].tolist() == [[1, 1, 1, 1, 1, 0], [2, 2, 0, 0, 0, 0]]


# Streams that lag ------------------------------------------------------------------------------


class NoCopies:
    """An event whose ``wait`` returns at once."""

    def wait(self) -> None:
        pass


def with_streams_that_lag(folder, make, broken):
    """How far the logits are from those of a cache on the device, how many copies lost their
    memory, and the most buffers that a call's layers had."""
    model = Model(folder, max_input_len=32)
    caches = [
        KVCache(model, 64, 3, residence=residence, **MAKES[make])
        for residence in (OnHost(), KVCache(model, 4).layers[0].spec.residence)
    ]
    model.load_autosplit(caches[0])
    sim.let_streams_lag()
    start, buffers, most = Prefetch.start, set(), []

    def noting(*args, memory=None, **options):
        prefetch = start(*args, memory=None if broken == "freed early" else memory, **options)
        buffers.add(prefetch.memory.data_ptr())
        if broken == "freed early":
            prefetch._here = {name: torch.zeros_like(x) for name, x in prefetch._here.items()}
            prefetch.memory = prefetch.memory[:0].clone()
        return prefetch

    Prefetch.start = noting
    if broken == "not waited for":
        Prefetch._copies = property(lambda self: NoCopies(), lambda self, copies: None)
    forward = model.forward_chunk

    def counting(*args, **options):
        buffers.clear()
        out = forward(*args, **options)
        most.append(len(buffers))
        return out

    model.forward_chunk = counting
    away, here = (ragged_calls(model, cache) for cache in caches)
    return (away - here).abs().max().item(), sim.lifetime_errors(), max(most)


@pytest.mark.parametrize("make", MAKES)
def test_late_copies_alternate_between_two_buffers(tmp_path, make):
    folder = str(save(reference(llama(num_hidden_layers=5)), tmp_path / "model"))
    difference, lost, buffers = run_sim(with_streams_that_lag, "64M", args=[folder, make, ""])
    assert (difference, lost, buffers) == (0, 0, 2)


@pytest.mark.parametrize("broken", ["not waited for", "freed early"])
def test_lagging_streams_reveal_early_reads_and_frees(tmp_path, broken):
    folder = str(save(reference(llama(num_hidden_layers=3)), tmp_path / "model"))
    difference, lost, _ = run_sim(with_streams_that_lag, "64M", args=[folder, "float", broken])
    assert difference > 0
    assert (lost > 0) == (broken == "freed early")


def left_to_a_stream(recorded):
    """A copy that is waited for, and one whose source is freed before."""
    sim.let_streams_lag()
    device, host = torch.device("sim:0"), torch.ones(4)
    here, stream = torch.zeros(4, device=device), torch.Stream(device)
    with stream:
        here.copy_(host, non_blocking=True)
        copied = stream.record_event()
    seen = [here.tolist()]
    torch.accelerator.current_stream(device).wait_event(copied)
    seen.append(here.tolist())
    with stream:
        lost = torch.zeros(4, device=device)
        lost.copy_(host, non_blocking=True)
    if recorded:
        lost.record_stream(stream)
    del lost
    return seen, sim.lifetime_errors()


@pytest.mark.parametrize("recorded", [True, False])
def test_lagging_stream_copies_when_waited_for(recorded):
    seen, lost = run_sim(left_to_a_stream, "64M", args=[recorded])
    assert seen == [[0.0] * 4, [1.0] * 4]
    assert lost == (0 if recorded else 1)
