"""The contract of every kind of cache, run over the table of kinds."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace

import cases
import pytest
import torch
from safetensors.torch import save_file
from tiny import llama, loaded, reference, save
from torch import Tensor

from exkv import Cache, Cache8bit, KVCache, Model
from exkv.cache import Dynamic, OnHost, Sinks, Storage, Window

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return loaded(llama(), tmp_path_factory.mktemp("model"), max_input_len=16)


def combined(**properties) -> type[KVCache]:
    """A combination of properties without a name in the table."""

    class Combined(KVCache):
        @classmethod
        def compose(cls, spec, config, layer):
            return replace(spec, **properties)

    return Combined


FOUR = Storage(keys="int4", values="int4", rotate=True)
BY_CHANNEL = Storage(keys="int4c", values="int4", recent=32)
KINDS = cases.KINDS | {
    "4bit-sinks-host-dynamic": combined(
        storage=FOUR, retention=Sinks(24, 3), residence=OnHost(), growth=Dynamic(16)
    ),
    "8bit-window-device-static": combined(
        storage=Storage(keys="int8", values="int8"), retention=Window(20)
    ),
    "kivi-window-device-dynamic": combined(
        storage=BY_CHANNEL, retention=Window(40), growth=Dynamic(8)
    ),
    "kivi-sinks-host-static": combined(
        storage=BY_CHANNEL, retention=Sinks(36, 4), residence=OnHost()
    ),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def ids(length: int, rows: int = 1) -> Tensor:
    return torch.randint(3, 320, (rows, length), generator=torch.Generator().manual_seed(2))


def assert_near(logits: Tensor, expected: Tensor) -> None:
    """Equal up to the order of summation, which in 8 bits may flip a value's last bit."""
    assert (logits - expected).abs().max() <= 2e-4 * expected.abs().max()


def test_prompts_may_be_split_into_any_calls(model, kind):
    whole = model.forward(ids(12), kind(model, 32))
    for cut in ([8, 4], [1] * 12, [5, 1, 6]):
        cache = kind(model, 32)
        parts = [model.forward(part, cache) for part in ids(12).split(cut, dim=1)]
        assert_near(torch.cat(parts, dim=1), whole)
        assert cache.current_seq_len == 12


def test_trim_and_crop_drop_only_the_end(model, kind):
    cache = kind(model, 32)
    model.forward(ids(10), cache)
    expected = model.forward(ids(12)[:, 10:], cache)
    cache.trim(7)
    assert cache.seq_lens == [5]
    model.forward(ids(10)[:, 5:], cache)
    assert_near(model.forward(ids(12)[:, 10:], cache), expected)
    cache.crop(10)
    assert_near(model.forward(ids(12)[:, 10:], cache), expected)
    cache.current_seq_len = 3
    assert cache.sequences == [ids(10)[0, :3].tolist()]
    cache.trim(99)
    assert cache.current_seq_len == 0


def test_reset_drops_everything(model, kind):
    cache = kind(model, 32)
    expected = model.forward(ids(9), cache)
    cache.reset()
    assert torch.equal(model.forward(ids(9), cache), expected)


def test_clone_is_independent(model, kind):
    cache = kind(model, 32)
    model.forward(ids(9), cache)
    other = cache.clone()
    token = torch.tensor([[7]])
    expected = model.forward(token, cache)
    model.forward(ids(5), cache)
    assert other.seq_lens == [9]
    assert torch.equal(model.forward(token, other), expected)


def filled(model, kind, rows: int = 3, lengths=(9, 4, 7), capacity: int = 4):
    """A cache whose rows share a prefix and then differ."""
    cache = kind(model, 40, capacity)
    tokens = torch.cat((ids(3).expand(rows, 3), ids(6, rows)), dim=1)
    model.forward(tokens, cache, new_lens=lengths)
    return cache


def answers(model, cache, rows: int) -> Tensor:
    """Each row's logits for a next token; the cache is restored afterwards."""
    before = cache.seq_lens
    logits = model.forward(torch.full((rows, 1), 7), cache)
    cache.crop(before)
    return logits


@pytest.mark.parametrize(
    "rows", [[2, 0, 1], [1, 1, 1], [0, 1, 2], [2], [0, 0, 2, 2], [3, 1], []], ids=str
)
def test_reorder_permutes_rows(model, kind, rows):
    cache = filled(model, kind)
    before, sequences = answers(model, cache, 4), [list(row) for row in cache.sequences]
    cache.reorder(torch.tensor(rows, dtype=torch.int64))
    assert cache.sequences == [sequences[row] for row in rows] + [[]] * (4 - len(rows))
    if rows:
        assert_near(answers(model, cache, len(rows)), before[rows])


