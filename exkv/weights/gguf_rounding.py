"""Round float weights to ggml's blocks with error feedback, for the inputs of a text: what
``exkv quantize`` writes to a GGUF file.

A block has codes, and scales and perhaps minima as 16-bit floats; K types have one or two of these
floats for 256 weights, which small integers multiply for groups of 16 or 32. Block by block, scales
and minima are chosen for the least error of the layer's outputs, given the feedback so far
(``feedback``): first each group's own best scale and minimum, by least squares for the codes of
several ranges; then the floats whose integers lose least; then neighbouring integers, group by
group, with new codes each time. Codes are then rounded column by column with feedback, as in GPTQ.

The order of sums depends on shapes alone, so that results are reproducible to the byte.
``gguf_blocks`` documents the layouts.
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
#: Candidate shares of a group's range; and of a block's largest scale.
_SHARES, _OF_BLOCK = (1.0, 0.94, 0.88, 0.82, 0.76, 0.7), (1.0, 0.97, 0.94, 0.9)
#: Rows rounded at a time: few enough for the temporaries to stay in the processor's cache.
_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """One of ggml's types: weight = scale * (code - zero) - minimum.

    Attributes:
        bits: bits of a code.
        group: weights that share a scale.
        groups: groups of a block.
        minima: whether groups have a minimum; if not, ``zero`` is half the codes' range.
        least, most: range of the integers that multiply a block's floats; 1 and 1 for blocks of one
            group.
        pack: encodes the parts of blocks as bytes (blocks, n).
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
        """Smallest and largest code minus the zero. (ggml doesn't use Q8_0's -128.)"""
        least = -self.zero + (self.bits == 8)
        return least, (1 << self.bits) - 1 - self.zero


@dataclass(slots=True, kw_only=True)
class _Parts:
    """Parts of blocks: codes uint8 (n, block); scales and minima, integers as fp32 (n, groups); the
    16-bit floats that multiply them, as fp32 (n, 1)."""

    codes: Tensor
    scales: Tensor
    minima: Tensor
    scale: Tensor
    minimum: Tensor

    def of_groups(self) -> tuple[Tensor, Tensor]:
        """Each group's scale and minimum, fp32 (n, groups)."""
        return self.scale * self.scales, self.minimum * self.minima

    def beside_weights(self) -> tuple[Tensor, Tensor]:
        """:meth:`of_groups` with the shape (n, groups, 1)."""
        scale, low = self.of_groups()
        return scale.unsqueeze(-1), low.unsqueeze(-1)


def blocks_with_factor(root: Tensor, weight: Tensor, name: str) -> Tensor:
    """Round a matrix (out, in) of floats to blocks, uint8 (out, bytes a row).

    Args:
        root: upper triangular factor of the inputs' moments: ``feedback.cholesky_factor``.
        name: one of ``TYPES``, whose block divides the inputs.

    Raises:
        ValueError: it doesn't, or the values are too large for 16-bit scales.
    """
    type = TYPES[name]
    if weight.shape[1] % type.block:
        raise ValueError(
            f"{weight.shape[1]} inputs are not a multiple of {name}'s blocks of {type.block}"
        )
    if not float(weight.abs().max()) < 65504:
        raise ValueError(f"weights up to {float(weight.abs().max()):g} are too large for {name}")
    return torch.cat([_rows(root, rows.float(), type) for rows in weight.split(_ROWS)])


def values_of(blocks: Tensor, name: str) -> Tensor:
    """Dequantize blocks (out, bytes) to fp32 (out, in)."""
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
    """Values of codes minus their zero (n, groups, group)."""
    scale, low = parts.beside_weights()
    return signed * scale - low


