"""compressed-tensors, as llm-compressor writes it: integers, 8-bit and 4-bit floats.

``config_groups`` says which layers are quantized how; layers that the checkpoint has as floats are
floats nevertheless. Settings of activations are ignored: they stay floats.

- ``pack-quantized``: ``weight_packed`` int32 (out, ceil(in * bits / 32)), integers + 2^(bits - 1)
  from the lowest bit on; ``weight_scale`` (out, groups); zero points packed likewise along the
  outputs; ``weight_g_idx``, the group of each input (actorder ``group``); ``weight_shape``.
- ``int-quantized``: ``weight`` int8 (out, in), unpacked scales and zero points.
- ``float-quantized``: ``weight`` e4m3 with a scale for the matrix, or a row, group or block.
- ``naive-quantized``: one of the latter two, by the type.
- ``nvfp4-pack-quantized``, ``mxfp4-pack-quantized``: see ``nvfp4.py`` and ``mxfp4.py``.
- ``mxfp8-quantized``: ``weight`` e4m3 with uint8 scales for 32 inputs, powers of two.

``transform_config`` has transforms of inputs: see ``transforms.py``.

Source: the package compressed-tensors, ``compressors/`` and ``utils/match.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig
from exkv.ops.weight_groups import PLANES, pack_codes

from . import mxfp4, nvfp4
from .bits import order_of, pack, stored_scale, unpack, words, words_of
from .finite import check_finite
from .floats import FLOATS
from .format import Size, WeightFormat
from .fp8 import MXFP8_ROWS, Fp8Format
from .groups import GroupFormat
from .methods import FormatOf, register
from .rounding import Rounded
from .settings import (
    ROUTERS,
    Headers,
    Settings,
    float_stacks,
    headers_of,
    in_stack,
    stays_float,
)
from .targets import check_pattern, names_layer, patterns_of
from .transforms import TRANSFORMS, blocks_of, transform_settings, unknown_transform

PACKED, INTEGERS, FLOAT, NAIVE, MIXED = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    "mixed-precision",
)
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
#: Every quantized layer has one of these tensors.
_MARKERS = ("weight_packed", "weight_scale")
_OF_OTHERS = (
    *("quant_method", "quantization_status", "global_compression_ratio", "kv_cache_scheme"),
    *("version", "run_compressed", "dequantize"),
)
#: Must be empty: sparse weights are not supported.
_SPARSITY = "sparsity_config"
_ACTORDERS = ("group", "dynamic", True, "weight", "static", False)
_OF_OBSERVERS = ("observer", "observer_kwargs", "dynamic", "zp_dtype", "scale_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedFormat(GroupFormat):
    """The layout of groups, as compressed-tensors stores it.

    Attributes:
        packed: whether codes are packed into words, and not int8.
        shared: whether one scale is stored for the whole matrix.
    """

    packed: bool
    shared: bool = False

    @property
    def name(self) -> str:
        kind = "packed" if self.packed else "int8"
        return f"compressed-{kind}{'-shared' if self.shared else ''} {self.layout_name}"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        outputs, inputs = size
        self.layout(size)  # raises for inputs that it cannot have
        by_group = (1,) if self.shared else (outputs, self.groups.count(inputs))
        found = {"weight_scale": ExpectedTensor(shape=by_group, dtypes=(self.scale,))}
        if self.packed:
            found["weight_packed"] = words(outputs, words_of(inputs, self.bits))
        else:
            found["weight"] = ExpectedTensor(shape=size, dtypes=(torch.int8,))
        if self.shift == "zero":
            of_bytes = ExpectedTensor(shape=by_group, dtypes=(torch.int8,))
            of_words = words(words_of(outputs, self.bits), by_group[-1])
            found["weight_zero_point"] = of_words if self._packs_zeros() else of_bytes
        if self.ordered:
            found["weight_g_idx"] = words(inputs)
        return found

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        check_finite("weight_scale", stored["weight_scale"])
        outputs, inputs = self._size(stored)
        zero = order = None
        if self.shift == "zero":
            zero = self._zeros(stored["weight_zero_point"], outputs)
        if self.ordered:
            order = order_of(stored["weight_g_idx"], self.group or inputs, "weight_g_idx")
        scale = stored["weight_scale"].expand(outputs, -1)
        return self.beside(self._codes(stored, inputs, order), scale, zero, order)

    def _size(self, stored: Mapping[str, torch.Tensor]) -> Size:
        outputs, inputs = stored["weight_packed" if self.packed else "weight"].shape
        return outputs, inputs * 32 // self.bits if self.packed else inputs

    def _packs_zeros(self) -> bool:
        return self.packed and not self.shared

    def _codes(
        self, stored: Mapping[str, torch.Tensor], inputs: int, order: torch.Tensor | None
    ) -> torch.Tensor:
        """Codes in the kernels' order."""
        if self.packed:
            return torch.ops.exkv.pack_words(stored["weight_packed"], self.bits, inputs, order)
        codes = self._unsigned(stored["weight"], "weight")
        return pack_codes(codes if order is None else codes[:, order], self.bits)

    def _zeros(self, stored: torch.Tensor, outputs: int) -> torch.Tensor:
        """Unsigned integers (out, groups)."""
        if self._packs_zeros():
            return unpack(stored.T, self.bits, outputs).T
        return self._unsigned(stored, "weight_zero_point").expand(outputs, -1)

    def _unsigned(self, signed: torch.Tensor, name: str) -> torch.Tensor:
        half = 1 << self.bits - 1
        low, high = self._ends(signed)
        if low < -half or high >= half:
            raise ValueError(
                f"{name} has integers from {low} to {high}, which don't fit {self.bits} bits: "
                "config.json and the weights contradict each other, download the model again"
            )
        return signed.view(torch.uint8) + half  # modulo 256

    def _ends(self, signed: torch.Tensor) -> tuple[int, int]:
        """The smallest and largest of integers that could exceed the format's bits."""
        if self.bits == 8 or not signed.numel():
            return 0, 0
        low, high = signed.aminmax()
        return int(low), int(high)


