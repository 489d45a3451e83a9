"""Op registration: a schema, a reference in plain PyTorch, and a fake for shapes.

The reference is registered for every backend (``CompositeExplicitAutograd``); a native kernel in
``exkv_ext`` overrides it for one dispatch key, and no Python ``if`` chooses between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_LIBRARY = torch.library.Library("exkv", "FRAGMENT")

#: Op name -> its fake, which computes shapes only.
FAKES: dict[str, Callable[..., Any]] = {}

#: Op name -> its reference, the tests' oracle.
REFERENCES: dict[str, Callable[..., Any]] = {}


class Named(Protocol):
    """An object that a str argument of an op names."""

    @property
    def has_kernels(self) -> bool:
        """Whether native kernels support it; otherwise the op's reference runs."""


#: Op name -> objects that its str arguments name. Entries may be added at any time.
NAMED: dict[str, Mapping[str, Named]] = {}

#: Device types that compute on the host's processor.
HOST = ("cpu", "sim")

#: Ops with native kernels only; simulated devices don't have them.
NATIVE: set[str] = set()


def define_native(schema: str) -> None:
    """Define ``exkv::<schema>`` without a reference: callers have another route."""
    _LIBRARY.define(schema)
    NATIVE.add(schema.split("(", 1)[0])


def define_op(
    schema: str,
    *,
    fake: Callable[..., Any] | None = None,
    kernels_fall_back: bool = False,
    names: Mapping[str, Named] | None = None,
    reference_names: Mapping[str, object] | None = None,
) -> Callable[[Callable], Callable]:
    """Register the decorated function as the reference of ``exkv::<schema>``.

    ``kernels_fall_back`` or ``names`` mean that kernels leave some calls to the reference (formats
    they don't support, or GPUs without a kernel). For these the reference is an op of its own, too,
    ``exkv::<name>_reference``, which takes :func:`text_number` of a name in place of a str, since
    torch (2.11 to 2.13) leaks a copy of each str that native code passes on.

    Args:
        fake: computes shapes only; None for an op that returns nothing, or a tensor like its first
            argument.
        names: objects that a str argument may name; they say whether kernels support them.
        reference_names: the same, if kernels ignore the name since other arguments suffice.
    """
    name = schema.split("(", 1)[0]
    if fake is None:
        fake = _like_first if not schema.endswith("-> ()") else lambda *args: None

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        _define(schema, reference, fake)
        if kernels_fall_back or names is not None:
            given = reference_names if names is None else names
            known = {} if given is None else given  # by reference: it may still be empty
            by_number = (_by_number(schema, known, each) for each in (reference, fake))
            numbered = schema.replace("str ", "int ").removeprefix(name)
            _define(f"{name}_reference{numbered}", *by_number)
        FAKES[name], REFERENCES[name] = fake, reference
        if names is not None:
            NAMED[name] = names
        return reference

    return register


def _like_first(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"exkv::{name}", _of_meta_only(name, fake), lib=_LIBRARY)


def _of_meta_only(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Guard the fake, which the dispatcher runs as soon as one tensor is on ``meta``: with tensors
    on other devices, the result would be on those, and never computed.

    Raises:
        ValueError: tensors on ``meta`` beside others.
    """

    @wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        devices = {x.device for x in _tensors_in((*args, *kwargs.values()))}
        if len(devices) > 1 and torch.device("meta") in devices:
            raise ValueError(
                f"{name}: tensors are on {', '.join(sorted(map(str, devices)))}; move them to one "
                "device"
            )
        return fake(*args, **kwargs)

    return checked


def _tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the real tensors among an op's arguments; fake ones may report any device."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            if not isinstance(argument, FakeTensor):
                yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors_in(argument)


@functools.cache
def text_number(text: str) -> int:
    """Hash of a text: FNV-1a (Fowler, Noll, Vo) over its bytes, without the last bit; as
    ``TextNumber`` in exkv_ext/params/kv_formats.h."""
    number = 0xCBF29CE484222325
    for byte in text.encode():
        number = (number ^ byte) * 0x100000001B3 % 2**64
    return number >> 1


def _by_number(
    schema: str, names: Iterable[str], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap the function to take :func:`text_number` of a name for each str of the schema."""
    arguments = schema.split("(", 1)[1].split(", ")
    texts = [index for index, argument in enumerate(arguments) if argument.startswith("str ")]
    if not texts:
        return function

    def numbered(*args: Any) -> Any:
        found, named = list(args), {text_number(name): name for name in names}
        for index in texts:
            found[index] = named.get(found[index], f"number {found[index]}")
        return function(*found)

    return numbered


def has_kernel(name: str, device_type: str) -> bool:
    """Whether a native kernel, not the reference, serves ``exkv::<name>`` on this device type."""
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"exkv::{name}", key)


def computes_on(x: Tensor) -> str:
    """Device type on which ops on this tensor compute. A tensor without memory may stand for a type
    that is not available here."""
    return getattr(x, "stands_for", None) or x.device.type


def is_readable(x: Tensor) -> bool:
    """Whether the host can read the values without waiting: a plain tensor in host memory, and not
    a subclass, which may have no values."""
    return type(x) is Tensor and x.device.type == "cpu"
