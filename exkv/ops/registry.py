"""How an op is made: a schema, a reference in plain PyTorch, and a fake for shapes.

The reference is registered for every backend (``CompositeExplicitAutograd``); a native kernel
in ``exkv_ext`` overrides it for one dispatch key, and no Python ``if`` chooses between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

_LIBRARY = torch.library.Library("exkv", "FRAGMENT")

#: Op name -> its fake: results of the right shapes, and nothing computed.
FAKES: dict[str, Callable[..., Any]] = {}

#: Op name -> its reference, the tests' oracle.
REFERENCES: dict[str, Callable[..., Any]] = {}


class Named(Protocol):
    """What a str argument of an op names."""

    @property
    def has_kernels(self) -> bool:
        """Whether native kernels know it; if not, the op's reference serves it."""


#: Op name -> what its str arguments name. An entry may be added at any time.
NAMED: dict[str, Mapping[str, Named]] = {}

#: Types of devices on which the host's processor computes.
HOST = ("cpu", "sim")

#: Ops that have native kernels only; simulated devices don't have them.
NATIVE: set[str] = set()


def define_native(schema: str) -> None:
    """Define ``exkv::<schema>`` without a reference: there is another way to what it does."""
    _LIBRARY.define(schema)
    NATIVE.add(schema.split("(", 1)[0])


def define_op(
    schema: str,
    *,
    fake: Callable[..., Any],
    kernels_fall_back: bool = False,
    names: Mapping[str, Named] | None = None,
    reference_names: Mapping[str, object] | None = None,
) -> Callable[[Callable], Callable]:
    """Register the decorated function as the reference of ``exkv::<schema>``.

    With ``kernels_fall_back`` or ``names`` there are kernels that leave some calls to the
    reference (those with formats they don't know, or on GPUs that no kernel is made for): for these
    it is an op of its own, too, ``exkv::<name>_reference``, which takes :func:`text_number` of a
    name where the op takes a str: of a str that native code hands on, torch (2.11 to 2.13) keeps a
    copy for good.

    Args:
        names: what a str argument may name; entries say whether kernels know them.
        reference_names: the same, where kernels never look at the name: other arguments tell them
            all.
    """
    name = schema.split("(", 1)[0]

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        _define(schema, reference, fake)
        if kernels_fall_back or names is not None:
            given = reference_names if names is None else names
            known = {} if given is None else given  # which may be empty by now
            by_number = (_by_number(schema, known, each) for each in (reference, fake))
            numbered = schema.replace("str ", "int ").removeprefix(name)
            _define(f"{name}_reference{numbered}", *by_number)
        FAKES[name], REFERENCES[name] = fake, reference
        if names is not None:
            NAMED[name] = names
        return reference

    return register


def _define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"exkv::{name}", _of_meta_only(name, fake), lib=_LIBRARY)


def _of_meta_only(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake, which the dispatcher runs as soon as one tensor is on ``meta``: where others are
    not, its result would be on their device, and never computed.

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


def _tensors_in(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The real tensors among an op's arguments; fake ones have devices of their own choice."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            if not isinstance(argument, FakeTensor):
                yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors_in(argument)


@functools.cache
def text_number(text: str) -> int:
    """A text as a number: FNV-1a (Fowler, Noll, Vo) over its bytes, without the last bit; as
    ``TextNumber`` in exkv_ext/params/kv_formats.h."""
    number = 0xCBF29CE484222325
    for byte in text.encode():
        number = (number ^ byte) * 0x100000001B3 % 2**64
    return number >> 1


def _by_number(
    schema: str, names: Iterable[str], function: Callable[..., Any]
) -> Callable[..., Any]:
    """The function with :func:`text_number` of a name for each str of the schema."""
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


def computes_on(x: torch.Tensor) -> str:
    """The type of device on which ops on a tensor compute. One without memory says for which type
    it stands, where that can't be had here."""
    return getattr(x, "stands_for", None) or x.device.type


def is_readable(x: torch.Tensor) -> bool:
    """Whether its numbers can be looked at without waiting: a plain tensor in host memory, and
    none of a subclass, which may have no numbers."""
    return type(x) is torch.Tensor and x.device.type == "cpu"
