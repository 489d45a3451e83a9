"""Result shapes of torch's ops, on ``meta``, where they are cheap to compute.

torch has such rules for every op. Many are written in Python, take longer than the op itself, and
import a library for symbolic algebra (half a second). So the common ones are here, by classes of
ops; :func:`result_of` asks torch for the others, and a test compares all of these with torch's own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

Shape = Sequence[int]
#: Returned by a rule where only torch knows the result.
_ASK_TORCH = object()


def result_of(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The op's results: tensors on ``meta``, as those in its arguments are."""
    if not func._schema.returns:
        return None
    if _writes_in_place(func):
        return args[0]
    rule = _RULES.get(func) or (_pointwise if torch.Tag.pointwise in func.tags else None)
    result = _ASK_TORCH if rule is None else rule(func, args, kwargs)
    return func(*args, **kwargs) if result is _ASK_TORCH else result


@functools.cache
def _writes_in_place(func: OpOverload) -> bool:
    """Whether the result is the first argument, of unchanged shape."""
    alias = func._schema.returns[0].alias_info
    named = func._schema.name.rsplit("::")[-1].endswith("_")
    written = alias is not None and alias.is_write
    return named and written and torch.Tag.inplace_view not in func.tags


def _meta(shape: Shape, dtype: torch.dtype, stride: Shape | None = None) -> torch.Tensor:
    stride = _contiguous(shape) if stride is None else stride
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta")


def _contiguous(shape: Shape) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


# Pointwise ops ----------------------------------------------------------------------------------


