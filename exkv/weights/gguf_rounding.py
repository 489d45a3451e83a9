"""ggml's blocks from float weights and the inputs of a text: what ``exkv quantize`` writes to a
GGUF file.

A block has codes, and scales (and what is taken away, "minima") of 16-bit floats; those of the K
types have one or two of these floats for 256 weights, and small integers that multiply them for
groups of 16 or 32. Block after block both are chosen together, for the error of the outputs that is
left of what feedback asks of the block (``feedback``): first each group's own best scale and
minimum, by least squares for the codes of several ranges; then the floats that give their integers
the least error; then, group by group, integers beside those, with new codes each time. Codes are
then rounded column by column with feedback, as in GPTQ.

Sums are made in an order that depends on shapes alone, so that bytes are the same every time.
``gguf_blocks`` has what bytes stand for, and the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from exkv.checkpoint.gguf.header import TENSOR_TYPES

from .gguf import FORMATS
from .gguf_blocks import UNPACK

_STORED = {type.name: type for type in TENSOR_TYPES.values()}
#: Shares of a group's range that are tried; those of a block's largest scale.
_SHARES, _OF_BLOCK = (1.0, 0.94, 0.88, 0.82, 0.76, 0.7), (1.0, 0.97, 0.94, 0.9)
#: Rows that are looked at at once: what is made of their blocks stays in a cache.
_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """One of ggml's types: weight = scale * (code - zero) - minimum.

    Attributes:
        bits: of a code.
        group: weights that share a scale.
        groups: of a block.
        minima: whether groups have one; where not, ``zero`` is half the codes' range.
        least, most: integers by which a block's floats are multiplied; 1 and 1 where a block has
            one group.
        pack: what makes bytes (blocks, n) of a block's parts.
    """

    name: str
    bits: int
    group: int
    groups: int = 1
    minima: bool = False
    least: int = 1
    most: int = 1
    pack: Callable[[_Parts], Tensor] = field(repr=False)

    @property
    def block(self) -> int:
        return self.group * self.groups

    @property
    def nbytes(self) -> int:
        return _STORED[self.name].nbytes

    @property
    def zero(self) -> int:
        return 0 if self.minima else 1 << self.bits - 1

    @property
    def codes(self) -> tuple[int, int]:
        """The least and the largest, less the zero. (Q8_0's -128 has no use in ggml.)"""
        least = -self.zero + (self.bits == 8)
        return least, (1 << self.bits) - 1 - self.zero


@dataclass(slots=True, kw_only=True)
class _Parts:
    """Blocks' parts: codes uint8 (n, block); scales and minima, integers as fp32 (n, groups); the
    floats that multiply them, fp32 (n, 1), which are halves."""

    codes: Tensor
    scales: Tensor
    minima: Tensor
    scale: Tensor
    minimum: Tensor


def blocks_with_factor(root: Tensor, weight: Tensor, name: str) -> Tensor:
    """A matrix (out, in) of floats as blocks, uint8 (out, bytes a row).

    Args:
        root: upper triangular, of the inputs' moments: ``feedback.cholesky_factor``.
        name: one of ``TYPES``, whose block divides the inputs.

    Raises:
        ValueError: it does not; or the values are beyond what 16-bit floats scale.
    """
    type = TYPES[name]
    if weight.shape[1] % type.block:
        raise ValueError(f"{weight.shape[1]} inputs are no blocks of {type.block}, as {name} has")
    if not float(weight.abs().max()) < 65504:
        raise ValueError(f"weights up to {float(weight.abs().max()):g} are too large for {name}")
    return torch.cat([_rows(root, rows.float(), type) for rows in weight.split(_ROWS)])


def values_of(blocks: Tensor, name: str) -> Tensor:
    """What blocks (out, bytes) stand for, fp32 (out, in)."""
    type = TYPES[name]
    if name in UNPACK:
        return UNPACK[name](blocks.reshape(-1, type.nbytes)).view(len(blocks), -1)
    format = FORMATS[name]
    return format.dequantize(format.convert({"weight": blocks}), torch.float32)


def _rows(root: Tensor, weight: Tensor, type: BlockType) -> Tensor:
    errors = torch.zeros_like(weight)
    packed = []
    for begin in range(0, weight.shape[1], type.block):
        own = slice(begin, begin + type.block)
        within = root[own, own]
        carried = errors[:, :begin] @ root[:begin, own]
        target = torch.linalg.solve_triangular(within, carried, upper=True, left=False)
        target.add_(weight[:, own])
        parts = _chosen(target.unflatten(1, (type.groups, -1)), within.diagonal().square(), type)
        parts.codes = _with_feedback(target, within, parts, type)
        made = _values(parts.codes.float().sub_(type.zero).unflatten(1, (type.groups, -1)), parts)
        torch.sub(weight[:, own], made.flatten(1), out=errors[:, own])
        packed.append(type.pack(parts))
    return torch.cat(packed, 1)


def _values(signed: Tensor, parts: _Parts) -> Tensor:
    """Of codes less their zero (n, groups, group)."""
    scale = (parts.scale * parts.scales).unsqueeze(-1)
    return signed * scale - (parts.minimum * parts.minima).unsqueeze(-1)


def _with_feedback(target: Tensor, root: Tensor, parts: _Parts, type: BlockType) -> Tensor:
    """Codes, uint8 (n, block), each rounded to what makes up for those before it."""
    scale = (parts.scale * parts.scales).repeat_interleave(type.group, 1).T.contiguous()
    low = (parts.minimum * parts.minima).repeat_interleave(type.group, 1).T.contiguous()
    inverse = torch.where(scale == 0, scale, 1 / scale)
    unit, least = root / root.diagonal(), type.codes
    columns, errors = target.T.contiguous(), torch.zeros_like(target.T)
    codes = torch.empty_like(columns)
    for column in range(len(columns)):
        goal = columns[column] + unit[:column, column] @ errors[:column]
        code = (goal + low[column]).mul_(inverse[column]).round_().clamp_(*least)
        codes[column] = code
        errors[column] = columns[column] - (code * scale[column] - low[column])
    return codes.add_(type.zero).T.to(torch.uint8)


# Scales -----------------------------------------------------------------------------------------


def _half(x: Tensor) -> Tensor:
    return x.to(torch.float16).float()


def _nearest(wide: Tensor, scale: Tensor, low: Tensor, type: BlockType) -> Tensor:
    """Codes less their zero, of weights (n, groups, group); scale and low (n, groups, 1)."""
    inverse = torch.where(scale == 0, scale, 1 / scale)
    return (wide + low).mul_(inverse).round_().clamp_(*type.codes)


def _chosen(wide: Tensor, importance: Tensor, type: BlockType) -> _Parts:
    """Scales and minima for weights (n, groups, group), by the squared errors' importance
    (block,)."""
    weights = importance.view(1, type.groups, -1)
    scale, low = _of_groups(wide, weights, type)
    if type.groups == 1:
        parts = _alone(scale, low, type)
        return _refitted(wide, weights, parts, type)
    return _of_block(wide, weights, scale, low, type)


def _of_groups(wide: Tensor, weights: Tensor, type: BlockType) -> tuple[Tensor, Tensor]:
    """Each group's own best (n, groups, 1)."""
    least, most = type.codes
    if type.minima:
        low = wide.amin(-1, keepdim=True)
        low = low.clamp(max=0) if type.groups > 1 else low
        high = wide.amax(-1, keepdim=True).clamp(min=0)
        tried = [((high - low) * (share / most), -low * share) for share in _SHARES]
    else:
        largest = wide.gather(-1, wide.abs().argmax(-1, keepdim=True))
        none = torch.zeros_like(largest)
        tried = [(largest * (share / least), none) for share in _SHARES]
        tried += [(largest.abs() * (share / (most + 0.5)), none) for share in _SHARES]
    best, scale, low = None, tried[0][0], tried[0][1]
    for candidate in tried:
        for _ in range(2):
            codes = _nearest(wide, *candidate, type)
            error = _error(wide, codes, *candidate, weights)
            better = error < (torch.inf if best is None else best)
            best = error if best is None else torch.where(better, error, best)
            scale = torch.where(better, candidate[0], scale)
            low = torch.where(better, candidate[1], low)
            candidate = _fitted(wide, codes, weights, type)
    return scale, low


def _error(wide: Tensor, codes: Tensor, scale: Tensor, low: Tensor, weights: Tensor) -> Tensor:
    """Of groups (n, groups, 1)."""
    return (codes * scale).sub_(low).sub_(wide).square_().mul_(weights).sum(-1, keepdim=True)


def _fitted(wide: Tensor, codes: Tensor, weights: Tensor, type: BlockType) -> tuple[Tensor, Tensor]:
    """Scales and minima of least squares for these codes."""
    weighted = codes * weights
    qq = (weighted * codes).sum(-1, keepdim=True)
    qw = (weighted * wide).sum(-1, keepdim=True)
    alone = qw / qq.clamp(min=1e-30)
    if not type.minima:
        return alone, torch.zeros_like(alone)
    q = weighted.sum(-1, keepdim=True)
    w = (wide * weights).sum(-1, keepdim=True)
    one = weights.sum(-1, keepdim=True)
    determinant = qq * one - q * q
    usable = determinant > 1e-9 * qq * one
    determinant = torch.where(usable, determinant, 1)
    scale, low = (qw * one - q * w) / determinant, (q * qw - qq * w) / determinant
    if type.groups > 1:  # K types' minima are not below zero
        usable = usable & (low > 0)
    return torch.where(usable, scale, alone), torch.where(usable, low, 0)


def _alone(scale: Tensor, low: Tensor, type: BlockType) -> _Parts:
    """Of a block that is one group."""
    ones = torch.ones_like(scale[..., 0])
    parts = _Parts(codes=ones, scales=ones, minima=ones, scale=ones, minimum=ones)
    parts.scale, parts.minimum = _half(scale[..., 0]), _half(low[..., 0])
    return parts


def _refitted(wide: Tensor, weights: Tensor, parts: _Parts, type: BlockType) -> _Parts:
    """With floats of least squares for the codes and integers, where they are better."""
    for _ in range(2):
        scale, low = (
            (parts.scale * parts.scales)[..., None],
            (parts.minimum * parts.minima)[..., None],
        )
        codes = _nearest(wide, scale, low, type)
        before = _error(wide, codes, scale, low, weights).sum(1)
        made = codes * parts.scales[..., None]
        flat = (each.flatten(1).unsqueeze(1) for each in (wide, made, weights.expand_as(wide)))
        whole, product, every = flat
        if type.minima:
            minima = parts.minima[..., None].expand_as(wide).flatten(1).unsqueeze(1)
            new, taken = _pair(whole, product, minima, every, type.groups == 1)
        else:
            new = (product * whole * every).sum(-1) / (product.square() * every).sum(-1).clamp(
                min=1e-30
            )
            taken = parts.minimum
        new, taken = _half(new.view_as(parts.scale)), _half(taken.view_as(parts.minimum))
        scale, low = (new * parts.scales)[..., None], (taken * parts.minima)[..., None]
        codes = _nearest(wide, scale, low, type)
        better = _error(wide, codes, scale, low, weights).sum(1) < before
        better &= new.isfinite() & taken.isfinite()
        parts.scale = torch.where(better, new, parts.scale)
        parts.minimum = torch.where(better, taken, parts.minimum)
    return parts


def _pair(
    whole: Tensor, a: Tensor, b: Tensor, weights: Tensor, any_sign: bool
) -> tuple[Tensor, Tensor]:
    """x and y of least squares for whole = x a - y b; y is 0 or more unless it may be any."""
    aa, ab, bb = ((p * q * weights).sum(-1) for p, q in ((a, a), (a, b), (b, b)))
    wa, wb = ((whole * p * weights).sum(-1) for p in (a, b))
    determinant = aa * bb - ab * ab
    usable = determinant > 1e-9 * aa * bb
    safe = torch.where(usable, determinant, 1)
    x, y = (wa * bb - ab * wb) / safe, (ab * wa - aa * wb) / safe
    usable &= (y >= 0) | any_sign
    return torch.where(usable, x, wa / aa.clamp(min=1e-30)), torch.where(usable, y, 0)


def _integers(x: Tensor, unit: Tensor, type: BlockType, least: int) -> Tensor:
    inverse = torch.where(unit == 0, unit, 1 / unit)
    return (x.squeeze(-1) * inverse).round_().clamp_(least, type.most)


def _of_block(wide: Tensor, weights: Tensor, scale: Tensor, low: Tensor, type: BlockType) -> _Parts:
    """The floats by which all groups' integers lose least, and these."""
    best: _Parts | None = None
    error = torch.zeros(0)
    signed = type.least < 0
    top = scale.abs().amax(1) if not signed else scale.gather(1, scale.abs().argmax(1, True))[:, 0]
    for share in _OF_BLOCK:
        # The largest gets the integer of most magnitude, which of signed ones is the least.
        unit = _half(top * (share / (type.least if signed else type.most)))
        taken = _half(low.amax(1) * (share / type.most)) if type.minima else torch.zeros_like(unit)
        parts = _Parts(
            codes=unit,
            scales=_integers(scale, unit, type, type.least),
            minima=_integers(low, taken, type, 0),
            scale=unit,
            minimum=taken,
        )
        parts = _refitted(wide, weights, parts, type)
        lost = _lost(wide, weights, parts, type).sum(1)
        if best is None:
            best, error = parts, lost
            continue
        better = lost < error
        error = torch.where(better, lost, error)
        for name in ("scales", "minima", "scale", "minimum"):
            chosen = torch.where(better, getattr(parts, name), getattr(best, name))
            setattr(best, name, chosen)
    assert best is not None
    return _refitted(wide, weights, _beside(wide, weights, best, type), type)


def _lost(wide: Tensor, weights: Tensor, parts: _Parts, type: BlockType) -> Tensor:
    """Errors of groups (n, groups, 1), each with the nearest codes."""
    scale, low = (parts.scale * parts.scales)[..., None], (parts.minimum * parts.minima)[..., None]
    return _error(wide, _nearest(wide, scale, low, type), scale, low, weights)


def _beside(wide: Tensor, weights: Tensor, parts: _Parts, type: BlockType) -> _Parts:
    """With the best of each group's integers and those beside them."""
    steps = (0, -1, 1)
    pairs = [(s, m) for s in steps for m in (steps if type.minima else (0,))]
    scales, minima = parts.scales, parts.minima
    best: Tensor | None = None
    found = scales, minima
    for step, of_minimum in pairs:
        parts.scales = (scales + step).clamp(type.least, type.most)
        parts.minima = (minima + of_minimum).clamp(0, type.most) if type.minima else minima
        lost = _lost(wide, weights, parts, type).squeeze(-1)
        if best is None:
            best = lost
            continue
        better = lost < best
        best = torch.where(better, lost, best)
        found = (
            torch.where(better, parts.scales, found[0]),
            torch.where(better, parts.minima, found[1]),
        )
    parts.scales, parts.minima = found
    return parts


# Layouts ----------------------------------------------------------------------------------------


def _fields(codes: Tensor, bits: int, run: int) -> Tensor:
    """Bytes whose fields are these codes (n, count): the inverse of ``gguf_blocks.fields``."""
    parts = codes.view(len(codes), -1, 8 // bits, run)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, -1, 1)
    return (parts << shifts).sum(2, dtype=torch.uint8).flatten(1)


def _bytes(*floats: Tensor) -> Tensor:
    """Of 16-bit floats (n, 1)."""
    return torch.cat(floats, 1).to(torch.float16).view(torch.uint8)


def _simple(parts: _Parts, bits: int, minima: bool) -> Tensor:
    floats = _bytes(parts.scale, -parts.minimum) if minima else _bytes(parts.scale)
    pieces = [floats]
    if bits == 8:
        return torch.cat([floats, parts.codes ^ 128], 1)
    if bits == 5:
        pieces.append(_fields(parts.codes >> 4, 1, 1))
    return torch.cat([*pieces, _fields(parts.codes & 15, 4, 16)], 1)


def _q2_k(parts: _Parts) -> Tensor:
    integers = parts.scales.to(torch.uint8) | parts.minima.to(torch.uint8) << 4
    return torch.cat([integers, _fields(parts.codes, 2, 32), _bytes(parts.scale, parts.minimum)], 1)


def _q3_k(parts: _Parts) -> Tensor:
    scales = (parts.scales + 32).to(torch.uint8)
    codes = [_fields(parts.codes >> 2, 1, 32), _fields(parts.codes & 3, 2, 32)]
    integers = [_fields(scales & 15, 4, 8), _fields(scales >> 4, 2, 4)]
    return torch.cat([*codes, *integers, _bytes(parts.scale)], 1)


def _with_minima(parts: _Parts, bits: int) -> Tensor:
    scales, minima = parts.scales.to(torch.uint8), parts.minima.to(torch.uint8)
    upper = [(each[:, :4] | (each[:, 4:] >> 4) << 6) for each in (scales, minima)]
    lower = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    pieces = [_bytes(parts.scale, parts.minimum), *upper, lower]
    if bits == 5:
        pieces.append(_fields(parts.codes >> 4, 1, 32))
    return torch.cat([*pieces, _fields(parts.codes & 15, 4, 32)], 1)


def _q6_k(parts: _Parts) -> Tensor:
    scales = parts.scales.to(torch.int8).view(torch.uint8)
    codes = [_fields(parts.codes & 15, 4, 64), _fields(parts.codes >> 4, 2, 32)]
    return torch.cat([*codes, scales, _bytes(parts.scale)], 1)


def _of_32(bits: int, minima: bool) -> BlockType:
    name = f"Q{bits}_{int(minima)}"
    return BlockType(
        name=name,
        bits=bits,
        group=32,
        minima=minima,
        pack=lambda parts: _simple(parts, bits, minima),
    )


def _k(bits: int, group: int, bounds: Sequence[int], pack: Callable[[_Parts], Tensor]) -> BlockType:
    return BlockType(
        name=f"Q{bits}_K",
        bits=bits,
        group=group,
        groups=256 // group,
        minima=bounds[0] == 0,
        least=bounds[0],
        most=bounds[1],
        pack=pack,
    )


#: By ggml's names, the finest first.
TYPES = {
    type.name: type
    for type in (
        _of_32(8, False),
        _k(6, 16, (-128, 127), _q6_k),
        _of_32(5, True),
        _k(5, 32, (0, 63), lambda parts: _with_minima(parts, 5)),
        _of_32(5, False),
        _of_32(4, True),
        _k(4, 32, (0, 63), lambda parts: _with_minima(parts, 4)),
        _of_32(4, False),
        _k(3, 16, (-32, 31), _q3_k),
        _k(2, 16, (0, 15), _q2_k),
    )
}
