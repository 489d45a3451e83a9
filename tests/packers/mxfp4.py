"""4-bit floats: weight / scale rounded to e2m1, the scale a power of two for 32 inputs (OCP's
Microscaling Formats specification, section 6.3)."""

from __future__ import annotations

import torch

from . import Packed, Recipe

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def pack(weight: torch.Tensor) -> Packed:
    """weight (..., out, in) -> blocks (..., out, in / 32, 16) and scales (..., out, in / 32)."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor().sub(2).clamp(-127, 127)
    scaled = groups / exponents.exp2().unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    plain = E2M1[codes].copysign(scaled) * exponents.exp2().unsqueeze(-1)
    bits = (codes + 8 * scaled.signbit()).to(torch.uint8)
    blocks = bits[..., ::2] + 16 * bits[..., 1::2]
    scales = exponents.add(127).to(torch.uint8)
    return {"blocks": blocks, "scales": scales}, plain.flatten(-2)


def flat(weight: torch.Tensor, name: str) -> Packed:
    """As other tools store it: codes (out, in / 2) under ``name``, and ``weight_scale``."""
    tensors, plain = pack(weight)
    return {name: tensors["blocks"].flatten(1), "weight_scale": tensors["scales"]}, plain


RECIPES = {
    "mxfp4": Recipe(
        settings={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "layers.1"]},
        pack=lambda layer, weight: pack(weight),
        takes=lambda layer: ".layers.0." in layer,
        split=True,
    )
}
