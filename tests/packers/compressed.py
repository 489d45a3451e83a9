"""compressed-tensors: integers as int8 or packed into words, 8-bit and 4-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import Packed, Recipe, every_projection
from .fp8 import blocks
from .integers import groups_of, packed_bits, rounded, value
from .mxfp4 import flat
from .nvfp4 import pack as nvfp4


def integers(
    layer: str, weight: torch.Tensor, *, bits: int, group: int, sym: bool, packed: bool, act: bool
) -> Packed:
    group_of = groups_of(layer, weight.shape[1], group, act)
    codes, scale, zero = rounded(weight, bits, group_of, sym)
    half = 2 ** (bits - 1)
    tensors = {"weight_scale": scale}
    if packed:
        tensors["weight_packed"] = packed_bits(codes, bits)
        tensors["weight_shape"] = torch.tensor(weight.shape)
    else:
        tensors["weight"] = (codes - half).to(torch.int8)
    if not sym:
        of_words = packed_bits(zero.T.contiguous(), bits).T
        tensors["weight_zero_point"] = of_words if packed else (zero - half).to(torch.int8)
    if act:
        tensors["weight_g_idx"] = group_of.int()
    return tensors, value(codes, scale, zero, group_of)


def hadamard(block: int) -> torch.Tensor:
    """Sylvester's matrix, divided by its root: minus where both numbers have an odd count of bits
    in common."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)]
    return torch.tensor(signs, dtype=torch.float64) * block**-0.5


def turned(weight: torch.Tensor, block: int) -> torch.Tensor:
    """Each block of inputs times that."""
    blocks = weight.double().unflatten(1, (-1, block))
    return (blocks @ hadamard(block)).flatten(1).float()


def shared(weight: torch.Tensor) -> Packed:
    """int8 with one scale."""
    scale = (weight.abs().max() / 127).to(torch.bfloat16)
    codes = (weight / scale.float()).round().clamp(-128, 127)
    return {
        "weight": codes.to(torch.int8),
        "weight_scale": scale.reshape(1),
    }, codes * scale.float()


def floats(weight: torch.Tensor, high: int, wide: int, shape: tuple[int, ...] | None) -> Packed:
    tensors, plain = blocks(weight, high, wide, torch.bfloat16)
    scale = tensors["weight_scale_inv"]
    return {
        "weight": tensors["weight"],
        "weight_scale": scale if shape is None else scale.reshape(shape),
    }, plain


def settings(format: str, *groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": format,
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **more,
    }


def group(targets: list[str] = ["Linear"], **weights: Any) -> dict[str, Any]:  # noqa: B006
    args = {"type": "int", "symmetric": True, "dynamic": False, "observer": "minmax", **weights}
    return {"targets": targets, "weights": args, "input_activations": None}


def _int(
    format: str,
    *,
    bits: int,
    group_size: int,
    sym: bool = True,
    act: bool = False,
    split: bool = False,
) -> Recipe:
    strategy = {"strategy": "channel"}
    if group_size != -1:
        strategy = {"strategy": "group", "group_size": group_size}
    order = {"actorder": "group"} if act else {}
    how = {"bits": bits, "group": group_size, "sym": sym, "act": act}
    packed = format == "pack-quantized"
    return Recipe(
        settings=settings(format, group(num_bits=bits, symmetric=sym, **strategy, **order)),
        pack=lambda layer, weight: integers(layer, weight, packed=packed, **how),
        split=split,
    )


def _float(high: int, wide: int, shape: tuple[int, ...] | None = None, **weights: Any) -> Recipe:
    """A height or width of -1 is that of the matrix."""

    def pack(layer: str, weight: torch.Tensor) -> Packed:
        size = (high if high > 0 else weight.shape[0], wide if wide > 0 else weight.shape[1])
        return floats(weight, *size, shape)

    return Recipe(
        settings=settings("float-quantized", group(num_bits=8, **weights, type="float")), pack=pack
    )


