"""Formats of keys and values: floats, or 8, 4 or 2 bits.

A :class:`KVFormat` defines the tensors of a store, encodes keys or values into them, and decodes
them to floats. Keys and values of one cache may have different formats. ``attention_part`` reads
every format tile by tile (see ``exkv.ops.attention_parts``).

The formats of 4 and 2 bits are asymmetric: a group of 32 values has its minimum as offset and
(maximum - minimum) / (levels - 1) as scale, both float16. ``int4`` and ``int2`` group 32 features
of one token's head, as ``int8`` does. ``int4c`` and ``int2c`` group 32 consecutive tokens of one
channel: keys have channels that are large in every token, and these then cost no other channel its
resolution (KIVI, Liu et al., 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from .kv_quant import GROUP, num_groups
from .registry import define_op

#: Bits a value of packed formats.
PACKED_BITS = (2, 4)
_FLOAT16_MAX = torch.finfo(torch.float16).max

#: The tensors of one store by name; the values' name is "".
Stored: TypeAlias = Mapping[str, Tensor]
Layout: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]
#: Shape of keys or values: (B, S, H_kv, D).
Shape: TypeAlias = tuple[int, int, int, int]


class KVFormat(Protocol):
    """A value: stores of equal formats store alike."""

    @property
    def name(self) -> str:
        """Name in :data:`FORMATS` and in ``attention_part``'s arguments."""

    @property
    def lossless(self) -> bool:
        """Whether decoding returns exactly what was encoded."""

    @property
    def has_kernels(self) -> bool:
        """Whether native kernels support it; otherwise the ops' references run."""

    @property
    def group(self) -> int:
        """Consecutive tokens that are encoded together: 1, or 32."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in the layout's order; "", the values, comes first."""

    def layout(self, shape: Shape, dtype: torch.dtype) -> Layout:
        """Name -> shape and dtype of the tensors that store (B, S, H_kv, D). The values have an
        entry for every token, the other tensors one for every ``group`` tokens."""

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Encode x (B, T, H_kv, D).

        Raises:
            ValueError: T is not a multiple of ``group``.
        """

    def widen(self, stored: Stored, dtype: torch.dtype, head_dim: int | None = None) -> Tensor:
        """Decode to floats (B, T, H_kv, D). The last group of tokens may be incomplete.

        Args:
            head_dim: D, if it does not fill the last packed byte; None if it does.
        """


# Packing ----------------------------------------------------------------------------------------


def packed_dim(head_dim: int, bits: int) -> int:
    """Bytes of ``head_dim`` values of 2 or 4 bits; the last byte may be partly empty."""
    _check_bits(bits)
    return -(-head_dim * bits // 8)


def _check_bits(bits: int) -> None:
    if bits not in PACKED_BITS:
        raise ValueError(f"bits is {bits}: packed values have 2 or 4 (8 bits are quantize_kv's)")


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


def _pack(levels: Tensor, bits: int) -> Tensor:
    """Pack uint8 (..., D), each below 2^bits, into uint8 (..., packed D). A byte holds neighbours,
    the first in its lowest bits; unused bits are zero."""
    size = packed_dim(levels.shape[-1], bits)
    missing = size * (8 // bits) - levels.shape[-1]
    padded = torch.nn.functional.pad(levels, (0, missing)).unflatten(-1, (size, 8 // bits))
    return (padded << _shifts(bits, levels.device)).sum(-1, dtype=torch.uint8)


def _unpack(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """Inverse of :func:`_pack`, uint8 (..., D)."""
    levels = (packed.unsqueeze(-1) >> _shifts(bits, packed.device)).bitwise_and_(2**bits - 1)
    return levels.flatten(-2)[..., :head_dim]


def _to_levels(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """x float32, one group along ``dim`` -> levels uint8, scale and offset float16 (dim kept).

    The scale spans from the rounded offset to the maximum, so that rounding the offset costs
    nothing at the upper end. Scale and offset are clamped to float16's range; a group with a NaN
    has both NaN.
    """
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    offset = low.clamp_(-_FLOAT16_MAX, _FLOAT16_MAX).half()
    base, top = offset.float(), 2**bits - 1
    scale = (high.sub_(base) / top).clamp_(0, _FLOAT16_MAX).half()
    step = scale.float()
    levels = torch.where(step > 0, (x - base).div_(step), 0).round_().clamp_(0, top)
    return levels.to(torch.uint8), scale, offset


# Along the head dimension -----------------------------------------------------------------------


def _quantize_groups_fake(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    *rest, head_dim = x.shape
    scales = (*rest, num_groups(head_dim))
    packed = x.new_empty((*rest, packed_dim(head_dim, bits)), dtype=torch.uint8)
    scale, offset = (x.new_empty(scales, dtype=torch.float16) for _ in range(2))
    return packed, scale, offset


@define_op(
    "quantize_groups(Tensor x, int bits) -> (Tensor, Tensor, Tensor)",
    fake=_quantize_groups_fake,
    kernels_fall_back=True,
)
def quantize_groups(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (..., D) float -> packed uint8 (..., ceil(D * bits / 8)), scale and offset float16
    (..., ceil(D / 32)).

    A value is stored as (x - offset) / scale rounded half to even, between 0 and 2^bits - 1. All
    arithmetic is float32 on the rounded scale and offset.

    Raises:
        ValueError: bits is neither 2 nor 4, or x has no dimension.
    """
    _check_bits(bits)
    if x.dim() < 1:
        raise ValueError("quantize_groups: x needs a dimension to group along; it has none")
    head_dim, groups = x.shape[-1], num_groups(x.shape[-1])
    wide = x.float()
    if head_dim % GROUP:  # a short last group repeats its last value, which changes no extreme
        wide = wide[..., torch.arange(groups * GROUP, device=x.device).clamp_(max=head_dim - 1)]
    levels, scale, offset = _to_levels(wide.unflatten(-1, (groups, GROUP)), -1, bits)
    packed = _pack(levels.flatten(-2)[..., :head_dim], bits)
    return packed, scale.squeeze(-1), offset.squeeze(-1)