def test_common_prefixes_are_not_moved(model, kind):
    """A mark written into the first row's prefix appears in no other row."""
    cache = filled(model, kind)
    marked = []
    for layer in cache.layers:
        slots = layer.spec.arrangement.slots
        holding = [(t, slots(name, 0, 3)) for name, t in layer.tensors.items()]
        # Of a group that isn't complete yet, its tensors hold nothing.
        marked += (held := [(t, part) for t, part in holding if part.stop])
        assert held and all(part == slice(0, 3) for _, part in held)
        assert len(held) == len(holding) or layer.spec.storage.recent
    for tensor, part in marked:
        tensor[2, part] = 0
    cache.reorder([2, 0, 1])
    for tensor, part in marked:
        assert (tensor[2, part] == 0).all() and (tensor[0, part] != 0).any()


def test_select_and_repeat_interleave(model, kind):
    cache = filled(model, kind)
    expected = answers(model, cache, 3)
    cache.select([2, 0])
    assert cache.seq_lens == [7, 9, 0, 0]
    assert_near(answers(model, cache, 2), expected[[2, 0]])
    cache.repeat_interleave(2)
    assert cache.seq_lens == [7, 7, 9, 9]
    assert_near(answers(model, cache, 4), expected[[2, 2, 0, 0]])
    cache.select([0])
    cache.repeat_interleave(3, rows=1)
    assert cache.seq_lens == [7, 7, 7, 0]
    with pytest.raises(ValueError, match="6 rows, but the cache was built for 4"):
        cache.repeat_interleave(2)
    with pytest.raises(ValueError, match="repeats is 0"):
        cache.repeat_interleave(0)
    with pytest.raises(ValueError, match="no row 4: the cache has 4"):
        cache.reorder([4])
    with pytest.raises(ValueError, match="no row -1"):
        cache.reorder([-1])


def test_a_deep_copy_is_a_clone(model, kind):
    cache = filled(model, kind)
    expected = answers(model, cache, 3)
    other = copy.deepcopy(cache)
    cache.reset()
    model.forward(ids(9), cache)
    assert other.model is model
    assert torch.equal(answers(model, other, 3), expected)


# Files ----------------------------------------------------------------------------------------


def test_save_and_load_into_another_size(model, kind, tmp_path):
    cache = filled(model, kind)
    expected = answers(model, cache, 3)
    cache.save(tmp_path / "cache.safetensors")
    other = kind(model, 12, 3)
    model.forward(ids(5), other)
    other.load(tmp_path / "cache.safetensors")
    assert other.sequences == cache.sequences[:3]
    assert_near(answers(model, other, 3), expected)
    used = 3 * sum(layer.spec.nbytes(9) for layer in cache.layers) / cache.batch_size
    assert (tmp_path / "cache.safetensors").stat().st_size < used + 8192


def test_an_empty_cache_can_be_saved_too(model, kind, tmp_path):
    kind(model, 16).save(tmp_path / "empty")
    cache = kind(model, 16)
    model.forward(ids(5), cache)
    cache.load(tmp_path / "empty")
    assert cache.seq_lens == [0]


