"""Weights of 8-bit floats (e4m3) with a scale a matrix, a row or a block: ``fp8`` as DeepSeek,
Qwen and vLLM's tools write it, and ``fbgemm_fp8``.

w = weight * scale under either name of the scale: ``weight_scale_inv`` is the inverse of the factor
by which the weights were multiplied. Scales are floats, or powers of two in 8 bits (UE8M0: 2^(byte
- 127)). Activations stay floats, and their settings are ignored. The bytes are the same on every
device.

Sources: transformers' ``finegrained_fp8`` and ``fbgemm_fp8``, the config.json of DeepSeek-V3;
OCP's Microscaling Formats specification for UE8M0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig

from .finite import check_finite
from .floats import FLOATS
from .format import Layout, Size, Tensors, WeightFormat, in_blocks, picked
from .methods import FormatOf, register
from .settings import Headers, Settings, headers_of
from .source import Slice, Source
from .tiles import CHUNK, Packing, TiledFormat, packed_layout

E4M3, UE8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
#: Dtype of scales -> its part of a format's name. UE8M0 may be stored as plain bytes.
SCALES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    UE8M0: "ue8m0",
    torch.uint8: "ue8m0",
}
SCALE_NAMES = ("weight_scale_inv", "weight_scale")
#: Settings that don't change the weights' values.
_OF_OTHERS = ("quant_method", "activation_scheme", "activation_scale_ub", "kv_cache_scheme")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format(TiledFormat):
    """8-bit floats with scales.

    Attributes:
        block: outputs and inputs that share a scale; None for the whole matrix.
        scale_name: name of the scales in the checkpoint.
        scale_dtype: dtype of the scales in the checkpoint and on a device.
        scale_shape: shape of the scales in the checkpoint; None for one a block.
    """

    block: tuple[int, int] | None
    scale_name: str = "weight_scale_inv"
    scale_dtype: torch.dtype = torch.float32
    scale_shape: tuple[int, ...] | None = None
    names: ClassVar[tuple[str, ...]] = ("weight", "scale")

    @property
    def name(self) -> str:
        block = "" if self.block is None else f" {self.block[0]}x{self.block[1]}"
        stored = "" if self.scale_shape is None else f" {list(self.scale_shape)}"
        kind = "bytes" if self.scale_dtype == torch.uint8 else SCALES[self.scale_dtype]
        return f"fp8{block} {self.scale_name} {kind}{stored}"

    def _blocks(self, size: Size) -> tuple[int, int]:
        if self.block is None:
            return (1, 1)
        return math.ceil(size[0] / self.block[0]), math.ceil(size[1] / self.block[1])

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        shape = self._blocks(size) if self.scale_shape is None else self.scale_shape
        return {
            "weight": ExpectedTensor(shape=size, dtypes=(E4M3,)),
            self.scale_name: ExpectedTensor(shape=shape, dtypes=(self.scale_dtype,)),
        }

    def layout(self, size: Size) -> Layout:
        scale = torch.uint8 if SCALES[self.scale_dtype] == "ue8m0" else self.scale_dtype
        return {"weight": (size, E4M3), "scale": (self._blocks(size), scale)}

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scale, weight = stored[self.scale_name], stored["weight"]
        if SCALES[self.scale_dtype] == "ue8m0":
            scale = scale.view(torch.uint8)
        check_finite(self.scale_name, _as_float(scale))
        return {
            "weight": weight,
            "scale": scale.reshape(self._blocks((weight.shape[0], weight.shape[1]))),
        }

    def native(self, size: Size) -> tuple[int, ...] | None:
        high, wide = self.block or (0, size[1])
        if size[1] % CHUNK or (wide % CHUNK and wide < size[1]):
            return None
        return packed_layout(Packing.FLOAT8, high, 0 if wide >= size[1] else wide)

    def part(self, tensors: Tensors, begin: int, end: int) -> dict[str, torch.Tensor] | None:
        weight, scale = tensors["weight"][begin:end], tensors["scale"]
        if self.block is None:
            return {"weight": weight, "scale": scale}
        high = self.block[0]
        if begin % high or (end % high and end != len(tensors["weight"])):
            return None
        return {"weight": weight, "scale": scale[begin // high : math.ceil(end / high)]}

    def of_rows(self, size: Size, rows: torch.Tensor) -> WeightFormat:
        """With a scale for each row, where rows are not whole blocks."""
        block = self.block
        if block is not None and not in_blocks(rows, block[0]):
            block = 1, block[1]
        return replace(self, block=block, scale_shape=None)

    def take(self, tensors: Tensors, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        weight, scale = picked(tensors["weight"], rows), tensors["scale"]
        if self.block is not None:
            high = self.block[0]
            each = rows[::high] if in_blocks(rows, high) else rows
            scale = picked(scale, each // high)
        return {"weight": weight, "scale": scale}

    def together(
        self, name: str, size: tuple[int, int, int], slices: Sequence[Slice]
    ) -> Source | None:
        """As transformers 5 stacks experts: ``name`` (count, out, in), and ``name_scale_inv`` with
        the blocks of each; None if a block would be torn apart."""
        count, *each = size
        outputs, inputs = each
        if self.block is None or any(part.size[0] % self.block[0] for part in slices):
            return None
        high, scales = self.block[0], f"{name}_scale_inv"
        shape = count, *self._blocks((outputs, inputs))
        expected = {
            name: ExpectedTensor(shape=size, dtypes=(E4M3,)),
            scales: ExpectedTensor(shape=shape, dtypes=(self.scale_dtype,)),
        }

        def convert(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            check_finite(scales, _as_float(stored[scales]))
            made = dict[str, torch.Tensor]()
            for part in slices:
                rows = part.of(torch.arange(count * outputs).view(count, outputs))
                blocks = picked(stored[scales].flatten(0, 1), rows[::high] // high)
                made |= {f"{part.name}.weight": part.of(stored[name]), f"{part.name}.scale": blocks}
            return made

        parameters = (f"{part.name}.{tensor}" for part in slices for tensor in self.names)
        return Source(stored=expected, parameters=tuple(parameters), convert=convert)

    def outputs(self, tensors: Tensors) -> int:
        return len(tensors["weight"])

    def rows(self, tensors: Tensors, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        weight, scale = tensors["weight"], _as_float(tensors["scale"])
        rows = float8_values(weight.view(torch.uint8)[ids])
        if self.block is None:
            return rows.mul_(scale).to(dtype)
        high, wide = self.block
        block_of = torch.arange(len(scale), device=ids.device).repeat_interleave(high)
        of_rows = scale[block_of[ids]]  # ids // high would have a plan import sympy
        if scale.shape[1] > 1:
            of_rows = of_rows.repeat_interleave(wide, 1)[:, : rows.shape[1]]
        return rows.mul_(of_rows).to(dtype)


#: MXFP8, as compressed-tensors and ModelOpt store it: scales for 32 inputs, powers of two.
MXFP8_ROWS = Fp8Format(block=(1, 32), scale_name="weight_scale", scale_dtype=torch.uint8)


def float8_values(codes: torch.Tensor) -> torch.Tensor:
    """Bytes of e4m3 -> float32, by a table: eight times as fast on the CPU as torch's cast."""
    every = torch.arange(256, dtype=torch.uint8, device=codes.device).view(E4M3).float()
    return every.index_select(0, codes.flatten().int()).view(codes.shape)


