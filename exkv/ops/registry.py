"""How an op is made: a schema, a reference in plain PyTorch, and a fake for shapes.

The reference is registered for every backend (``CompositeExplicitAutograd``); a native kernel
in ``exkv_ext`` overrides it for one dispatch key, and no Python ``if`` chooses between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("exkv", "FRAGMENT")

#: Op name -> its reference. The tests' oracle, and what the workspace prediction looks into.
REFERENCES: dict[str, Callable[..., Any]] = {}

#: Op name -> a function from its arguments to those of a call that shows the peak of temporaries:
#: a shorter one for references that loop over the cache, the worst one for references whose
#: temporaries depend on what the tensors hold. Not every op has one.
SHORTENED: dict[str, Callable[..., tuple]] = {}


def define_op(
    schema: str, *, fake: Callable[..., Any], shortened: Callable[..., tuple] | None = None
) -> Callable[[Callable], Callable]:
    """Register the decorated function as the reference of ``exkv::<schema>``."""
    name = schema.split("(", 1)[0]

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"exkv::{name}", fake, lib=_LIBRARY)
        REFERENCES[name] = reference
        if shortened is not None:
            SHORTENED[name] = shortened
        return reference

    return register


def has_kernel(name: str, device_type: str) -> bool:
    """Whether a native kernel, not the reference, serves ``exkv::<name>`` on this device type."""
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"exkv::{name}", key)
