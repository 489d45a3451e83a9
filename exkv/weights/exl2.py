"""EXL2, ExLlamaV2's format: groups of inputs of 8 to 2 bits in one matrix, with the inputs sorted
by importance.

For the sorted input k of group g, and output n::

    w = (q[k, n] - 2^(bits - 1)) * (s[g, n] + 1)^2 * q_scale_max[g] / 256

``q_weight`` int32 (words, out) packs q along the inputs, group after group, and ``q_scale`` int32
(groups, out / 8) packs s along the outputs, 4 bits each, both from the lowest bit on, with outputs
padded to a multiple of 32. ``q_groups`` int16 has each group's bits and its first row of words.
The model's input j is the sorted one ``q_invperm[j]``. The head is quantized too, and never tied to
the embedding.

On a device codes are in the order of the CPU's kernels (``exkv.ops.weight_groups``), blocks of
eight outputs with all their inputs, and scales as in the file: no more bytes than it has. A format
is built from ``q_groups``, since nothing else says how many inputs have how many bits.

Source: exllamav2's ``conversion/adaptivegptq.py`` and ``exllamav2_ext/cuda/q_matrix.cu``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig, open_checkpoint
from exkv.checkpoint.files import quoted
from exkv.ops.weight_groups import BLOCK, CHUNK, unpack_codes

from .bits import check_permutation, words_of
from .finite import check_finite
from .floats import FLOATS
from .format import Layout, Size, Tensors, WeightFormat
from .methods import FormatOf, register
from .settings import EMBEDDING, Headers, Settings, headers_of
from .tiles import Packing, TiledFormat

BITS = (8, 6, 5, 4, 3, 2)


class Section(NamedTuple):
    """Sorted inputs of equal bits.

    Attributes:
        bits: bits of each code.
        group: inputs that share a scale; the last group of a matrix may have fewer.
        inputs: number of inputs.
    """

    bits: int
    group: int
    inputs: int

    @property
    def groups(self) -> int:
        return -(-self.inputs // self.group)

    @property
    def words(self) -> int:
        """Rows of ``q_weight``."""
        return words_of(self.inputs, self.bits)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of outputs on a device."""
        return BLOCK * self.inputs * self.bits // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Exl2Format(TiledFormat):
    """Sections of sorted inputs; input k of them is the model's ``order[k]``."""

    sections: tuple[Section, ...]
    outputs_of: int
    names: ClassVar[tuple[str, ...]] = ("codes", "scale", "largest", "order")

    @property
    def name(self) -> str:
        parts = (f"{s.bits}x{s.inputs}/{s.group}" for s in self.sections)
        return f"exl2 {self.outputs_of}: {' '.join(parts)}"

    def native(self, size: Size) -> tuple[int, ...] | None:
        each = (number for s in self.sections for number in (s.bits, s.group, s.inputs))
        return (Packing.SECTIONS.value, self.outputs_of, len(self.sections), 0, *each)

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        padded, groups = -(-size[0] // 32) * 32, self._groups()
        shapes = {
            "q_weight": ((sum(s.words for s in self.sections), padded), torch.int32),
            "q_scale": ((groups, padded // 8), torch.int32),
            "q_scale_max": ((groups,), torch.float16),
            "q_invperm": ((size[1],), torch.int32),
            "q_groups": ((2 * groups,), torch.int16),
        }
        return {
            name: ExpectedTensor(shape=shape, dtypes=(dtype,))
            for name, (shape, dtype) in shapes.items()
        }

    def layout(self, size: Size) -> Layout:
        blocks = -(-size[0] // BLOCK)
        return {
            "codes": ((blocks, sum(s.block_bytes for s in self.sections)), torch.uint8),
            "scale": ((self._groups(), blocks), torch.int32),
            "largest": ((self._groups(),), torch.float16),
            "order": ((size[1],), torch.int32),
        }

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        check_finite("q_scale_max", stored["q_scale_max"])
        check_permutation("q_invperm", stored["q_invperm"])
        blocks = -(-self.outputs_of // BLOCK)
        codes = torch.empty(blocks, sum(s.block_bytes for s in self.sections), dtype=torch.uint8)
        word = byte = 0
        for section in self.sections:
            words = stored["q_weight"][word : word + section.words, : blocks * BLOCK]
            packed = torch.ops.exkv.pack_words(words.T, section.bits, section.inputs, None)
            codes[:, byte : byte + section.block_bytes] = packed.flatten(1)
            word, byte = word + section.words, byte + section.block_bytes
        return {
            "codes": codes,
            "scale": stored["q_scale"][:, :blocks].contiguous(),
            "largest": stored["q_scale_max"],
            "order": stored["q_invperm"].argsort().to(torch.int32),
        }

    def outputs(self, tensors: Tensors) -> int:
        return self.outputs_of

    def rows(self, tensors: Tensors, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # ids // 8 would have a plan import sympy.
        blocks = tensors["codes"][ids >> 3]
        lanes = torch.arange(len(ids), device=ids.device), ids & 7
        scale = self._scales(tensors, ids)
        parts, byte, group = [], 0, 0
        for section in self.sections:
            packed = blocks[:, byte : byte + section.block_bytes]
            chunks = packed.unflatten(1, (section.inputs // CHUNK, -1))
            codes = unpack_codes(chunks, section.bits).unflatten(0, (-1, BLOCK))[lanes]
            factor = scale[:, group : group + section.groups].repeat_interleave(section.group, 1)
            half = 1 << section.bits - 1
            parts.append(codes.float().sub_(half).mul_(factor[:, : section.inputs]))
            byte, group = byte + section.block_bytes, group + section.groups
        values = torch.cat(parts, 1)
        return torch.empty_like(values).index_copy_(1, tensors["order"].long(), values).to(dtype)

    def _groups(self) -> int:
        return sum(section.groups for section in self.sections)

    def _scales(self, tensors: Tensors, ids: torch.Tensor) -> torch.Tensor:
        """Scales of these outputs, fp32 (n, groups)."""
        fields = tensors["scale"][:, ids >> 3] >> (ids & 7) * 4 & 15
        square = (fields + 1).square().float().T
        return square * (tensors["largest"].float() / 256)


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer, from its ``q_groups``, which are read here.

    Raises:
        ValueError: there is no checkpoint, or it is damaged; config.json alone doesn't say how many
            bits a layer has.
    """
    settings, headers = Settings.of(config), headers_of(config)
    settings.only("quant_method", "version", "bits", "head_bits", "calibration")
    if headers is None or config.path is None:
        raise ValueError(
            f"{settings.where}: with EXL2 only the weights' files say how many bits a layer has, "
            "and there are none that can be read: give the folder of the whole model"
        )
    quantized = settings.quantized(headers, (EMBEDDING,), "q_weight")
    with open_checkpoint(config.path) as checkpoint:
        names = (name for name in headers if name.endswith(".q_groups"))
        groups = {name: checkpoint.tensor(name).flatten().tolist() for name in names}

    def format_of(layer: str, size: Size) -> WeightFormat:
        if not quantized(layer) or f"{layer}.q_weight" not in headers:
            return FLOATS[dtype]  # if that is missing too, loading reports it
        spans = _spans(layer, groups.get(f"{layer}.q_groups", []), headers)
        sections = tuple(_sections(layer, size[1], spans))
        return register(Exl2Format(sections=sections, outputs_of=size[0]))

    return format_of


def _spans(layer: str, pairs: list[int], headers: Headers) -> list[tuple[int, int]]:
    """Bits and words of the layer's groups.

    Raises:
        ValueError: ``q_groups`` is invalid.
    """
    weight = headers[f"{layer}.q_weight"]
    bits, first = pairs[::2], pairs[1::2]
    rows = weight.shape[0] if weight.shape else 0
    spans = [end - begin for begin, end in itertools.pairwise([*first, rows])]
    sound = len(bits) == len(spans) > 0 and first[0] == 0 and min(spans) > 0
    if not sound or not set(bits) <= set(BITS) or bits != sorted(bits, reverse=True):
        raise ValueError(
            f"{weight.file}: {layer}.q_groups must be pairs of descending bits, of "
            f"{', '.join(map(str, BITS))}, and first rows of q_weight's {rows}, ascending from 0, "
            f"not {quoted(pairs)}: download the model again"
        )
    return list(zip(bits, spans, strict=True))


def _sections(layer: str, inputs: int, groups: list[tuple[int, int]]) -> Iterator[Section]:
    """Combine groups of equal bits.

    Raises:
        ValueError: their sizes don't match, or don't add up to ``inputs``.
    """
    left = inputs
    for bits, some in itertools.groupby(groups, key=lambda pair: pair[0]):
        spans = [count for _, count in some]
        size = spans[0] * 32 // bits
        there = min(sum(spans) * 32 // bits, left)
        equal = all(count == spans[0] for count in spans[:-1]) and spans[-1] <= spans[0]
        whole = size % CHUNK == there % CHUNK == 0
        if there == 0 or not equal or not whole or spans[0] * 32 % bits:
            left = -1
            break
        left -= there
        yield Section(bits=bits, group=size, inputs=there)
    if left:
        raise ValueError(
            f"{layer}.q_groups has groups of different sizes, or not {inputs} inputs, or not in "
            f"multiples of {CHUNK}: config.json and the weights are not of the same model, "
            "download it again"
        )