def _pointwise(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Results of the broadcast shape; a call on single numbers determines the dtype."""
    operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if (out := kwargs.get("out")) is not None:
        fits = out.shape == torch.Size(_broadcast([operand.shape for operand in operands]))
        return out if fits else _ASK_TORCH
    if any(isinstance(value, torch.Tensor) for value in kwargs.values()):
        return _ASK_TORCH
    dtype = _dtype(func, tuple(map(_kind, args)), tuple(kwargs.items()))
    shape = _broadcast([operand.shape for operand in operands])
    return _meta(shape, dtype, _strides(shape, operands))


def _kind(arg: Any) -> Any:
    """What may affect the result's dtype: of a tensor, its dtype and whether it has dimensions; of
    a number, its value."""
    if isinstance(arg, torch.Tensor):
        return _Kind((arg.dtype, arg.dim() > 0))
    return (type(arg), arg)


class _Kind(tuple):
    """Marks a tensor's entry, as opposed to a number's."""


@functools.cache
def _dtype(func: OpOverload, kinds: tuple, kwargs: tuple) -> torch.dtype:
    numbers = [_number(*kind) if isinstance(kind, _Kind) else kind[1] for kind in kinds]
    return func(*numbers, **dict(kwargs)).dtype


def _number(dtype: torch.dtype, has_dimensions: bool) -> torch.Tensor:
    return torch.ones((1,) if has_dimensions else (), dtype=dtype)


def _broadcast(shapes: Sequence[Shape]) -> list[int]:
    length = max(map(len, shapes))
    padded = [(1,) * (length - len(shape)) + tuple(shape) for shape in shapes]
    return [next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True)]


def _strides(shape: Shape, operands: Sequence[torch.Tensor]) -> list[int]:
    """Dense strides in the memory order of the operands' dimensions, as TensorIterator (ATen) finds
    it: by the first operand that distinguishes two dimensions."""
    if all(o.is_contiguous() and len(o.shape) == len(shape) for o in operands):
        return _contiguous(shape)
    return _dense(shape, [_steps(shape, operand) for operand in operands])


def _dense(shape: Shape, steps: Sequence[Shape]) -> list[int]:
    """Likewise for operands given by their strides, 0 where they are broadcast."""
    order = list(range(len(shape) - 1, -1, -1))  # innermost first
    for position in range(1, len(order)):
        moving = position
        for other in range(position - 1, -1, -1):
            swap = _compare(order[other], order[moving], steps, shape)
            if swap > 0:
                order[other], order[moving] = order[moving], order[other]
                moving = other
            elif swap < 0:
                break
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim], step = step, step * max(shape[dim], 1)
    return strides


def _steps(shape: Shape, operand: torch.Tensor) -> list[int]:
    """The operand's strides, 0 where it is broadcast."""
    missing = len(shape) - operand.dim()
    own = zip(operand.shape, operand.stride(), shape[missing:], strict=True)
    return [0] * missing + [0 if size == 1 != whole else step for size, step, whole in own]


def _compare(inner: int, outer: int, steps: Sequence[Shape], shape: Shape) -> int:
    """1 if the two dimensions are in the wrong order, -1 if in the right one, 0 if undecided."""
    for strides in steps:
        one, two = strides[inner], strides[outer]
        if one == 0 or two == 0:
            continue
        if one != two:
            return 1 if one > two else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


# Others -----------------------------------------------------------------------------------------


def _factory(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """empty, zeros, ones: (sizes, ...); full: (sizes, value, ...)."""
    if kwargs.get("memory_format") is not None:
        return _ASK_TORCH
    return _meta(args[0], kwargs.get("dtype") or _default_dtype(args[1] if args[1:] else 0.0))


def _scalar(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    return _meta((), kwargs.get("dtype") or torch.get_default_dtype())


def _default_dtype(value: float) -> torch.dtype:
    by_type = {bool: torch.bool, int: torch.int64}
    return by_type.get(type(value)) or torch.get_default_dtype()


def _new(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    return _meta(args[1], kwargs.get("dtype") or args[0].dtype)


def _like(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """empty_like and similar; copies, too, keep the memory order unless told otherwise."""
    x, wanted = args[0], kwargs.get("memory_format")
    contiguous = wanted is torch.contiguous_format
    if not contiguous and wanted not in (None, torch.preserve_format):
        return _ASK_TORCH
    strides = None if contiguous else _strides(x.shape, [x])
    return _meta(x.shape, kwargs.get("dtype") or x.dtype, strides)


def _arange(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    start, end, step = (0, *args, 1)[-3:] if len(args) == 1 else (*args, 1)[:3]
    if not all(isinstance(number, int) for number in (start, end, step)):
        return _ASK_TORCH
    return _meta([max(math.ceil((end - start) / step), 0)], kwargs.get("dtype") or torch.int64)


def _matmul(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """mm and bmm; with a first argument that is added, addmm and baddbmm."""
    left, right = args[-2:]
    return _meta([*left.shape[:-1], right.shape[-1]], left.dtype)


def _grouped_matmul(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Rows (N, K) times one of several matrices (E, K, M) each. (torch's own rule knows bfloat16
    only.)"""
    left, right = args[:2]
    if left.dim() != 2 or right.dim() != 3 or len(args) > 3 or kwargs.get("out_dtype") is not None:
        return _ASK_TORCH
    return _meta([left.shape[0], right.shape[-1]], left.dtype)


def _embedding(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    table, ids = args[:2]
    return _meta([*ids.shape, table.shape[1]], table.dtype)


def _gather(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    x, _, index = args[:3]
    return _meta(index.shape, x.dtype)


def _sorted(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Values and their indices."""
    x = args[0]
    strides = _strides(x.shape, [x])
    return _meta(x.shape, x.dtype, strides), _meta(x.shape, torch.int64, strides)


def _softmax(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    x, _, to_float = args
    if not x.is_contiguous():
        return _ASK_TORCH
    return _meta(x.shape, torch.float32 if to_float else x.dtype)


def _cat(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    alike = len({part.dtype for part in parts}) == len({part.dim() for part in parts}) == 1
    if not alike or any(part.is_contiguous(memory_format=_LAST) for part in parts):
        return _ASK_TORCH
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return _meta(shape, parts[0].dtype)


def _masked(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    x, mask = args[:2]
    return _meta(_broadcast([x.shape, mask.shape]), x.dtype)


def _stack(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    if len({(part.dtype, part.shape) for part in parts}) > 1:
        return _ASK_TORCH
    shape = list(parts[0].shape)
    shape.insert(dim % (len(shape) + 1), len(parts))
    return _meta(shape, parts[0].dtype)


def _repeat(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    x, times = args
    sizes = (1,) * (len(times) - x.dim()) + tuple(x.shape)
    return _meta([size * count for size, count in zip(sizes, times, strict=True)], x.dtype)


def _topk(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Values and indices along the last dimension."""
    x, count, *rest = args
    if rest or kwargs or not x.dim():
        return _ASK_TORCH
    shape = [*x.shape[:-1], count]
    return _meta(shape, x.dtype), _meta(shape, torch.int64)


def _reduced(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """sum, mean, amax, amin over some dimensions: (x, dims, keepdim)."""
    x, dims, keep, *_ = (*args, None, False)[:3] if len(args) < 3 else args
    if not x.is_contiguous() or not isinstance(dims, Sequence) or not dims or not x.dim():
        return _ASK_TORCH
    gone = {dim % x.dim() for dim in dims}
    dtype = _dtype(func, (_kind(x), (list, (0,))), tuple(kwargs.items()))
    sizes = [(1 if dim in gone else size) for dim, size in enumerate(x.shape)]
    return _meta(sizes if keep else [n for dim, n in enumerate(sizes) if dim not in gone], dtype)


def _index(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """x[i, j, ...] with integer tensors for adjacent dimensions."""
    x, indices = args
    taken = [dim for dim, index in enumerate(indices) if index is not None]
    there = [indices[dim] for dim in taken]
    first, stop = taken[0], taken[-1] + 1
    if len(taken) != stop - first or any(index.dtype in _MASKS for index in there):
        return _ASK_TORCH
    found = _broadcast([index.shape for index in there])
    shape = [*x.shape[:first], *found, *x.shape[stop:]]
    before, behind = [0] * first, [0] * (x.dim() - stop)
    steps = [[*x.stride()[:first], *[0] * len(found), *x.stride()[stop:]]]
    steps += [[*before, *_steps(found, index), *behind] for index in there]
    return _meta(shape, x.dtype, _dense(shape, steps))


def _flash_attention(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Results and log-sum-exp, which lies in memory as (B, T, H)."""
    q = args[0]
    batch, heads, length, _ = q.shape
    out = _meta(q.shape, q.dtype, _strides(q.shape, [q]))
    sums = _meta((batch, length, heads), torch.float32 if q.dtype != torch.float64 else q.dtype)
    return out, sums.transpose(1, 2)


def _flash_forward(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The same on CUDA for q (B, T, H, D), plus outputs that only training needs."""
    q = args[0]
    batch, length, heads, _ = q.shape
    empty = _meta((0,), torch.uint64), _meta((0,), q.dtype)
    sums = _meta((batch, heads, length), torch.float32)
    return _meta(q.shape, q.dtype), sums, _meta((2,), torch.uint64), *empty


def _reshape_alias(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    x, shape, strides = args
    return x.as_strided(shape, strides, x.storage_offset())


def _unsafe_view(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    return args[0].view(args[1])


_LAST = torch.channels_last
_MASKS = (torch.bool, torch.uint8)
aten = torch.ops.aten
_RULES: dict[OpOverload, Callable[[OpOverload, tuple, dict[str, Any]], Any]] = {
    **dict.fromkeys(
        [aten.empty.memory_format, aten.zeros.default, aten.ones.default, aten.full.default],
        _factory,
    ),
    **dict.fromkeys([aten.new_empty.default, aten.new_zeros.default, aten.new_full.default], _new),
    **dict.fromkeys(
        [
            aten.empty_like.default,
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.full_like.default,
            aten.clone.default,
            aten._to_copy.default,
            aten.lift_fresh.default,  # called by torch.tensor
        ],
        _like,
    ),
    **dict.fromkeys([aten.arange.default, aten.arange.start, aten.arange.start_step], _arange),
    **dict.fromkeys(
        [aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default], _matmul
    ),
    **dict.fromkeys(
        [aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default], _reduced
    ),
    aten._grouped_mm.default: _grouped_matmul,
    aten.embedding.default: _embedding,
    aten._softmax.default: _softmax,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.masked_fill.Scalar: _masked,
    aten.masked_fill.Tensor: _masked,
    aten.repeat.default: _repeat,
    aten.topk.default: _topk,
    aten.gather.default: _gather,
    aten.sort.default: _sorted,
    aten.sort.stable: _sorted,
    aten.scalar_tensor.default: _scalar,
    aten._unsafe_view.default: _unsafe_view,
    aten.index.Tensor: _index,
    aten._reshape_alias.default: _reshape_alias,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_attention,
    aten._flash_attention_forward.default: _flash_forward,
}
