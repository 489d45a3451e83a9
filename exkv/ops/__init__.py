"""The ops of the ``exkv`` namespace: one file a family, each with schema, reference and fake.

Call them as ``torch.ops.exkv.<name>``; the dispatcher picks the native kernel where one stands.
"""

import exkv_ext  # noqa: F401  (importing it registers the native kernels)

from . import (
    append_kv,
    attend,
    attention,
    attention_parts,
    decoder_layers,
    experts,
    gate,
    held_layers,
    kv_formats,
    kv_quant,
    layer,
    linear,
    norm,
    rope,
    sample,
)
from .registry import REFERENCES, SHORTENED, define_op, has_kernel

__all__ = [
    "REFERENCES",
    "SHORTENED",
    "append_kv",
    "attend",
    "attention",
    "attention_parts",
    "decoder_layers",
    "define_op",
    "experts",
    "gate",
    "has_kernel",
    "held_layers",
    "kv_formats",
    "kv_quant",
    "layer",
    "linear",
    "norm",
    "rope",
    "sample",
]