def stored_as_packed(values: Rounded, bits: int) -> dict[str, torch.Tensor]:
    """Encode integers as ``pack-quantized`` stores them."""
    made = {
        "weight_packed": pack(values.codes, bits),
        "weight_scale": values.scale,
        "weight_shape": torch.tensor(values.codes.shape),
    }
    if values.zero is not None:
        made["weight_zero_point"] = pack(values.zero.T.contiguous(), bits).T.contiguous()
    return made


def packed_nbytes(format: GroupFormat, size: Size) -> int:
    """Bytes of codes, scales and zero points in the file."""
    (outputs, inputs), groups = size, format.groups.count(size[1])
    count = outputs * words_of(inputs, format.bits)
    count += groups * words_of(outputs, format.bits) if format.zeros else 0
    return 4 * count + outputs * groups * format.scale.itemsize


def rounded_of_packed(
    stored: Mapping[str, torch.Tensor], layer: str, format: GroupFormat
) -> Rounded:
    """Inverse of :func:`stored_as_packed`, for one layer among these tensors."""
    outputs, inputs = stored[f"{layer}.weight_shape"].tolist()
    codes, zero = unpack(stored[f"{layer}.weight_packed"], format.bits, inputs), None
    if format.zeros:
        zero = unpack(stored[f"{layer}.weight_zero_point"].T, format.bits, outputs).T
    return Rounded(codes=codes, scale=stored[f"{layer}.weight_scale"], zero=zero)


