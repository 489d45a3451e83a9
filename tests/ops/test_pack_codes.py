"""Codes in the kernels' order: native packing equals plain PyTorch."""

import pytest
import torch
from native import needs_kernels

import exkv.weights.awq  # noqa: F401  (defines pack_awq)
from exkv.ops import REFERENCES
from exkv.ops.weight_groups import PLANES
from exkv.weights.gguf import FORMATS, SplitFormat

#: ggml's numbers of the types whose blocks are split, and their bytes.
SPLIT = {2: 18, 3: 20, 6: 22, 7: 24, 8: 34}


@needs_kernels
@pytest.mark.parametrize("bits", PLANES)
def test_codes_are_packed_as_the_reference_packs_them(bits):
    codes = torch.randint(0, 1 << bits, (21, 96), dtype=torch.uint8)
    for rows in (codes, codes[:16], codes[:3, :32]):
        packed = torch.ops.exkv.pack_codes(rows, bits)
        assert torch.equal(packed, REFERENCES["pack_codes"](rows, bits))


@needs_kernels
@pytest.mark.parametrize("bits", PLANES)
def test_words_are_packed_as_the_reference_packs_them(bits):
    """Words of an output together, or of 150 outputs side by side; inputs in order, or sorted."""
    limit = 2**31
    rows = torch.randint(-limit, limit, (21, 3 * bits)).int()
    columns = torch.randint(-limit, limit, (3 * bits, 150)).int()
    for words in (rows, rows[:3], columns.T, columns[:, :13].T):
        for order in (None, torch.randperm(96)):
            given = (words, bits, 96, order)
            packed = torch.ops.exkv.pack_words(*given)
            assert torch.equal(packed, REFERENCES["pack_words"](*given))


@needs_kernels
def test_awq_s_words_are_packed_as_the_reference_packs_them():
    words = torch.randint(-(2**31), 2**31, (96, 19)).int()
    for each in (words, words[:, :1], words[:32, ::2]):
        assert torch.equal(torch.ops.exkv.pack_awq(each), REFERENCES["pack_awq"](each))


@needs_kernels
@pytest.mark.parametrize("type", SPLIT)
def test_blocks_are_split_as_the_reference_splits_them(type):
    rows = torch.randint(0, 256, (19, 3 * SPLIT[type]), dtype=torch.uint8)
    found = torch.ops.exkv.split_blocks(rows, type)
    expected = REFERENCES["split_blocks"](rows, type)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_every_type_whose_blocks_are_split_is_one_of_these():
    split = [format.type for format in FORMATS.values() if isinstance(format, SplitFormat)]
    assert sorted(type.nbytes for type in split) == sorted(SPLIT.values())


@pytest.mark.parametrize("call", ["op", "reference"])
def test_invalid_codes_are_refused_with_numbers(call):
    def run(name, *arguments):
        op = getattr(torch.ops.exkv, name) if call == "op" else REFERENCES[name]
        return op(*arguments)

    codes = torch.zeros(8, 32, dtype=torch.uint8)
    with pytest.raises((ValueError, RuntimeError), match="codes of 7 bits"):
        run("pack_codes", codes, 7)
    with pytest.raises((ValueError, RuntimeError), match=r"multiple of 32.*\(8, 31\)"):
        run("pack_codes", codes[:, :31], 4)
    words, order = torch.zeros(8, 12, dtype=torch.int32), torch.arange(32)
    for given, complaint in (
        ((words, 7, 32, None), "codes of 7 bits"),
        ((words, 4, 128, None), "128 inputs of 4 bits .* fit in 12 words"),
        ((words, 4, 33, None), "33 inputs .* multiple of 32"),
        ((words.long(), 4, 32, None), r"words must be int32.*\(8, 12\)"),
        ((words, 4, 32, order + 1), "order has 32, and there are 32 inputs"),
        ((words, 4, 32, order.int()), "order .*must be"),
        ((words, 4, 64, order), "order .*64"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=f"(?s){complaint}"):
            run("pack_words", *given)
    with pytest.raises((ValueError, RuntimeError), match=r"multiple of 32.*\(8, 12\)"):
        run("pack_awq", words)
    with pytest.raises((ValueError, RuntimeError), match="type 12"):
        run("split_blocks", codes, 12)
    with pytest.raises((ValueError, RuntimeError), match=r"blocks of 18 bytes.*\(8, 32\)"):
        run("split_blocks", codes, 2)