def _as_float(scale: torch.Tensor) -> torch.Tensor:
    return (scale.view(UE8M0) if scale.dtype == torch.uint8 else scale).float()


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer: blocks come from the settings; the checkpoint's headers say which
    layers are floats, and the names and shapes of scales."""
    settings, headers = Settings.of(config), headers_of(config)
    settings.only(
        *_OF_OTHERS,
        *("fmt", "weight_block_size", "scale_fmt", "modules_to_not_convert"),
        *("ignored_layers", "dequantize", "is_checkpoint_fp8_serialized"),
    )
    settings.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    settings.choice("is_checkpoint_fp8_serialized", (True,), True)
    sized = settings.values.get("weight_block_size") is not None
    block = settings.two_sizes("weight_block_size") if sized else None
    ignored = settings.names("modules_to_not_convert") + settings.names("ignored_layers")
    quantized = settings.quantized(headers, ignored, *SCALE_NAMES)
    by_row = settings.values["quant_method"] == "fbgemm_fp8"

    def format_of(layer: str, size: Size) -> WeightFormat:
        if not quantized(layer):
            return FLOATS[dtype]
        expected = (1, size[1]) if by_row else block
        if headers is None:
            named = SCALE_NAMES[0 if block else 1]
            return register(Fp8Format(block=expected, scale_name=named))
        return register(format_found(layer, size, expected, headers))

    return format_of


def format_found(
    layer: str, size: Size, block: tuple[int, int] | None, headers: Headers
) -> Fp8Format:
    """The format with the checkpoint's scales. Without blocks, their number tells a scale a row
    from one for the matrix."""
    infos = {name: headers.get(f"{layer}.{name}") for name in SCALE_NAMES}
    found = {name: info for name, info in infos.items() if info is not None}
    if not found:
        return Fp8Format(block=block)  # loading reports the missing scale
    if len(found) > 1:
        raise ValueError(
            f"{headers[f'{layer}.weight_scale'].file}: {layer} has both {' and '.join(found)}: "
            "which of them scales its weights is unknown, download the model again"
        )
    ((name, info),) = found.items()
    if block is None and size[0] > 1 and math.prod(info.shape) == size[0]:
        block = (1, size[1])
    dtype = info.dtype if info.dtype in SCALES else torch.float32
    format = Fp8Format(block=block, scale_name=name, scale_dtype=dtype)
    whole = math.prod(info.shape) == math.prod(format._blocks(size))
    if whole and info.shape != format._blocks(size):
        return Fp8Format(block=block, scale_name=name, scale_dtype=dtype, scale_shape=info.shape)
    return format
