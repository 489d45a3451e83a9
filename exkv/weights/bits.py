"""What quantization methods share: bit fields in words, groups of inputs, and checks of tensors'
contents."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from exkv.checkpoint import ExpectedTensor
from exkv.ops.registry import define_op
from exkv.ops.weight_groups import BLOCK, CHUNK, PLANES, pack_codes

from .finite import refuse_any
from .settings import Headers

#: Dtypes of stored scales, which they keep on a device.
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WORDS = (torch.int32,)


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 (..., words) -> uint8 (..., count): adjacent fields of ``bits`` bits, from the lowest
    bit of the first word on."""
    each = 8 // math.gcd(8, bits)  # fields that end with a byte
    stored, span = words.contiguous().view(torch.uint8), each * bits // 8
    if bits == 8:
        return stored[..., :count]
    if bits == 4:  # two fields at a time in 16-bit arithmetic, which is several times as fast
        wide = stored.to(torch.int16)
        wide = (wide << 4).bitwise_or_(wide).bitwise_and_(0x0F0F)
        return wide.view(torch.uint8)[..., :count]
    needed = -(-count // each) * span
    parts = F.pad(stored, (0, needed - stored.shape[-1])).unflatten(-1, (-1, span)).unbind(-1)
    fields = []
    for byte, shift in (divmod(first, 8) for first in range(0, each * bits, bits)):
        field = parts[byte] >> shift
        if shift + bits > 8:
            field = field | parts[byte + 1] << 8 - shift
        fields.append(field & (1 << bits) - 1)
    return torch.stack(fields, -1).flatten(-2)[..., :count]


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of :func:`unpack`: uint8 (n, count) -> int32 (n, words)."""
    each = 8 // math.gcd(8, bits)  # fields that end with a byte
    fields = F.pad(codes, (0, -codes.shape[1] % 32)).unflatten(1, (-1, each)).unbind(-1)
    parts = [torch.zeros_like(fields[0]) for _ in range(each * bits // 8)]
    for place, field in enumerate(fields):
        byte, shift = divmod(place * bits, 8)
        parts[byte] |= field << shift
        if shift + bits > 8:
            parts[byte + 1] |= field >> 8 - shift
    packed = torch.stack(parts, -1).flatten(1).view(torch.int32)
    return packed[:, : words_of(codes.shape[1], bits)].contiguous()


def _packed_fake(
    words: torch.Tensor, bits: int, inputs: int, order: torch.Tensor | None
) -> torch.Tensor:
    return words.new_empty(
        (-(-len(words) // BLOCK), inputs // CHUNK, CHUNK * bits), dtype=torch.uint8
    )


@define_op(
    "pack_words(Tensor words, int bits, int inputs, Tensor? order) -> Tensor", fake=_packed_fake
)
def pack_words(
    words: torch.Tensor, bits: int, inputs: int, order: torch.Tensor | None
) -> torch.Tensor:
    """Repack a file's codes as kernels read them (``weight_groups.pack_codes``).

    Args:
        words: int32 (out, words), fields of ``bits`` bits from the lowest on, in any strides.
        inputs: number of fields, a multiple of 32.
        order: int64 (inputs,), index of each input's field; None for in order.

    Raises:
        ValueError: the arguments contradict each other.
    """
    if bits not in PLANES:
        raise ValueError(f"pack_words: codes of {bits} bits; they must have 2 to 6, or 8")
    if words.dtype != torch.int32 or words.dim() != 2:
        raise ValueError(
            f"pack_words: words must be int32 (out, words); they are {words.dtype} "
            f"{tuple(words.shape)}"
        )
    if inputs < 0 or inputs % CHUNK or words.shape[1] < words_of(inputs, bits):
        raise ValueError(
            f"pack_words: {inputs} inputs of {bits} bits must be a multiple of {CHUNK} and fit in "
            f"{words.shape[1]} words"
        )
    codes = unpack(words, bits, inputs)
    return pack_codes(codes if order is None else _in_order(codes, order), bits)


def _in_order(codes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    inputs = codes.shape[1]
    if order.dtype != torch.int64 or order.shape != (inputs,):
        raise ValueError(
            f"pack_words: order is {order.dtype} {tuple(order.shape)}; it must be int64 ({inputs},)"
        )
    wrong = order[(order < 0) | (order >= inputs)]
    if len(wrong):
        raise ValueError(f"pack_words: order has {int(wrong[0])}, and there are {inputs} inputs")
    return codes[:, order]


def words_of(count: int, bits: int) -> int:
    """32-bit words for ``count`` adjacent fields."""
    return -(-count * bits // 32)


def order_of(groups: torch.Tensor, size: int, name: str) -> torch.Tensor:
    """The order of inputs in which groups are contiguous.

    Args:
        groups: the group of each input, (in,).
        size: inputs of a group; the last may have fewer.
        name: name of the tensor in messages.

    Raises:
        ValueError: a group has another number of inputs.
    """
    order = groups.argsort(stable=True)
    expected = torch.arange(len(groups), dtype=groups.dtype) // size
    wrong = groups[order] != expected
    if wrong.any():
        first = int(order[wrong.nonzero()[0]])
        raise ValueError(
            f"{name} puts input {first} into group {int(groups[first])}, but groups have {size} "
            f"inputs each, from 0 to {int(expected[-1])}: download the model again"
        )
    return order


def check_permutation(name: str, order: torch.Tensor) -> None:
    """ValueError unless every input occurs once."""
    expected = torch.arange(len(order), dtype=order.dtype)
    wrong = order.sort().values != expected
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name} is not a permutation of the {len(order)} inputs, {first} is missing or "
            "another occurs twice: download the model again"
        )


def check_constant(name: str, values: torch.Tensor, expected: int, why: str) -> None:
    """ValueError if integers are not all as expected."""
    contradiction = "config.json and the weights contradict each other, download the model again"
    what = f"{name} are not {expected}, which {why}"
    refuse_any(values != expected, values, what, contradiction)


def stored_scale(
    layer: str, name: str, headers: Headers | None, default: torch.dtype
) -> torch.dtype:
    """Dtype in which the checkpoint stores a layer's scales; the default without a checkpoint."""
    info = None if headers is None else headers.get(f"{layer}.{name}")
    dtype = default if info is None else info.dtype
    return dtype if dtype in SCALE_DTYPES else torch.float16


def words(*shape: int) -> ExpectedTensor:
    """A tensor of packed fields."""
    return ExpectedTensor(shape=shape, dtypes=WORDS)
