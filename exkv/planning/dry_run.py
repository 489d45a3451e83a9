"""Run code on tensors that have a device and a shape but no memory, and count what it would take.

``DryRun`` is all that exkv knows of prediction: while it is on, every tensor that is made is a
``ShapeTensor``, every op computes shapes only, and the storages that come and go on one type of
device are counted as its allocator would. (``FakeTensorMode`` is torch's own such mode. It imports
torch's compiler, which takes a second; and plain ``meta`` tensors don't say where they are, so that
attention takes another way than on a device.)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from exkv.devices import rounded
from exkv.ops import REFERENCES, SHORTENED, has_kernel
from exkv.ops.registry import FAKES, KernelUse, kernel_use

from .shapes import result_of

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class ShapeTensor(torch.Tensor):
    """A tensor that says where it is and has no memory; ``meta`` has its shape and storage."""

    meta: torch.Tensor

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device) -> ShapeTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        made.meta = meta
        return made

    def __init__(self, meta: torch.Tensor, device: torch.device) -> None:
        super().__init__()

    # torch.Tensor's own stubs have untyped functions of C++ in the place of these two.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        raise RuntimeError(f"{func} was called on a tensor of a dry run that is over")


class DryRun(TorchDispatchMode):
    """Counts the bytes of storages on one type of device, and their peak.

    Args:
        device_type: of the storages that count.
        kernels: the device type whose native kernels count as there; None for the same.

    Attributes:
        current, peak: bytes, each storage rounded as allocators do.
    """

    def __init__(self, device_type: str, kernels: str | None = None) -> None:
        super().__init__()
        self.device_type = device_type
        self.kernels = kernels or device_type
        self.current = 0
        self.peak = 0
        self._alive: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler, to keep this from being compiled."""
        return False

    def restart(self, held: object) -> None:
        """Count anew: these tensors, and those that are made from now on."""
        self.current = self.peak = 0
        self._alive = {}
        for tensor in _tensors(held):
            if isinstance(tensor, ShapeTensor):
                self._follow(tensor)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        use = self._kernel_use(func, args)
        if (parts := self._parts(func, use)) is not None:
            with self:  # so that their storages count
                out = parts(*args, **kwargs)
        else:
            out = self._shapes(func, args, kwargs)
        if use is not None:  # beside the results
            self.peak = max(self.peak, self.current + rounded(use.scratch))
        return out

    # What an op consists of ---------------------------------------------------------------

    def _kernel_use(self, func: OpOverload, args: tuple) -> KernelUse | None:
        """Of one of our ops whose kernel here allocates something, or leaves calls to others."""
        name = func.name().removeprefix("exkv::")
        if func.namespace != "exkv" or not has_kernel(name, self.kernels):
            return None
        return kernel_use(name, self.kernels, args)

    def _parts(self, func: OpOverload, use: KernelUse | None) -> Callable[..., Any] | None:
        """What an op runs, if it is made of others; None for one that isn't."""
        if func.namespace == "exkv":
            return self._reference(func.name().removeprefix("exkv::"), use)
        # SDPA, for one, is made of others, and converts its mask.
        if func.namespace == "aten" and _is_composite(func):
            return functools.partial(func._op_dk, _COMPOSITE)
        return None

    def _reference(self, name: str, use: KernelUse | None) -> Callable[..., Any]:
        """What serves a call of our ops, or tells what a kernel's parts take; where a kernel takes
        the call whole, what makes its results alone."""
        taken = has_kernel(name, self.kernels) and (use is None or use.takes)
        if taken:
            return FAKES[name]
        reference, shorten = REFERENCES[name], SHORTENED.get(name)
        if shorten is None:
            return reference
        return lambda *args, **kwargs: reference(*shorten(*args), **kwargs)

    # One op -------------------------------------------------------------------------------

    def _shapes(self, func: OpOverload, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """The op's results, by shapes alone."""
        given = {id(meta): (tensor, meta) for tensor, meta in _with_metas((args, kwargs))}
        metas = {id(tensor): meta for tensor, meta in given.values()}
        device = kwargs.get("device")
        where = _device_of(tensor for tensor, _ in given.values()) if device is None else device
        known = {meta.untyped_storage()._cdata for _, meta in given.values()}

        def result(meta: torch.Tensor) -> torch.Tensor:
            if id(meta) in given:  # it was written to
                return given[id(meta)][0]
            made = ShapeTensor(meta, torch.device(where))
            if meta.untyped_storage()._cdata not in known:
                self._follow(made)
            return made

        to_meta = {"device": torch.device("meta")} if device is not None else {}
        pinned = {"pin_memory": False} if kwargs.get("pin_memory") else {}
        swap = functools.partial(_mapped, lambda tensor: metas[id(tensor)])
        keywords = {name: swap(value) for name, value in kwargs.items()} | to_meta | pinned
        return _mapped(result, result_of(func, swap(args), keywords))

    def _follow(self, tensor: ShapeTensor) -> None:
        """Count the tensor's storage until it dies."""
        storage = tensor.meta.untyped_storage()
        if tensor.device.type != self.device_type or storage._cdata in self._alive:
            return
        self._alive[storage._cdata] = nbytes = rounded(storage.nbytes())
        weakref.finalize(storage, self._forget, storage._cdata)
        self.current += nbytes
        self.peak = max(self.peak, self.current)

    def _forget(self, storage: int) -> None:
        self.current -= self._alive.pop(storage, 0)


@functools.cache
def _is_composite(op: OpOverload) -> bool:
    return op.has_kernel_for_dispatch_key(_COMPOSITE)


def _tensors(values: object) -> Iterator[torch.Tensor]:
    """In (lists, tuples and dictionaries of) what an op is given or answers with."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(change, item) for item in value)
    return value


def _with_metas(values: object) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor and its shape on ``meta``; real tensors, too, are read for their shape only."""
    for tensor in _tensors(values):
        if isinstance(tensor, ShapeTensor):
            yield tensor, tensor.meta
        else:
            size, stride = tensor.size(), tensor.stride()
            yield tensor, torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")


def _device_of(tensors: Iterator[torch.Tensor]) -> torch.device:
    """Where an op on these computes: host scalars and indices go to the device."""
    found = torch.device("cpu")
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return tensor.device
    return found