def test_foreign_files_are_refused_without_change(model, kind, tmp_path, monkeypatch):
    file = tmp_path / "cache"
    filled(model, kind).save(file)
    good = file.read_bytes()
    cache = kind(model, 40, 4)
    model.forward(ids(5), cache)
    expected = answers(model, cache, 1)

    def refused(match: str, error: type[Exception] = ValueError, into=cache) -> None:
        with pytest.raises(error, match=match):
            into.load(file)
        assert cache.sequences[0] == ids(5)[0].tolist()
        assert torch.equal(answers(model, cache, 1), expected)

    refused("9 tokens, and this cache has room for 4 of 8", into=kind(model, 8, 4))
    refused("3 rows of up to 9.*room for 2 of 40", into=kind(model, 40, 2))
    mine = str(cache.layers[0].spec.storage)
    other = Cache if mine != "float keys and float values" else Cache8bit
    refused(f"its layer 0 has {mine}.*and this cache's", into=other(model, 40, 4))
    if kind is Cache:
        wide = Cache(model, 40, 4, dtype=torch.bfloat16)
        refused("float32.*stores torch.bfloat16.*another dtype", into=wide)
    file.write_bytes(good[: len(good) // 2])
    refused("cache: .*")
    save_file({"a": torch.zeros(3)}, file)
    refused("not a cache saved by exkv")
    monkeypatch.setattr("exkv.cache.file.check_checksum", lambda file: None)
    file.write_bytes(good.replace(b'"layers"', b'"lawyer"'))
    refused("it has 0 layers, and this cache has 4")
    first = str(ids(3)[0].tolist()[0]).encode()
    file.write_bytes(good.replace(b"[[" + first, b"[[" + b"9" * len(first), 1))
    refused("numbers below 320")
    file.unlink()
    refused("does not exist", FileNotFoundError)


def test_bytes_are_those_of_the_shapes(model):
    rows = 3 * 256 * 2 * 4  # batch, tokens, key and value, layers
    float_bytes = rows * 2 * 32 * 4
    int8_bytes = rows * 2 * (32 + 2)
    assert Cache(model, 256, 3).nbytes() == {CPU: float_bytes}
    assert Cache8bit(model, 256, 3).nbytes() == {CPU: int8_bytes}
    assert Cache(model, 256, 3, dtype=torch.bfloat16).nbytes() == {CPU: float_bytes // 2}


def test_narrower_dtype_is_close(model):
    exact = model.forward(ids(12), Cache(model, 32))
    narrow = model.forward(ids(12), Cache(model, 32, dtype=torch.bfloat16))
    assert narrow.dtype == exact.dtype
    assert 0 < (narrow - exact).abs().max() / exact.abs().max() < 0.02


def test_8_bits_are_close_without_a_full_copy(model):
    """The largest tensor that attention makes is far smaller than the cache as floats."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return out

    from exkv.ops import REFERENCES

    heads, length = 2, 8192
    k = torch.randn(1, length, heads, 32)
    v = torch.randn(1, length, heads, 32)
    q = torch.randn(1, 1, 8, 32)
    past = torch.tensor([length - 1], dtype=torch.int32)
    stored = [*torch.ops.exkv.quantize_kv(k), *torch.ops.exkv.quantize_kv(v)]
    with Watch():
        out = REFERENCES["attention_int8"](q, *stored, past, length, 32**-0.5)
    widened = [
        torch.ops.exkv.dequantize_kv(*pair, torch.float32) for pair in (stored[:2], stored[2:])
    ]
    exact = torch.ops.exkv.attention(q, *widened, past, length, False, 32**-0.5)
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-6)
    assert largest < k.nbytes / 8


def test_model_forgets_dead_caches(model, kind):
    gc.collect()
    before = len(model.caches)
    cache = kind(model, 32)
    assert len(model.caches) == before + 1
    del cache
    gc.collect()
    assert len(model.caches) == before


def test_cache_survives_unload_and_is_empty(tmp_path, kind):
    model = Model(save(reference(llama()), tmp_path))
    cache = kind(model, 32)
    assert cache.nbytes() == {}
    with pytest.raises(ValueError, match="not loaded"):
        model.forward(ids(4), cache)
    model.load(devices=["cpu"])
    expected = model.forward(ids(9), cache)
    model.unload()
    assert cache.nbytes() == {} and cache.seq_lens == [0]
    with pytest.raises(ValueError, match="not loaded"):
        model.forward(ids(4), cache)
    model.load(devices=["cpu"])
    assert torch.equal(model.forward(ids(9), cache), expected)


def test_failed_call_leaves_tokens_unchanged(model, kind, monkeypatch):
    cache = kind(model, 64)
    model.forward(ids(5), cache)
    layer, calls = model.units[1].module, []

    def fail_in_the_second_chunk(*args):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("planted")
        return type(layer).forward(layer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", fail_in_the_second_chunk)
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            model.forward(ids(40), cache)
    assert len(calls) == 2
    assert cache.sequences == [ids(5)[0].tolist()]


def test_missing_storage_is_allocated_on_use(model, kind):
    cache = kind(model, 32)
    expected = model.forward(ids(9), cache)
    cache.free()
    assert cache.nbytes() == {}
    assert torch.equal(model.forward(ids(9), cache), expected)


def test_invalid_arguments_are_refused_with_numbers(model, kind):
    with pytest.raises(ValueError, match="max_seq_len is 0"):
        kind(model, 0)
    with pytest.raises(ValueError, match="batch_size is -1"):
        kind(model, 32, -1)
    cache = kind(model, 16)
    model.forward(ids(10), cache)
    with pytest.raises(ValueError, match="10 tokens .* adds 7: more than its max_seq_len of 16"):
        model.forward(ids(7), cache)
    with pytest.raises(ValueError, match="2 rows.*built for 1"):
        model.forward(ids(3, rows=2), cache)
    with pytest.raises(ValueError, match="only shrink"):
        cache.current_seq_len = 11
    with pytest.raises(ValueError, match="negative"):
        cache.trim(-1)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(-1)
    assert cache.seq_lens == [10]


def test_a_cache_of_another_model_is_refused(model, tmp_path, kind):
    other = Model(save(reference(llama()), tmp_path))
    cache = kind(other, 16)
    with pytest.raises(ValueError, match="another model"):
        model.forward(ids(3), cache)
    with pytest.raises(ValueError, match="another model"):
        other.load_autosplit(kind(model, 16))


def test_a_dtype_that_is_no_float_is_refused(model):
    with pytest.raises(ValueError, match="int8"):
        Cache(model, 16, dtype=torch.int8)
