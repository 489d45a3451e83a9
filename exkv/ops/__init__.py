"""The ops of the ``exkv`` namespace: one file a family, each with schema, reference and fake.

Call them as ``torch.ops.exkv.<name>``; the dispatcher picks the native kernel if there is one.
"""

import exkv_ext  # noqa: F401  (importing it registers the native kernels)

from . import (  # noqa: F401  (importing them defines the ops)
    activations,
    append_kv,
    attention,
    attention_parts,
    bound_run,
    decode_attention,
    experts,
    kv_formats,
    kv_quant,
    linear,
    norm,
    recurrent,
    rope,
    routing,
    sample,
    selective_scan,
    ssd,
    weight_groups,
)
from .registry import REFERENCES, define_op, has_kernel  # noqa: F401