@define_op(
    "dequantize_groups(Tensor packed, Tensor scale, Tensor offset, int bits, int head_dim, "
    "ScalarType dtype) -> Tensor",
    fake=lambda packed, scale, offset, bits, head_dim, dtype: packed.new_empty(
        (*packed.shape[:-1], head_dim), dtype=dtype
    ),
    kernels_fall_back=True,
)
def dequantize_groups(
    packed: Tensor, scale: Tensor, offset: Tensor, bits: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    """Inverse of :func:`quantize_groups`: level * scale + offset in float32, rounded to dtype,
    (..., D).

    Raises:
        ValueError: the tensors don't match ``quantize_groups`` of (..., head_dim).
    """
    _check_groups(packed, scale, offset, bits, head_dim)
    wide = _unpack(packed, bits, head_dim).float()
    wide *= scale.float().repeat_interleave(GROUP, dim=-1)[..., :head_dim]
    wide += offset.float().repeat_interleave(GROUP, dim=-1)[..., :head_dim]
    return wide.to(dtype)


def _check_groups(packed: Tensor, scale: Tensor, offset: Tensor, bits: int, head_dim: int) -> None:
    size = packed_dim(head_dim, bits)
    found = tuple(packed.shape)
    if packed.dtype != torch.uint8 or packed.dim() < 1 or found[-1] != size:
        raise ValueError(
            f"dequantize_groups: packed must be uint8 (..., {size}) for {head_dim} values of "
            f"{bits} bits; it is {packed.dtype} {found}"
        )
    expected = (*found[:-1], num_groups(head_dim))
    for name, tensor in (("scale", scale), ("offset", offset)):
        if tensor.dtype != torch.float16 or tensor.shape != expected:
            raise ValueError(
                f"dequantize_groups: {name} must be float16 {expected}, one entry for each {GROUP} "
                f"of {head_dim} values; it is {tensor.dtype} {tuple(tensor.shape)}"
            )


# The formats ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """Unquantized keys and values.

    Attributes:
        dtype: dtype of the store; None for that given to :meth:`layout` and :meth:`encode`.
    """

    name: ClassVar[str] = "float"
    has_kernels: ClassVar[bool] = True
    group: ClassVar[int] = 1
    names: ClassVar[tuple[str, ...]] = ("",)
    dtype: torch.dtype | None = None

    @property
    def lossless(self) -> bool:
        return self.dtype is None

    def layout(self, shape: Shape, dtype: torch.dtype) -> Layout:
        return {"": (tuple(shape), self.dtype or dtype)}

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        return {"": x.to(self.dtype or x.dtype)}

    def widen(self, stored: Stored, dtype: torch.dtype, head_dim: int | None = None) -> Tensor:
        return stored[""].to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Format:
    """int8 with a float16 scale for every 32 features of a head; see ``exkv.ops.kv_quant``."""

    name: ClassVar[str] = "int8"
    lossless: ClassVar[bool] = False
    has_kernels: ClassVar[bool] = True
    group: ClassVar[int] = 1
    names: ClassVar[tuple[str, ...]] = ("", "scale")

    def layout(self, shape: Shape, dtype: torch.dtype) -> Layout:
        scales = (*shape[:-1], num_groups(shape[-1]))
        return {"": (tuple(shape), torch.int8), "scale": (scales, torch.float16)}

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        values, scale = torch.ops.exkv.quantize_kv(x)
        return {"": values, "scale": scale}

    def widen(self, stored: Stored, dtype: torch.dtype, head_dim: int | None = None) -> Tensor:
        return torch.ops.exkv.dequantize_kv(stored[""], stored["scale"], dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFormat:
    """4 or 2 bits, groups of 32 features of one token's head: 5 or 3 bits a value in all."""

    bits: int
    lossless: ClassVar[bool] = False
    has_kernels: ClassVar[bool] = True
    group: ClassVar[int] = 1
    names: ClassVar[tuple[str, ...]] = ("", "scale", "offset")

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def layout(self, shape: Shape, dtype: torch.dtype) -> Layout:
        *rest, head_dim = shape
        scales = ((*rest, num_groups(head_dim)), torch.float16)
        values = ((*rest, packed_dim(head_dim, self.bits)), torch.uint8)
        return {"": values, "scale": scales, "offset": scales}

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, torch.ops.exkv.quantize_groups(x, self.bits), strict=True))

    def widen(self, stored: Stored, dtype: torch.dtype, head_dim: int | None = None) -> Tensor:
        tensors = [stored[name] for name in self.names]
        if head_dim is None:
            head_dim = tensors[0].shape[-1] * 8 // self.bits
        return torch.ops.exkv.dequantize_groups(*tensors, self.bits, head_dim, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelFormat:
    """4 or 2 bits, groups of 32 consecutive tokens of one channel (KIVI's keys)."""

    bits: int
    lossless: ClassVar[bool] = False
    has_kernels: ClassVar[bool] = True
    group: ClassVar[int] = GROUP
    names: ClassVar[tuple[str, ...]] = ("", "scale", "offset")

    @property
    def name(self) -> str:
        return f"int{self.bits}c"

    def layout(self, shape: Shape, dtype: torch.dtype) -> Layout:
        rows, tokens, heads, head_dim = shape
        scales = ((rows, num_groups(tokens), heads, head_dim), torch.float16)
        values = ((rows, tokens, heads, packed_dim(head_dim, self.bits)), torch.uint8)
        return {"": values, "scale": scales, "offset": scales}

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        if x.shape[1] % GROUP:
            raise ValueError(
                f"{self.name} stores {GROUP} tokens at a time, and there are {x.shape[1]}: store "
                "the last ones in another format until their group is full"
            )
        grouped = x.float().unflatten(1, (x.shape[1] // GROUP, GROUP))
        levels, scale, offset = _to_levels(grouped, 2, self.bits)
        packed = _pack(levels.flatten(1, 2), self.bits)
        return {"": packed, "scale": scale.squeeze(2), "offset": offset.squeeze(2)}

    def widen(self, stored: Stored, dtype: torch.dtype, head_dim: int | None = None) -> Tensor:
        packed = stored[""]
        wide = _unpack(packed, self.bits, stored["scale"].shape[-1]).float()
        tokens = slice(packed.shape[1])
        wide *= stored["scale"].float().repeat_interleave(GROUP, dim=1)[:, tokens]
        wide += stored["offset"].float().repeat_interleave(GROUP, dim=1)[:, tokens]
        return wide.to(dtype)


_KNOWN: tuple[KVFormat, ...] = (
    FloatFormat(),
    Int8Format(),
    *(PackedFormat(bits=bits) for bits in (4, 2)),
    *(ChannelFormat(bits=bits) for bits in (4, 2)),
)

#: Name -> format; entries may be added at any time. The kernels' side is in
#: exkv_ext/params/kv_formats.h.
FORMATS: dict[str, KVFormat] = {kind.name: kind for kind in _KNOWN}


# Rotation ---------------------------------------------------------------------------------------


@define_op("hadamard(Tensor x) -> Tensor", kernels_fall_back=True)
def hadamard(x: Tensor) -> Tensor:
    """The normalised Walsh-Hadamard transform of the last dimension, in float32; its own inverse.

    It spreads a large channel over all others, which reduces the error of 4-bit quantization;
    scores don't change if queries and keys are both transformed (QuaRot, Ashkboos et al., 2024;
    ExLlamaV2's 4-bit cache). If D is not a power of two, blocks of the largest power of two that
    divides it are transformed separately: 80 -> 16, 96 -> 32.
    """
    if x.dim() < 1:
        raise ValueError("hadamard: x needs a dimension to transform; it has none")
    head_dim = x.shape[-1]
    block = max(head_dim & -head_dim, 1)
    y, half = x.float(), 1
    while half < block:
        first, second = y.unflatten(-1, (head_dim // (2 * half), 2, half)).unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    return (y * block**-0.5).to(x.dtype).contiguous()