def _with_feedback(target: Tensor, root: Tensor, parts: _Parts, type: BlockType) -> Tensor:
    """Round to codes, uint8 (n, block), each compensating for the errors of those before it."""
    scale, low = (
        each.repeat_interleave(type.group, 1).T.contiguous() for each in parts.of_groups()
    )
    inverse = _inverse(scale)
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


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 for 0."""
    return torch.where(x == 0, x, 1 / x)


def _nearest(wide: Tensor, scale: Tensor, low: Tensor, type: BlockType) -> Tensor:
    """Nearest codes minus their zero, for weights (n, groups, group); scale and low (n, groups,
    1)."""
    return (wide + low).mul_(_inverse(scale)).round_().clamp_(*type.codes)


def _chosen(wide: Tensor, importance: Tensor, type: BlockType) -> _Parts:
    """Choose scales and minima for weights (n, groups, group), with squared errors weighted by
    importance (block,)."""
    weights = importance.view(1, type.groups, -1)
    scale, low = _of_groups(wide, weights, type)
    if type.groups == 1:
        return _refitted(wide, weights, _single_group(scale, low), type)
    return _of_block(wide, weights, scale, low, type)


def _of_groups(wide: Tensor, weights: Tensor, type: BlockType) -> tuple[Tensor, Tensor]:
    """Each group's own best scale and minimum (n, groups, 1)."""
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
    """Errors of groups (n, groups, 1)."""
    return (codes * scale).sub_(low).sub_(wide).square_().mul_(weights).sum(-1, keepdim=True)


def _fitted(wide: Tensor, codes: Tensor, weights: Tensor, type: BlockType) -> tuple[Tensor, Tensor]:
    """Least squares scales and minima for these codes."""
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


def _single_group(scale: Tensor, low: Tensor) -> _Parts:
    """Parts of blocks with a single group."""
    ones = torch.ones_like(scale[..., 0])
    parts = _Parts(codes=ones, scales=ones, minima=ones, scale=ones, minimum=ones)
    parts.scale, parts.minimum = _half(scale[..., 0]), _half(low[..., 0])
    return parts


def _refitted(wide: Tensor, weights: Tensor, parts: _Parts, type: BlockType) -> _Parts:
    """Refit the floats to codes and integers by least squares, where that is better."""
    for _ in range(2):
        scale, low = parts.beside_weights()
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
    """Least squares x and y for whole = x a - y b; y is at least 0 unless ``any_sign``."""
    aa, ab, bb = ((p * q * weights).sum(-1) for p, q in ((a, a), (a, b), (b, b)))
    wa, wb = ((whole * p * weights).sum(-1) for p in (a, b))
    determinant = aa * bb - ab * ab
    usable = determinant > 1e-9 * aa * bb
    safe = torch.where(usable, determinant, 1)
    x, y = (wa * bb - ab * wb) / safe, (ab * wa - aa * wb) / safe
    usable &= (y >= 0) | any_sign
    return torch.where(usable, x, wa / aa.clamp(min=1e-30)), torch.where(usable, y, 0)


def _integers(x: Tensor, unit: Tensor, type: BlockType, least: int) -> Tensor:
    return (x.squeeze(-1) * _inverse(unit)).round_().clamp_(least, type.most)


def _of_block(wide: Tensor, weights: Tensor, scale: Tensor, low: Tensor, type: BlockType) -> _Parts:
    """Choose the floats whose integers lose least over all groups of a block, and the integers."""
    best: _Parts | None = None
    error = torch.zeros(0)
    signed = type.least < 0
    top = scale.abs().amax(1) if not signed else scale.gather(1, scale.abs().argmax(1, True))[:, 0]
    for share in _OF_BLOCK:
        # The largest gets the integer of largest magnitude, which is negative for signed ones.
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
    """Errors of groups (n, groups, 1) with their nearest codes."""
    scale, low = parts.beside_weights()
    return _error(wide, _nearest(wide, scale, low, type), scale, low, weights)


def _beside(wide: Tensor, weights: Tensor, parts: _Parts, type: BlockType) -> _Parts:
    """Replace each group's integers by neighbouring ones, where these are better."""
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
    """Pack codes (n, count) into bytes: the inverse of ``gguf_blocks.fields``."""
    parts = codes.view(len(codes), -1, 8 // bits, run)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, -1, 1)
    return (parts << shifts).sum(2, dtype=torch.uint8).flatten(1)


def _bytes(*floats: Tensor) -> Tensor:
    """Bytes of floats (n, 1) as 16-bit floats."""
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


#: By ggml's names, in descending precision.
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
