"""bitsandbytes, as transformers saves it: ``nf4`` and ``fp4`` with or without double quantization
(Dettmers et al., 2023), and ``int8`` (Dettmers et al., 2022).

4 bits: ``weight`` uint8 (out * in / 2, 1), the matrix row by row, the first of two weights in the
high half of a byte; a weight is ``quant_map[code] * absmax[block]``. With double quantization
``absmax`` has 8 bits: ``nested_quant_map[absmax] * nested_absmax[block of blocks] +
nested_offset``. Other values are JSON in ``quant_state.bitsandbytes__nf4``. 8 bits: ``weight`` int8
times ``SCB / 127``, one number a row; the separate handling of outlier activations is not done.

Source: bitsandbytes' ``functional.py`` (``QuantState``) and ``nn/modules.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig
from exkv.checkpoint.files import parse_json_object
from exkv.checkpoint.value_checks import is_int, is_number

from .finite import check_finite
from .floats import FLOATS
from .format import Layout, Size, Tensors, WeightFormat, picked
from .groups import GroupFormat
from .methods import FormatOf, register
from .settings import Headers, Settings, headers_of
from .tiles import CHUNK, Packing, TiledFormat, packed_layout

_KINDS = ("nf4", "fp4")
#: Possible numbers of weights that share an absmax; and of absmax that share one of their own.
BLOCKS = (64, 32, 128, 256, 512, 1024, 2048, 4096)
_NESTED = 256
#: Division by them as a shift: with ``//`` a plan would import sympy.
_SHIFTS = {size: size.bit_length() - 1 for size in BLOCKS}
#: Upper bound on the bytes of the JSON.
_LONGEST = 4096
_OF_OTHERS = (
    *("quant_method", "bnb_4bit_compute_dtype", "llm_int8_threshold", "_load_in_8bit"),
    *("llm_int8_enable_fp32_cpu_offload", "_load_in_4bit"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bnb4Format(TiledFormat):
    """4-bit indices into 16 values.

    Attributes:
        kind: "nf4" or "fp4".
        block: weights that share an absmax, row by row.
        nested: whether absmax are quantized too.
        state: bytes of the JSON in the checkpoint.
    """

    kind: str
    block: int
    nested: bool
    state: int
    names4: ClassVar[tuple[str, ...]] = ("weight", "absmax", "quant_map")
    nested_names: ClassVar[tuple[str, ...]] = ("nested_absmax", "nested_quant_map", "nested_offset")

    @property
    def name(self) -> str:
        return f"bnb-{self.kind}-{self.block}{'-nested' if self.nested else ''} {self.state}"

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.names4, *(self.nested_names if self.nested else ()))

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        layout = self.layout(size)
        flat = ExpectedTensor(shape=(size[0] * size[1] // 2, 1), dtypes=(torch.uint8,))
        found = {"weight": flat}
        for name in self.names[1:]:
            if name != "nested_offset":
                shape, dtype = layout[name]
                found[f"weight.{name}"] = ExpectedTensor(shape=shape, dtypes=(dtype,))
        found[self._state_name()] = ExpectedTensor(shape=(self.state,), dtypes=(torch.uint8,))
        return found

    def _state_name(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def layout(self, size: Size) -> Layout:
        if size[1] % 2:
            raise ValueError(f"a matrix of {size[1]} inputs can't be in {self.kind}: odd number")
        blocks = math.ceil(size[0] * size[1] / self.block)
        whole: Layout = {
            "weight": ((size[0], size[1] // 2), torch.uint8),
            "absmax": ((blocks,), torch.uint8 if self.nested else torch.float32),
            "quant_map": ((16,), torch.float32),
            "nested_absmax": ((math.ceil(blocks / _NESTED),), torch.float32),
            "nested_quant_map": ((256,), torch.float32),
            "nested_offset": ((1,), torch.float32),
        }
        return {name: whole[name] for name in self.names}

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state = self._read_state(stored)
        made = {name: stored[f"weight.{name}"] for name in self.names[1:5]}
        for name, values in made.items():
            if values.dtype == torch.float32:
                check_finite(name, values)
        if self.nested:
            made["nested_offset"] = torch.tensor([state["nested_offset"]], dtype=torch.float32)
        return {"weight": stored["weight"].view(state["shape"][0], -1), **made}

    def _read_state(self, stored: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The JSON, checked against the other tensors' shapes."""
        name = self._state_name()
        state = parse_json_object(bytes(stored[name].tolist()), name)
        shape = state.get("shape")
        numbers = shape if isinstance(shape, list) and all(map(is_int, shape)) else []
        whole = len(numbers) == 2 and min(numbers) > 0
        if not whole or math.prod(numbers) != 2 * stored["weight"].numel():
            raise ValueError(
                f"{name} has shape {shape!r}, which the stored weights don't match: download the "
                "model again"
            )
        sizes = {"blocksize": self.block, "nested_blocksize": _NESTED if self.nested else None}
        for key, size in sizes.items():
            if state.get(key) != size:
                raise ValueError(
                    f"{name} has {key} {state.get(key)!r}, but the number of absmax means {size}: "
                    "download the model again"
                )
        if self.nested and not is_number(state.get("nested_offset")):
            raise ValueError(
                f"{name} has nested_offset {state.get('nested_offset')!r}, which must be a finite "
                "number: download the model again"
            )
        return state

    def native(self, size: Size) -> tuple[int, ...] | None:
        if size[1] % CHUNK:
            return None
        return packed_layout(Packing.TABLE, self.block, int(self.nested))

    def part(self, tensors: Tensors, begin: int, end: int) -> dict[str, torch.Tensor] | None:
        weight, inputs = tensors["weight"][begin:end], 2 * tensors["weight"].shape[1]
        whole = self.block * (_NESTED if self.nested else 1)
        if begin * inputs % whole or (end * inputs % whole and end != len(tensors["weight"])):
            return None
        return {
            **{name: tensors[name] for name in self.names},
            "weight": weight,
            **{
                name: tensors[name][begin * inputs // size : math.ceil(end * inputs / size)]
                for name, size in (("absmax", self.block), ("nested_absmax", whole))
                if name in self.names
            },
        }

    def of_rows(self, size: Size, rows: torch.Tensor) -> WeightFormat | None:
        """With absmax in floats, and for blocks within rows: others may be torn apart."""
        each = math.gcd(size[1], self.block)
        return replace(self, block=each, nested=False) if each in BLOCKS else None

    def take(self, tensors: Tensors, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs, inputs = len(tensors["weight"]), 2 * tensors["weight"].shape[1]
        first = torch.arange(0, outputs * inputs, math.gcd(inputs, self.block))
        absmax = self._absmax(tensors, first >> _SHIFTS[self.block]).view(outputs, -1)
        weight, absmax = picked(tensors["weight"], rows), picked(absmax, rows).flatten()
        return {"weight": weight, "absmax": absmax, "quant_map": tensors["quant_map"]}

    def _absmax(self, tensors: Tensors, blocks: torch.Tensor) -> torch.Tensor:
        """Those of these blocks, fp32 of the same shape."""
        absmax = tensors["absmax"][blocks]
        if self.nested:
            absmax = tensors["nested_quant_map"][absmax.int()]
            absmax.mul_(tensors["nested_absmax"][blocks >> _SHIFTS[_NESTED]])
            absmax.add_(tensors["nested_offset"])
        return absmax

    def outputs(self, tensors: Tensors) -> int:
        return len(tensors["weight"])

    def rows(self, tensors: Tensors, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        both = tensors["weight"][ids]  # (n, in / 2)
        codes = torch.stack([both >> 4, both & 15], -1).flatten(1)
        inputs = codes.shape[1]
        each = math.gcd(inputs, self.block)  # adjacent weights of a row that share an absmax
        first = torch.arange(0, inputs, each, device=ids.device)
        blocks = ids.unsqueeze(1) * inputs + first >> _SHIFTS[self.block]
        absmax = self._absmax(tensors, blocks)
        values = tensors["quant_map"].index_select(0, codes.flatten().int()).view(codes.shape)
        return values.mul_(absmax.repeat_interleave(each, 1)).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bnb8Format(GroupFormat):
    """int8 with a scale a row, in the layout of groups."""

    @property
    def name(self) -> str:
        return f"bnb-{self.layout_name}"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        self.layout(size)  # raises for inputs that it cannot have
        return {
            "weight": ExpectedTensor(shape=size, dtypes=(torch.int8,)),
            "SCB": ExpectedTensor(shape=size[:1], dtypes=(torch.float32,)),
        }

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        check_finite("SCB", stored["SCB"])
        codes = (stored["weight"].short() + 128).to(torch.uint8)
        return self.pack(codes, (stored["SCB"] / 127).unsqueeze(1))


INT8 = Bnb8Format(bits=8, group=0, scale=torch.float32)


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer; the checkpoint's headers say which are quantized."""
    settings, headers = Settings.of(config), headers_of(config)
    four = _has_four_bits(settings)
    kind = settings.choice("bnb_4bit_quant_type", _KINDS, "fp4")
    nested = settings.flag("bnb_4bit_use_double_quant")
    ignored = settings.names("llm_int8_skip_modules")
    quantized = settings.quantized(headers, ignored, "weight.absmax" if four else "SCB")

    def format_of(layer: str, size: Size) -> WeightFormat:
        if not quantized(layer):
            return FLOATS[dtype]
        if not four:
            return register(INT8)
        start = Bnb4Format(kind=kind, block=BLOCKS[0], nested=nested, state=0)
        return register(_format_found(start, layer, size, headers))

    return format_of


def _has_four_bits(settings: Settings) -> bool:
    """Whether weights have 4 bits and not 8; checks the other settings."""
    settings.only(
        *_OF_OTHERS,
        *("load_in_4bit", "load_in_8bit", "llm_int8_skip_modules", "llm_int8_has_fp16_weight"),
        *("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage"),
    )
    settings.choice("llm_int8_has_fp16_weight", (False,), False)
    settings.choice("bnb_4bit_quant_storage", ("uint8",), "uint8")
    four, eight = settings.flag("load_in_4bit"), settings.flag("load_in_8bit")
    if four == eight:
        raise settings.bad("load_in_4bit", f"other than load_in_8bit, {eight}")
    return four


def _format_found(
    format: Bnb4Format, layer: str, size: Size, headers: Headers | None
) -> Bnb4Format:
    """The format with the block size that the number of absmax implies, and the JSON's length."""
    absmax = None if headers is None else headers.get(f"{layer}.weight.absmax")
    if headers is None or absmax is None:  # loading reports that it is missing
        return format
    of_size = [b for b in BLOCKS if absmax.shape == (math.ceil(size[0] * size[1] / b),)]
    state = headers.get(f"{layer}.{format._state_name()}")
    length = state.shape[0] if state is not None and len(state.shape) == 1 else 0
    return replace(format, block=(of_size or BLOCKS)[0], state=min(length, _LONGEST))