def settings_of_packed(
    formats: Mapping[str, GroupFormat], ignore: list[str]
) -> dict[str, Any] | None:
    """The quantization_config of a checkpoint with linear layers in these formats; None if all are
    floats.

    transformers 5.24 with compressed-tensors 0.20 reads zero points only where it dequantizes all
    weights as it loads them, and then takes one group of settings for all.

    Args:
        formats: name of a layer -> its format.
        ignore: layers that are floats.
    """
    groups: dict[tuple[int, int, bool], list[str]] = {}
    for layer, format in formats.items():
        groups.setdefault((format.bits, format.group, format.zeros), []).append(layer)
    if not groups:
        return None
    names, alone = {*formats, *ignore}, len(groups) == 1
    weights = {"type": "int", "strategy": "group", "dynamic": False}
    whole = alone and any(format.zeros for format in formats.values())
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{place}": {
                "targets": ["Linear"] if alone else patterns_of(layers, names - {*layers}),
                "weights": {
                    **weights,
                    "symmetric": not zeros,
                    "num_bits": bits,
                    "group_size": group,
                },
            }
            for place, ((bits, group, zeros), layers) in enumerate(sorted(groups.items()))
        },
        **({"dequantize": True} if whole else {}),
        "ignore": ignore,
        **transform_settings({name: format.hadamard for name, format in formats.items()}, ignore),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """One of the config_groups.

    Attributes:
        targets: names of layers, patterns of names, and types of modules.
        format: how its layers are stored.
        weights: the settings of weights; None if only activations are quantized.
    """

    targets: tuple[str, ...]
    format: str
    weights: Settings | None


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer, from the group that names the layer or else its type."""
    settings, headers = Settings.of(config), headers_of(config)
    settings.only(*_OF_OTHERS, *("config_groups", "format", "ignore"), _SPARSITY, TRANSFORMS)
    _check_dense(settings)
    block_of = blocks_of(settings)
    groups, ignored = _groups(settings), settings.names("ignore")
    for name in (*ignored, *(target for group in groups for target in group.targets)):
        check_pattern(settings.where, name)
    scale, stacks = config.dtype or dtype, float_stacks(headers)

    def format_of(layer: str, size: Size) -> WeightFormat:
        group = _group_of(layer, groups)
        if group is None or group.weights is None or any(names_layer(n, layer) for n in ignored):
            return floats(layer, size)
        if _is_float(layer, headers, stacks):
            return floats(layer, size)
        kinds = _KINDS[group.format]
        made = kinds[str(group.weights.choice("type", tuple(kinds), "int"))]
        format, block = made(group, layer, size, headers, scale), block_of(layer, size[1])
        if block:
            if not isinstance(format, CompressedFormat):
                raise unknown_transform(settings, layer, f"of weights in {format.name}")
            format = replace(format, hadamard=block)
        return register(format)

    def floats(layer: str, size: Size) -> WeightFormat:
        # Packers don't treat routers and fused experts as linear layers, see _is_float.
        no_linear = stays_float(layer, (*ROUTERS, "experts"))
        if not no_linear and block_of(layer, size[1]):
            raise unknown_transform(settings, layer, "of a layer of floats")
        return FLOATS[dtype]

    return format_of


def _is_float(layer: str, headers: Headers | None, stacks: frozenset[str]) -> bool:
    """Whether the checkpoint has the layer as floats. Packers only quantize an ``nn.Linear``, which
    routers and fused experts are not in transformers 5."""
    if headers is None:
        return stays_float(layer, ROUTERS)
    quantized = any(f"{layer}.{marker}" in headers for marker in _MARKERS)
    return (f"{layer}.weight" in headers or in_stack(layer, stacks)) and not quantized


def _check_dense(settings: Settings) -> None:
    """ValueError for sparse weights."""
    part = settings.part(_SPARSITY)
    if part is not None and part.values.get("format", "dense") != "dense":
        raise settings.bad(_SPARSITY, "dense, or none")
    if part is not None and part.values.get("config_groups"):
        raise settings.bad(_SPARSITY, "empty")


def _groups(settings: Settings) -> list[_Group]:
    found = []
    parts = settings.part("config_groups")
    kind = settings.choice("format", (*_KINDS, MIXED))
    for key in parts.values if parts else ():
        assert parts is not None
        part = parts.part(key) or parts
        part.only("targets", "weights", "input_activations", "output_activations", "format")
        format = part.choice("format", tuple(_KINDS), None if kind == MIXED else kind)
        found.append(_Group(targets=part.names("targets"), format=format, weights=_weights(part)))
    if not found:
        raise settings.bad("config_groups", "an object that says how layers are quantized")
    return found


def _weights(part: Settings) -> Settings | None:
    weights = part.part("weights")
    if weights is not None:
        weights.only(
            *_OF_OBSERVERS,
            *("num_bits", "type", "symmetric", "group_size", "strategy"),
            *("block_structure", "actorder"),
        )
        weights.choice("dynamic", (False,), False)
    return weights


def _group_of(layer: str, groups: list[_Group]) -> _Group | None:
    """The group that matches the layer by name, else by a pattern, else by its type."""
    ranked = [
        (0 if name == layer else 1 if name.startswith("re:") else 2, place)
        for place, group in enumerate(groups)
        for name in group.targets
        if names_layer(name, layer)
    ]
    return groups[min(ranked)[1]] if ranked else None


def _float_format(
    group: _Group, layer: str, size: Size, headers: Headers | None, scale: torch.dtype
) -> WeightFormat:
    weights = group.weights
    assert weights is not None
    weights.choice("num_bits", (8,), 8)
    weights.choice("symmetric", (True,), True)
    strategy = _strategy(weights, ("tensor", "channel", "group", "block"))
    blocks = {"tensor": None, "channel": (1, size[1])}
    if strategy == "group":
        blocks["group"] = (1, _group_size(weights))
    if strategy == "block":
        blocks["block"] = weights.two_sizes("block_structure")
    return Fp8Format(
        block=blocks[strategy],
        scale_name="weight_scale",
        scale_dtype=stored_scale(layer, "weight_scale", headers, scale),
        scale_shape=(1,) if strategy == "tensor" else None,
    )


def _fixed(
    format: WeightFormat, bits: int, inputs: int, strategy: str = "group"
) -> Callable[..., WeightFormat]:
    """Maker of a format of floats; ValueError unless the settings have its values, or none."""

    def make(group: _Group, *rest: object) -> WeightFormat:
        assert group.weights is not None
        group.weights.choice("num_bits", (bits,), bits)
        group.weights.choice("symmetric", (True,), True)
        group.weights.choice("group_size", (inputs,), inputs)
        group.weights.choice("strategy", (strategy,), strategy)
        return format

    return make


def _integer_format(
    group: _Group, layer: str, size: Size, headers: Headers | None, scale: torch.dtype
) -> WeightFormat:
    weights = group.weights
    assert weights is not None
    strategy = _strategy(weights, ("tensor", "channel", "group"))
    # Some tools that sort inputs write the inputs' groups, others restore the order.
    indexed = weights.choice("actorder", (*_ACTORDERS, None)) in _ACTORDERS[:3]
    if headers is not None:
        indexed = f"{layer}.weight_g_idx" in headers
    return CompressedFormat(
        bits=weights.choice("num_bits", tuple(sorted(PLANES)), 8),
        group=_group_size(weights) if strategy == "group" else 0,
        scale=stored_scale(layer, "weight_scale", headers, scale),
        shift="symmetric" if weights.flag("symmetric", True) else "zero",
        ordered=indexed and strategy == "group",
        packed=group.format == PACKED,
        shared=strategy == "tensor",
    )


def _strategy(weights: Settings, known: tuple[str, ...]) -> str:
    sized = weights.values.get("group_size") is not None
    return str(weights.choice("strategy", known, "group" if sized else "tensor"))


def _group_size(weights: Settings) -> int:
    size = weights.group_size("group_size")
    if size is None:
        raise weights.bad("group_size", "a multiple of 32, as strategy says group")
    return size


#: How layers are stored -> type of their weights -> function that makes their format. A new kind is
#: an entry.
_KINDS: dict[str, dict[str, Callable[..., WeightFormat]]] = {
    PACKED: {"int": _integer_format},
    INTEGERS: {"int": _integer_format},
    FLOAT: {"float": _float_format},
    NAIVE: {"int": _integer_format, "float": _float_format},
    NVFP4: {"float": _fixed(nvfp4.COMPRESSED_TENSORS, 4, nvfp4.GROUP, "tensor_group")},
    MXFP4: {"float": _fixed(mxfp4.COMPRESSED_TENSORS, 4, mxfp4.GROUP)},
    MXFP8: {"float": _fixed(MXFP8_ROWS, 8, mxfp4.GROUP)},
}