def _turned(block: int, bits: int) -> Recipe:
    """Integers of what the inputs' transform makes of the matrix."""
    how = {"bits": bits, "group": 32, "sym": True, "packed": True, "act": False}

    def pack(layer: str, weight: torch.Tensor) -> Packed:
        tensors, plain = integers(layer, turned(weight, block), **how)
        return tensors, turned(plain, block)

    places = [{"targets": "Linear", "ignore": ["lm_head"], "location": "input"}]
    places.append({**places[0], "location": "weight_input", "inverse": True})
    scheme = {"type": "hadamard", "head_dim": block, "randomize": False, "apply": places}
    weights = group(num_bits=bits, strategy="group", group_size=32)
    transform = {"config_groups": {"v": {**scheme, "precision": "torch.float32"}}}
    return Recipe(
        settings=settings("pack-quantized", weights, transform_config=transform),
        pack=pack,
        split=True,
    )


def _named(
    format: str, pack: Callable[[torch.Tensor], Packed], split: bool, **weights: Any
) -> Recipe:
    """Floats whose groups are those of the format."""
    return Recipe(
        settings=settings(format, group(type="float", **weights), moe_sparsity_config=None),
        pack=lambda layer, weight: pack(weight),
        split=split,
    )


def _mxfp8(weight: torch.Tensor) -> Packed:
    tensors, plain = blocks(weight, 1, 32, torch.uint8)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, plain


def _mixed(layer: str, weight: torch.Tensor) -> Packed:
    if "down_proj" in layer:
        return floats(weight, len(weight), weight.shape[1], (1,))
    bits = 8 if layer.endswith("layers.1.self_attn.q_proj") else 4
    how = {"group": 32, "sym": True, "packed": True, "act": False}
    return integers(layer, weight, bits=bits, **how)


_GROUPED = {"strategy": "group", "group_size": 32}
_MIXED = settings(
    "mixed-precision",
    {**group(num_bits=4, **_GROUPED), "format": "pack-quantized"},
    {
        **group(["re:.*down_proj"], num_bits=8, type="float", strategy="tensor"),
        "format": "float-quantized",
        "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
    },
    {
        **group(["model.layers.1.self_attn.q_proj"], num_bits=8, **_GROUPED),
        "format": "pack-quantized",
    },
    ignore=["lm_head", "re:.*layers.0.mlp.*"],
    sparsity_config={"format": "dense"},
    transform_config={},
)

RECIPES = {
    "compressed 4": _int("pack-quantized", bits=4, group_size=32, split=True),
    "compressed 4 asymmetric": _int("pack-quantized", bits=4, group_size=64, sym=False),
    "compressed 4 act-order": _int("pack-quantized", bits=4, group_size=32, act=True),
    "compressed 8 rows": _int("pack-quantized", bits=8, group_size=-1),
    "compressed int8": _int("int-quantized", bits=8, group_size=-1),
    "compressed int8 asymmetric": _int("int-quantized", bits=8, group_size=-1, sym=False),
    "compressed naive": _int("naive-quantized", bits=4, group_size=32),
    "compressed int8 matrix": Recipe(
        settings=settings("int-quantized", group(num_bits=8, strategy="tensor")),
        pack=lambda layer, weight: shared(weight),
    ),
    "compressed fp8 matrix": _float(-1, -1, (1,), strategy="tensor"),
    "compressed fp8 rows": _float(1, -1, strategy="channel"),
    "compressed fp8 blocks": _float(32, 64, strategy="block", block_structure=[32, 64]),
    "compressed nvfp4": _named(
        "nvfp4-pack-quantized",
        lambda weight: nvfp4(weight, "weight_packed", "weight_global_scale"),
        split=True,
        num_bits=4,
        strategy="tensor_group",
        group_size=16,
    ),
    "compressed mxfp4": _named(
        "mxfp4-pack-quantized",
        lambda weight: flat(weight, "weight_packed"),
        split=True,
        num_bits=4,
        strategy="group",
        group_size=32,
    ),
    "compressed mxfp8": _named(
        "mxfp8-quantized", _mxfp8, split=False, num_bits=8, strategy="group", group_size=32
    ),
    "compressed 5 hadamard": _turned(32, bits=5),
    "compressed mixed": Recipe(
        settings=_MIXED,
        pack=_mixed,
        takes=lambda layer: every_projection(layer) and "layers.0.mlp" not in layer,
        split=True,
    ),
}
