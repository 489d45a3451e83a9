"""NVFP4: weight / scale rounded to e2m1, the scale e4m3 for 16 inputs times a float for the matrix
(NVIDIA's description of Blackwell's number formats)."""

from __future__ import annotations

import torch

from . import Packed
from .fp8 import LARGEST
from .mxfp4 import E2M1


def pack(weight: torch.Tensor, name: str, factor: str) -> Packed:
    """Codes under ``name``; compressed-tensors' ``factor``, a global scale, is the inverse of
    ModelOpt's ``weight_scale_2``."""
    groups = weight.unflatten(1, (-1, 16))
    whole = weight.abs().max() / (6 * LARGEST)
    inverse = factor == "weight_global_scale"
    stored = (1 / whole).reshape(1) if inverse else whole
    scale = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    effective = scale.float() / stored if inverse else scale.float() * stored
    scaled = groups / effective.unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    plain = E2M1[codes].copysign(scaled) * effective.unsqueeze(-1)
    bits = (codes + 8 * scaled.signbit()).flatten(1).to(torch.uint8)
    tensors = {name: bits[:, ::2] + 16 * bits[:, 1::2], "weight_scale": scale, factor: stored}
    return tensors, plain.flatten(1)
