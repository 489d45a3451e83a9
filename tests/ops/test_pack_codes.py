"""Codes in the kernels' order: what native code packs is what plain PyTorch does."""

import pytest
import torch
from native import needs_kernels

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
def test_what_cannot_be_packed_is_refused_by_number(call):
    def run(name, *arguments):
        op = getattr(torch.ops.exkv, name) if call == "op" else REFERENCES[name]
        return op(*arguments)

    codes = torch.zeros(8, 32, dtype=torch.uint8)
    with pytest.raises((ValueError, RuntimeError), match="codes of 7 bits"):
        run("pack_codes", codes, 7)
    with pytest.raises((ValueError, RuntimeError), match=r"multiple of 32.*\(8, 31\)"):
        run("pack_codes", codes[:, :31], 4)
    with pytest.raises((ValueError, RuntimeError), match="type 12"):
        run("split_blocks", codes, 12)
    with pytest.raises((ValueError, RuntimeError), match=r"blocks of 18 bytes.*\(8, 32\)"):
        run("split_blocks", codes, 2)
